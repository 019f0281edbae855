"""One layer's keys, values or queries of a chunk without their rotation: mean, moments, codes.

On a GPU the kernels read the tokens as they came and undo RoPE on the way; elsewhere a float32
copy is turned back once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from quantwm.cache.dispatch import QtcKernels, qtc_kernels
from quantwm.cache.formats import qtc_basis, qtc_coder, qtc_fallback, qtc_gain, qtc_levels
from quantwm.cache.formats.qtc_basis import Basis
from quantwm.cache.formats.qtc_planes import BLOCK
from quantwm.cache.positions import TokenPositions, phase_origin, phases, rotate_, turns
from quantwm.cache.spec import RopeLayout

GROUP = 16
"""Tokens, at most, of a group; groups' means compete for the centre that tells outliers."""
OUTLIER = 16.0
"""A token farther from the centre than this times the median (squared distances) counts as if it
stood there: one broken token must not own mean and covariance."""


@dataclass(frozen=True)
class Tokens:
    """Tokens as they came, [H, N, D], and what RoPE did to them; rope None for nothing.

    Token i stands at the place i * step of positions.
    """

    given: Tensor
    rope: RopeLayout | None
    positions: TokenPositions
    step: int = 1

    @classmethod
    def of(cls, x: Tensor, rope: RopeLayout | None, positions: TokenPositions) -> Tokens:
        """rope: of the stream; what is cached before RoPE has nothing to be undone."""
        return cls(x, rope if rope is not None and rope.baked else None, positions)

    def last(self, count: int) -> Tokens:
        """The last `count` tokens."""
        first = self.given.shape[1] - count
        if not first:
            return self
        positions = self.positions.select(slice(first, first + count))
        return Tokens(self.given[:, first:], self.rope, positions)

    def every(self, step: int) -> Tokens:
        """Every step-th token, from the first."""
        if step == 1:
            return self
        return Tokens(self.given[:, ::step], self.rope, self.positions, step * self.step)

    @cached_property
    def plain(self) -> Tensor:
        """Without rotation, float32 [H, N, D]."""
        x = self.given.to(torch.float32, copy=True)
        if self.rope is None:
            return x
        if self.step == 1:
            turn = turns(self.rope, self.positions, 0, self.positions.count, x.device)
        else:
            turn = strided_turns(self.rope, self.positions, self.step, x.device)
        return rotate_(x, turn, inverse=True)

    @cached_property
    def _kernels(self) -> QtcKernels | None:
        return qtc_kernels(self.given.device, self.given.shape[2])

    @cached_property
    def _turning(self) -> Any:
        return turning(self._kernels, self.rope, self.positions, self.given, self.step)

    @property
    def group(self) -> int:
        """Tokens of a group: 16, or the power of two that leaves 8 groups or more."""
        wanted = min(max(self.given.shape[1] // 8, 1), GROUP)
        return 1 << (wanted.bit_length() - 1)

    def centre(self) -> tuple[Tensor, Tensor]:
        """Mean [H, D] and the weight of each token [H, N], float32.

        The plain mean and ones unless a token stands out: from the median of the means of groups
        of tokens, by the median of groups' mean squared distances from it; neither is moved by few
        broken tokens.
        """
        if self._kernels is not None:
            given = self._kernels.moments.centre(self.given, self._turning, self.group, OUTLIER)
            return given[0], given[1]
        x = self.plain
        middle, limit = self._middle(x)
        squares = (x - middle.unsqueeze(1)).square().sum(-1)
        within = (squares <= limit) | (limit == 0)
        weights = torch.where(within, 1.0, limit / squares.clamp(min=1e-30))
        weighted = torch.bmm(weights.unsqueeze(1), x).squeeze(1)
        return weighted / weights.sum(1, keepdim=True), weights

    def coded_mean(self, about: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The mean in INT8 steps from another: int8 [H, 1, D], bfloat16 [H, 1], and float32 [H, D]
        as it is read again. about: float32 [H, D]."""
        if self._kernels is not None:
            about = about.contiguous()
            centre = self._kernels.moments.centre
            return centre(self.given, self._turning, self.group, OUTLIER, about)[2]
        codes, scales = qtc_gain.mean_codes(self.centre()[0], about)
        return codes, scales, qtc_gain.decoded_means(codes, scales, about).squeeze(1)

    def _middle(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Median [H, D] of the means of 8 groups or more, 63 at most, where there are as many
        tokens; and what squared distance from it is an outlier's, [H, 1]."""
        sums, squares = self._sums(x), self._sums(x.square().sum(-1, keepdim=True))
        groups = sums.shape[1]
        several = max(groups // 32, 1)
        whole = groups // several * several
        sums, squares = (s[:, :whole].unflatten(1, (-1, several)).sum(2) for s in (sums, squares))
        counts = torch.full((whole // several, 1), float(several * self.group), device=x.device)
        # The last group may be short; those that are left over by whole ones are not needed.
        if whole == groups:
            counts[-1] = x.shape[1] - (len(counts) - 1) * several * self.group
        middle = (sums / counts).median(1).values
        apart = (squares - 2.0 * (sums @ middle.unsqueeze(-1))) / counts
        apart = apart.squeeze(-1) + middle.square().sum(-1, keepdim=True)
        # What overflowed says nothing; 0 is no limit.
        apart = apart.nan_to_num_(nan=0.0, posinf=torch.inf).clamp_(min=0.0)
        return middle, OUTLIER * apart.median(1, keepdim=True).values

    def _sums(self, x: Tensor) -> Tensor:
        """Sums of groups of tokens, float32 [H, groups, channels]."""
        whole = x.shape[1] // self.group * self.group
        sums = x[:, :whole].unflatten(1, (-1, self.group)).sum(2)
        if whole == x.shape[1]:
            return sums
        return torch.cat((sums, x[:, whole:].sum(1, keepdim=True)), dim=1)

    def second_moment(self, centre: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """Sum of w (x - c)(x - c)^T, float32 [H, D, D]; c = 0 and w = 1 without."""
        if self._kernels is not None:
            return self._kernels.moments.second_moment(self.given, self._turning, centre, weights)
        x = self.plain
        if centre is not None and weights is not None:
            x = (x - centre.unsqueeze(1)) * weights.sqrt().unsqueeze(-1)
        return x.transpose(1, 2) @ x

    def encoded(
        self,
        mean: Tensor,
        basis: Basis | None,
        metric: Tensor | None,
        plain_bits: int,
        token_gains: bool = True,
        projection: Projection | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Codes and gains of what is left without the mean, float32 [H, D].

        plain_bits: of codes without a basis. projection: on the basis, where it was made before.
        """
        feedback = basis is None and metric is not None
        if self._kernels is None or feedback or not token_gains:
            x = self.plain - mean.unsqueeze(1)
            if basis is None:
                return qtc_coder.encode_plain(x, metric, plain_bits)
            return qtc_coder.encode_in_basis(x, basis, metric, token_gains)
        heads, _, head_dim = self.given.shape
        device = self.given.device
        if basis is None:
            widths = plain_basis(head_dim, plain_bits, device)[3]
            widths, words = widths.expand(heads, -1).contiguous(), plain_bits * head_dim // BLOCK
            analysis = qtc_fallback.rotation(head_dim, device).expand(heads, -1, -1).contiguous()
            projection = Projection(
                *self._kernels.encode.split(analysis), torch.ones(heads, head_dim, device=device)
            )
        else:
            widths, words = basis.widths, sum(basis.host_widths[0])
            if projection is None:
                projection = Projection.of(self._kernels, basis, metric)
        tables = qtc_levels.table(device), gain_table(device), qtc_levels.cell_table(device)
        return self._kernels.encode.encode_qtc(
            self.given, self._turning, mean.contiguous(), (projection.high, projection.low),
            projection.costs, widths, words, tables,
        )  # fmt: skip


@dataclass(frozen=True)
class Projection:
    """What the kernel encodes by: analysis in two parts [H, D, u], costs float32 [H, u]."""

    high: Tensor
    low: Tensor
    costs: Tensor

    @classmethod
    def of(cls, kernels: QtcKernels, basis: Basis, metric: Tensor | None) -> Projection:
        parts = kernels.encode.split(qtc_basis.analysis(basis, metric))
        return cls(*parts, qtc_basis.channel_costs(basis, metric))

    def heads(self, which: slice) -> Projection:
        """Of some heads."""
        return Projection(self.high[which], self.low[which], self.costs[which])


def turning(
    kernels: QtcKernels | None,
    rope: RopeLayout | None,
    positions: TokenPositions,
    like: Tensor,
    step: int = 1,
) -> Any:
    """What the kernels are told of the rotation of tokens like these [H, N, D], every step-th."""
    if rope is None:
        return kernels.turning()
    device, cells = like.device, math.prod(rope.grid)
    first = phase_origin(positions, rope)
    places = positions.places
    if places is not None:
        places = (places[::step] - first * cells).to(torch.int32).to(device)
    return kernels.turning(
        phases=phases(rope, first, like.shape[-1], device),
        split=(rope.split[0] // 2, rope.split[1] // 2),
        grid=rope.grid,
        first_place=positions.first - first * cells,
        places=places,
        step=step,
    )


def strided_turns(
    rope: RopeLayout, positions: TokenPositions, step: int, device: torch.device
) -> Tensor:
    """Rotation of every step-th of these places, as `turns`; the newest are kept, as the layers of
    a chunk ask for the same."""
    if positions.places is not None:
        return turns(rope, positions, 0, positions.count, device)[::step]
    return _strided_turns(rope, positions.first, positions.count, step, device)


@lru_cache(maxsize=4)
def _strided_turns(
    rope: RopeLayout, first: int, count: int, step: int, device: torch.device
) -> Tensor:
    return turns(rope, TokenPositions(first, count), 0, count, device)[::step].contiguous()


@lru_cache(maxsize=8)
def gain_table(device: torch.device) -> Tensor:
    """Gains of all codes, float32 [256]."""
    return qtc_gain.gains(torch.arange(256)).to(device)


@lru_cache(maxsize=8)
def plain_basis(
    head_dim: int, bits: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The Hadamard rotation in a basis's tensors, one for all heads; head_dim a power of two."""
    signs = torch.sign(qtc_fallback.rotation(head_dim, torch.device("cpu"))).t()
    return (
        signs.to(torch.int8).contiguous().unsqueeze(0).to(device),
        torch.full((1, head_dim), head_dim**-0.5, dtype=torch.bfloat16, device=device),
        torch.zeros(1, head_dim, dtype=torch.bfloat16, device=device),
        torch.full((1, head_dim // BLOCK), bits, dtype=torch.uint8, device=device),
    )

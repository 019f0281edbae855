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
    """Tokens as they came, [H, N, D], and what RoPE did to them; rope None for nothing."""

    given: Tensor
    rope: RopeLayout | None
    positions: TokenPositions

    @classmethod
    def of(cls, x: Tensor, rope: RopeLayout | None, positions: TokenPositions) -> Tokens:
        """rope: of the stream; what is cached before RoPE has nothing to be undone."""
        return cls(x, rope if rope is not None and rope.baked else None, positions)

    def last(self, count: int, step: int) -> Tokens:
        """Every step-th of the last `count` tokens."""
        first = self.given.shape[1] - count
        stop = first + count
        keep = slice(first, stop) if step == 1 else torch.arange(first, stop, step)
        positions = self.positions.select(keep)
        return Tokens(self.given[:, first::step], self.rope, positions)

    @cached_property
    def plain(self) -> Tensor:
        """Without rotation, float32 [H, N, D]."""
        x = self.given.to(torch.float32, copy=True)
        if self.rope is None:
            return x
        turn = turns(self.rope, self.positions, 0, self.positions.count, x.device)
        return rotate_(x, turn, inverse=True)

    @cached_property
    def _kernels(self) -> QtcKernels | None:
        return qtc_kernels(self.given.device, self.given.shape[2])

    @cached_property
    def _turning(self) -> Any:
        return turning(self._kernels, self.rope, self.positions, self.given)

    @property
    def group(self) -> int:
        """Tokens of a group: 16, or the power of two that leaves 8 groups or more."""
        wanted = min(max(self.given.shape[1] // 8, 1), GROUP)
        return 1 << (wanted.bit_length() - 1)

    def centre(self) -> tuple[Tensor, Tensor]:
        """Mean [H, D] and the weight of each token [H, N], float32.

        The plain mean and ones unless a token stands out: from the median of the means of groups
        of tokens, which few broken tokens do not move.
        """
        middle = self._group_means().median(1).values
        if self._kernels is None:
            squares = (self.plain - middle.unsqueeze(1)).square().sum(-1)
        else:
            squares = self._kernels.moments.distances(self.given, self._turning, middle)
        limit = OUTLIER * squares.median(1, keepdim=True).values
        within = (squares <= limit) | (limit == 0)
        weights = torch.where(within, 1.0, limit / squares.clamp(min=1e-30))
        return self._sums(weights).sum(1) / weights.sum(1, keepdim=True), weights

    def _group_means(self) -> Tensor:
        """Means of 8 groups or more, at most 32 where there are as many tokens, [H, groups, D]."""
        sums = self._sums(None)
        groups, tokens = sums.shape[1], self.given.shape[1]
        several = max(groups // 32, 1)
        whole = groups // several * several
        size = several * self.group
        means = sums[:, :whole].unflatten(1, (-1, several)).sum(2) / size
        # The last group may be short; those that are left over by whole ones are not needed.
        if whole == groups:
            means[:, -1] *= size / (tokens - (whole // several - 1) * size)
        return means

    def _sums(self, weights: Tensor | None) -> Tensor:
        """Sums of groups, float32 [H, groups, D]."""
        if self._kernels is not None:
            return self._kernels.moments.group_sums(self.given, self._turning, weights, self.group)
        x = self.plain if weights is None else self.plain * weights.unsqueeze(-1)
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
    ) -> tuple[Tensor, Tensor]:
        """Codes and gains of what is left without the mean, float32 [H, D].

        plain_bits: of codes without a basis.
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
            analysis = qtc_fallback.rotation(head_dim, device).expand(heads, -1, -1).contiguous()
            costs = torch.ones(heads, head_dim, device=device)
            widths, words = widths.expand(heads, -1).contiguous(), plain_bits * head_dim // BLOCK
        else:
            analysis = qtc_basis.analysis(basis, metric)
            costs = qtc_basis.channel_costs(basis, metric)
            widths, words = basis.widths, sum(basis.host_widths[0])
        tables = (
            qtc_levels.table(device), gain_table(device), *qtc_levels.cell_tables(device),
        )  # fmt: skip
        return self._kernels.encode.encode_qtc(
            self.given, self._turning, mean.contiguous(), analysis, costs, widths, words, tables
        )


def turning(
    kernels: QtcKernels, rope: RopeLayout | None, positions: TokenPositions, like: Tensor
) -> Any:
    """What the kernels are told of the rotation of tokens like these [H, N, D]."""
    if rope is None:
        return kernels.turning()
    device, cells = like.device, math.prod(rope.grid)
    first = phase_origin(positions, rope)
    places = positions.places
    if places is not None:
        places = (places - first * cells).to(torch.int32).to(device)
    return kernels.turning(
        phases=phases(rope, first, like.shape[-1], device),
        split=(rope.split[0] // 2, rope.split[1] // 2),
        grid=rope.grid,
        first_place=positions.first - first * cells,
        places=places,
    )


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

"""A packed span of the `qtc` format: its tensors, and how tokens are joined, selected, decoded."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from operator import attrgetter

import torch
from torch import Tensor

from quantwm.cache.dispatch import Decode, qtc_kernels
from quantwm.cache.formats import qtc_coder, qtc_gain, qtc_levels
from quantwm.cache.formats.qtc_basis import Basis
from quantwm.cache.formats.qtc_tokens import gain_table, plain_basis, turning
from quantwm.cache.formats.rows import cut_rows, join_rows
from quantwm.cache.positions import TokenPositions, rotate_, turns
from quantwm.cache.spec import RopeLayout


@dataclass(frozen=True)
class QtcSpan:
    """N tokens in C chunks of H heads, in one basis or in none.

    Attributes:
        codes: uint8 [H, N, B / 8], bit planes (qtc_planes.py).
        gains: uint8 [H, N] (qtc_gain.py).
        mean_codes, mean_scales: int8 [H, C, D], bfloat16 [H, C]; a chunk's mean, from the basis's.
        chunk_stops: int32 [C], the token at which each chunk ends.
        chunk_tokens: the tokens of each chunk, on the host.
        positions: where the tokens stand, where rope asks for it.
        rope: what turns decoded keys; None for values and for keys without position.
        basis: None is the fallback of qtc_fallback.py.
        asked_at: of the lesson that a chunk was encoded by (qtc_learner.py), 0 without a basis.
    """

    codes: Tensor
    gains: Tensor
    mean_codes: Tensor
    mean_scales: Tensor
    chunk_stops: Tensor
    chunk_tokens: tuple[int, ...]
    positions: TokenPositions | None
    rope: RopeLayout | None
    basis: Basis | None
    asked_at: int

    @property
    def tokens(self) -> int:
        return self.gains.shape[1]

    def picked(self, kept: Tensor) -> QtcSpan:
        """The tokens at ascending int64 positions (a CPU tensor)."""
        stops = torch.tensor(self.chunk_tokens).cumsum(0)
        counts = torch.searchsorted(kept, stops).diff(prepend=torch.zeros(1, dtype=torch.long))
        chunks = counts.nonzero().flatten()
        device = self.codes.device
        where, held = kept.to(device), chunks.to(device)
        return replace(
            self,
            codes=self.codes.index_select(1, where),
            gains=self.gains.index_select(1, where),
            mean_codes=self.mean_codes.index_select(1, held),
            mean_scales=self.mean_scales.index_select(1, held),
            chunk_stops=counts[chunks].cumsum(0).to(device, torch.int32),
            chunk_tokens=tuple(counts[chunks].tolist()),
            positions=self.positions and self.positions.select(kept),
        )

    def thinned(self, step: int) -> Tensor:
        """Every step-th token of a span of one chunk without rotation, float32 [H, n, D]."""
        codes, gains = self.codes[:, ::step].contiguous(), self.gains[:, ::step].contiguous()
        span = replace(self, codes=codes, gains=gains, chunk_tokens=(gains.shape[1],), rope=None)
        out = torch.empty(*gains.shape, self.mean_codes.shape[2], device=codes.device)
        span.decode(out, 0, 0, gains.shape[1])
        return out

    def _unrotated(self, heads: slice, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Tokens start..stop-1 of some heads without rotation, float32 [heads, stop - start, D].

        dtype: of the product with the rows.
        """
        head_dim = self.mean_codes.shape[2]
        codes, gains = self.codes[heads, start:stop], self.gains[heads, start:stop]
        if self.basis is None:
            x = qtc_coder.decode_plain(codes, gains, head_dim)
        else:
            x = qtc_coder.decode_in_basis(codes, gains, self.basis.heads(heads), dtype)
        first = 0
        means = self.means()[heads]
        for chunk, tokens in enumerate(self.chunk_tokens):
            low, high = max(first, start), min(first + tokens, stop)
            if low < high:
                x[:, low - start : high - start] += means[:, chunk : chunk + 1]
            first += tokens
        return x

    def means(self) -> Tensor:
        """Means of its chunks, float32 [H, C, D]."""
        heads, _, head_dim = self.mean_codes.shape
        zeros = self.mean_codes.new_zeros(heads, head_dim)
        about = zeros if self.basis is None else self.basis.mean
        return qtc_gain.decoded_means(self.mean_codes, self.mean_scales, about)

    @cached_property
    def decode(self) -> Decode:
        """Made at the first reading; it holds this span's own tensors and nothing beside them."""
        kernels = qtc_kernels(self.codes.device, self.mean_codes.shape[2])
        if kernels is None:
            return self._decode_plainly
        device, head_dim = self.codes.device, self.mean_codes.shape[2]
        basis, plain_bits = self.basis, 8 * self.codes.shape[2] // head_dim
        return kernels.decode.prepare_qtc(
            self.codes,
            self.gains,
            plain_basis(head_dim, plain_bits, device) if basis is None else basis.tensors(),
            (self.mean_codes, self.mean_scales, self.chunk_stops),
            (qtc_levels.pair_levels(device), gain_table(device)),
            turning(kernels, self.rope, self.positions, self.mean_codes),
        )

    def _decode_plainly(
        self, out: Tensor, offset: int, start: int, stop: int, first_head: int = 0
    ) -> None:
        x = self._unrotated(slice(first_head, first_head + out.shape[0]), start, stop, out.dtype)
        if self.rope is not None and self.positions is not None:
            rotate_(x, turns(self.rope, self.positions, start, stop, x.device))
        out[:, offset : offset + stop - start] = x


def join_all(firsts: Sequence[QtcSpan], seconds: Sequence[QtcSpan]) -> list[QtcSpan]:
    """Every first span with its second behind it; both of one basis."""
    before = firsts[0].tokens
    later = (torch.stack([s.chunk_stops for s in seconds]) + before).split(1)
    parts = (
        join_rows([f.codes for f in firsts], [s.codes for s in seconds]),
        join_rows([f.gains for f in firsts], [s.gains for s in seconds]),
        *(
            join_rows([pick(f) for f in firsts], [pick(s) for s in seconds], anywhere=True)
            for pick in (attrgetter("mean_codes"), attrgetter("mean_scales"))
        ),
        join_rows([f.chunk_stops.unsqueeze(0) for f in firsts], later, anywhere=True),
    )
    return [
        replace(
            first,
            codes=codes,
            gains=gains,
            mean_codes=mean_codes,
            mean_scales=mean_scales,
            chunk_stops=stops.squeeze(0),
            chunk_tokens=first.chunk_tokens + second.chunk_tokens,
            positions=first.positions and first.positions.joined(second.positions),
        )
        for first, second, codes, gains, mean_codes, mean_scales, stops in zip(
            firsts, seconds, *parts, strict=True
        )
    ]


def cut_all(spans: Sequence[QtcSpan], start: int, stop: int) -> list[QtcSpan]:
    """Tokens start..stop-1 of every span; alike in their chunks. Nothing comes from the host."""
    if start >= stop:
        return [span.picked(torch.arange(0)) for span in spans]
    stops = list(accumulate(spans[0].chunk_tokens))
    chunks = slice(bisect_right(stops, start), bisect_left(stops, stop) + 1)
    kept = [min(s, stop) - start for s in stops[chunks]]
    tokens = tuple(b - a for a, b in pairwise((0, *kept)))
    moved = torch.stack([span.chunk_stops for span in spans])[:, chunks] - start
    parts = (
        cut_rows([span.codes for span in spans], start, stop),
        cut_rows([span.gains for span in spans], start, stop),
        cut_rows([span.mean_codes for span in spans], chunks.start, chunks.stop, anywhere=True),
        cut_rows([span.mean_scales for span in spans], chunks.start, chunks.stop, anywhere=True),
        moved.clamp_(max=stop - start).unbind(0),
    )
    return [
        replace(
            span,
            codes=codes,
            gains=gains,
            mean_codes=mean_codes,
            mean_scales=mean_scales,
            chunk_stops=ends,
            chunk_tokens=tokens,
            positions=span.positions and span.positions.select(slice(start, stop)),
        )
        for span, codes, gains, mean_codes, mean_scales, ends in zip(spans, *parts, strict=True)
    ]

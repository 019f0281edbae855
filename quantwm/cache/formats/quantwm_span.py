"""A packed span of the `quantwm` format: its tensors; how tokens are joined, picked, decoded."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from quantwm.cache.codebook import Codebook
from quantwm.cache.dispatch import Decode, ops_for
from quantwm.cache.formats.base import shape_of
from quantwm.cache.formats.correction import (
    Correction,
    Room,
    cut_corrections,
    join_all_corrections,
)
from quantwm.cache.formats.rows import cut_rows, join_rows, part_rows, pick_rows, pick_runs
from quantwm.cache.pack import CODES_PER_BYTE, pack, unpack_range
from quantwm.cache.pack import packed_bytes as bytes_of_codes
from quantwm.cache.unrotation import KeyTurns


@dataclass(frozen=True)
class QuantWMSpan:
    """See docs/architecture.md; chunk_tokens holds the same as chunk_stops, on the host.

    turns: of keys that were un-rotated before they were encoded; None for all others.
    """

    codes: Tensor
    ids: Tensor
    scales: Tensor
    secondary: Tensor
    chunk_stops: Tensor
    chunk_tokens: tuple[int, ...]
    zeros: Tensor
    codebook: Codebook
    correction: Correction | None
    turns: KeyTurns | None = None

    @property
    def tokens(self) -> int:
        return self.ids.shape[1]

    @cached_property
    def decode(self) -> Decode:
        """Made at the first reading; it holds this span's own tensors and nothing beside them."""
        return self.decoder({})

    def decoder(self, wide: Mapping[str, Tensor]) -> Decode:
        """wide: of `prepare_quantwm`'s arguments those that are not taken as they are held."""
        rows = self.correction
        correction = (None, None, None, 0)
        if rows is not None:
            coefficients = wide.get("coefficients", rows.coefficients)
            row_scales = wide.get("coefficient_scales", rows.row_scales)
            correction = (coefficients, row_scales, rows.basis, rows.first)
        centroids = wide.get("centroids", self.codebook.centroids)
        return ops_for(self.codes.device).prepare_quantwm(
            self.codes,
            self.ids,
            centroids,
            self.scales,
            self.secondary,
            self.chunk_stops,
            self.zeros,
            centroids.shape[2] // self.scales.shape[2],
            *correction,
        )

    def _widened(self) -> dict[str, Tensor]:
        """Sparse or INT4 rows and INT8 centroids, for one reading: kept, they would be bytes that
        nobody counts."""
        wide, rows = {}, self.correction
        if self.codebook.scales is not None:
            wide["centroids"] = self.codebook.dense()
        if rows is not None and not rows.is_plain:
            plain = rows.plain()
            wide |= {"coefficients": plain.coefficients, "coefficient_scales": plain.row_scales}
        return wide

    def _for_one_reading(self, wide: dict[str, Tensor]) -> Decode:
        """A decoder made once is given them every time, where it can be: checking takes longer."""
        frame = vars(self).get("frame")
        if frame is not None:
            return frame.rebound(wide)
        decode = self.decoder(wide)
        rebound = getattr(decode, "rebound", None)  # asking a protocol takes 30 us
        if rebound is not None:
            vars(self)["frame"] = rebound(dict.fromkeys(wide))
        return decode

    def decode_into(
        self, out: Tensor, offset: int, start: int, stop: int, first_head: int = 0
    ) -> None:
        """Tokens start..stop-1 of the heads from first_head on, as `dispatch.Decode` has it."""
        wide = self._widened()
        decode = self._for_one_reading(wide) if wide else self.decode
        if self.turns is None:
            decode(out, offset, start, stop, first_head)
            return
        self.turns.redo(decode, out, offset, start, stop, first_head)

    def read_from(self) -> tuple[Any, Sequence[Tensor]] | None:
        """See `base.Movable`. How many rows a sparse correction keeps, its launches do not say."""
        rows, book = self.correction, self.codebook
        if self.turns is not None or book.scales is not None:
            return None
        tensors = (self.codes, self.ids, self.scales, self.secondary, self.chunk_stops, self.zeros,
                   book.centroids)  # fmt: skip
        if rows is None:
            return shape_of(tensors), tensors
        corrected = (rows.basis,) if rows.mask is None else (rows.basis, rows.mask)
        held = (rows.coefficients, rows.row_scales)
        shapes = shape_of((*tensors, *corrected))
        if rows.mask is None:
            shapes += shape_of(held)
        elif not all(t.is_contiguous() for t in held):
            return None
        kind = rows.coefficients.dtype, rows.coefficients.shape[-1], rows.first, rows.count
        return (shapes, kind), (*tensors, *corrected, *held)

    def decode_spread(self, out: Tensor, offset: int, start: int, stop: int, room: Room) -> bool:
        """As `decode_into` with sparse rows spread in a room; False, and nothing done, where that
        is not all that a reading of this span needs."""
        rows = self.correction
        if rows is None or self.turns is not None or self.codebook.scales is not None:
            return False
        plain = rows.spread(room) if rows.coefficients.dtype == torch.int8 else None
        if plain is None:
            return False
        wide = {"coefficients": plain.coefficients, "coefficient_scales": plain.row_scales}
        self._for_one_reading(wide)(out, offset, start, stop)
        return True

    def with_correction(self, correction: Correction) -> QuantWMSpan:
        """`replace`, of which a commit would do one a layer while the device waits."""
        given = self.codes, self.ids, self.scales, self.secondary, self.chunk_stops
        held = self.chunk_tokens, self.zeros, self.codebook
        return QuantWMSpan(*given, *held, correction, self.turns)

    def parted(
        self, books: Sequence[Codebook], bases: Sequence[Tensor | None]
    ) -> list[QuantWMSpan]:
        """Spans of one chunk, of as many slots, whose heads lie behind each other here; so do
        their stops."""
        count, rows = len(books), self.correction
        corrections: list[Correction | None] = [None] * count
        if rows is not None:
            corrections = [
                replace(rows, basis=basis, coefficients=coefficients, row_scales=scales)
                for basis, coefficients, scales in zip(
                    bases,
                    part_rows(rows.coefficients, count),
                    part_rows(rows.row_scales, count),
                    strict=True,
                )
            ]
        parts = (
            part_rows(self.codes, count),
            part_rows(self.ids, count),
            part_rows(self.scales, count),
            part_rows(self.secondary, count, anywhere=True),
            self.chunk_stops.split(1),
            [self.chunk_tokens] * count,
            part_rows(self.zeros, count),
            books,
            corrections,
        )
        return [QuantWMSpan(*span) for span in zip(*parts, strict=True)]

    def picked(self, kept: Tensor) -> QuantWMSpan:
        """Tokens at ascending int64 positions (a CPU tensor)."""
        groups = self.scales.shape[2]
        chunks, chunk_tokens = pick_runs(self.chunk_tokens, kept)
        stops = torch.tensor(chunk_tokens, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        zeros = unpack_range(self.zeros, 0, self.tokens * groups)
        zeros = zeros.unflatten(1, (self.tokens, groups))
        correction = self.correction
        return QuantWMSpan(
            codes=pick_rows(self.codes, kept),
            ids=pick_rows(self.ids, kept),
            scales=pick_rows(self.scales, kept),
            secondary=pick_rows(self.secondary, chunks),
            chunk_stops=stops.to(self.codes.device, non_blocking=True),
            chunk_tokens=chunk_tokens,
            zeros=pack(pick_rows(zeros, kept).flatten(1)),
            codebook=self.codebook,
            correction=None if correction is None else correction.select(kept),
            turns=self.turns and self.turns.select(kept),
        )


def join_all(firsts: Sequence[QuantWMSpan], seconds: Sequence[QuantWMSpan]) -> list[QuantWMSpan]:
    """Every first span with its second behind it; both of one codebook."""
    before, after = firsts[0].tokens, seconds[0].tokens
    later_stops = (torch.stack([s.chunk_stops for s in seconds]) + before).split(1)
    stops = join_rows([f.chunk_stops.unsqueeze(0) for f in firsts], later_stops, anywhere=True)
    corrections = join_all_corrections(
        [f.correction for f in firsts], before, [s.correction for s in seconds], after
    )
    parts = (
        join_rows([f.codes for f in firsts], [s.codes for s in seconds]),
        join_rows([f.ids for f in firsts], [s.ids for s in seconds]),
        join_rows([f.scales for f in firsts], [s.scales for s in seconds]),
        join_rows([f.secondary for f in firsts], [s.secondary for s in seconds], anywhere=True),
        [joined.squeeze(0) for joined in stops],
        [f.chunk_tokens + s.chunk_tokens for f, s in zip(firsts, seconds, strict=True)],
        _join_zeros(firsts, seconds),
        [f.codebook for f in firsts],
        corrections,
        [f.turns and f.turns.joined(s.turns) for f, s in zip(firsts, seconds, strict=True)],
    )
    return [QuantWMSpan(*span) for span in zip(*parts, strict=True)]


def _join_zeros(firsts: Sequence[QuantWMSpan], seconds: Sequence[QuantWMSpan]) -> list[Tensor]:
    before = firsts[0].scales.shape[1] * firsts[0].scales.shape[2]
    if before % CODES_PER_BYTE == 0:
        return join_rows([f.zeros for f in firsts], [s.zeros for s in seconds])
    after = seconds[0].scales.shape[1] * seconds[0].scales.shape[2]
    codes = (
        (unpack_range(f.zeros, 0, before), unpack_range(s.zeros, 0, after))
        for f, s in zip(firsts, seconds, strict=True)
    )
    return [pack(torch.cat(pair, dim=1)) for pair in codes]


def cut_all(spans: Sequence[QuantWMSpan], start: int, stop: int) -> list[QuantWMSpan]:
    """Tokens start..stop-1 of every span; alike in their chunks."""
    tokens, groups = spans[0].tokens, spans[0].scales.shape[2]
    ends = stop == tokens or stop * groups % CODES_PER_BYTE == 0
    if start >= stop or start * groups % CODES_PER_BYTE or not ends:
        return [span.picked(torch.arange(start, stop)) for span in spans]
    # Zeros begin and end with a byte here: ranges of every part, and no host sync.
    stops = list(accumulate(spans[0].chunk_tokens))
    chunks = bisect_right(stops, start), bisect_left(stops, stop) + 1
    kept_stops = [min(s, stop) - start for s in stops[slice(*chunks)]]
    moved_stops = torch.stack([s.chunk_stops for s in spans])[:, slice(*chunks)] - start
    zeros = start * groups // CODES_PER_BYTE, bytes_of_codes(stop * groups)
    parts = (
        cut_rows([s.codes for s in spans], start, stop),
        cut_rows([s.ids for s in spans], start, stop),
        cut_rows([s.scales for s in spans], start, stop),
        cut_rows([s.secondary for s in spans], *chunks, anywhere=True),
        list(moved_stops.clamp_(max=stop - start).unbind(0)),
        [tuple(b - a for a, b in pairwise((0, *kept_stops)))] * len(spans),
        cut_rows([s.zeros for s in spans], *zeros),
        [s.codebook for s in spans],
        cut_corrections([s.correction for s in spans], start, stop),
        [s.turns and s.turns.select(slice(start, stop)) for s in spans],
    )
    return [QuantWMSpan(*span) for span in zip(*parts, strict=True)]

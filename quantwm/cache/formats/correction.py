"""PSAC rows of a span's keys: dense, or sparse by a bit a token, whichever is smaller.

Both forms hold the same rows; a row that the gate refused is all zero and its scale is 0. The
sparse form keeps the other rows only, all heads behind each other, and a bit mask that says whose
they are (the paper says "rows and indices"; a bit a token is less than any index).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import TypeGuard

import torch
from torch import Tensor

from quantwm.cache.dispatch import kernels_in
from quantwm.cache.formats.base import storage_bytes
from quantwm.cache.formats.rows import ALIGNED_BYTES, LARGE_BYTES, cut_rows, join_rows
from quantwm.cache.pack import pack, packed_bytes, unpack

Room = Callable[[int], Tensor | None]
"""Bytes -> uint8 [at least as many] to write to until the next reading; None if there is none."""

ROW_LIMITS = {"int8": 127, "int4": 7}
"""Largest coefficient of a row, by how rows are stored."""


def row_bytes(rank: int, kind: str) -> int:
    """Of a row's coefficients as stored, its scale aside."""
    return packed_bytes(rank, 4) if kind == "int4" else rank


def stored_rows(coefficients: Tensor, kind: str) -> Tensor:
    """int8 [..., r] within the kind's limit as it is stored: itself, or uint8 [..., ceil(r / 2)].

    INT4 is two's complement, so that a byte of zeros is two zeros.
    """
    if kind == "int8":
        return coefficients
    return pack((coefficients & 15).to(torch.uint8), 4)


@dataclass(frozen=True)
class Correction:
    """Correction of a span's tokens from `first` on (earlier ones came before any query).

    Attributes:
        first, count: the corrected tokens are first .. first + count - 1 of the span.
        basis: bfloat16 [H, D, r].
        coefficients, row_scales: int8 [H, count, r], or uint8 [H, count, ceil(r / 2)] in INT4, and
            float16 [H, count]; when sparse [R, ...] and [R].
        mask: None when dense; sparse: uint8 [H, ceil(count / 8)], token 8b + j in bit j of byte b.
    """

    first: int
    count: int
    basis: Tensor
    coefficients: Tensor
    row_scales: Tensor
    mask: Tensor | None

    def dense(self) -> Correction:
        if self.mask is None:
            return self
        kernel = kernels_in("rows", self.mask.device)
        if kernel is None:
            return dense_all([self])[0]
        rows = kernel.spread_rows(self.mask, self.coefficients, self.row_scales, self.count)
        return Correction(self.first, self.count, self.basis, *rows, None)

    def spread(self, room: Room) -> Correction | None:
        """The dense form of a sparse one in a room that others use after it; None without a kernel
        or a room."""
        kernel = kernels_in("rows", self.row_scales.device)
        if kernel is None or self.mask is None:
            return None
        heads, stored = self.basis.shape[0], self.coefficients.shape[-1]
        size = heads * self.count * stored
        behind = -(-size // ALIGNED_BYTES) * ALIGNED_BYTES
        bytes_of = room(behind + heads * self.count * 2)
        if bytes_of is None:
            return None
        rows = bytes_of[:size].view(self.coefficients.dtype).view(heads, self.count, stored)
        scales = bytes_of[behind : behind + heads * self.count * 2].view(torch.float16)
        into = rows, scales.view(heads, self.count)
        kernel.spread_rows(self.mask, self.coefficients, self.row_scales, self.count, into)
        return Correction(self.first, self.count, self.basis, *into, None)

    @property
    def is_plain(self) -> bool:
        """Whether a decoder reads it as it is held."""
        return self.mask is None and self.coefficients.dtype == torch.int8

    def plain(self) -> Correction:
        """The dense form in INT8."""
        dense = self.dense()
        if dense.coefficients.dtype == torch.int8:
            return dense
        codes = unpack(dense.coefficients, self.basis.shape[2], 4).to(torch.int8)
        return replace(dense, coefficients=(codes ^ 8) - 8)

    def sparse_is_smaller(self, kept: int) -> bool:
        """Than the dense form, were `kept` rows and a mask stored. To be asked of the latter."""
        heads, stored = self.basis.shape[0], self.coefficients.shape[-1]
        return kept * (stored + 2) + heads * -(-self.count // 8) < self.dense_bytes()

    def select(self, kept: Tensor) -> Correction | None:
        """kept: int64 [n], ascending positions in the span, on the CPU."""
        before = int(torch.searchsorted(kept, self.first))
        stop = int(torch.searchsorted(kept, self.first + self.count))
        if stop == before:
            return None
        rows = kept[before:stop] - self.first
        rows = rows.to(self.row_scales.device, non_blocking=True)
        dense = self.dense()
        return replace(
            dense,
            first=before,
            count=stop - before,
            coefficients=dense.coefficients.index_select(1, rows),
            row_scales=dense.row_scales.index_select(1, rows),
        )

    def row_tensors(self) -> tuple[Tensor, ...]:
        rows = (self.coefficients, self.row_scales)
        return rows if self.mask is None else (*rows, self.mask)

    def dense_bytes(self) -> int:
        return self.basis.shape[0] * self.count * (self.coefficients.shape[-1] + 2)

    def nbytes(self) -> int:
        return storage_bytes(self.row_tensors())


def kept_rows(corrections: Sequence[Correction]) -> list[Tensor]:
    """Rows of each dense form that correct anything, on the device, in order: int64 [any] each."""
    scales = [c.row_scales for c in corrections]
    if scales and len({s.shape for s in scales}) == 1:
        return [torch.stack(scales).flatten(1).count_nonzero(1)]
    return [s.count_nonzero().unsqueeze(0) for s in scales]


@dataclass(frozen=True)
class Ahead:
    """Of alike dense forms what becoming sparse takes, but for how many rows are kept: launched
    before the host waits for that, not after.

    Attributes:
        counts: `kept_rows` of all, int64 [forms].
        rows, scales: of all tokens, all forms behind each other, [forms * H * count, ...].
        order: places in them, those of kept rows first and ascending.
        masks: of each form, see `Correction`.
    """

    counts: Tensor
    rows: Tensor
    scales: Tensor
    order: Tensor
    masks: Sequence[Tensor]

    @classmethod
    def of(cls, dense: Sequence[Correction]) -> Ahead:
        scales = torch.stack([c.row_scales for c in dense])
        present = scales != 0
        rows = torch.cat([c.coefficients for c in dense]).flatten(0, 1)
        # The kept rows in order: a stable sort does not sync the device, as nonzero would.
        order = torch.argsort((~present).flatten().to(torch.uint8), stable=True)
        counts, masks = present.flatten(1).count_nonzero(1), _pack_bits(present).unbind(0)
        return cls(counts, rows, scales.flatten(), order, masks)

    def sparse(
        self, dense: Sequence[Correction], counts: Sequence[int], chosen: Sequence[bool]
    ) -> list[Correction]:
        """The sparse form of those of all the dense ones that are chosen. counts: on the host."""
        kept, places = list(counts), self.order[: sum(counts)]
        masks: Sequence[Tensor] = self.masks
        if not all(chosen):
            places = torch.cat(list(compress(places.split(kept), chosen)))
            dense, kept = list(compress(dense, chosen)), list(compress(kept, chosen))
            masks = torch.stack(list(compress(masks, chosen))).unbind(0)
        rows = self.rows.index_select(0, places).split(kept)
        scales = self.scales.index_select(0, places).split(kept)
        return [
            Correction(c.first, c.count, c.basis, own, own_scales, mask)
            for c, own, own_scales, mask in zip(dense, rows, scales, masks, strict=True)
        ]


def counted(corrections: Sequence[Correction]) -> tuple[list[Tensor], Ahead | None]:
    """`kept_rows`, and what `settled_corrections` can have ahead; None of forms that are not made
    sparse together."""
    if len(corrections) and next(_runs(corrections)) == slice(0, len(corrections)):
        ahead = Ahead.of(corrections)
        return [ahead.counts], ahead
    return kept_rows(corrections), None


def settled_corrections(
    corrections: Sequence[Correction], counts: Sequence[int], ahead: Ahead | None = None
) -> Iterator[Correction]:
    """Each dense form, or its sparse one where that is smaller. counts, ahead: of `counted`, the
    former on the host.

    Rows of several layers may share a storage. Where only some become sparse, the others get one of
    their own: else the whole of it would be held for them.
    """
    chosen = [c.sparse_is_smaller(n) for c, n in zip(corrections, counts, strict=True)]
    if all(chosen) and ahead is not None:
        yield from ahead.sparse(corrections, counts, chosen)
        return
    some = list(compress(corrections, chosen))
    rest = [c for c, wanted in zip(corrections, chosen, strict=True) if not wanted]
    if ahead is None or not some:
        sparse = iter(sparse_all(some, list(compress(counts, chosen))))
    else:
        sparse = iter(ahead.sparse(corrections, counts, chosen))
    dense = iter(alone_all(rest) if some else rest)
    for wanted in chosen:
        yield next(sparse) if wanted else next(dense)


TOGETHER = LARGE_BYTES // 8
"""Rows that are put in or taken out together, with an int64 place each: a bound on the transient.
Of one layer alone it is some 15 launches, 20 us of CPU each."""


def _runs(corrections: Sequence[Correction]) -> Iterator[slice]:
    """Neighbours whose rows may share a storage and do not pass `TOGETHER`."""
    first = 0
    while first < len(corrections):
        one, stop = corrections[first], first + 1
        rows = one.basis.shape[0] * one.count
        sizes = rows * one.coefficients.shape[-1], rows * one.row_scales.element_size()
        if all(size % ALIGNED_BYTES == 0 for size in sizes):
            most = min(first + max(TOGETHER // max(rows, 1), 1), len(corrections))
            while stop < most and _alike(one, corrections[stop]):
                stop += 1
        yield slice(first, stop)
        first = stop


def _alike(one: Correction, other: Correction) -> bool:
    geometry = (other.count, other.basis.shape, other.coefficients.shape[-1])
    return geometry == (one.count, one.basis.shape, one.coefficients.shape[-1])


def dense_all(corrections: Sequence[Correction]) -> list[Correction]:
    """`Correction.dense` of every one, with a few operations for many."""
    found: list[Correction] = list(corrections)
    sparse = [place for place, c in enumerate(found) if c.mask is not None]
    for run in _runs([found[place] for place in sparse]):
        places = sparse[run]
        some = [found[place] for place in places]
        masks = [c.mask for c in some if c.mask is not None]
        heads, count, stored = some[0].basis.shape[0], some[0].count, some[0].coefficients.shape[-1]
        kept = _unpack_bits(torch.stack(masks), count).flatten()
        # The rank of each kept token among all kept, without a count that would sync the device.
        row = (kept.cumsum(0) - 1).clamp(min=0)
        source = torch.cat([c.coefficients for c in some])
        source_scales = torch.cat([c.row_scales for c in some])
        if source.shape[0] == 0:
            source, source_scales = source.new_zeros(1, stored), source_scales.new_zeros(1)
        rows = source.index_select(0, row) * kept.unsqueeze(-1)
        scales = source_scales.index_select(0, row) * kept
        shape = (len(some), heads, count)
        parts = zip(rows.view(*shape, stored).unbind(0), scales.view(shape).unbind(0), strict=True)
        for place, c, part in zip(places, some, parts, strict=True):
            found[place] = Correction(c.first, count, c.basis, *part, None)
    return found


def sparse_all(dense: Sequence[Correction], counts: Sequence[int]) -> list[Correction]:
    """The sparse form of every dense one. counts: rows of each that correct anything."""
    found: list[Correction] = []
    for run in _runs(dense):
        some, kept = dense[run], counts[run]
        found += Ahead.of(some).sparse(some, kept, [True] * len(some))
    return found


def alone_all(dense: Sequence[Correction]) -> list[Correction]:
    """Every dense form with rows apart from all others', with two operations for many."""
    found: list[Correction] = []
    for run in _runs(dense):
        some = dense[run]
        heads = some[0].basis.shape[0]
        rows = torch.cat([c.coefficients for c in some]).split(heads)
        scales = torch.cat([c.row_scales for c in some]).split(heads)
        found += [
            replace(c, coefficients=own, row_scales=own_scales)
            for c, own, own_scales in zip(some, rows, scales, strict=True)
        ]
    return found


def cut_corrections(
    corrections: Sequence[Correction | None], start: int, stop: int
) -> list[Correction | None]:
    """Of tokens start .. stop - 1 of each span."""
    if not _in_step(corrections):
        return [c and cut_corrections([c], start, stop)[0] for c in corrections]
    all_dense = dense_all(corrections)
    held = all_dense[0]
    first, last = max(start, held.first), min(stop, held.first + held.count)
    if first >= last:
        return [None] * len(all_dense)
    rows = first - held.first, last - held.first
    parts = (
        cut_rows([c.coefficients for c in all_dense], *rows),
        cut_rows([c.row_scales for c in all_dense], *rows),
    )
    place = first - start, last - first
    return [Correction(*place, c.basis, *p, None) for c, *p in zip(all_dense, *parts, strict=True)]


def _in_step(corrections: Sequence[Correction | None]) -> TypeGuard[Sequence[Correction]]:
    """Whether all spans have corrections, of the same tokens."""
    return None not in corrections and len({(c.first, c.count) for c in corrections if c}) == 1


def join_all_corrections(
    firsts: Sequence[Correction | None], before: int,
    seconds: Sequence[Correction | None], after: int,
) -> list[Correction | None]:  # fmt: skip
    """`join_corrections` of every pair."""
    if _in_step(firsts) and _in_step(seconds):
        heads, tails = dense_all(firsts), dense_all(seconds)
        if heads[0].first + heads[0].count == before and tails[0].first == 0:
            parts = (
                join_rows([c.coefficients for c in heads], [c.coefficients for c in tails]),
                join_rows([c.row_scales for c in heads], [c.row_scales for c in tails]),
            )
            place = heads[0].first, heads[0].count + tails[0].count
            return [
                Correction(*place, c.basis, *p, None) for c, *p in zip(heads, *parts, strict=True)
            ]
    return [
        join_corrections(first, before, second, after)
        for first, second in zip(firsts, seconds, strict=True)
    ]


def join_corrections(
    first: Correction | None, before: int, second: Correction | None, after: int
) -> Correction | None:
    """Corrections of a span of `before` tokens and of the `after` tokens that follow it."""
    if second is None:
        return first if first is None else _padded(first, before)
    if first is None:
        return replace(second.dense(), first=before + second.first)
    head, tail = _padded(first, before), second.dense()
    gap = tail.first
    return replace(
        head,
        count=head.count + gap + tail.count,
        coefficients=torch.cat(
            (head.coefficients, _zero_rows(head.coefficients, gap), tail.coefficients), dim=1
        ),
        row_scales=torch.cat(
            (head.row_scales, _zero_rows(head.row_scales, gap), tail.row_scales), dim=1
        ),
    )


def _padded(correction: Correction, stop: int) -> Correction:
    """The dense form with rows up to token `stop` of the span."""
    dense = correction.dense()
    missing = stop - dense.first - dense.count
    if missing == 0:
        return dense
    return replace(
        dense,
        count=dense.count + missing,
        coefficients=torch.cat(
            (dense.coefficients, _zero_rows(dense.coefficients, missing)), dim=1
        ),
        row_scales=torch.cat((dense.row_scales, _zero_rows(dense.row_scales, missing)), dim=1),
    )


def _zero_rows(like: Tensor, count: int) -> Tensor:
    return like.new_zeros(like.shape[0], count, *like.shape[2:])


def _pack_bits(present: Tensor) -> Tensor:
    """bool [..., N] -> uint8 [..., ceil(N / 8)]."""
    padded = torch.nn.functional.pad(present, (0, -present.shape[-1] % 8)).unflatten(-1, (-1, 8))
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=padded.device)
    return (padded * weights).sum(-1, dtype=torch.uint8)


def _unpack_bits(mask: Tensor, count: int) -> Tensor:
    """uint8 [..., ceil(count / 8)] -> bool [..., count]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=mask.device)
    return ((mask.unsqueeze(-1) >> shifts) & 1).flatten(-2)[..., :count].bool()

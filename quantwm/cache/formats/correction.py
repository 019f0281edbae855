"""PSAC rows of a span's keys: dense, or sparse by a bit a token, whichever is smaller.

Both forms hold the same rows; a row that the gate refused is all zero and its scale is 0. The
sparse form keeps the other rows only, all heads behind each other, and a bit mask that says whose
they are (the paper says "rows and indices"; a bit a token is less than any index).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

import torch
from torch import Tensor

from quantwm.cache.formats.base import storage_bytes
from quantwm.cache.formats.rows import cut_rows, join_rows
from quantwm.cache.pack import pack, packed_bytes, unpack

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
        heads, stored = self.basis.shape[0], self.coefficients.shape[-1]
        kept = _unpack_bits(self.mask, self.count).flatten()
        # The rank of each kept token among all kept, without a count that would sync the device.
        row = (kept.cumsum(0) - 1).clamp(min=0)
        source, source_scales = self.coefficients, self.row_scales
        if source.shape[0] == 0:
            source, source_scales = source.new_zeros(1, stored), source_scales.new_zeros(1)
        coefficients = source.index_select(0, row) * kept.unsqueeze(-1)
        row_scales = source_scales.index_select(0, row) * kept
        return replace(
            self,
            coefficients=coefficients.view(heads, self.count, stored),
            row_scales=row_scales.view(heads, self.count),
            mask=None,
        )

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

    def smallest(self, kept: int) -> Correction:
        """The dense form or, when `kept` rows and the mask take less, the sparse one."""
        heads, stored = self.basis.shape[0], self.coefficients.shape[-1]
        if kept * (stored + 2) + heads * -(-self.count // 8) >= self.dense_bytes():
            return self
        present = self.row_scales != 0
        # The kept rows in order: a stable sort does not sync the device, as nonzero would.
        rows = torch.argsort((~present).flatten().to(torch.uint8), stable=True)[:kept]
        return replace(
            self,
            coefficients=self.coefficients.reshape(-1, stored).index_select(0, rows),
            row_scales=self.row_scales.flatten().index_select(0, rows),
            mask=_pack_bits(present),
        )

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

    def alone(self) -> Correction:
        """With rows in storage of their own."""
        return replace(
            self, coefficients=self.coefficients.clone(), row_scales=self.row_scales.clone()
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


def settled_corrections(
    corrections: Sequence[Correction], counts: Sequence[int]
) -> Iterator[Correction]:
    """Each dense form, or its sparse one where that is smaller. counts: `kept_rows`, on the host.

    Rows of several layers may share a storage. Where only some become sparse, the others get one of
    their own: else the whole of it would be held for them.
    """
    found = [c.smallest(kept) for c, kept in zip(corrections, counts, strict=True)]
    mixed = len({c.mask is None for c in found}) == 2
    return (c.alone() if mixed and c.mask is None else c for c in found)


def cut_corrections(
    corrections: Sequence[Correction | None], start: int, stop: int
) -> list[Correction | None]:
    """Of tokens start .. stop - 1 of each span."""
    if not _in_step(corrections):
        return [c and cut_corrections([c], start, stop)[0] for c in corrections]
    all_dense = [c.dense() for c in corrections]
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
        heads, tails = [c.dense() for c in firsts], [c.dense() for c in seconds]
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
    padded = torch.nn.functional.pad(present, (0, -present.shape[1] % 8)).unflatten(1, (-1, 8))
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=padded.device)
    return (padded * weights).sum(-1, dtype=torch.uint8)


def _unpack_bits(mask: Tensor, count: int) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=mask.device)
    return ((mask.unsqueeze(-1) >> shifts) & 1).flatten(1)[:, :count].bool()

"""What formats of centroids and a ternary residual (qvg, qvg-pro) have in common: spans, joined,
cut and counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

from torch import Tensor

from quantwm.cache.dispatch import Decode
from quantwm.cache.formats.base import Codebook, QueryGuide, shape_of, storage_bytes
from quantwm.cache.formats.rows import cut_rows, join_rows, part_rows, pick_rows


@dataclass(frozen=True)
class CodedSpan:
    """N tokens of H heads: uint8 codes [H, N, D / 4], uint8 ids [H, N] or [H, N, stages], scales
    float8_e4m3fn [H, N, D / G]; the codebook is shared."""

    codes: Tensor
    ids: Tensor
    scales: Tensor
    codebook: Codebook

    @cached_property
    def decode(self) -> Decode:
        """Made at the first reading; it holds this span's own tensors and nothing beside them."""
        return self.decoder()

    def decoder(self) -> Decode:
        """With the codebook widened for this decoder alone, where it is INT8."""
        raise NotImplementedError

    def with_rows(self, codes: Tensor, ids: Tensor, scales: Tensor) -> CodedSpan:
        return replace(self, codes=codes, ids=ids, scales=scales)


SpanT = TypeVar("SpanT", bound=CodedSpan)


class CodedFormat(Generic[SpanT]):
    """Spans of one kind; see `base.Format`."""

    compresses = True
    uses_queries = False
    full_moment = False
    rank = 0
    exact = False

    def join(self, first: SpanT, second: SpanT) -> SpanT:
        return self.join_all([first], [second])[0]

    def join_all(self, firsts: Sequence[SpanT], seconds: Sequence[SpanT]) -> list[SpanT]:
        parts = (
            join_rows([f.codes for f in firsts], [s.codes for s in seconds]),
            join_rows([f.ids for f in firsts], [s.ids for s in seconds]),
            join_rows([f.scales for f in firsts], [s.scales for s in seconds]),
        )
        return [f.with_rows(*rows) for f, *rows in zip(firsts, *parts, strict=True)]

    def cut_all(self, spans: Sequence[SpanT], start: int, stop: int) -> list[SpanT]:
        parts = (
            cut_rows([s.codes for s in spans], start, stop),
            cut_rows([s.ids for s in spans], start, stop),
            cut_rows([s.scales for s in spans], start, stop),
        )
        return [s.with_rows(*rows) for s, *rows in zip(spans, *parts, strict=True)]

    def for_parting(self, span: SpanT, count: int) -> SpanT:
        return span

    def parted(
        self, span: SpanT, books: Sequence[Codebook], guides: Sequence[QueryGuide]
    ) -> list[SpanT]:
        parts = (part_rows(t, len(books)) for t in (span.codes, span.ids, span.scales))
        return [
            replace(span, codes=codes, ids=ids, scales=scales, codebook=book)
            for codes, ids, scales, book in zip(*parts, books, strict=True)
        ]

    def select(self, span: SpanT, keep: slice | Tensor) -> SpanT:
        if isinstance(keep, slice):
            start, stop, _ = keep.indices(self.tokens(span))
            return self.cut_all([span], start, stop)[0]
        return span.with_rows(*(pick_rows(t, keep) for t in (span.codes, span.ids, span.scales)))

    def settle(self, spans: Sequence[SpanT]) -> list[SpanT]:
        return list(spans)

    def decode_into(self, span: SpanT, out: Tensor, offset: int, start: int, stop: int) -> None:
        self.decode_heads_into(span, out, offset, start, stop, 0)

    def decode_heads_into(
        self, span: SpanT, out: Tensor, offset: int, start: int, stop: int, first_head: int
    ) -> None:
        # An INT8 codebook is widened for one reading only: kept, it would be bytes not counted.
        decode = span.decode if span.codebook.scales is None else span.decoder()
        decode(out, offset, start, stop, first_head)

    def prepared(self, span: SpanT) -> Decode | None:
        return span.decode if span.codebook.scales is None else None

    def read_from(self, span: SpanT) -> tuple[Any, Sequence[Tensor]] | None:
        if span.codebook.scales is not None:
            return None
        tensors = (span.codes, span.ids, span.scales, span.codebook.centroids)
        return shape_of(tensors), tensors

    def tokens(self, span: SpanT) -> int:
        return span.ids.shape[1]

    def parts(self, span: SpanT) -> Mapping[str, Sequence[Tensor]]:
        return {
            "codes": (span.codes,),
            "scales": (span.scales,),
            "ids": (span.ids,),
            "codebooks": span.codebook.tensors(),
        }

    def nominal_bytes(self, span: SpanT) -> int:
        return sum(storage_bytes(tensors) for tensors in self.parts(span).values())

"""The `qvg` format: one centroid a token and a ternary residual with E4M3 group scales.

Quant VideoGen (arXiv 2602.02958) sections 3-4, one stage, INT2. Per token and head at D = 128:
256 bits of codes, 8 per group of scales, 8 of centroid id; per span and head a BF16 codebook.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from torch import Generator, Tensor

from kernels.format import Side
from quantwm.cache import kmeans
from quantwm.cache.codebook import codebook_bytes
from quantwm.cache.codebook_life import CodebookLife
from quantwm.cache.dispatch import Decode, ops_for
from quantwm.cache.formats.base import (
    Codebook,
    QueryGuide,
    Role,
    check_clustering,
    check_group,
    storage_bytes,
)
from quantwm.cache.formats.rows import cut_rows, join_rows, pick_rows
from quantwm.cache.pack import packed_bytes as bytes_of_codes


@dataclass(frozen=True)
class QvgConfig(CodebookLife):
    """centroids: of a codebook; group_size: channels a scale; iterations: of k-means."""

    centroids: int = 256
    group_size: int = 64
    iterations: int = 2

    def __post_init__(self) -> None:
        check_clustering(self.centroids, self.group_size, self.iterations)
        self.check_life()


PRESETS = {
    "published": QvgConfig(),
    "embedded": QvgConfig(centroids=64),
}


@dataclass(frozen=True)
class QvgSpan:
    """See docs/architecture.md: codes, ids, scales as there; the codebook is shared."""

    codes: Tensor
    ids: Tensor
    scales: Tensor
    codebook: Codebook

    @cached_property
    def decode(self) -> Decode:
        """Made at the first reading; it holds this span's own tensors and nothing beside them."""
        return self.decoder()

    def decoder(self) -> Decode:
        centroids = self.codebook.dense()
        group_size = centroids.shape[2] // self.scales.shape[2]
        span = (self.codes, self.ids, centroids, self.scales)
        return ops_for(self.codes.device).prepare_qvg(*span, group_size)


class QvgFormat:
    """x = centroid + (code - 1) * scale."""

    name = "qvg"
    compresses = True
    uses_queries = False
    full_moment = False
    rank = 0
    exact = False

    def __init__(self, config: QvgConfig | None = None) -> None:
        self.config = self.life = config or QvgConfig()

    def check(self, head_dim: int) -> None:
        check_group(self.config.group_size, head_dim)

    def fit(self, x: Tensor, generator: Generator, warm: Codebook | None) -> Codebook | None:
        return fit_codebook(x, self.config, generator, warm)

    def encode(
        self, x: Tensor, codebook: Codebook | None, role: Role, guide: QueryGuide
    ) -> QvgSpan:
        codebook = require_codebook(codebook)
        ops, centroids = ops_for(x.device), codebook.dense()
        ids = ops.assign(x, centroids)
        codes, scales = ops.encode_qvg(x, ids, centroids, self.config.group_size)
        return QvgSpan(codes, ids, scales, codebook)

    def join(self, first: QvgSpan, second: QvgSpan) -> QvgSpan:
        return self.join_all([first], [second])[0]

    def join_all(self, firsts: Sequence[QvgSpan], seconds: Sequence[QvgSpan]) -> list[QvgSpan]:
        parts = (
            join_rows([f.codes for f in firsts], [s.codes for s in seconds]),
            join_rows([f.ids for f in firsts], [s.ids for s in seconds]),
            join_rows([f.scales for f in firsts], [s.scales for s in seconds]),
        )
        return [QvgSpan(*p, f.codebook) for f, *p in zip(firsts, *parts, strict=True)]

    def cut_all(self, spans: Sequence[QvgSpan], start: int, stop: int) -> list[QvgSpan]:
        parts = (
            cut_rows([s.codes for s in spans], start, stop),
            cut_rows([s.ids for s in spans], start, stop),
            cut_rows([s.scales for s in spans], start, stop),
        )
        return [QvgSpan(*p, s.codebook) for s, *p in zip(spans, *parts, strict=True)]

    def select(self, span: QvgSpan, keep: slice | Tensor) -> QvgSpan:
        if isinstance(keep, slice):
            start, stop, _ = keep.indices(self.tokens(span))
            return self.cut_all([span], start, stop)[0]
        return replace(
            span,
            codes=pick_rows(span.codes, keep),
            ids=pick_rows(span.ids, keep),
            scales=pick_rows(span.scales, keep),
        )

    def settle(self, spans: Sequence[QvgSpan]) -> list[QvgSpan]:
        return list(spans)

    def decode_into(self, span: QvgSpan, out: Tensor, offset: int, start: int, stop: int) -> None:
        self.decode_heads_into(span, out, offset, start, stop, 0)

    def decode_heads_into(
        self, span: QvgSpan, out: Tensor, offset: int, start: int, stop: int, first_head: int
    ) -> None:
        # An INT8 codebook is widened for one reading only: kept, it would be bytes not counted.
        decode = span.decode if span.codebook.scales is None else span.decoder()
        decode(out, offset, start, stop, first_head)

    def prepared(self, span: QvgSpan) -> Decode | None:
        return span.decode if span.codebook.scales is None else None

    def side(self, span: QvgSpan) -> Side:
        packed = (span.codes, span.ids, span.codebook.dense(), span.scales)
        return Side("ternary", None, *packed)

    def tokens(self, span: QvgSpan) -> int:
        return span.ids.shape[1]

    def parts(self, span: QvgSpan) -> Mapping[str, Sequence[Tensor]]:
        return {
            "codes": (span.codes,),
            "scales": (span.scales,),
            "ids": (span.ids,),
            "codebooks": span.codebook.tensors(),
        }

    def power(self, span: QvgSpan) -> Tensor:
        return span.scales.float().square().mean()

    def shared(self, span: QvgSpan) -> Sequence[Tensor]:
        return span.codebook.tensors()

    def book_bytes(self, heads: int, head_dim: int) -> int:
        config = self.config
        return heads * codebook_bytes(config.centroids, head_dim, config.centroid_bits)

    def nominal_bytes(self, span: QvgSpan) -> int:
        return sum(storage_bytes(tensors) for tensors in self.parts(span).values())

    def packed_bytes(
        self, tokens: int, chunks: int, heads: int, head_dim: int, role: Role
    ) -> dict[str, int]:
        return {
            "codes": tokens * heads * bytes_of_codes(head_dim),
            "scales": tokens * heads * (head_dim // self.config.group_size),
            "ids": tokens * heads,
            "codebooks": self.book_bytes(heads, head_dim),
        }


class Clustered(Protocol):
    """Settings of a format with one codebook."""

    @property
    def centroids(self) -> int: ...

    @property
    def iterations(self) -> int: ...

    @property
    def centroid_bits(self) -> int: ...


def fit_codebook(
    x: Tensor, config: Clustered, generator: Generator, warm: Codebook | None
) -> Codebook:
    """k-means of a chunk, from the last codebook where there is one."""
    ops = ops_for(x.device)
    fitted = kmeans.fit(
        x,
        config.centroids,
        config.iterations,
        generator,
        None if warm is None else warm.dense(),
        assign=ops.assign,
        update=ops.update,
    )
    return Codebook.of(fitted, config.centroid_bits)


def require_codebook(codebook: Codebook | None) -> Codebook:
    if codebook is None:
        raise ValueError("a span with centroids needs its codebook before a chunk is encoded")
    return codebook

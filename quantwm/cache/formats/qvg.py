"""The `qvg` format: one centroid a token and a ternary residual with E4M3 group scales.

Quant VideoGen (arXiv 2602.02958) sections 3-4, one stage, INT2. Per token and head at D = 128:
256 bits of codes, 8 per group of scales, 8 of centroid id; per span and head a BF16 codebook.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
)
from quantwm.cache.formats.coded import CodedFormat, CodedSpan
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
class QvgSpan(CodedSpan):
    """See docs/architecture.md."""

    def decoder(self) -> Decode:
        centroids = self.codebook.dense()
        group_size = centroids.shape[2] // self.scales.shape[2]
        span = (self.codes, self.ids, centroids, self.scales)
        return ops_for(self.codes.device).prepare_qvg(*span, group_size)


class QvgFormat(CodedFormat[QvgSpan]):
    """x = centroid + (code - 1) * scale."""

    name = "qvg"

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

    def side(self, span: QvgSpan) -> Side:
        packed = (span.codes, span.ids, span.codebook.dense(), span.scales)
        return Side("ternary", None, *packed)

    def power(self, span: QvgSpan) -> Tensor:
        return span.scales.float().square().mean()

    def shared(self, span: QvgSpan) -> Sequence[Tensor]:
        return span.codebook.tensors()

    def book_bytes(self, heads: int, head_dim: int) -> int:
        config = self.config
        return heads * codebook_bytes(config.centroids, head_dim, config.centroid_bits)

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

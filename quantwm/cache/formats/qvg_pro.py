"""The `qvg-pro` format: QVG with several stages of centroids, each of what the last one left.

Quant VideoGen (arXiv 2602.02958) section 4.2, progressive residual quantization: 4 stages, groups
of 16 channels. Per token and head at D = 128: 256 bits of codes, 64 of E4M3 scales and 8 a stage of
centroid ids; per span and head a BF16 codebook a stage.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from quantwm.cache import kmeans
from quantwm.cache.dispatch import Decode, ops_for
from quantwm.cache.formats.base import (
    Codebook,
    QueryGuide,
    Role,
    check_clustering,
    check_group,
)
from quantwm.cache.formats.coded import CodedFormat, CodedSpan
from quantwm.cache.formats.qvg import require_codebook
from quantwm.cache.pack import packed_bytes as bytes_of_codes
from quantwm.errors import UserError

MAX_STAGES = 16


@dataclass(frozen=True)
class QvgProConfig:
    """stages: codebooks, one after the other; the others as in QvgConfig, centroids a stage."""

    stages: int = 4
    centroids: int = 256
    group_size: int = 16
    iterations: int = 2

    def __post_init__(self) -> None:
        check_clustering(self.centroids, self.group_size, self.iterations)
        if not 1 <= self.stages <= MAX_STAGES:
            raise UserError(f"stages must be 1 to {MAX_STAGES}, got {self.stages}")


PRESETS = {
    "published": QvgProConfig(),
    "embedded": QvgProConfig(centroids=64),
}


@dataclass(frozen=True)
class QvgProSpan(CodedSpan):
    """N tokens of H heads.

    Attributes:
        codes: uint8 [H, N, D / 4], of the last stage's residual; as in the qvg format.
        ids: uint8 [H, N, S], the centroid of each of S stages.
        scales: float8_e4m3fn [H, N, D / G].
        codebook: centroids [H, S * K, D], those of stage s from s * K on; shared by the span.
    """

    def decoder(self) -> Decode:
        centroids = self.codebook.centroids
        group_size = centroids.shape[2] // self.scales.shape[2]
        span = (self.codes, self.ids, centroids, self.scales)
        return ops_for(self.codes.device).prepare_stages(*span, group_size)


class QvgProFormat(CodedFormat[QvgProSpan]):
    """x = the sum of one centroid a stage + (code - 1) * scale."""

    name = "qvg-pro"

    def __init__(self, config: QvgProConfig | None = None) -> None:
        self.config = config or QvgProConfig()

    def check(self, head_dim: int) -> None:
        check_group(self.config.group_size, head_dim)

    def fit(self, x: Tensor, generator: Generator, warm: Codebook | None) -> Codebook | None:
        """k-means a stage, of the residual that the stages before leave."""
        ops, config, fitted = ops_for(x.device), self.config, []
        warm_stages = [None] * config.stages if warm is None else self._stages(warm)
        left: Tensor | None = None  # of all stages so far, in one buffer
        for init in warm_stages:
            found = kmeans.fit(
                x,
                config.centroids,
                config.iterations,
                generator,
                init,
                assign=ops.assign,
                update=ops.update,
            )
            fitted.append(found.to(torch.bfloat16))
            if len(fitted) < config.stages:
                x = left = ops.residual(x, ops.assign(x, fitted[-1]), fitted[-1], left)
        return Codebook(torch.cat(fitted, dim=1))

    def _stages(self, codebook: Codebook) -> list[Tensor]:
        return [c.contiguous() for c in codebook.centroids.split(self.config.centroids, dim=1)]

    def encode(
        self, x: Tensor, codebook: Codebook | None, role: Role, guide: QueryGuide
    ) -> QvgProSpan:
        codebook = require_codebook(codebook)
        ops, ids = ops_for(x.device), []
        left: Tensor | None = None  # of all stages so far, in one buffer
        *stages, last = self._stages(codebook)
        for centroids in stages:
            ids.append(ops.assign(x, centroids))
            x = left = ops.residual(x, ids[-1], centroids, left)
        ids.append(ops.assign(x, last))
        codes, scales = ops.encode_qvg(x, ids[-1], last, self.config.group_size)
        return QvgProSpan(codes, torch.stack(ids, dim=-1), scales, codebook)

    def packed_bytes(
        self, tokens: int, chunks: int, heads: int, head_dim: int, role: Role
    ) -> dict[str, int]:
        config = self.config
        return {
            "codes": tokens * heads * bytes_of_codes(head_dim),
            "scales": tokens * heads * (head_dim // config.group_size),
            "ids": tokens * heads * config.stages,
            "codebooks": heads * config.stages * config.centroids * head_dim * 2,
        }

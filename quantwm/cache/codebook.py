"""A codebook: centroids of one layer's keys or values, in BF16 or in INT8 with a scale each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CENTROID_MAX = 127


@dataclass(frozen=True)
class Codebook:
    """Centroids of one layer, keys or values.

    Attributes:
        centroids: bfloat16 [H, K, D]; int8 with scales.
        scales: bfloat16 [H, K], one a centroid; None where centroids are BF16. (BF16 as the
            centroids are when widened, so that one multiplication widens them.)
    """

    centroids: Tensor
    scales: Tensor | None = None

    @classmethod
    def of(cls, fitted: Tensor, bits: int = 16) -> Codebook:
        """fitted: float32 [H, K, D]; bits: 16 or 8 of a stored entry."""
        if bits == 16:
            return cls(fitted.to(torch.bfloat16))
        scales = (fitted.abs().amax(-1) / CENTROID_MAX).to(torch.bfloat16)
        steps = scales.float().unsqueeze(-1).clamp(min=torch.finfo(torch.bfloat16).tiny)
        codes = torch.floor(fitted / steps + 0.5).clamp(-CENTROID_MAX, CENTROID_MAX)
        return cls(codes.to(torch.int8), scales)

    def dense(self) -> Tensor:
        """bfloat16 [H, K, D]: what tokens are encoded against and decoded from."""
        if self.scales is None:
            return self.centroids
        return self.centroids * self.scales.unsqueeze(-1)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.centroids,) if self.scales is None else (self.centroids, self.scales)

    def joined(self, other: Codebook) -> Codebook:
        """The heads of both, in BF16: where fitting begins, not what is stored."""
        return Codebook(torch.cat((self.dense(), other.dense())))

    def halves(self) -> tuple[Codebook, Codebook]:
        """The first and the last half of the heads, as views."""
        parts = (t.chunk(2) for t in self.tensors())
        first, last = zip(*parts, strict=True)
        return Codebook(*first), Codebook(*last)


def codebook_bytes(centroids: int, head_dim: int, bits: int) -> int:
    """Of one head's codebook, as `Codebook.of` makes it."""
    return centroids * (head_dim * 2 if bits == 16 else head_dim + 2)

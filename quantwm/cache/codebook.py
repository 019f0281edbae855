"""A codebook: centroids of one layer's keys or values, in BF16 or in INT8 with a scale each."""

from __future__ import annotations

from collections.abc import Sequence
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

    @classmethod
    def behind_each_other(cls, books: Sequence[Codebook]) -> Codebook:
        """`joined` of many."""
        return cls(_whole([book.dense() for book in books]))

    def halves(self) -> tuple[Codebook, Codebook]:
        """The first and the last half of the heads, as views."""
        first, last = self.parted(2)
        return first, last

    def parted(self, count: int) -> list[Codebook]:
        """As many parts of its heads, one after the other, as views."""
        parts = (t.chunk(count) for t in self.tensors())
        return [Codebook(*part) for part in zip(*parts, strict=True)]


def codebook_bytes(centroids: int, head_dim: int, bits: int) -> int:
    """Of one head's codebook, as `Codebook.of` makes it."""
    return centroids * (head_dim * 2 if bits == 16 else head_dim + 2)


def _whole(parts: Sequence[Tensor]) -> Tensor:
    """torch.cat(parts): a view where contiguous parts lie behind each other in one storage, as
    `Codebook.parted` leaves them."""
    first, step = parts[0], parts[0].nbytes
    at, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for place, part in enumerate(parts):
        behind = part.data_ptr() == at + place * step
        alike = part.shape == first.shape and part.dtype == first.dtype and part.is_contiguous()
        if not (behind and alike and part.untyped_storage().data_ptr() == storage):
            return torch.cat(list(parts))
    return first.as_strided((len(parts) * first.shape[0], *first.shape[1:]), first.stride())

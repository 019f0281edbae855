"""Second moments in 16 bits an entry: deviations of channels, and correlations in fixed steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

STEPS = 32767
"""Of a correlation between 0 and 1. Half a step is 1.5e-5: over 128 channels that moves no
eigenvalue of the correlations by more than 2e-3, well below what shrinkage and ridge add, and a
mean of n chunks still learns from a chunk whose correlations differ by 1.5e-5 n. Half-precision
numbers take as much, with 16 times the error where channels go together."""


@dataclass(frozen=True)
class Correlations:
    """The mean of z z^T over what was seen, for some heads.

    Attributes:
        deviations: float32 [H, D], roots of the diagonal.
        codes: int16 [H, D (D + 1) / 2], upper triangle of the correlations in STEPS.
    """

    deviations: Tensor
    codes: Tensor

    @classmethod
    def empty(cls, device: torch.device) -> Correlations:
        nothing = torch.zeros(0, device=device)
        return cls(nothing, nothing.to(torch.int16))

    @classmethod
    def of(cls, matrix: Tensor) -> Correlations:
        """matrix: float32 [H, D, D], symmetric."""
        deviations = matrix.diagonal(dim1=-2, dim2=-1).clamp(min=0.0).sqrt()
        inverse = torch.where(deviations > 0, 1.0 / deviations, 0.0)
        scaled = matrix * (STEPS * inverse).unsqueeze(-1) * inverse.unsqueeze(-2)
        corner = _corner(matrix.shape[-1], matrix.device)
        codes = scaled.flatten(-2).index_select(-1, corner).round_().clamp_(-STEPS, STEPS)
        return cls(deviations, codes.to(torch.int16))

    @classmethod
    def joined(cls, several: Sequence[Correlations]) -> Correlations:
        """The heads of all of them behind each other."""
        parts = zip(*(one.tensors() for one in several), strict=True)
        return cls(*(torch.cat(part) for part in parts))

    def matrix(self) -> Tensor:
        """float32 [H, D, D]."""
        size = self.deviations.shape[-1]
        codes = self.codes.index_select(-1, _places(size, self.codes.device)).float()
        scales = self.deviations / STEPS
        codes = codes.unflatten(-1, (size, size))
        return codes * scales.unsqueeze(-1) * self.deviations.unsqueeze(-2)

    def grown(self, added: Tensor, known: int, count: int) -> Correlations:
        """With the sum of z z^T over `count` more; `known` had been seen. added: float32
        [H, D, D]."""
        added = added / (known + count)
        if known:
            added = torch.add(added, self.matrix(), alpha=known / (known + count))
        return Correlations.of(added)

    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.deviations, self.codes


def correlation_bytes(heads: int, head_dim: int) -> int:
    return heads * (head_dim * 4 + head_dim * (head_dim + 1) // 2 * 2)


@lru_cache(maxsize=8)
def _corner(size: int, device: torch.device) -> Tensor:
    """Where the upper triangle lies in a flat matrix, int64 [D (D + 1) / 2]."""
    rows, columns = torch.triu_indices(size, size)
    return (rows * size + columns).to(device)


@lru_cache(maxsize=8)
def _places(size: int, device: torch.device) -> Tensor:
    """Of every element of a flat symmetric matrix, its place in the triangle, int64 [D * D]."""
    rows, columns = torch.triu_indices(size, size)
    found = torch.zeros(size, size, dtype=torch.long)
    found[rows, columns] = found[columns, rows] = torch.arange(len(rows))
    return found.flatten().to(device)

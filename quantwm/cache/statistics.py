"""The query second moment of past chunks, and what is made of it: QSAC weights, PSAC bases."""

from __future__ import annotations

import torch
from torch import Tensor


def moment(q: Tensor) -> Tensor:
    """Sum of q q^T over tokens. q: [H, N, D] -> float32 [H, D, D] (QuantWM Eq. 6, unnormalised)."""
    q = q.float()
    return torch.bmm(q.transpose(1, 2), q)


class QueryStatistics:
    """Plain running sum of q q^T per slot (layer and stream) and head; no decay, as published.

    `moments`: float32 [slots, H, D, D] or None before the first query.
    """

    def __init__(self, slots: int, heads: int, head_dim: int, device: torch.device) -> None:
        self._shape = (slots, heads, head_dim, head_dim)
        self._device = device
        self.moments: Tensor | None = None
        self.count = 0

    def reserve(self) -> None:
        """Allocate, so that `fold` cannot fail half-way."""
        if self.moments is None:
            self.moments = torch.zeros(self._shape, device=self._device)

    def fold(self, pending: dict[int, Tensor], tokens: int) -> None:
        """Add a finished chunk. pending: slot -> its `moment`."""
        if not pending:
            return
        self.reserve()
        for slot, added in pending.items():
            self.moments[slot].add_(added)  # += would copy the sum onto itself
        self.count += tokens

    def weights(self) -> Tensor | None:
        """Mean-1 channel sensitivity w = diag(M) / mean(diag(M)), float32 [slots, H, D].

        None before any query. A head without queries gets ones.
        """
        if self.count == 0 or self.moments is None:
            return None
        diagonal = self.moments.diagonal(dim1=-2, dim2=-1)
        mean = diagonal.mean(-1, keepdim=True)
        return torch.where(mean > 0, diagonal / mean, torch.ones_like(diagonal))

    def sensitivity(self) -> Tensor | None:
        """The whole moment with a trace of D, float32 [slots, H, D, D]; weights() its diagonal.

        None before any query. A head without queries gets the identity.
        """
        if self.count == 0 or self.moments is None:
            return None
        diagonal = self.moments.diagonal(dim1=-2, dim2=-1)
        mean = diagonal.mean(-1)[..., None, None]
        identity = torch.eye(self.moments.shape[-1], device=self.moments.device)
        return torch.where(mean > 0, self.moments / mean, identity)

    def bases(self, rank: int) -> tuple[Tensor, Tensor] | None:
        """The `rank` leading eigenvectors, one batched call for all slots and heads.

        Returns basis bfloat16 [slots, H, D, rank] and eigenvalues float32 [slots, H, rank] of
        the mean moment, largest first; None before any query.
        """
        if self.count == 0 or self.moments is None:
            return None
        values, vectors = torch.linalg.eigh(self.moments / self.count)
        basis = vectors[..., -rank:].flip(-1).to(torch.bfloat16).contiguous()
        return basis, values[..., -rank:].flip(-1).clamp(min=0).contiguous()

    def copy(self) -> QueryStatistics:
        other = QueryStatistics(*self._shape[:3], self._device)
        other.moments = None if self.moments is None else self.moments.clone()
        other.count = self.count
        return other

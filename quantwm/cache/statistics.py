"""The query second moment of past chunks, and what is made of it: QSAC weights, PSAC bases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from quantwm.cache.subspace import leading

GROUP_BYTES = 32 << 20
"""Whole moments worked on together where they are kept as triangles: a bound on the transient."""


def moment(q: Tensor, out: Tensor | None = None) -> Tensor:
    """Sum of q q^T over tokens. q: [H, N, D] -> float32 [H, D, D] (QuantWM Eq. 6, unnormalised).

    out: where to put it, in place of a new tensor.
    """
    if q.is_cuda and q.dtype == torch.bfloat16:
        # Products of BF16 numbers are exact in float32, so the tensor cores lose nothing.
        return torch.bmm(q.transpose(1, 2), q, out_dtype=torch.float32, out=out)
    q = q.float()
    return torch.bmm(q.transpose(1, 2), q, out=out)


def moment_bytes(head_dim: int, compact: bool) -> int:
    """Of one head's moment, as `QueryStatistics` keeps it."""
    return head_dim * (head_dim + 1) // 2 * 2 + 4 if compact else head_dim**2 * 4


class QueryStatistics:
    """Plain running sum of q q^T per slot (layer and stream) and head; no decay, as published.

    `moments`: float32 [slots, H, D, D]; compact: the lower triangle of the mean, float16
    [slots, H, D (D + 1) / 2] over its largest entry, which `largest` holds, float32 [slots, H].
    (BF16 would stop learning: a mean of n chunks moves by 1 / n, and 2**-9 is its half step. The
    half step here is 2**-12.) None before the first query.
    """

    def __init__(
        self, slots: int, heads: int, head_dim: int, device: torch.device, compact: bool = False
    ) -> None:
        self._shape = (slots, heads, head_dim, head_dim)
        self._device = device
        self.compact = compact
        self.moments: Tensor | None = None
        self.largest: Tensor | None = None
        self.count = 0

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for t in (self.moments, self.largest) if t is not None)

    def shapes(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Type and shape of each tensor that `tensors` gives once a query was seen, by name."""
        slots, heads, size, _ = self._shape
        if not self.compact:
            return {"moments": (torch.float32, self._shape)}
        triangle = (slots, heads, size * (size + 1) // 2)
        return {
            "moments": (torch.float16, triangle),
            "largest": (torch.float32, (slots, heads)),
        }

    def prepared(self, pending: Mapping[int, Tensor], tokens: int) -> Callable[[], None]:
        """What adds a finished chunk, once called; it allocates nothing, so it cannot fail.

        pending: slot -> its `moment`; tokens: queries of a slot.
        """
        if not pending:
            return lambda: None
        grown = self._grown_triangles(pending, tokens) if self.compact else None
        moments = self.moments
        if grown is None and moments is None:
            moments = torch.zeros(self._shape, device=self._device)
        sums = [] if grown is not None else [moments[slot] for slot in pending]
        added = list(pending.values())

        def commit() -> None:
            if grown is not None:
                self.moments, self.largest = grown
            else:
                torch._foreach_add_(sums, added)  # in a few launches
                self.moments = moments
            self.count += tokens

        return commit

    def fold(self, pending: Mapping[int, Tensor], tokens: int) -> None:
        """Add a finished chunk at once."""
        self.prepared(pending, tokens)()

    def weights(self) -> Tensor | None:
        """Mean-1 channel sensitivity w = diag(M) / mean(diag(M)), float32 [slots, H, D].

        None before any query. A head without queries gets ones.
        """
        if self.count == 0 or self.moments is None:
            return None
        diagonal = self._diagonal()
        mean = diagonal.mean(-1, keepdim=True)
        return torch.where(mean > 0, diagonal / mean, torch.ones_like(diagonal))

    def sensitivity(self) -> Tensor | None:
        """The whole moment with a trace of D, float32 [slots, H, D, D]; weights() its diagonal.

        None before any query. A head without queries gets the identity.
        """
        if self.count == 0 or self.moments is None:
            return None
        moments = self._whole(slice(None))
        mean = moments.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        identity = torch.eye(moments.shape[-1], device=moments.device)
        return torch.where(mean > 0, moments / mean, identity)

    def bases(self, rank: int, start: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
        """The `rank` leading eigenvectors of all slots and heads together; no host sync.

        start: the last basis, [slots, H, D, rank], to begin from. Returns basis bfloat16
        [slots, H, D, rank] and eigenvalues float32 [slots, H, rank] of the mean moment, largest
        first; None before any query.
        """
        if self.count == 0 or self.moments is None:
            return None
        found = [
            leading(self._whole(part), rank, None if start is None else start[part])
            for part in self._groups()
        ]
        basis, values = (torch.cat(parts) for parts in zip(*found, strict=True))
        scale = 1.0 if self.compact else 1.0 / self.count
        return basis.to(torch.bfloat16), values * scale

    def share(self, basis: Tensor) -> Tensor | None:
        """Part of the queries' energy that lies along a basis, mean over slots and heads.

        basis: [slots, H, D, r]. A float32 scalar on the device; None before any query. A head
        without queries counts as 1.
        """
        if self.count == 0 or self.moments is None:
            return None
        parts = []
        for group in self._groups():
            directions, moments = basis[group].float(), self._whole(group)
            along = (torch.matmul(moments, directions) * directions).sum((-2, -1))
            energy = moments.diagonal(dim1=-2, dim2=-1).sum(-1)
            parts.append(torch.where(energy > 0, along / energy, 1.0))
        return torch.cat(parts).mean()

    def copy(self) -> QueryStatistics:
        other = QueryStatistics(*self._shape[:3], self._device, self.compact)
        other.moments = None if self.moments is None else self.moments.clone()
        other.largest = self.largest  # replaced, never changed
        other.count = self.count
        return other

    def _groups(self) -> Iterator[slice]:
        """Slots whose whole moments are made together; all at once where they are kept whole."""
        slots, heads, head_dim, _ = self._shape
        size = slots
        if self.compact:
            size = max(1, GROUP_BYTES // (heads * head_dim**2 * 4))
        for first in range(0, slots, size):
            yield slice(first, first + size)

    def _whole(self, part: slice) -> Tensor:
        """float32 [some slots, H, D, D]: the sum, or the mean where it is compact."""
        if not self.compact:
            return self.moments[part]
        size = self._shape[-1]
        places = torch.arange(size, device=self._device)
        rows, columns = (
            torch.maximum(places[:, None], places),
            torch.minimum(places[:, None], places),
        )
        triangle = self.moments[part].float() * self.largest[part].unsqueeze(-1)
        whole = triangle.index_select(-1, (rows * (rows + 1) // 2 + columns).flatten())
        return whole.unflatten(-1, (size, size))

    def _diagonal(self) -> Tensor:
        """float32 [slots, H, D]."""
        if not self.compact:
            return self.moments.diagonal(dim1=-2, dim2=-1)
        places = torch.arange(self._shape[-1], device=self._device)
        diagonal = self.moments.index_select(-1, places * (places + 3) // 2).float()
        return diagonal * self.largest.unsqueeze(-1)

    def _grown_triangles(self, pending: Mapping[int, Tensor], tokens: int) -> tuple[Tensor, Tensor]:
        """`moments` and `largest` with a chunk in them, in storage of their own."""
        slots, heads, size, _ = self._shape
        rows, columns = torch.tril_indices(size, size, device=self._device)
        entries = rows * size + columns
        kept, total = self.count / (self.count + tokens), self.count + tokens
        made, tops = [], []
        for group in self._groups():
            shape = (len(range(slots)[group]), heads, entries.shape[0])
            mean = torch.zeros(shape, device=self._device)
            if self.moments is not None:
                mean = self.moments[group].float() * (self.largest[group] * kept).unsqueeze(-1)
            for place, slot in enumerate(range(slots)[group]):
                if slot in pending:
                    added = pending[slot].flatten(1).index_select(1, entries)
                    mean[place].add_(added, alpha=1.0 / total)
            # No entry of a second moment exceeds the largest of its diagonal.
            top = mean.amax(-1)
            made.append((mean / top.clamp(min=1e-30).unsqueeze(-1)).to(torch.float16))
            tops.append(top)
        return torch.cat(made), torch.cat(tops)

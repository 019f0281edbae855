"""The scratch of one layer: decoded history and the current chunk, shared by layers and lanes."""

from __future__ import annotations

import torch
from torch import Tensor

GROWTH = 1.25
"""A cache without a window grows by a chunk at a time; a quarter more each time keeps the number
of allocations logarithmic in its length."""


class Workspace:
    """One buffer for keys and one for values, reused by every layer of every lane.

    The buffers are flat, so that any [H, N, D] that fits is a contiguous view of their beginning.
    """

    def __init__(self) -> None:
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def take(
        self,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        expected_tokens: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Views [H, N, D] for keys and values; what they held before is lost.

        expected_tokens: the most that a window will ever need, reserved at once.
        """
        heads, tokens, head_dim = shape
        needed = heads * tokens * head_dim
        if not self._fits(needed, dtype, device):
            held = self._keys.numel() if self._fits(1, dtype, device) else 0
            grown = int(held * GROWTH) // head_dim * head_dim
            wanted = max(needed, heads * expected_tokens * head_dim, grown)
            self._keys = self._values = None
            self._keys = torch.empty(wanted, dtype=dtype, device=device)
            self._values = torch.empty(wanted, dtype=dtype, device=device)
        return self._keys[:needed].view(shape), self._values[:needed].view(shape)

    def _fits(self, needed: int, dtype: torch.dtype, device: torch.device) -> bool:
        keys, values = self._keys, self._values
        return (
            keys is not None
            and values is not None
            and keys.dtype == dtype
            and keys.device == device
            and keys.numel() >= needed
        )

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for t in (self._keys, self._values) if t is not None)

    @property
    def nbytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in self.tensors())

    def release(self) -> None:
        self._keys = self._values = None

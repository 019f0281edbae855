"""The scratch of one layer: decoded history and the current chunk, shared by layers and lanes."""

from __future__ import annotations

import torch
from torch import Tensor

from quantwm.cache.dispatch import AttentionMode, attention_mode
from quantwm.errors import UserError

GROWTH = 1.25
"""A cache without a window grows by a chunk at a time; a quarter more each time keeps the number
of allocations logarithmic in its length."""

SCRATCH_LIMIT = 800_000_000
"""Bytes. A window of 18 latent frames at 480p takes 0.58 GB in 40 heads and is read at once;
150,000 tokens and a chunk of 4,680 take 0.79 GB in 10 of the 40 heads at a time."""


def heads_at_once(
    heads: int, tokens: int, head_dim: int, itemsize: int, limit: int = SCRATCH_LIMIT
) -> int:
    """Heads whose keys and values of so many tokens are in the scratch together, 1 at least.

    The fewest passes that fit the limit, and these as equal as they can be.
    """
    per_head = max(2 * tokens * head_dim * itemsize, 1)
    passes = -(-heads // max(limit // per_head, 1))
    return -(-heads // passes)


class Workspace:
    """One buffer for keys and one for values, reused by every layer of every lane.

    The buffers are flat, so that any [H, N, D] that fits is a contiguous view of their beginning.
    """

    def __init__(
        self, scratch_limit: int = SCRATCH_LIMIT, mode: AttentionMode | None = None
    ) -> None:
        """scratch_limit: bytes that an attention decodes into at a time; beyond it heads take
        turns, with the same bits. One head's tokens, and what `gather` returns, are not split.

        mode: "staged" decodes into the scratch, "slabs" a few thousand tokens of it at a time,
        "fused" inside the attention, without one; None for what QUANTWM_ATTENTION says.
        """
        if scratch_limit < 1:
            raise UserError(f"scratch_limit is in bytes and at least 1, got {scratch_limit}")
        self.scratch_limit = scratch_limit
        self.mode = attention_mode(mode)
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
            reserved = max(heads * expected_tokens * head_dim, int(held * GROWTH))
            most = self.scratch_limit // (2 * dtype.itemsize)
            wanted = max(needed, min(reserved, most) // head_dim * head_dim)
            self._keys = self._values = None
            self._keys = torch.empty(wanted, dtype=dtype, device=device)
            self._values = torch.empty(wanted, dtype=dtype, device=device)
        return self._keys[:needed].view(shape), self._values[:needed].view(shape)

    def heads_at_once(self, shape: tuple[int, int, int], dtype: torch.dtype) -> int:
        """Of keys and values [H, N, D]: how many heads one pass of an attention may decode."""
        heads, tokens, head_dim = shape
        return heads_at_once(heads, tokens, head_dim, dtype.itemsize, self.scratch_limit)

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

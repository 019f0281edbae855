"""The scratch of one layer: decoded history and the current chunk, shared by layers and lanes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

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


KEPT_ON_CPU = 128_000_000
"""Bytes of histories that an engine keeps from pass to pass of a chunk on a CPU, where decoding
them again takes a third of a chunk: 8,192 tokens of the embedded world's 10 layers. A GPU decodes
faster than it would read a second layer's scratch from memory that the cache is there to save."""


class Lent(Protocol):
    """What an open chunk works in and leaves to the next one."""

    def tensors(self) -> Sequence[Tensor]: ...

    @property
    def hidden_bytes(self) -> int:
        """Of memory that is no tensor."""
        ...


LentT = TypeVar("LentT", bound=Lent)


@dataclass
class Kept:
    """One slot's history as a pass of a chunk left it, for the chunk's later passes.

    Attributes:
        keys, values: flat, as in `Workspace`.
        source: the segments that it was decoded from, weakly, and the first visible frame.
    """

    keys: Tensor
    values: Tensor
    source: tuple[tuple[weakref.ref[Any], ...], int] | None = None

    def holds(self, segments: Sequence[Any], first: int) -> bool:
        """Whether it was decoded from just these; segments never change."""
        if self.source is None or self.source[1] != first or len(self.source[0]) != len(segments):
            return False
        return all(ref() is s for ref, s in zip(self.source[0], segments, strict=True))

    def decoded(self, segments: Sequence[Any], first: int) -> None:
        self.source = tuple(weakref.ref(s) for s in segments), first


def heads_at_once(
    heads: int, tokens: int, head_dim: int, itemsize: int, limit: int = SCRATCH_LIMIT
) -> int:
    """Heads whose keys and values of so many tokens are in the scratch together, 1 at least.

    The fewest passes that fit the limit, and these as equal as they can be.
    """
    per_head = max(2 * tokens * head_dim * itemsize, 1)
    passes = -(-heads // max(limit // per_head, 1))
    return -(-heads // passes)


SLAB_BYTES = 84_000_000
"""Of a slab's keys and values at most: 4,096 tokens of 40 heads of 128 in BF16."""
SLAB_HEADS = 0
"""Heads of a slab at most, 0 for all: fewer heads of as many tokens are a smaller slab, and their
running softmax is smaller too."""

VIEWS = 8
"""Shapes of the scratch that are kept: a view takes 2 us of the host, four of them in every layer;
Matrix-Game-2's streams have three shapes."""


ROOM = 4 << 20
"""Bytes of what a reading spreads that are kept for the next one, 1 % of the scratch: PSAC's rows
of 12 heads and 2,640 tokens are 0.3 MB, of 28,080 tokens 3.4. Larger ones come and go."""


class Workspace:
    """One buffer for keys and one for values, reused by every layer of every lane.

    The buffers are flat, so that any [H, N, D] that fits is a contiguous view of their beginning.
    """

    def __init__(
        self,
        scratch_limit: int = SCRATCH_LIMIT,
        mode: AttentionMode | None = None,
        kept_limit: int = 0,
        slab_bytes: int = SLAB_BYTES,
        slab_heads: int = SLAB_HEADS,
    ) -> None:
        """scratch_limit: bytes that an attention decodes into at a time; beyond it heads take
        turns, with the same bits. One head's tokens, and what `gather` returns, are not split.

        mode: "staged" decodes into the scratch, "slabs" a few thousand tokens of it at a time,
        "fused" inside the attention, without one; None for what QUANTWM_ATTENTION says.

        kept_limit: bytes of histories of several layers that are kept for a chunk's later passes,
        layers beyond it being decoded in each; counted in `tensors`.

        slab_bytes, slab_heads: of a slab at most; every choice gives the same bits.
        """
        if scratch_limit < 1:
            raise UserError(f"scratch_limit is in bytes and at least 1, got {scratch_limit}")
        if slab_bytes < 1 or slab_heads < 0:
            raise UserError(
                "slab_bytes is at least 1 and slab_heads at least 0 (0: all heads), got "
                f"{slab_bytes} and {slab_heads}"
            )
        self.scratch_limit = scratch_limit
        self.slab_bytes, self.slab_heads = min(slab_bytes, scratch_limit), slab_heads
        self.mode = attention_mode(mode)
        self.kept_limit = kept_limit
        self._kept: dict[int, Kept] = {}
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._room: Tensor | None = None
        self._views: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
        self.lent: list[Lent] = []
        self._free: dict[Hashable, list[Any]] = {}

    def lend(self, kind: Hashable, make: Callable[[], LentT]) -> LentT:
        """What open chunks of one kind work in, for one of them until `take_back`; made where none
        is free. It lasts, and is counted, until `release`."""
        free = self._free.setdefault(kind, [])
        if not free:
            free.append(make())
            self.lent.append(free[-1])
        return free.pop()

    def take_back(self, kind: Hashable, lent: Lent) -> None:
        if any(lent is known for known in self.lent):
            self._free[kind].append(lent)

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
            self._drop()
            self._keys = torch.empty(wanted, dtype=dtype, device=device)
            self._values = torch.empty(wanted, dtype=dtype, device=device)
        if shape not in self._views:
            if len(self._views) == VIEWS:
                self._views.clear()
            views = self._keys[:needed].view(shape), self._values[:needed].view(shape)
            self._views[shape] = views
        return self._views[shape]

    def kept(
        self, slot: int, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
    ) -> tuple[Kept, Tensor, Tensor] | None:
        """A slot's own buffers and views [H, N, D] of them; None where they would pass the limit.

        What they hold is what `Kept.holds` says; slots of all lanes and companions are the same.
        """
        needed = shape[0] * shape[1] * shape[2]
        held = self._kept.get(slot)
        fits = held is not None and held.keys.dtype == dtype and held.keys.device == device
        if not fits or held.keys.numel() < needed:
            self._kept.pop(slot, None)
            size = max(needed, int(held.keys.numel() * GROWTH) if fits else 0)
            room = self.kept_limit - sum(2 * k.keys.nbytes for k in self._kept.values())
            if 2 * size * dtype.itemsize > room:
                size = needed
            if 2 * size * dtype.itemsize > room:
                return None
            keys, values = (torch.empty(size, dtype=dtype, device=device) for _ in range(2))
            held = self._kept[slot] = Kept(keys, values)
        return held, held.keys[:needed].view(shape), held.values[:needed].view(shape)

    def room_on(self, device: torch.device) -> Callable[[int], Tensor | None]:
        """What gives a reading of small layers room for what it spreads before it decodes."""

        def room(count: int) -> Tensor | None:
            if count > ROOM:
                return None
            held = self._room
            if held is None or held.numel() < count or held.device != device:
                self._room = None
                self._room = torch.empty(count, dtype=torch.uint8, device=device)
            return self._room

        return room

    @property
    def room_at(self) -> tuple[int, int]:
        """Where it is, and its bytes."""
        return (0, 0) if self._room is None else (self._room.data_ptr(), self._room.numel())

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
        kept = (t for held in self._kept.values() for t in (held.keys, held.values))
        own = (self._keys, self._values, self._room)
        lent = (t for one in self.lent for t in one.tensors())
        return (*(t for t in own if t is not None), *kept, *lent)

    @property
    def hidden_bytes(self) -> int:
        """Of memory that is no tensor: what recordings work in."""
        return sum(one.hidden_bytes for one in self.lent)

    @property
    def nbytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in self.tensors()) + self.hidden_bytes

    def release(self) -> None:
        self._drop()
        self._room = None
        self._kept.clear()
        self.lent.clear()
        self._free.clear()

    def _drop(self) -> None:
        self._keys = self._values = None
        self._views.clear()

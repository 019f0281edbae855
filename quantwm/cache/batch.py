"""Many layers' shares of a chunk encoded in one go, as the heads of one, where launches are the
work.

A layer of Matrix-Game-2 (12 heads of 2,640 tokens) is encoded in 0.8 ms beside its model, and in
0.2 ms by what the same kernels take for larger layers: the rest is launching. Formats encode every
head by itself, so the bits are those of one layer after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Generator, Tensor

from quantwm.cache.beside import Streams
from quantwm.cache.codebook import Codebook
from quantwm.cache.codebook_life import outliving
from quantwm.cache.dispatch import ops_for
from quantwm.cache.formats.base import Format, Parted
from quantwm.cache.segments import ChunkGuide
from quantwm.cache.unrotation import wants_unrotated

BATCH_BYTES = 96 << 20
"""Of keys and values that wait to be encoded together: 6 layers of Matrix-Game-2, 97 MB."""
FEWEST = 4
"""Slots that are worth waiting for. Causal-Forcing's (12 heads of 4,680 tokens, 29 MB) would be 3:
those keep a GPU busy one by one, and hide beside the model."""
LAST = 2
"""Slots of the last batch where there are several: it ends after the model's last attention, and so
few are hidden by what the model still computes."""
ROOMS = 2
"""One is filled while the other is encoded from."""

Books = tuple[Codebook, Codebook]


def slots_together(fmt: Format[Any], slots: int, heads: int, tokens: int, head_dim: int) -> int:
    """How many slots' shares of a chunk, BF16 [heads, tokens, head_dim], are encoded in one go; 1
    for each by itself.

    Not where one codebook may outlive another, nor where keys are turned back first.
    """
    if not isinstance(fmt, Parted) or outliving(fmt) is not None or wants_unrotated(fmt):
        return 1
    most = min(BATCH_BYTES // max(4 * heads * tokens * head_dim, 1), slots)
    return most if most >= FEWEST else 1


def batch_bytes(fmt: Format[Any], slots: int, heads: int, tokens: int, head_dim: int) -> int:
    """What that takes while a chunk is written: the rooms, and beside them k-means' sums in four
    parts, means of two rounds and codebooks of as many heads, 13 times a BF16 codebook. 0 where
    slots are encoded one by one."""
    most = slots_together(fmt, slots, heads, tokens, head_dim)
    if most < 2:
        return 0
    rooms = min(ROOMS, -(-slots // most)) * most * 4 * heads * tokens * head_dim
    book_bytes = getattr(fmt, "book_bytes", None)
    return rooms + (0 if book_bytes is None else 13 * book_bytes(most * heads, head_dim))


def are_warm(pairs: Sequence[Any]) -> TypeGuard[Sequence[Books]]:
    """Whether these are all codebooks: fitting them anew draws nothing."""
    return all(isinstance(book, Codebook) for pair in pairs for book in pair)


@dataclass
class _Room:
    """pairs: BF16 [2, slots, H, N, D], keys and values. read: when the last encoding from it is
    done; None before any."""

    pairs: Tensor
    read: Any = None


@dataclass
class Batch:
    """Keys and values that wait to be encoded together; of one open chunk.

    Attributes:
        streams: the model's, which copies them here, and the one that they are encoded on.
        most: slots of a batch.
        waiting: slot -> moment and number of its queries (see `PendingWrite`), in the order of
            their places in the room.
    """

    streams: Streams
    most: int
    waiting: dict[int, tuple[Tensor | None, int]] = field(default_factory=dict)
    _rooms: list[_Room] = field(default_factory=list)
    _turn: int = 0

    def full(self, left: int, slots: int) -> bool:
        """Whether those that wait are encoded now. left: slots that are still to come, of all."""
        last = LAST if slots > self.most else 0
        return left in (0, last) or len(self.waiting) >= self.most

    def put(self, slot: int, k: Tensor, v: Tensor, queries: tuple[Tensor | None, int]) -> None:
        """Copy a slot's keys and values [H, N, D] behind the others, in BF16."""
        if self._turn == len(self._rooms):
            shape = (2, self.most, *k.shape)
            self._rooms.append(_Room(torch.empty(shape, dtype=torch.bfloat16, device=k.device)))
        room = self._rooms[self._turn]
        if not self.waiting and room.read is not None:
            self.streams.wait(room.read)
        keys, values = room.pairs[:, len(self.waiting)]
        ops_for(k.device).copy_pair(keys, values, 0, k, v)
        self.waiting[slot] = queries

    @contextmanager
    def staged(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values of `waiting`, [slots, H, N, D] each, to be encoded inside. They wait no
        longer once that is done; if it fails, they still do."""
        room = self._rooms[self._turn]
        keys, values = room.pairs[:, : len(self.waiting)]
        with self.streams.beside():
            yield keys, values
        room.read = self.streams.mark()
        self.waiting = {}
        self._turn = (self._turn + 1) % ROOMS

    def tensors(self) -> list[Tensor]:
        moments = (moment for moment, _ in self.waiting.values() if moment is not None)
        return [*(room.pairs for room in self._rooms), *moments]


def encode_slots(
    fmt: Format[Any],
    generator: Generator,
    slots: Sequence[int],
    k: Tensor,
    v: Tensor,
    guide: ChunkGuide,
    books: Sequence[Books],
    opens: bool,
) -> list[tuple[tuple[Any, Any], Books]]:
    """`chunk.encode_pair` of many slots, each with its codebooks.

    k, v: bfloat16 [slots, H, N, D]. opens: whether the chunk opens a span, for which the codebooks
    are fitted again.
    """
    if not isinstance(fmt, Parted):
        raise ValueError(f"{fmt.name} does not encode many slots at once")
    queries = guide.of_slots(slots)
    of_slots = [guide.of_slot(slot) for slot in slots]
    columns = []
    for role, x, column in zip(("keys", "values"), (k, v), zip(*books, strict=True), strict=True):
        x = x.flatten(0, 1)
        whole, own = Codebook.behind_each_other(column), list(column)
        if opens:
            whole = fmt.fit(x, generator, whole)
            own = whole.parted(len(slots))
        span = fmt.encode(x, whole, role, queries)
        columns.append(zip(fmt.parted(span, own, of_slots), own, strict=True))
    return [
        ((keys, values), (key_book, value_book))
        for (keys, key_book), (values, value_book) in zip(*columns, strict=True)
    ]

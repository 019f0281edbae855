"""Many layers' shares of a chunk encoded in one go, as the heads of one, where launches are the
work.

A layer of Matrix-Game-2 (12 heads of 2,640 tokens) is encoded in 0.8 ms beside its model, and in
0.2 ms by what the same kernels take for larger layers: the rest is launching. Formats encode every
head by itself, so the bits are those of one layer after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeGuard
from weakref import finalize

import torch
from torch import Generator, Tensor

from quantwm.cache.beside import Streams
from quantwm.cache.codebook import Codebook
from quantwm.cache.codebook_life import outliving
from quantwm.cache.dispatch import ops_for
from quantwm.cache.formats.base import Format, Parted, QueryGuide, Role
from quantwm.cache.recorded import Recordings, at_once, recorder_for
from quantwm.cache.segments import ChunkGuide
from quantwm.cache.statistics import moment
from quantwm.cache.unrotation import wants_unrotated
from quantwm.cache.workspace import Workspace

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

PUT_KINDS = 4
"""Of places that slots are copied from into one place of a room, each recorded: a world has one, or
two with a second kind of pass."""
ENCODED_KINDS = 64
"""Of batches, each recorded: sizes, rooms, with and without a new span, for several lanes."""

ROLES: tuple[Role, Role] = ("keys", "values")
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
    """What that takes from the second chunk on, for all lanes: the rooms with their moments; what
    k-means works in, its sums in four parts, means of two rounds and codebooks, 13 times a BF16
    codebook of as many heads; of recordings where a batch's codebooks and guide lie and, twice,
    what becomes of it. 0 where slots are encoded one by one."""
    most = slots_together(fmt, slots, heads, tokens, head_dim)
    if most < 2:
        return 0
    wide = most * heads
    asked = head_dim**2 * 4 if fmt.uses_queries else 0
    rooms = min(ROOMS, -(-slots // most)) * wide * (4 * tokens * head_dim + asked)
    packed = sum(sum(fmt.packed_bytes(tokens, 1, wide, head_dim, role).values()) for role in ROLES)
    guide = wide * ((head_dim + fmt.rank) * 4 + head_dim * fmt.rank * 2)
    book_bytes = getattr(fmt, "book_bytes", None)
    books = 0 if book_bytes is None else 15 * book_bytes(wide, head_dim)
    return rooms + books + 2 * (packed + wide * asked) + (guide if fmt.uses_queries else 0)


def are_warm(pairs: Sequence[Any]) -> TypeGuard[Sequence[Books]]:
    """Whether these are all codebooks: fitting them anew draws nothing."""
    return all(isinstance(book, Codebook) for pair in pairs for book in pair)


class Room:
    """A batch's keys and values.

    pairs: BF16 [2, slots, H, N, D]. moments: of their queries, float32 [slots, H, D, D], zeros for
    a slot without; None until one is asked for. read: when the last encoding from it is done; None
    before any.
    """

    def __init__(self, shape: tuple[int, int, int, int], device: torch.device) -> None:
        """shape: slots, heads, tokens, channels."""
        self.read: Any = None
        self.moments: Tensor | None = None
        with torch.inference_mode(False):  # written in and out of it
            self.pairs = torch.empty((2, *shape), dtype=torch.bfloat16, device=device)

    def asked(self) -> Tensor:
        """`moments`."""
        if self.moments is None:
            _, slots, heads, _, head_dim = self.pairs.shape
            shape = slots, heads, head_dim, head_dim
            with torch.inference_mode(False):
                self.moments = torch.zeros(shape, device=self.pairs.device)
        return self.moments


class Rooms:
    """Where the batches of a chunk lie, and what was recorded of copying and encoding them; lasts
    from chunk to chunk."""

    def __init__(self, shape: tuple[int, int, int, int], device: torch.device) -> None:
        """shape: slots of a batch, heads, tokens, channels."""
        self._shape, self._device = shape, device
        self._rooms: list[Room] = []
        slots, heads = shape[:2]
        # Each has memory of its own to work in: one is replayed beside the other.
        self.copying = Recordings(recorder_for(device, "model"), PUT_KINDS * ROOMS * slots)
        self.encoding = Recordings(recorder_for(device, "beside"), ENCODED_KINDS, slots * heads)

    def __getitem__(self, number: int) -> Room:
        if number == len(self._rooms):
            self._rooms.append(Room(self._shape, self._device))
        return self._rooms[number]

    def tensors(self) -> list[Tensor]:
        found = [*self.copying.tensors(), *self.encoding.tensors()]
        for room in self._rooms:
            found += [room.pairs] if room.moments is None else [room.pairs, room.moments]
        return found

    @property
    def hidden_bytes(self) -> int:
        return self.copying.hidden_bytes + self.encoding.hidden_bytes


@dataclass
class Batch:
    """Keys and values that wait to be encoded together; of one open chunk.

    Attributes:
        streams: the model's, which copies them here, and the one that they are encoded on.
        most: slots of a batch.
        rooms: the chunk's alone until `release`.
        waiting: slot -> number of its queries, in the order of their places in the room; 0 where
            they are not wanted.
    """

    streams: Streams
    most: int
    rooms: Rooms
    waiting: dict[int, int] = field(default_factory=dict)
    _give_back: finalize[..., Any] | None = None
    _turn: int = 0

    @classmethod
    def of(cls, streams: Streams, most: int, k: Tensor, workspace: Workspace) -> Batch:
        """k: [H, N, D], of any slot; its rooms are the workspace's."""
        kind = (most, *k.shape), k.device
        rooms = workspace.lend(kind, partial(Rooms, *kind))
        batch = cls(streams, most, rooms)
        batch._give_back = finalize(batch, workspace.take_back, kind, rooms)
        batch._give_back.atexit = False
        return batch

    def release(self) -> None:
        """The rooms may serve another chunk; nothing is done with the batch after it. They may too
        once nobody has the batch: a cache can be dropped with its chunk open."""
        if self._give_back is not None:
            self._give_back()

    def full(self, left: int, slots: int) -> bool:
        """Whether those that wait are encoded now. left: slots that are still to come, of all."""
        last = LAST if slots > self.most else 0
        return left in (0, last) or len(self.waiting) >= self.most

    def put(self, slot: int, k: Tensor, v: Tensor, q: Tensor | None, lasting: bool) -> None:
        """Copy a slot's keys and values [H, N, D] behind the others, in BF16, and the moment of its
        queries where they are wanted. lasting: these tensors lie where those of earlier chunks do.
        """
        room, place = self.rooms[self._turn], len(self.waiting)
        if not self.waiting and room.read is not None:
            self.streams.wait(room.read)

        def copy() -> None:
            keys, values = room.pairs[:, place]
            ops_for(k.device).copy_pair(keys, values, 0, k, v)
            if q is not None:
                moment(q, room.asked()[place])
            elif room.moments is not None:
                room.moments[place].zero_()

        if lasting:
            whence = tuple(None if t is None else _where(t) for t in (k, v, q))
            self.rooms.copying.run((self._turn, place, room.moments is None, whence), (), copy)
        else:
            copy()
        self.waiting[slot] = 0 if q is None else q.shape[1]

    @contextmanager
    def staged(self) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Keys and values of `waiting`, [slots, H, N, D] each, and the moments of their queries,
        [slots, H, D, D] or None, to be encoded inside. They wait no longer once that is done; if it
        fails, they still do."""
        room, count = self.rooms[self._turn], len(self.waiting)
        keys, values = room.pairs[:, :count]
        asked = any(self.waiting.values()) and room.moments is not None
        with self.streams.beside():
            yield keys, values, room.moments[:count] if asked else None
        room.read = self.streams.mark()
        self.waiting = {}
        self._turn = (self._turn + 1) % ROOMS

    def recorded(self, *kind: Hashable) -> Run:
        """Runs an encoding from the room whose turn it is. kind: what it depends on beside it."""
        return partial(self.rooms.encoding.run, (self._turn, len(self.waiting), *kind))


Run = Callable[[Sequence[Tensor | None], Callable[..., Any]], Any]
"""As `recorded.at_once` is called."""


def _where(tensor: Tensor) -> tuple[Hashable, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


@dataclass(frozen=True)
class Encoded:
    """What slots became that were encoded together.

    Attributes:
        slots: of each the spans and the codebooks, keys and values.
        ends: least and largest of each slot's keys, then of its values, then of its queries' sums
            of squares where they are wanted: float32 [2, roles * slots], NaN where any is.
        moments: of each slot's queries, or None.
    """

    slots: list[tuple[tuple[Any, Any], Books]]
    ends: Tensor
    moments: Sequence[Tensor | None]


def encode_slots(
    fmt: Format[Any],
    generator: Generator,
    slots: Sequence[int],
    k: Tensor,
    v: Tensor,
    guide: ChunkGuide,
    books: Sequence[Books],
    opens: bool,
    moments: Tensor | None = None,
    run: Run = at_once,
) -> Encoded:
    """`chunk.encode_pair` of many slots, each with its codebooks.

    k, v: bfloat16 [slots, H, N, D]. opens: whether the chunk opens a span, for which the codebooks
    are fitted again. moments: of their queries. run: calls what is launched, which reads k, v and
    moments where they are.
    """
    if not isinstance(fmt, Parted):
        raise ValueError(f"{fmt.name} does not encode many slots at once")
    queries = guide.of_slots(slots)
    columns = list(zip(*books, strict=True))
    starts = [Codebook.behind_each_other(column).centroids for column in columns]

    def work(keys: Tensor, values: Tensor, *said: Tensor | None) -> tuple[Any, ...]:
        found = []
        for role, x, start in zip(ROLES, (k, v), (keys, values), strict=True):
            x, book = x.flatten(0, 1), Codebook(start)
            fitted = fmt.fit(x, generator, book) if opens else None
            span = fmt.encode(x, fitted or book, role, QueryGuide(*said))
            found.append((fmt.for_parting(span, len(slots)), fitted))
        return *found, ends_of(k, v, moments), None if moments is None else moments.clone()

    said = queries.weights, queries.basis, queries.eigenvalues
    *sides, ends, seen = run((*starts, *said), work)
    of_slots, parts = [guide.of_slot(slot) for slot in slots], []
    for (span, fitted), column in zip(sides, columns, strict=True):
        own = list(column) if fitted is None else fitted.parted(len(slots))
        parts.append(zip(fmt.parted(span, own, of_slots), own, strict=True))
    found = [
        ((keys, values), (key_book, value_book))
        for (keys, key_book), (values, value_book) in zip(*parts, strict=True)
    ]
    return Encoded(found, ends, [None] * len(slots) if seen is None else seen.unbind(0))


def ends_of(k: Tensor, v: Tensor, moments: Tensor | None) -> Tensor:
    """`Encoded.ends`. Where a query is not finite the sums of squares are not either, and they are
    few; nor are they of queries beyond 1e18, of which the statistics could make nothing."""
    asked = [] if moments is None else [moments.diagonal(dim1=-2, dim2=-1)]
    found = [torch.aminmax(x.flatten(1), dim=1) for x in (k, v, *asked)]
    return torch.stack(
        [torch.cat([end.float() for end in ends]) for ends in zip(*found, strict=True)]
    )

"""A history that is read again as it is: what reading it launched, launched again in one go.

Every layer decodes its history in every pass. Asking segments, spans and decoders for it takes the
host 20 to 60 us a layer and 100 the first time, twice that on a slow one, and the launches
themselves under 10; where layers are small the device waits for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantwm.cache.dispatch import kernels_in


@dataclass(frozen=True)
class Place:
    """What the launches of a reading depend on beside the history, compared before every one.

    Attributes:
        first: the first visible frame.
        shape: heads, tokens and channels of what is read.
        room: address and bytes of the scratch's room, see `Workspace.room_on`.
        own: address, strides and type of the scratch and of the chunk's own keys and values.
    """

    first: int
    shape: tuple[int, int, int]
    room: tuple[int, int]
    own: tuple[tuple[int, Any, torch.dtype], ...]

    @classmethod
    def of(
        cls, first: int, shape: tuple[int, int, int], room: tuple[int, int], *own: Tensor
    ) -> Place:
        return cls(first, shape, room, tuple((t.data_ptr(), t.stride(), t.dtype) for t in own))

    def has(self, address: int) -> bool:
        """Whether it is of these tensors, or in the room."""
        room, size = self.room
        return room <= address < room + size or any(address == at for at, _, _ in self.own)


@dataclass(frozen=True)
class Origin:
    """What one slot's reading is made from.

    Attributes:
        kind: readings of which it is equal are the same launches but for the addresses.
        addresses: of the spans' tensors, in an order.
    """

    kind: Any
    addresses: tuple[int, ...]

    @classmethod
    def of(cls, kinds: Sequence[Any], tensors: Sequence[Tensor]) -> Origin | None:
        """None where an address does not tell a tensor from others."""
        addresses = tuple(t.data_ptr() for t in tensors)
        if 0 in addresses or len(set(addresses)) < len(addresses):
            return None
        return cls(tuple(kinds), addresses)


class Replays:
    """The launches of one history's readings, by slot; forgotten when the history changes.

    They hold addresses, nothing alive: of spans, which live as long as the history that they are
    of, and of what a `Place` compares before every reading. A slot that was not read before takes
    another slot's launches, with addresses of its own, where their spans are alike.
    """

    def __init__(self) -> None:
        # None for a reading that cannot be launched again: asking every time would cost as much.
        self._known: dict[int, tuple[Place, Any]] = {}
        self._pattern: tuple[Place, Origin, Any] | None = None

    def forget(self) -> None:
        self._known.clear()
        self._pattern = None

    def read(
        self,
        slot: int,
        place: Place,
        device: torch.device,
        reading: Callable[[], int],
        origin: Callable[[], Origin | None],
    ) -> None:
        """Do `reading`, or launch again what it did when it was done last at this place.

        reading: gives the number of launches that it is made of, none of them of anything that does
        not last; 0 where it is not made of such launches alone. origin: of this slot.
        """
        known = self._known.get(slot)
        if known is not None and known[0] == place:
            if known[1] is None:
                reading()
            else:
                known[1].again()
            return
        self._known.pop(slot, None)
        kernels = kernels_in("launch", device)
        if kernels is None:
            reading()
            return
        own = origin()
        moved = self._moved(place, own)
        if moved is not None:
            moved.again()
            self._known[slot] = place, moved
            return
        with kernels.noted() as launches:
            count = reading()
        if not count or len(launches) != count:
            self._known[slot] = place, None
            return
        self._known[slot] = place, launches
        if own is not None and _all_known(launches, place, own):
            self._pattern = place, own, launches

    def _moved(self, place: Place, own: Origin | None) -> Any:
        if own is None or self._pattern is None:
            return None
        where, other, launches = self._pattern
        if where != place or other.kind != own.kind:
            return None
        return launches.moved(dict(zip(other.addresses, own.addresses, strict=True)))


def _all_known(launches: Any, place: Place, own: Origin) -> bool:
    """Whether every address is of the spans or of the place: none of a copy that somebody made."""
    return all(place.has(at) for at in launches.addresses() - set(own.addresses))

"""A history that is read again as it is: what reading it launched, launched again in one go.

Every layer decodes its history in every pass. Asking segments, spans and decoders for it takes the
host 20 to 60 us a layer, twice that on a slow one, and the launches themselves under 10; where
layers are small the device waits for that.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from quantwm.cache.dispatch import kernels_in

Place = tuple[Any, ...]
"""Everything that the launches of a reading depend on beside the history: what is seen of it, and
the addresses, strides and types of the scratch and of the chunk's own keys and values."""


def lies(*tensors: Tensor) -> Place:
    """Where tensors lie, and how."""
    return tuple((t.data_ptr(), t.stride(), t.dtype) for t in tensors)


class Replays:
    """The launches of one history's readings, by slot; forgotten when the history changes.

    They hold addresses, nothing alive: of spans, which live as long as the history that they are
    of, and of what a `Place` compares before every reading.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Place, Any]] = {}

    def forget(self) -> None:
        self._known.clear()

    def read(
        self, slot: int, place: Place, device: torch.device, reading: Callable[[], int]
    ) -> None:
        """Do `reading`, or launch again what it did when it was done last at this place.

        reading: gives the number of launches that it is made of, none of them of anything that does
        not last; 0 where it is not made of such launches alone.
        """
        known = self._known.get(slot)
        if known is not None and known[0] == place:
            known[1].again()
            return
        self._known.pop(slot, None)
        kernels = kernels_in("launch", device)
        with nullcontext() if kernels is None else kernels.noted() as launches:
            count = reading()
        if launches is not None and count and len(launches) == count:
            self._known[slot] = place, launches

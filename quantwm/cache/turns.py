"""Heads in turns through a scratch that cannot hold them all, decoded beside attention on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from quantwm.cache.reading import Reading
from quantwm.cache.workspace import Workspace

QUERIES = 128
"""Of a program of cuDNN's attention on Hopper, of which a multiprocessor runs one at a time."""

Turn = tuple[slice, slice]
"""Heads, and their places in the scratch."""


def attend_in_turns(
    reading: Reading, q: Tensor, workspace: Workspace, together: int,
    attend: Callable[[slice, Tensor, Tensor], Tensor],
) -> Tensor:  # fmt: skip
    """q [H, Nq, D] over all that the reading shows -> [H, Nq, D], `together` heads in the scratch.

    attend: of some heads, over their keys and values [heads, tokens, D]. On a GPU the heads of the
    scratch take two turns where that takes attention no longer, on a stream that goes first; the
    next turn is decoded meanwhile by the multiprocessors that attention's last programs leave
    idle. At 150,000 tokens 7 and 3 of 10 heads took 26.4 ms for 27.3 one after the other
    (quantwm, H200, 4,680 queries, 40 heads, 2026-11-30).
    """
    keys, values = reading.room(workspace, q.dtype, together)
    turns = _turns(q.shape[0], together, _split(together, q))
    out = torch.empty_like(q)
    if len({places.start for _, places in turns}) == 1:
        for heads, places in turns:
            reading.decode_heads(keys[places], values[places], heads)
            out[heads] = attend(heads, keys[places], values[places])
        return out
    main, first = torch.cuda.current_stream(q.device), _goes_first(q.device)
    first.wait_stream(main)
    attended: list[torch.cuda.Event] = []
    try:
        for heads, places in turns:
            if len(attended) > 1:
                main.wait_event(attended[-2])  # what lay in these places has been read
            reading.decode_heads(keys[places], values[places], heads)
            first.wait_stream(main)
            with torch.cuda.stream(first):
                out[heads] = attend(heads, keys[places], values[places])
            attended.append(first.record_event())
    finally:
        main.wait_stream(first)
    return out


def _split(together: int, q: Tensor) -> int:
    """Heads of the first of two turns through the scratch; all of them for one turn."""
    if not q.is_cuda or torch.cuda.is_current_stream_capturing():
        return together
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    return first_turn(together, -(-q.shape[1] // QUERIES), processors)


def first_turn(together: int, programs: int, processors: int) -> int:
    """The most heads below `together` that, with the others in a second turn, take no more waves.

    programs: of a head. A wave is what all multiprocessors run at once.
    """

    def waves(heads: int) -> int:
        return -(-heads * programs // processors)

    fitting = (
        heads
        for heads in range(together - 1, 0, -1)
        if waves(heads) + waves(together - heads) <= waves(together)
    )
    return next(fitting, together)


def _turns(heads: int, together: int, first: int) -> list[Turn]:
    """All heads in order, `first` in the front of the scratch and the others behind, in turns."""
    turns: list[Turn] = []
    begin = 0
    while begin < heads:
        front = not turns or turns[-1][1].start > 0 or first == together
        place = 0 if front else first
        count = min(first if front else together - first, heads - begin)
        turns.append((slice(begin, begin + count), slice(place, place + count)))
        begin += count
    return turns


@lru_cache(maxsize=16)
def _goes_first(device: torch.device) -> torch.cuda.Stream:
    """Its programs get a free multiprocessor before those of streams made without a priority."""
    return torch.cuda.Stream(device, priority=-1)

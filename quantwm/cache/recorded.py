"""Work that is launched again and again on tensors of the same shapes: recorded once, replayed.

Encoding a batch of small layers is some 40 launches, and a slow host takes 65 to 130 us for each:
41 to 55 ms of Matrix-Game-2's clean pass, where BF16 takes 26. As a CUDA graph they are one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from itertools import accumulate
from operator import itemgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from quantwm.cache.capture import Captured, CudaCapture, Segment
from quantwm.cache.dispatch import note_fallback

Work = Callable[..., Any]
"""Takes tensors, or None in place of some; gives tensors, alone or in dataclasses and tuples. What
else it reads stays where it is, and the launches it makes do not depend on what tensors hold."""
Make = Callable[[Sequence[Tensor]], Any]

PLACE_BYTES = 16
"""Where results begin, so that they are copied in words."""

NO_MEMORY = "no memory for CUDA graphs of what a clean pass encodes: it is launched op by op"
FAILED = "what a clean pass encodes is launched op by op, recording it failed: "


class Recorder(Protocol):
    """What makes one launch of many: `CudaCapture`, or in tests a tape of PyTorch's operations."""

    @property
    def nbytes(self) -> int:
        """Of memory that its recordings hold and that is no tensor of theirs."""
        ...

    def __call__(self, segment: Segment) -> Captured: ...


def recorder_for(device: torch.device, on: str) -> Recorder | None:
    """None where launching costs nothing. on: of what is replayed one behind the other."""
    if device.type != "cuda":
        return None
    return CudaCapture(device, _stream(device, torch.cuda.current_stream(device).stream_id, on))


@lru_cache(maxsize=16)
def _stream(device: torch.device, model: int, on: str) -> torch.cuda.Stream:
    """To capture on. cuBLAS keeps memory for each, which two replays at once must not share."""
    return torch.cuda.Stream(device)


@contextmanager
def op_by_op() -> Iterator[None]:
    """Inside, nothing is recorded or replayed: to compare with."""
    _op_by_op.append(True)
    try:
        yield
    finally:
        _op_by_op.pop()


_op_by_op: list[bool] = []


def at_once(inputs: Sequence[Tensor | None], work: Work) -> Any:
    """`Recordings.run` of what is not to be recorded."""
    return work(*inputs)


class Recordings:
    """Work by key: done as it comes the first time, recorded the second, replayed from then on.

    A recording reads inputs and leaves results at places of its own. Inputs are copied there, and
    results into memory that whoever asked keeps, each by one launch for all of them; the places are
    the same for all recordings, which are replayed one after the other on one stream.
    """

    def __init__(self, recorder: Recorder | None, most: int, rows: int = 0) -> None:
        """recorder: None to do everything as it comes. most: keys that are known, what comes with
        others is done as it comes. rows: the most that inputs have in their first dimension."""
        self._recorder, self._most, self._rows = recorder, most, rows
        self._known: dict[Hashable, _Recording | None] = {}
        self._inputs: dict[tuple[int, torch.Size, torch.dtype], Tensor] = {}
        self._results: list[Tensor] = []
        self.hidden_bytes = 0

    @property
    def count(self) -> int:
        """Of what was recorded."""
        return sum(known is not None for known in self._known.values())

    def tensors(self) -> list[Tensor]:
        """The places; `hidden_bytes` are held beside them."""
        return [*self._inputs.values(), *self._results]

    def run(self, key: Hashable, inputs: Sequence[Tensor | None], work: Work) -> Any:
        """work(*inputs), its results in memory of their own; work is the same where key is."""
        if self._recorder is None or _op_by_op:
            return work(*inputs)
        kind = (key, *(None if t is None else (t.shape, t.dtype) for t in inputs))
        if kind not in self._known:
            found = work(*inputs)
            if len(self._known) < self._most:
                self._known[kind] = None
            return found
        known = self._known[kind]
        if known is None:
            known = self._known[kind] = self._recorded(inputs, work)
            if known is None:
                self._known.clear()
                return work(*inputs)
        return known.replayed(inputs)

    def _recorded(self, inputs: Sequence[Tensor | None], work: Work) -> _Recording | None:
        """None where it fails, for want of memory mostly; then nothing is recorded any more."""
        # Imported here: what says which settings would fit plans with what waits here.
        from quantwm.cache.remedy import is_out_of_memory

        try:
            return self._record(inputs, work)
        except (RuntimeError, MemoryError) as error:
            # Ending a capture that ran out of memory may fail for another reason.
            causes = [e for e in (error, error.__context__) if e is not None]
            said = FAILED + str(error).partition("\n")[0]
            note_fallback(NO_MEMORY if any(map(is_out_of_memory, causes)) else said)
        self._recorder, self.hidden_bytes = None, 0
        self._inputs.clear()
        self._results.clear()
        return None

    def _record(self, inputs: Sequence[Tensor | None], work: Work) -> _Recording:
        given = [None if t is None else self._input(n, t) for n, t in enumerate(inputs)]
        read = {t.untyped_storage().data_ptr() for t in given if t is not None}
        places = [_bytes(t) for t in given if t is not None]
        _copy(places, inputs)
        made: list[tuple[Make, list[Tensor], list[tuple[torch.Size, torch.dtype]]]] = []

        def segment() -> tuple[Tensor, ...]:
            results: list[Tensor] = []
            make = _maker(work(*given), results, read)
            left = self._places(results)
            _copy(left, results)
            made.append((make, left, [(t.shape, t.dtype) for t in results]))
            return ()  # a result's own memory is free for the next recording

        _, replay = self._recorder(segment)
        self.hidden_bytes = self._recorder.nbytes
        return _Recording(places, *made[-1], replay)

    def _input(self, number: int, like: Tensor) -> Tensor:
        """The place of an input."""
        kind = number, like.shape[1:], like.dtype
        if kind not in self._inputs or len(self._inputs[kind]) < len(like):
            shape = (max(self._rows, len(like)), *like.shape[1:])
            self._inputs[kind] = _lasting(shape, like.dtype, like.device)
        return self._inputs[kind][: len(like)]

    def _places(self, results: Sequence[Tensor]) -> list[Tensor]:
        """Of results, as bytes."""
        if not results:
            return []
        sizes = [-(-t.nbytes // PLACE_BYTES) * PLACE_BYTES for t in results]
        *starts, size = accumulate(sizes, initial=0)
        room = next((room for room in self._results if room.numel() >= size), None)
        if room is None:
            room = _lasting((size,), torch.uint8, results[0].device)
            self._results.append(room)
        return [room[at : at + t.nbytes] for at, t in zip(starts, results, strict=True)]


@dataclass(frozen=True)
class _Recording:
    """inputs, results: places, as bytes; kinds: shape and type of every result; make: what was
    returned, of results that are kept."""

    inputs: list[Tensor]
    make: Make
    results: list[Tensor]
    kinds: list[tuple[torch.Size, torch.dtype]]
    replay: Callable[[], None]

    def replayed(self, inputs: Sequence[Tensor | None]) -> Any:
        _copy(self.inputs, inputs)
        self.replay()
        kept = [
            torch.empty(shape, dtype=dtype, device=place.device)
            for place, (shape, dtype) in zip(self.results, self.kinds, strict=True)
        ]
        if kept:
            torch._foreach_copy_([_bytes(t) for t in kept], self.results)
        return self.make(kept)


def _lasting(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Written in and out of inference mode."""
    with torch.inference_mode(False):
        return torch.empty(tuple(shape), dtype=dtype, device=device)


def _bytes(tensor: Tensor) -> Tensor:
    """uint8 [any]: tensors of one type are copied by one launch."""
    flat = tensor.view(-1)
    return flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)


def _copy(places: list[Tensor], tensors: Sequence[Tensor | None]) -> None:
    """Tensors to their places, by one launch."""
    if places:
        found = [_bytes(t.contiguous()) for t in tensors if t is not None]
        torch._foreach_copy_(places, found)


def _maker(value: Any, results: list[Tensor], read: set[int]) -> Make:
    """What makes such a value anew of other results; those of this one are put into `results`.

    Tensors in storages that are read (`read`: where) are no results; a result may stand twice.
    """
    if isinstance(value, Tensor):
        if value.untyped_storage().data_ptr() in read:
            return lambda kept: value
        for number, known in enumerate(results):
            if known is value:
                return itemgetter(number)
        results.append(value)
        return itemgetter(len(results) - 1)
    if is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        parts = [_maker(getattr(value, f.name), results, read) for f in fields(value)]
        return lambda kept: kind(*[part(kept) for part in parts])
    if isinstance(value, tuple):
        parts = [_maker(part, results, read) for part in value]
        return lambda kept: tuple(part(kept) for part in parts)
    return lambda kept: value

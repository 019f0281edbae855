"""What an interpreted kernel may touch: its own arguments, and nothing of another program's.

The interpreter reads and writes whatever address it is given, and runs programs one behind the
other, so that it shows neither a read beside a tensor nor two programs that meet in one place. Here
every active lane of every access is looked at. A fault ends the launch with a MemoryFault.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from benchmarks.guards import altered_empty

ADDRESSES = 2**32  # whole numbers of 64 bits in a table from here on are taken for addresses
SEVERAL = -1  # in place of the number of a program


class MemoryFault(Exception):
    """A kernel touched what is not its own, or what another program of the launch writes."""


class Extent:
    """The bytes that one tensor argument covers, its strides' gaps among them.

    writers, readers: by byte, 1 + the number of the program that wrote and that read it, 0 for
    none, SEVERAL; made when the launch first stores there, readers also when an earlier one did.
    """

    def __init__(self, name: str, tensor: Tensor) -> None:
        spans = zip(tensor.shape, tensor.stride(), strict=True)
        elements = 1 + sum((size - 1) * stride for size, stride in spans) if tensor.numel() else 0
        self.name, self.first = name, tensor.data_ptr()
        self.stop = self.first + elements * tensor.element_size()
        self.writers: np.ndarray | None = None
        self.readers: np.ndarray | None = None

    def watch(self) -> None:
        if self.readers is None:
            self.readers = np.zeros(self.stop - self.first, dtype=np.int32)

    def bytes(self) -> np.ndarray:
        """What lies there now."""
        held = (ctypes.c_uint8 * (self.stop - self.first)).from_address(self.first)
        return np.frombuffer(held, dtype=np.uint8)

    def places(self, pointers: np.ndarray, size: int) -> np.ndarray:
        """Every byte of accesses of `size` bytes, counted from the first of the tensor."""
        places = (pointers - np.uint64(self.first)).astype(np.int64)
        return (places[:, None] + np.arange(size)).ravel()


_STORED: dict[str, set[str]] = {}
"""Kernel -> arguments that a launch of it has stored to: who reads these is noted from then on."""


class Launch:
    """One launch: what it may touch, and who has touched what so far."""

    def __init__(self, kernel: str, arguments: dict[str, Any]) -> None:
        self.kernel, self.stored = kernel, _STORED.setdefault(kernel, set())
        self.fault: MemoryFault | None = None
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        extents = [Extent(name, tensor) for name, tensor in tensors.items()]
        for name, tensor in tensors.items():
            if tensor.dtype == torch.int64:
                extents += _pointed_to(name, tensor)
        self.extents = extents
        for extent in extents:
            if extent.name in self.stored:
                extent.watch()

    def extent_of(self, what: str, pointers: np.ndarray, size: int) -> list[tuple[Extent, Any]]:
        """The tensors that the lanes lie in and which lanes these are: as a rule one, and all."""
        least, most = int(pointers.min()), int(pointers.max()) + size
        for extent in self.extents:
            if extent.first <= least and most <= extent.stop:
                return [(extent, slice(None))]
        found, left = [], np.ones(len(pointers), dtype=bool)
        for extent in self.extents:
            inside = left & (pointers >= extent.first) & (pointers + np.uint64(size) <= extent.stop)
            if inside.any():
                found.append((extent, inside))
                left &= ~inside
        if left.any():
            self.fail(f"{what} {_beside(self.extents, pointers[left], size)}")
        return found

    def fail(self, what: str) -> None:
        grid = tuple(interpreter.interpreter_builder.grid_idx)
        self.fault = MemoryFault(f"{self.kernel}, program {grid}: {what}")
        raise self.fault

    def loads(self, pointers: np.ndarray, size: int) -> None:
        for extent, lanes in self.extent_of("a load", pointers, size):
            if extent.writers is None and extent.readers is None:
                continue
            places = extent.places(pointers[lanes], size)
            if extent.writers is not None:
                self._unless_others(extent, extent.writers[places], "reads {}, which {} wrote")
            if extent.readers is not None:
                before, mine = extent.readers[places], _program()
                alone = (before == 0) | (before == mine)
                extent.readers[places] = np.where(alone, mine, SEVERAL)

    def stores(self, pointers: np.ndarray, size: int, values: np.ndarray) -> None:
        for extent, lanes in self.extent_of("a store", pointers, size):
            self.stored.add(extent.name)
            extent.watch()
            if extent.writers is None:
                extent.writers = np.zeros_like(extent.readers)
            places = extent.places(pointers[lanes], size)
            mine, before = values[lanes].ravel(), extent.writers[places]
            before[extent.bytes()[places] == mine] = 0  # the same value twice does no harm
            self._unless_others(extent, before, "writes {} otherwise than {}")
            self._unless_others(extent, extent.readers[places], "writes {}, which {} read")
            extent.writers[places] = _program()

    def _unless_others(self, extent: Extent, programs: np.ndarray, what: str) -> None:
        others = (programs != 0) & (programs != _program())
        if others.any():
            number = int(programs[others][0])
            other = "others" if number == SEVERAL else f"program number {number - 1}"
            self.fail(what.format(f"{int(others.sum())} bytes of {extent.name}", other))


def _pointed_to(table: str, tensor: Tensor) -> list[Extent]:
    """The live tensors that a table of addresses names."""
    wanted = {int(value) for value in tensor.flatten().tolist() if value >= ADDRESSES}
    if not wanted:
        return []
    found: dict[int, Extent] = {}
    for held in gc.get_objects():
        if issubclass(type(held), Tensor) and held.device.type == "cpu" and held.numel():
            address = held.data_ptr()
            if address in wanted:
                extent = Extent(f"what {table} points to", held)
                if address not in found or extent.stop > found[address].stop:
                    found[address] = extent
    return list(found.values())


def _beside(extents: list[Extent], pointers: np.ndarray, size: int) -> str:
    """How far the worst lane lies from the nearest argument."""
    told = []
    for extent in extents:
        before = extent.first - int(pointers.min())
        behind = int(pointers.max()) + size - extent.stop
        told.append((max(before, behind), before >= behind, extent))
    if not told:
        return "of a launch without tensors"
    distance, is_before, extent = min(told, key=lambda entry: entry[0])
    side = "before" if is_before else "behind"
    of = f"{extent.stop - extent.first} bytes of {extent.name}"
    return f"goes {distance} bytes {side} the {of}, {len(pointers)} lanes outside of every argument"


def _program() -> int:
    """1 + the number of the program that runs."""
    builder = interpreter.interpreter_builder
    (x, y, z), (_, ys, zs) = builder.grid_idx, builder.grid_dim
    return 1 + (x * ys + y) * zs + z


_current: list[Launch] = []


def _active(pointers: Any, mask: Any) -> np.ndarray:
    """Addresses of the lanes that are not masked off."""
    if mask is None or bool(mask.data.all()):
        return pointers.data.ravel()
    return pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]


def _size(pointers: Any) -> int:
    return max(1, pointers.get_element_ty().primitive_bitwidth // 8)


def _looked_at(name: str, genuine: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the interpreter's builder that looks at its access first."""

    def load(builder: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        lanes = _active(pointers, mask)
        if len(lanes) and _current:
            _current[-1].loads(lanes, _size(pointers))
        return genuine(builder, pointers, mask, *rest)

    def store(builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        lanes, size = _active(pointers, mask), _size(pointers)
        if len(lanes) and _current:
            whole = np.broadcast_to(value.data, pointers.data.shape)
            chosen = whole[np.broadcast_to(mask.data, whole.shape)]
            raw = np.ascontiguousarray(chosen).view(np.uint8).reshape(len(lanes), -1)
            _current[-1].stores(lanes, size, raw[:, :size])
        return genuine(builder, pointers, value, mask, *rest)

    def atomic(builder: Any, *args: Any) -> Any:
        pointers, mask = (args[0], None) if name == "create_atomic_cas" else (args[1], args[3])
        lanes = _active(pointers, mask)
        if len(lanes) and _current:
            _current[-1].extent_of("an atomic access", lanes, _size(pointers))
        return genuine(builder, *args)

    return {"create_masked_load": load, "create_masked_store": store}.get(name, atomic)


ACCESSES = (
    "create_masked_load", "create_masked_store", "create_atomic_cas", "create_atomic_rmw",
)  # fmt: skip
"""Every access of the interpreter ends in one of these, in Triton 3.6 to 3.9."""


@contextmanager
def guarded() -> Iterator[None]:
    """While it lasts, an interpreted launch that touches what is not its own is a MemoryFault."""
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    genuine = {name: getattr(builder, name) for name in ACCESSES}
    run = executor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        known = inspect.signature(self.fn).parameters
        bound = inspect.getcallargs(
            self.fn, *args, **{name: v for name, v in kwargs.items() if name in known}
        )
        _current.append(Launch(self.fn.__name__, bound))
        try:
            return run(self, *args, **kwargs)
        except interpreter.InterpreterError:
            if _current[-1].fault is not None:
                raise _current[-1].fault from None
            raise
        finally:
            _current.pop()

    for name in ACCESSES:
        setattr(builder, name, _looked_at(name, genuine[name]))
    executor.__call__ = launch
    try:
        yield
    finally:
        executor.__call__ = run
        for name, method in genuine.items():
            setattr(builder, name, method)


def _poison(tensor: Tensor) -> Tensor:
    """NaN, or 0x7F bytes where numbers are whole. Without fences: sizes stay what tests count."""
    if tensor.is_floating_point() and tensor.element_size() > 1:
        return tensor.fill_(torch.nan)
    tensor.view(torch.uint8).fill_(0x7F)  # of float8_e4m3fn, too, it is NaN
    return tensor


@pytest.fixture(autouse=True)
def guarded_launches() -> Iterator[None]:
    """Every launch of a file of tests that imports it, with poison in what launchers allocate."""
    with altered_empty(_poison), guarded():
        yield

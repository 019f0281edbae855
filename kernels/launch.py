"""Launching a kernel again without Triton's binding of its arguments, the dearer part of it.

For every launch Triton binds the arguments by name, asks what to specialise on, makes a key of it
and looks the compiled kernel up: several times the 8 us that the driver takes, and decoding is a
launch for every layer in every denoising pass. Here the first launch of a kind goes through Triton
and later ones call what it compiled. A kind is everything that Triton specialises on: types,
constants, addresses that are multiples of 16, integers that are 1 or multiples of 16.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any, NamedTuple

from torch import Tensor
from triton.runtime import JITFunction, driver

INT32_MAX = 2**31 - 1


class _Compiled(NamedTuple):
    """A kernel of one kind on one device, and its constants in the order of its signature."""

    run: Any
    function: Any
    metadata: Any
    constants: tuple[Any, ...]


_COMPILED: dict[tuple[Any, ...], _Compiled] = {}


_LOOKED_AT: dict[int, tuple[Any, tuple[bool, ...]]] = {}


def _specialised(kernel: Any) -> tuple[bool, ...]:
    """By argument: whether Triton looks at its value. (A kernel's own hash takes 4 us.)"""
    known = _LOOKED_AT.get(id(kernel))
    if known is None or known[0] is not kernel:
        flags = tuple(not p.do_not_specialize for p in kernel.params)
        known = _LOOKED_AT[id(kernel)] = kernel, flags
    return known[1]


def _integer_kind(value: int, specialised: bool) -> int:
    kind = 4 if value > INT32_MAX else 0
    if specialised:
        kind += 2 if value == 1 else value % 16 == 0
    return kind


def _described(
    args: Sequence[Any], specialised: Sequence[bool]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Arguments as the driver takes them, tensors as addresses, and the kind of each."""
    values: list[Any] = []
    kinds: list[Any] = []
    for arg, looked_at in zip(args, specialised, strict=False):
        if isinstance(arg, Tensor):
            address = arg.data_ptr()
            values.append(address)
            kinds.append((arg.dtype, address % 16 == 0))
        else:
            values.append(arg)
            kinds.append(_integer_kind(arg, looked_at) if isinstance(arg, int) else type(arg))
    return tuple(values), tuple(kinds)


def _first_launch(
    kernel: Any, grid: tuple[int, int], args: Sequence[Any], constants: Mapping[str, Any]
) -> _Compiled:
    compiled = kernel[grid](*args, **constants)
    ordered = tuple(constants[name] for name in kernel.arg_names[len(args) :])
    return _Compiled(compiled.run, compiled.function, compiled.packed_metadata, ordered)


def _launch_again(
    compiled: _Compiled, grid: tuple[int, int], device: int, values: tuple[Any, ...]
) -> None:
    run, function, metadata, constants = compiled
    stream = driver.active.get_current_stream(device)
    run(grid[0], grid[1], 1, stream, function, metadata, None, None, None, *values, *constants)


class Launches:
    """Launches as they were made, to be made again with the same arguments.

    Addresses are numbers here: whoever calls it knows that what was there still is.
    """

    def __init__(self) -> None:
        self.device = -1
        self._made: list[tuple[_Compiled, tuple[int, int], tuple[Any, ...], tuple[bool, ...]]] = []

    def __len__(self) -> int:
        return len(self._made)

    def add(
        self, kernel: Any, compiled: _Compiled, grid: tuple[int, int], device: int,
        values: tuple[Any, ...],
    ) -> None:  # fmt: skip
        self.device = device
        self._made.append((compiled, grid, values, _specialised(kernel)))

    def addresses(self) -> set[int]:
        """All of its arguments that are beyond 32 bits: no length is."""
        given = (value for _, _, values, _ in self._made for value in values)
        return {value for value in given if isinstance(value, int) and value > INT32_MAX}

    def moved(self, addresses: Mapping[int, int]) -> Launches | None:
        """The same with other addresses in place of these; None where a kernel is compiled for a
        multiple of 16 and another address is none, or the other way round."""
        other = Launches()
        other.device = self.device
        for compiled, grid, values, looked_at in self._made:
            moved = tuple(addresses.get(value, value) for value in values)
            for old, new, looked in zip(values, moved, looked_at, strict=False):
                if looked and old is not new and (old % 16 == 0) != (new % 16 == 0):
                    return None
            other._made.append((compiled, grid, moved, looked_at))
        return other

    def again(self) -> None:
        """On the stream that is the current one now."""
        for compiled, grid, values, _ in self._made:
            _launch_again(compiled, grid, self.device, values)


_noting = threading.local()


@contextmanager
def noted() -> Iterator[Launches]:
    """What this thread launches inside, as far as it is compiled."""
    launches = _noting.launches = Launches()
    try:
        yield launches
    finally:
        del _noting.launches


def _note(*made: Any) -> None:
    launches = getattr(_noting, "launches", None)
    if launches is not None:
        launches.add(*made)


def launch(
    kernel: Any, grid: tuple[int, int], args: Sequence[Any], constants: Mapping[str, Any]
) -> bool:
    """kernel[grid](*args, **constants). args come first in the kernel's signature, then constants.

    Returns whether this was the first of its kind. Anything but a compiled kernel (the
    interpreter's) is launched as it stands.
    """
    if not isinstance(kernel, JITFunction):
        kernel[grid](*args, **constants)
        return False
    device = driver.active.get_current_device()
    values, kinds = _described(args, _specialised(kernel))
    key = (id(kernel), device, kinds, *constants.values())
    compiled = _COMPILED.get(key)
    first = compiled is None
    if compiled is None:
        _COMPILED[key] = compiled = _first_launch(kernel, grid, args, constants)
    else:
        _launch_again(compiled, grid, device, values)
    _note(kernel, compiled, grid, device, values)
    return first


def compile_only(
    kernel: Any, grid: tuple[int, int], args: Sequence[Any], constants: Mapping[str, Any]
) -> None:
    """So that a later `launch` of it compiles nothing."""
    if isinstance(kernel, JITFunction):
        kernel.warmup(*args, grid=grid, **constants)


class PreparedLaunch:
    """A kernel whose later arguments are fixed; a call gives a tensor and the integers before them.

    The fixed tensors are kept alive by it. What is left to do in a call is one address, the kinds
    of `strides` and the driver's launch.
    """

    def __init__(self, kernel: Any, fixed: Sequence[Any], constants: Mapping[str, Any]) -> None:
        self.kernel, self._fixed, self.constants = kernel, tuple(fixed), constants
        self._numbers: tuple[int, ...] = ()
        self._direct = isinstance(kernel, JITFunction)
        if self._direct:
            flags = _specialised(kernel)
            before = len(kernel.arg_names) - len(fixed) - sum(p.is_constexpr for p in kernel.params)
            self._values, kinds = _described(fixed, flags[before:])
            self._key = (id(kernel), kinds, *constants.values())
            self._known: dict[tuple[Any, ...], _Compiled] = {}

    def rebound(self, tensors: Mapping[int, Tensor | None]) -> PreparedLaunch:
        """The same with other fixed tensors at some places, of the kinds of those before.

        None: no longer kept alive, and to be given before a call. ValueError for another kind.
        """
        other = copy(self)
        fixed = list(self._fixed)
        for place, tensor in tensors.items():
            fixed[place] = tensor
        other._fixed, other._numbers = tuple(fixed), ()
        if self._direct:
            values, kinds = list(self._values), self._key[1]
            for place, tensor in tensors.items():
                values[place] = 0 if tensor is None else tensor.data_ptr()
                if tensor is not None and kinds[place] != (tensor.dtype, values[place] % 16 == 0):
                    raise ValueError(f"argument {place} is not of its earlier kind")
            other._values = tuple(values)
        return other

    def bounded(self, registers: int) -> PreparedLaunch:
        """The same with at most so many registers a thread."""
        other = copy(self)
        other.constants = {**self.constants, "maxnreg": registers}
        if self._direct:
            other._key = (*self._key[:2], *other.constants.values())
            other._known = {}
        return other

    @property
    def fixed(self) -> tuple[Any, ...]:
        return self._fixed

    @property
    def numbers(self) -> tuple[int, ...]:
        """What is fixed as whole numbers: tensors as addresses, nothing as 0."""
        if not self._numbers:
            self._numbers = tuple(
                t.data_ptr() if isinstance(t, Tensor) else 0 if t is None else t
                for t in self._fixed
            )
        return self._numbers

    def __call__(
        self,
        grid: tuple[int, int],
        tensor: Tensor,
        strides: tuple[int, int],
        lengths: tuple[int, ...],
    ) -> None:
        """strides: integers that Triton specialises on; lengths: those that it does not."""
        if not self._direct:
            self.kernel[grid](tensor, *strides, *lengths, *self._fixed, **self.constants)
            return
        device, address = driver.active.get_current_device(), tensor.data_ptr()
        kind = (
            device, tensor.dtype, address % 16 == 0,
            _integer_kind(strides[0], True), _integer_kind(strides[1], True),
        )  # fmt: skip
        values = (address, *strides, *lengths, *self._values)
        key = (*self._key, *kind)
        compiled = self._known.get(kind) or _COMPILED.get(key)
        if compiled is None:
            args = (tensor, *strides, *lengths, *self._fixed)
            compiled = _COMPILED[key] = _first_launch(self.kernel, grid, args, self.constants)
        else:
            _launch_again(compiled, grid, device, values)
        self._known[kind] = compiled
        _note(self.kernel, compiled, grid, device, values)

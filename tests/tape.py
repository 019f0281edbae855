"""A CUDA graph's stand-in on a CPU: PyTorch's operations as they were made, made again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from quantwm.cache.capture import Captured, Segment
from tests.host_syncs import READS

POISON = 0xA5


class Tape:
    """Makes a segment's operations again on the very tensors of the recording, as a graph does.

    No Python of the segment runs again. What the segment made holds garbage after the recording and
    before every replay, so that nothing is left of the values it was recorded with. Reading a value
    or drawing one is an error, as it is under capture.
    """

    nbytes = 0

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, segment: Segment) -> Captured:
        self.recorded += 1
        segment()  # warms up
        with _Listener() as heard:
            outputs = segment()
        _poison(heard.made)

        def replay() -> None:
            self.replayed += 1
            # Where tensors of both kinds may be written to: a graph does not know them.
            with _disable_current_modes(), torch.inference_mode():
                _poison(heard.made)
                for again in heard.calls:
                    again()

        return outputs, replay


class _Listener(TorchDispatchMode):
    """calls: every operation that is no view; made: the tensors that they returned."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], None]] = []
        self.made: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in READS or "rand" in name or kwargs.get("generator") is not None:
            raise RuntimeError(f"{name} cannot be recorded")
        found = func(*args, **kwargs)
        results = list(tensors_of(found))
        if func._schema.is_mutable:
            self.calls.append(lambda: func(*args, **kwargs))
        elif not is_view(args, results):
            self.made += results

            def again() -> None:
                for mine, new in zip(results, tensors_of(func(*args, **kwargs)), strict=True):
                    mine.copy_(new)

            if not name.startswith(("empty", "new_empty")):
                self.calls.append(again)
        return found


def tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_of(part)


def is_view(args: Any, results: list[Tensor]) -> bool:
    given = {t.untyped_storage().data_ptr() for t in tensors_of(args)}
    return bool(results) and all(t.untyped_storage().data_ptr() in given for t in results)


def _poison(made: list[Tensor]) -> None:
    for tensor in made:
        storage = tensor.untyped_storage()
        torch.empty(0, dtype=torch.uint8).set_(storage).fill_(POISON)


class Launches(TorchDispatchMode):
    """Counts what would be a launch: no view, no allocation. A replay is one, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        found = func(*args, **(kwargs or {}))
        made = func._schema.is_mutable or not is_view(args, list(tensors_of(found)))
        if made and not name.startswith(("empty", "new_empty")):
            self.names.append(name)
        return found

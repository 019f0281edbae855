"""One worker thread beside the stream: bases are made while the next chunk is being denoised.

Its result is asked for at a fixed point, the next chunk's first write, and waited for there if it
is not ready: the same chunks are coded by the same bases however fast the machine is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

ResultT = TypeVar("ResultT")


class Job(Generic[ResultT]):
    """Work that has been handed to the worker."""

    def __init__(
        self, work: Callable[[], ResultT], reads: Sequence[Tensor], device: torch.device
    ) -> None:
        """reads: tensors of the current stream that the work reads."""
        self._device, self._done = device, None
        if device.type == "cuda":
            work = self._beside(work, reads)
        self._future: Future[ResultT] = _pool().submit(torch.no_grad()(work))

    def result(self, made: Callable[[ResultT], Sequence[Tensor]]) -> ResultT:
        """What the work gave, or the error it raised. made: the tensors in it."""
        result = self._future.result()
        if self._done is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(self._done)
            for tensor in made(result):
                tensor.record_stream(stream)
        return result

    def made(self) -> ResultT | None:
        """What the work gave, without waiting: None before it is done, and where it failed."""
        if not self._future.done() or self._future.exception() is not None:
            return None
        return self._future.result()

    @property
    def running(self) -> bool:
        return not self._future.done()

    def _beside(self, work: Callable[[], ResultT], reads: Sequence[Tensor]) -> Callable[[], Any]:
        """The work on a stream of its own, behind all that is queued now."""
        side, ready = _side_stream(self._device), torch.cuda.Event()
        self._done = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self._device))
        for tensor in reads:
            tensor.record_stream(side)

        def run() -> ResultT:
            with torch.cuda.device(self._device), torch.cuda.stream(side):
                side.wait_event(ready)
                result = work()
                self._done.record(side)
            return result

        return run


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="qtc-bases")


@lru_cache(maxsize=8)
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)

"""One worker thread beside the stream: bases are made while the next chunk is being denoised.

Its result is asked for at a fixed point, the next chunk's first write, and waited for there if it
is not ready: the same chunks are coded by the same bases however fast the machine is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from threading import Thread
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


def wait_until_idle() -> None:
    """Until all work handed over so far is done: the one thread takes it in its order."""
    _pool().submit(lambda: None).result()


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "qtc-bases", _compute_alone)


HELPERS = 8
"""Threads, at most and half the cores, that decompose matrices for a GPU."""


def eigh(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """`torch.linalg.eigh` of [n, D, D]; on a GPU's own cores' behalf by those of its host.

    A GPU takes float64 matrices of 128 x 128 one behind the other, 1.7 ms each in hundreds of
    launches that stand between those of the stream; a core of the host takes 1.5 ms.
    """
    if not matrices.is_cuda:
        return torch.linalg.eigh(matrices)
    threads = max(min(HELPERS, (os.cpu_count() or 2) // 2), 1)
    parts = matrices.cpu().tensor_split(2 * threads)
    found = _helpers(threads).map(torch.linalg.eigh, [part for part in parts if len(part)])
    values, vectors = (torch.cat(parts) for parts in zip(*found, strict=True))
    return values.to(matrices.device), vectors.to(matrices.device)


@lru_cache(maxsize=1)
def _helpers(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "qtc-eigh", _compute_alone)


def _compute_alone() -> None:
    """This thread's operations take one core, as small matrices are slower on several: 40 of them
    13 times so on two busy cores.

    PyTorch also makes that the default of threads to come, which a passing thread puts back.
    """
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    passing = Thread(target=torch.set_num_threads, args=(usual,))
    passing.start()
    passing.join()


@lru_cache(maxsize=8)
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)

"""An engine whose every call runs on one and the same thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from quantwm.engine import Engine
from quantwm.engine_types import BlockResult, LaneConfig
from quantwm.worlds.base import ChunkAction

T = TypeVar("T")


class OneThread:
    """Runs calls on one thread of its own.

    Gradio takes each step of a generator on whichever worker thread is free, and OpenMP keeps a
    team of threads for every thread that ever called it: 16 workers on 64 cores would keep a
    thousand. The thread starts with the first call, and anew in a forked process.
    """

    def __init__(self) -> None:
        self._pid: int | None = None
        self._pool: ThreadPoolExecutor | None = None

    def run(self, call: Callable[[], T]) -> T:
        if self._pool is None or self._pid != os.getpid():
            self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
            self._pid = os.getpid()
        return self._pool.submit(call).result()


class PinnedEngine:
    """EngineLike over `inner`, all of whose calls run on `thread`."""

    def __init__(self, inner: Engine, thread: OneThread) -> None:
        self.inner = inner
        self._thread = thread

    @property
    def lanes(self) -> Sequence[LaneConfig]:
        return self.inner.lanes

    def start(self) -> BlockResult:
        return self._thread.run(self.inner.start)

    def step(self, action: ChunkAction) -> BlockResult:
        return self._thread.run(lambda: self.inner.step(action))

    def explain(self) -> str:
        return self.inner.explain()

    def close(self) -> None:
        self._thread.run(self.inner.close)

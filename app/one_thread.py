"""An engine whose every call runs on one and the same thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from quantwm.engine import Engine
from quantwm.engine_types import BlockResult, LaneConfig
from quantwm.token_selection import LayerPicks, QueryWatch, grid_of, picks
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
    """EngineLike over `inner`, all of whose calls run on `thread`. `watch` keeps its queries."""

    def __init__(self, inner: Engine, thread: OneThread, watch: QueryWatch) -> None:
        self.inner = inner
        self.watch = watch
        self._thread = thread

    @property
    def lanes(self) -> Sequence[LaneConfig]:
        return self.inner.lanes

    def start(self) -> BlockResult:
        return self._thread.run(self.inner.start)

    def step(self, action: ChunkAction) -> BlockResult:
        return self._thread.run(lambda: self.inner.step(action))

    def change_prompt(self, prompt: str) -> None:
        self._thread.run(lambda: self.inner.change_prompt(prompt))

    def explain(self) -> str:
        return self.inner.explain()

    def pick_tokens(
        self, frame: int, x: int, y: int
    ) -> tuple[int, int, int, int, list[LayerPicks]]:
        """What the query of the patch at pixel (x, y) of a latent frame picks: rows and columns of
        a frame's tokens, its width and height in pixels, and the picks by layer.

        Raises:
            UserError: the world cannot tell, or the patch is not of the newest chunk.
        """
        world = self.inner.world.spec
        rows, columns = grid_of(world.cache)
        width, height = world.video_size
        row, column = min(y * rows // height, rows - 1), min(x * columns // width, columns - 1)
        found = self._thread.run(lambda: picks(self.watch, self.inner.caches, frame, row, column))
        return rows, columns, width, height, found

    def close(self) -> None:
        self._thread.run(self.inner.close)

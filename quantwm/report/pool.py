"""The report's jobs, in this process or in several that share one device or more."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import torch

from quantwm.errors import UserError
from quantwm.report.schedule import OutOfTime, Schedule, Size, unknown
from quantwm.worlds.base import World
from quantwm.worlds.registry import keep_weights_in, load_world

T = TypeVar("T")
Task = Callable[[World], T]
"""Something to do with the loaded world; picklable where several processes work."""


START_SECONDS = 300.0
"""The slowest start of a worker that is waited for: a cold machine reads PyTorch from its disk."""
GRACE = 4.0
"""Seconds after the deadline in which a worker ends by itself: it looks at the clock after each
chunk of a lane, 0.1 s on a GPU and up to 2 s on a busy CPU."""
LONGEST_WAIT = 3600.0
"""Seconds between two looks at the clock where there is no deadline: waiting takes no infinity."""


@dataclass(frozen=True)
class Failure:
    """What a task said when it failed, one line."""

    reason: str


@dataclass(frozen=True)
class WorldSource:
    """Which world to load: a name that the registry knows, or a small one with random weights.

    folder: of downloaded worlds, where it is not the usual one; every process looks there.
    """

    name: str = "embedded"
    random_preset: str | None = None
    folder: str | None = None

    def load(self, device: torch.device) -> World:
        if self.folder is not None:
            keep_weights_in(self.folder)
        if self.random_preset is None:
            return load_world(self.name, device)
        from quantwm.worlds.embedded.adapter import EmbeddedWorld

        return EmbeddedWorld.random(self.random_preset, device=device)


class Workers:
    """Processes with a world each, or this process's own world when there is only one.

    On a GPU the host bounds a small world's rollouts, so several processes finish sooner; which
    one runs a task does not change its result on devices of one kind.
    """

    def __init__(
        self,
        source: WorldSource,
        devices: Sequence[torch.device],
        processes: int,
        world: World | None = None,
        patience: float = START_SECONDS,
    ) -> None:
        """devices: which the processes are spread over. world: what the source gives on the first
        of them, where it is loaded already. patience: seconds that `ready` waits."""
        self._source, self._devices, self._processes = source, tuple(devices), processes
        self._world = world
        self._pool: ProcessPoolExecutor | None = None
        self._starting: list[Future[bool]] = []
        self._ids: Any = ()
        if processes > 1 or len(self._devices) > 1:
            context = multiprocessing.get_context("spawn")
            started, ready = context.Value("i", 0), context.Barrier(processes)
            self._ids = context.Array("i", processes)
            told = (source, self._devices, started, ready, self._ids)
            self._pool = ProcessPoolExecutor(processes, context, _open, told)
            self._starting = [self._pool.submit(_wait, patience) for _ in range(processes)]

    def __enter__(self) -> Workers:
        return self

    @property
    def world(self) -> World:
        """This process's own, on the first device; loaded when it is first asked for."""
        if self._world is None:
            self._world = self._source.load(self._devices[0])
        return self._world

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def end(self) -> None:
        """End the processes, and wait until they have: from then on this one is alone."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(cancel_futures=True)

    def ready(self) -> bool:
        """Return once every process has its world.

        False when some of them still load theirs after `patience` seconds.

        Raises:
            UserError: one of them ended, for example because the device's memory is full.
        """
        try:
            return all(waiting.result() for waiting in self._starting)
        except BrokenProcessPool as error:
            raise UserError(
                f"{self._processes} processes do not all start on "
                f"{', '.join(map(str, self._devices))}; their own lines above say why, fewer "
                "(--processes) need less memory"
            ) from error

    def run(
        self,
        tasks: Sequence[Task[T]],
        deadline: float,
        report: Callable[[str], None],
        *,
        sizes: Sequence[Size] = (),
        pace: float = 0.0,
        seen: Callable[[Mapping[int, T | Failure | None]], None] = lambda results: None,
    ) -> list[T | Failure | None]:
        """Results in the order of the tasks; None for those that had not ended by the deadline.

        A task that fails leaves a Failure in its place, so that one lane's mistake does not cost
        the others' minutes. What processes that ended left undone is done in this one. Processes
        that do not heed the deadline are stopped GRACE seconds after it.

        deadline: seconds since the epoch; infinity for none. sizes, pace: what the tasks are
        reckoned to take, `Schedule`. seen: told all results after each.
        """
        schedule = Schedule(sizes or unknown(len(tasks)), deadline, pace)
        results: dict[int, T | Failure | None] = {}

        def note(place: int, result: T | Failure | None, began: float) -> None:
            results[place] = result
            if result is not None and not isinstance(result, Failure):
                schedule.ended(place, time.time() - began)
            report(f"{len(results)}/{len(tasks)}")
            seen(results)

        if self._pool is not None:
            self._share_out(self._pool, tasks, schedule, note, report)
        while (place := schedule.next(began := time.time())) is not None:
            note(place, _in_time(tasks[place], self.world, deadline), began)
        return [results.get(place) for place in range(len(tasks))]

    def _share_out(
        self,
        pool: ProcessPoolExecutor,
        tasks: Sequence[Task[T]],
        schedule: Schedule,
        note: Callable[[int, T | Failure | None, float], None],
        report: Callable[[str], None],
    ) -> None:
        """Have the processes do the tasks, one each at a time; all of them unless one ends."""
        running: dict[Future[T | Failure | None], tuple[int, float]] = {}
        try:
            while True:
                while len(running) < self._processes:
                    if (place := schedule.next(now := time.time())) is None:
                        break
                    running[pool.submit(_run, tasks[place], schedule.deadline)] = place, now
                if not running:
                    return
                left = max(schedule.deadline + GRACE - time.time(), 0.0)
                ended, _ = wait(running, min(left, LONGEST_WAIT), FIRST_COMPLETED)
                if not ended and time.time() >= schedule.deadline + GRACE:
                    self._stop()
                    return
                for future in ended:
                    place, began = running[future]
                    note(place, future.result(), began)
                    del running[future]
        except BrokenProcessPool:
            self._pool = None
            for place, _ in running.values():
                schedule.again(place)
            report("a process ended; this one does the rest")

    def _stop(self) -> None:
        """End the processes where they are: the report does not wait for them."""
        for number in self._ids:
            if number:
                os.kill(number, signal.SIGTERM)
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = None


def reasons(results: Sequence[T | Failure | None]) -> list[str]:
    """What the failed tasks said, each once."""
    return sorted({found.reason for found in results if isinstance(found, Failure)})


def whole(results: Sequence[T | Failure | None]) -> list[T | None]:
    """The results with None where a task failed or did not begin."""
    return [None if isinstance(found, Failure) else found for found in results]


def _in_time(task: Task[T], world: World, deadline: float) -> T | Failure | None:
    if time.time() >= deadline:
        return None
    try:
        return task(world)
    except OutOfTime:
        return None
    except (UserError, RuntimeError) as error:  # torch's own errors are RuntimeErrors
        return Failure(" ".join(str(error).split())[:300])


_world: World | None = None
"""Of a worker process: loaded once, before its first task."""
_ready: Any = None
"""Where a worker waits for the others."""


def _open(
    source: WorldSource, devices: Sequence[torch.device], started: Any, ready: Any, ids: Any
) -> None:
    global _world, _ready
    torch.set_num_threads(1)
    with started.get_lock():
        number, started.value = started.value, started.value + 1
    ids[number] = os.getpid()
    device = devices[number % len(devices)]
    make_current(device)
    _world, _ready = source.load(device), ready


def make_current(device: torch.device) -> None:
    """Kernels and graphs are launched on the current CUDA device; "cuda" alone is the first."""
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # it takes no device without an index


def _wait(patience: float) -> bool:
    try:
        _ready.wait(patience)
    except threading.BrokenBarrierError:
        return False
    return True


def _run(task: Task[T], deadline: float) -> T | Failure | None:
    if _world is None:
        raise RuntimeError("a worker of the report has no world")
    return _in_time(task, _world, deadline)


def task_of(call: Callable[..., T], *arguments: Any) -> Task[T]:
    """call(world, *arguments) as a task."""
    return partial(_call, call, arguments)


def _call(call: Callable[..., T], arguments: tuple[Any, ...], world: World) -> T:
    return call(world, *arguments)

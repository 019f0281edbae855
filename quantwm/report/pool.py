"""The report's jobs, in this process or in several that share one device or more."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import torch

from quantwm.errors import UserError
from quantwm.worlds.base import World
from quantwm.worlds.registry import load_world

T = TypeVar("T")
Task = Callable[[World], T]
"""Something to do with the loaded world; picklable where several processes work."""


@dataclass(frozen=True)
class Failure:
    """What a task said when it failed, one line."""

    reason: str


@dataclass(frozen=True)
class WorldSource:
    """Which world to load: a name that the registry knows, or a small one with random weights."""

    name: str = "embedded"
    random_preset: str | None = None

    def load(self, device: torch.device) -> World:
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
    ) -> None:
        """devices: which the processes are spread over. world: what the source gives on the first
        of them, where it is loaded already."""
        self._source, self._devices, self._processes = source, tuple(devices), processes
        self._world = world
        self._pool: ProcessPoolExecutor | None = None
        self._starting: list[Future[None]] = []
        if processes > 1 or len(self._devices) > 1:
            context = multiprocessing.get_context("spawn")
            started, ready = context.Value("i", 0), context.Barrier(processes)
            told = (source, self._devices, started, ready)
            self._pool = ProcessPoolExecutor(processes, context, _open, told)
            self._starting = [self._pool.submit(_wait) for _ in range(processes)]

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
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def ready(self) -> None:
        """Return once every process has its world: from then on the device is quiet.

        Raises:
            UserError: one of them ended, for example because the device's memory is full.
        """
        try:
            for waiting in self._starting:
                waiting.result()
        except (BrokenProcessPool, threading.BrokenBarrierError) as error:
            raise UserError(
                f"{self._processes} processes do not all start on "
                f"{', '.join(map(str, self._devices))}; their own lines above say why, fewer "
                "(--processes) need less memory"
            ) from error

    def run(
        self, tasks: Sequence[Task[T]], deadline: float, report: Callable[[str], None]
    ) -> list[T | Failure | None]:
        """Results in the order of the tasks; None for those that had not begun by the deadline.

        A task that fails leaves a Failure in its place, so that one lane's mistake does not cost
        the others' minutes. What processes that ended left undone is done in this one.

        deadline: seconds since the epoch; infinity for none.
        """
        results: dict[int, T | Failure | None] = {}
        if self._pool is not None:
            results = self._shared_out(self._pool, tasks, deadline, report)
        for place, task in enumerate(tasks):
            if place not in results:
                results[place] = _in_time(task, self.world, deadline)
                report(f"{len(results)}/{len(tasks)}")
        return [results[place] for place in range(len(tasks))]

    def _shared_out(
        self,
        pool: ProcessPoolExecutor,
        tasks: Sequence[Task[T]],
        deadline: float,
        report: Callable[[str], None],
    ) -> dict[int, T | Failure | None]:
        """What the processes made of the tasks, by their place; all of it unless one ended."""
        results: dict[int, T | Failure | None] = {}
        try:
            waiting = {pool.submit(_run, task, deadline): i for i, task in enumerate(tasks)}
            for done in as_completed(waiting):
                results[waiting[done]] = done.result()
                report(f"{len(results)}/{len(tasks)}")
        except BrokenProcessPool:
            self._pool = None
            report("a process ended; this one does the rest")
        return results


def run_tasks(
    tasks: Sequence[Task[T]],
    world: World,
    source: WorldSource,
    processes: int,
    deadline: float,
    report: Callable[[str], None],
) -> list[T | Failure | None]:
    """`Workers.run` for tasks that come all at once."""
    with Workers(source, [world.device], processes, world) as workers:
        return workers.run(tasks, deadline, report)


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
    except (UserError, RuntimeError) as error:  # torch's own errors are RuntimeErrors
        return Failure(" ".join(str(error).split())[:300])


START_SECONDS = 300.0
"""The slowest start of a worker that is waited for: a cold machine reads PyTorch from its disk."""

_world: World | None = None
"""Of a worker process: loaded once, before its first task."""
_ready: Any = None
"""Where a worker waits for the others."""


def _open(source: WorldSource, devices: Sequence[torch.device], started: Any, ready: Any) -> None:
    global _world, _ready
    torch.set_num_threads(1)
    with started.get_lock():
        number, started.value = started.value, started.value + 1
    device = devices[number % len(devices)]
    if device.type == "cuda":
        torch.cuda.set_device(device)  # kernels and graphs are launched on the current one
    _world, _ready = source.load(device), ready


def _wait() -> None:
    _ready.wait(START_SECONDS)


def _run(task: Task[T], deadline: float) -> T | Failure | None:
    if _world is None:
        raise RuntimeError("a worker of the report has no world")
    return _in_time(task, _world, deadline)


def task_of(call: Callable[..., T], *arguments: Any) -> Task[T]:
    """call(world, *arguments) as a task."""
    return partial(_call, call, arguments)


def _call(call: Callable[..., T], arguments: tuple[Any, ...], world: World) -> T:
    return call(world, *arguments)

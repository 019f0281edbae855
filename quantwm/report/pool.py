"""The report's jobs, in this process or in several that share the device."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
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


def run_tasks(
    tasks: Sequence[Task[T]],
    world: World,
    source: WorldSource,
    processes: int,
    deadline: float,
    report: Callable[[str], None],
) -> list[T | Failure | None]:
    """Results in the order of the tasks; None for those that had not begun by the deadline.

    A task that fails leaves a Failure in its place, so that one lane's mistake does not cost the
    others' minutes.

    deadline: seconds since the epoch; infinity for none.

    On a GPU the host bounds a small world's rollouts, so several processes with a world each
    finish sooner; which one runs a task does not change its result.
    """
    if processes <= 1:
        done: list[T | Failure | None] = []
        for task in tasks:
            done.append(_in_time(task, world, deadline))
            report(f"{len(done)}/{len(tasks)}")
        return done
    context = multiprocessing.get_context("spawn")
    results: dict[int, T | Failure | None] = {}
    with ProcessPoolExecutor(
        processes, context, initializer=_open, initargs=(source, str(world.device))
    ) as pool:
        waiting = {pool.submit(_run, task, deadline): i for i, task in enumerate(tasks)}
        for done in as_completed(waiting):
            results[waiting[done]] = done.result()
            report(f"{len(results)}/{len(tasks)}")
    return [results[i] for i in range(len(tasks))]


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


_world: World | None = None
"""Of a worker process: loaded once, before its first task."""


def _open(source: WorldSource, device: str) -> None:
    global _world
    torch.set_num_threads(1)
    _world = source.load(torch.device(device))


def _run(task: Task[T], deadline: float) -> T | Failure | None:
    if _world is None:
        raise RuntimeError("a worker of the report has no world")
    return _in_time(task, _world, deadline)


def task_of(call: Callable[..., T], *arguments: Any) -> Task[T]:
    """call(world, *arguments) as a task."""
    return partial(_call, call, arguments)


def _call(call: Callable[..., T], arguments: tuple[Any, ...], world: World) -> T:
    return call(world, *arguments)

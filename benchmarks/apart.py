"""Work in processes of its own: one that the device kills, or whose context it ruins, costs itself.

After an illegal address every further call of that process fails, and some end it outright.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from types import TracebackType
from typing import Any


def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def _result(future: Future[Any]) -> Any:
    """What the work gave, or a RuntimeError in one line."""
    try:
        return future.result()
    except BrokenProcessPool:
        return RuntimeError("its process died")
    except Exception as error:  # whatever the work raised there, handed on as its result
        words = str(error).strip().splitlines()
        return RuntimeError(f"{type(error).__name__}: {words[0] if words else ''}")


def all_at_once(
    work: Callable[..., Any], names: Sequence[str], *rest: Any
) -> Iterator[tuple[str, Any]]:
    """work(name, *rest) of every name, each in a process of its own; as they end.

    Yields a RuntimeError in place of a result where there is none. work: importable by name.
    """
    with ExitStack() as processes:
        running = {
            processes.enter_context(_process()).submit(work, name, *rest): name for name in names
        }
        for finished in as_completed(running):
            yield running[finished], _result(finished)


class OneByOne:
    """Runs work in one process after another; it goes on in the same one while all goes well."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> OneByOne:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._end()

    def __call__(self, work: Callable[..., Any], *args: Any) -> Any:
        """work(*args), or a RuntimeError that says why there is no result."""
        if self._pool is None:
            self._pool = _process()
        result = _result(self._pool.submit(work, *args))
        if isinstance(result, RuntimeError):
            self._end()
        return result

    def _end(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

"""Where the time of a step goes: wraps functions for a while and adds up what they take."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

Target = tuple[Any, str, str]
"""(owner, attribute, label)."""


class Stopwatch:
    """Milliseconds by label. A wrapped call inside another counts for the outer one alone."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._inside = False
        self._spans: dict[str, list[tuple[Any, Any]]] = defaultdict(list)

    @contextmanager
    def watching(self, targets: Sequence[Target]) -> Iterator[None]:
        genuine = [(owner, name, owner.__dict__[name]) for owner, name, _ in targets]
        for owner, name, label in targets:
            setattr(owner, name, self._wrapped(owner.__dict__[name], label))
        try:
            yield
        finally:
            for owner, name, function in genuine:
                setattr(owner, name, function)

    def totals(self) -> dict[str, float]:
        """Milliseconds so far; waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
            return {
                label: sum(begin.elapsed_time(end) for begin, end in spans)
                for label, spans in self._spans.items()
            }
        return {
            label: sum(end - begin for begin, end in spans) * 1e3
            for label, spans in self._spans.items()
        }

    def _wrapped(self, function: Callable[..., Any], label: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            self._inside = True
            begin = self._now()
            try:
                return function(*args, **kwargs)
            finally:
                self._inside = False
                self._spans[label].append((begin, self._now()))

        return call

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def split_time(
    device: torch.device, targets: Sequence[Target], step: Callable[[], Any], chunks: int
) -> dict[str, float]:
    """Milliseconds per chunk by label over `chunks` steps, the rest named, largest first."""
    watch = Stopwatch(device)
    began = time.perf_counter()
    with watch.watching(targets):
        for _ in range(chunks):
            step()
    whole = (time.perf_counter() - began) * 1e3
    parts = {label: total / chunks for label, total in watch.totals().items()}
    parts["transformer and the rest"] = whole / chunks - sum(parts.values())
    return {label: round(ms, 2) for label, ms in sorted(parts.items(), key=lambda p: -p[1])}

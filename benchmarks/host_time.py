"""Host beside device: how long a chunk's launching takes, and how long the host then waits.

Where the host waits for nothing the device had nothing to do in between: the chunk is bound by
launching, and every operation more makes it longer. Where it waits, launches are free.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from quantwm.cache import commit
from quantwm.engine import Engine

PHASES = ("denoising", "clean pass")
"""Of a lane, in the order in which an engine times them."""


class HostClock:
    """Notes when the host begins to wait for the device and when it goes on."""

    def __init__(self) -> None:
        self.waits: list[tuple[str, float, float]] = []

    def waiting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def waits(*given: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*given)
            finally:
                self.waits.append((name, began, time.perf_counter()))

        return waits

    @contextmanager
    def watching(self, engine: Engine) -> Iterator[None]:
        """The ends of timed phases, and the one read of a commit."""
        with (
            patch.object(engine, "_synchronize", self.waiting("end", engine._synchronize)),
            patch.object(commit, "read", self.waiting("read", commit.read)),
        ):
            yield

    def phases(self) -> list[list[float]]:
        """Of every timed call milliseconds of launching and waiting in turn, the last its end's."""
        found: list[list[float]] = []
        last, opened = 0.0, False
        for name, began, ended in self.waits:
            if opened:
                found[-1] += [(began - last) * 1e3, (ended - began) * 1e3]
                opened = name == "read"
            else:
                found.append([])
                opened = True
            last = ended
        return found


def host_time(engine: Engine, step: Callable[[], Any], lanes: Sequence[str]) -> dict[str, Any]:
    """Of one chunk, by lane and phase, ms: "launching" and "waiting" until a commit's read or the
    end; "after the read" and "at the end" of what a clean pass commits then."""
    clock = HostClock()
    with clock.watching(engine):
        step()
    turns = [(lane, phase) for phase in PHASES for lane in lanes]
    found: dict[str, Any] = {lane: {} for lane in lanes}
    for (lane, phase), spans in zip(turns, clock.phases(), strict=True):
        names = ("launching", "waiting", "after the read", "at the end")
        found[lane][phase] = {n: round(ms, 2) for n, ms in zip(names, spans, strict=False)}
    return found


def host_lines(found: dict[str, Any]) -> list[str]:
    return [
        f"    host, {lane}, {phase}: " + ", ".join(f"{name} {ms} ms" for name, ms in spans.items())
        for lane, phases in found.items()
        for phase, spans in phases.items()
    ]


def by_stream(events: Sequence[Any]) -> dict[str, tuple[int, float]]:
    """Of device events of a profile: launches and ms by stream, and the ms in which any ran."""
    found: dict[str, tuple[int, float]] = {}
    for event in events:
        name = f"stream {getattr(event, 'device_resource_id', '?')}"
        launches, ms = found.get(name, (0, 0.0))
        found[name] = launches + 1, ms + event.time_range.elapsed_us() / 1e3
    busy, reached = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.time_range.start):
        start, end = event.time_range.start, event.time_range.end
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    rounded = {name: (launches, round(ms, 2)) for name, (launches, ms) in found.items()}
    return {**rounded, "any stream": (len(events), round(busy / 1e3, 2))}


def device_events(profile: Any) -> list[Any]:
    """What ran on the device, of a `torch.profiler.profile`."""
    on_device = torch.autograd.DeviceType.CUDA
    return [event for event in profile.events() if event.device_type == on_device]

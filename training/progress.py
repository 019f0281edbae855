"""What a run says while it runs: a line on the terminal, the same as JSON in a small log."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


class Log:
    """Appends one JSON line per event and prints it; `minutes` counts from the start of the run."""

    def __init__(self, path: Path | None = None) -> None:
        self._path, self._start = path, time.monotonic()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)

    @property
    def minutes(self) -> float:
        return (time.monotonic() - self._start) / 60

    def event(self, stage: str, **values: Any) -> None:
        row = {"minutes": round(self.minutes, 2), "stage": stage, **values}
        text = " ".join(f"{k} {_short(v)}" for k, v in values.items())
        print(f"[{row['minutes']:7.2f} min] {stage}: {text}", file=sys.stderr, flush=True)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class Tally:
    """Says on the terminal, every few seconds, how many of something are there and what is left."""

    def __init__(self, what: str, total: int, there: int = 0, every: float = 5.0) -> None:
        """there: how many were there before; they cost no time."""
        self._what, self._total, self._there, self._every = what, total, there, every
        self._start = self._last = time.monotonic()

    def is_due(self) -> bool:
        return time.monotonic() - self._last >= self._every

    def say(self, done: int) -> None:
        self._last = time.monotonic()
        seconds, made = self._last - self._start, done - self._there
        eta = round(seconds / made * (self._total - done)) if made > 0 else "unknown"
        print(
            f"{self._what} {done}/{self._total}, {seconds:.0f} s, eta_s {eta}",
            file=sys.stderr, flush=True,
        )  # fmt: skip


class Budget:
    """A stage's time: how much of it is gone, and what is left."""

    def __init__(self, minutes: float, done: float = 0.0) -> None:
        """minutes: from now on; done: share of the whole that an earlier run has behind it."""
        self._start, self._done = time.monotonic(), done
        self.seconds = max(minutes, 0.0) * 60

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._start

    @property
    def fraction(self) -> float:
        """0 at the start of the whole, 1 when the time is over."""
        passed = min(self.elapsed / self.seconds, 1.0) if self.seconds > 0 else 1.0
        return self._done + (1.0 - self._done) * passed

    def seconds_to(self, fraction: float) -> float:
        """From now until so much of the whole is done; negative when it is behind."""
        return self.seconds * (fraction - self._done) / (1.0 - self._done) - self.elapsed

    @property
    def left(self) -> float:
        """Seconds."""
        return max(self.seconds - self.elapsed, 0.0)


class Pace:
    """Steps and tokens a second since the last time that was asked."""

    def __init__(self, tokens: int, step: int) -> None:
        """tokens: of a step."""
        self._tokens, self._time, self._step = tokens, time.monotonic(), step

    def so_far(self, step: int) -> dict[str, float]:
        now = time.monotonic()
        rate = (step - self._step) / max(now - self._time, 1e-6)
        self._time, self._step = now, step
        return {"steps_per_s": round(rate, 2), "tokens_per_s": round(rate * self._tokens)}

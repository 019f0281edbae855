"""Which task of the report begins next: the first that ends before the time is up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

MARGIN = 1.2
"""Over the seconds that a task is reckoned to take: batches of one kind differed by 15%."""
HOPE = 0.5
"""Of these seconds, what must be left for the smallest task to be tried where none is sure to end:
the first tasks of a process also load kernels, so that measured paces are high rather than low."""


class OutOfTime(Exception):
    """A task was stopped at the deadline; what it had is left out."""


@dataclass(frozen=True)
class Size:
    """Of a task. kind: tasks of one kind take alike seconds for as much work. work: chunks of
    lanes, one behind the other."""

    kind: str
    work: float


class Schedule:
    """Places of tasks in their order, but those that would not end in time are passed over.

    Seconds for a piece of work are the latest measured of the same kind; of a kind that none was
    measured of, the median of the others'; before any, `pace`.
    """

    def __init__(self, sizes: Sequence[Size], deadline: float, pace: float = 0.0) -> None:
        """deadline: seconds since the epoch. pace: seconds for a piece of work, 0 if unknown."""
        self.deadline = deadline
        self._sizes, self._pace = tuple(sizes), pace
        self._waiting = list(range(len(self._sizes)))
        self._measured: dict[str, float] = {}

    def next(self, now: float) -> int | None:
        """The place of the task to begin now; None when there is none, or none that would end."""
        if now >= self.deadline or not self._waiting:
            return None
        left = self.deadline - now
        fits = [place for place in self._waiting if self._seconds(place) * MARGIN <= left]
        place = fits[0] if fits else min(self._waiting, key=self._seconds)
        # a pace that nothing has confirmed must not keep everything from beginning
        if not fits and self._measured and self._seconds(place) * HOPE > left:
            return None
        self._waiting.remove(place)
        return place

    def ended(self, place: int, seconds: float) -> None:
        """A task has ended, after so many seconds."""
        size = self._sizes[place]
        self._measured[size.kind] = seconds / max(size.work, 1.0)

    def again(self, place: int) -> None:
        """A task that had begun has to begin once more."""
        self._waiting = sorted({*self._waiting, place})

    def _seconds(self, place: int) -> float:
        size = self._sizes[place]
        others = median(self._measured.values()) if self._measured else self._pace
        return size.work * self._measured.get(size.kind, others)


def check_time(deadline: float, now: float) -> None:
    """Raise OutOfTime at the deadline; both in seconds since the epoch."""
    if now >= deadline:
        raise OutOfTime("the time is up")


def unknown(count: int) -> list[Size]:
    """Sizes of tasks of which nothing is known: none is passed over."""
    return [Size("any", 0.0)] * count

"""Windows of a run, bootstrap intervals over scenes, and where free-running lanes have parted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from quantwm.errors import UserError


@dataclass(frozen=True)
class Window:
    """A stretch of a run, [start, stop) in seconds."""

    name: str
    start: float
    stop: float

    @property
    def label(self) -> str:
        return f"{self.start:g}-{self.stop:g} s"


WINDOWS = (Window("early", 0, 2), Window("middle", 2, 5), Window("late", 5, 10))
"""The windows of QVG's own sweep: a full-clip PSNR of minutes measures divergence alone."""

DIVERGED_DB = 20.0
DIVERGED_RUN = 4
"""Lanes have parted when this many frames in a row lie below this PSNR: the paper's full clips,
whose late frames show other things than BF16's, have 14 to 20 dB on four of its five models."""


def frames_of(window: Window, fps: float, total: int) -> slice:
    """The frames of a window, cut at the end of the video; maybe none."""
    return slice(min(round(window.start * fps), total), min(round(window.stop * fps), total))


def divergence_frame(
    psnr: Sequence[float] | np.ndarray, level: float = DIVERGED_DB, run: int = DIVERGED_RUN
) -> int | None:
    """First frame of the first `run` frames in a row whose PSNR is below `level`; None without.

    After it, PSNR of a free-running lane says that the content differs, not how good it is.
    """
    below = 0
    for index, value in enumerate(psnr):
        below = below + 1 if value < level else 0
        if below == run:
            return index - run + 1
    return None


@dataclass(frozen=True)
class Interval:
    """A figure over scenes: its mean and a bootstrap interval of it."""

    mean: float
    low: float
    high: float
    count: int

    def to_json(self) -> dict[str, float | int | None]:
        """Infinite or undefined figures are null in JSON."""
        values = {"mean": self.mean, "low": self.low, "high": self.high}
        return {k: v if math.isfinite(v) else None for k, v in values.items()} | {
            "count": self.count
        }


def bootstrap(
    values: Sequence[float] | np.ndarray,
    *,
    samples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
    statistic: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Interval:
    """Percentile bootstrap over scenes (rows): scenes are drawn with replacement.

    Args:
        values: one figure a scene; with `statistic` also a row of figures a scene.
        statistic: [samples, scenes, ...] -> [samples]; the mean over scenes when None. PSNR of the
            mean squared error over scenes is `lambda mse: 10 * np.log10(255**2 / mse.mean(1))`.
        seed: fixed, so that a report repeats itself.

    Raises:
        UserError: no scene.
    """
    rows = np.asarray(values, dtype=np.float64)
    if rows.shape[0] == 0:
        raise UserError("an interval over scenes needs at least one scene")
    reduce = statistic or (lambda drawn: drawn.mean(axis=1))
    picks = np.random.default_rng(seed).integers(0, len(rows), (samples, len(rows)))
    found = reduce(rows[picks])
    tail = (1 - level) / 2
    low, high = np.quantile(found, (tail, 1 - tail)) if np.isfinite(found).all() else _ends(found)
    return Interval(float(reduce(rows[None])[0]), float(low), float(high), len(rows))


def _ends(found: np.ndarray) -> tuple[float, float]:
    """Of figures that are partly infinite: identical pictures have an infinite PSNR."""
    return float(np.min(found)), float(np.max(found))

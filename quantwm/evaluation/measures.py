"""The measures of the acceptance table on frames, and the bootstrap over maps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quantwm.evaluation.episodes import Episode
from quantwm.evaluation.motion import motion_costs, step_evidence, turn_of
from quantwm.metrics import psnr_per_frame, sharpness

RESAMPLES = 2000
SEEN_STEP = 8.0  # map units a frame; a key walks up to 33, a quarter of that is seen for certain
EVIDENCE = 0.01
"""Share of the static cost by which a step must beat its opposite: stillness gives 0, the least
true step 0.016."""


def mean_psnr(frames: np.ndarray, truth: np.ndarray) -> float:
    """Mean over frames of the PSNR in dB, at most 60 a frame: identical frames have no number."""
    return float(np.minimum(psnr_per_frame(frames, truth), 60.0).mean())


def gradient_energy(frames: np.ndarray) -> float:
    """Mean over frames of `metrics.sharpness`, in squared grey levels."""
    return float(sharpness(frames).mean())


def brightness(frames: np.ndarray) -> float:
    """Mean of all values."""
    return float(frames.mean(dtype=np.float64))


def colourfulness(frames: np.ndarray) -> float:
    """Mean distance of a pixel's channels from its grey; 0 for grey pictures."""
    values = frames.astype(np.float32)
    return float(np.abs(values - values.mean(axis=-1, keepdims=True)).mean())


def contrast(frames: np.ndarray) -> float:
    """Mean over frames of the deviation of values over a frame's pixels, per channel; 0 for
    pictures of one colour."""
    return float(frames.astype(np.float32).std(axis=(1, 2)).mean())


@dataclass(frozen=True)
class Estimate:
    """A mean over maps with its 95 % bootstrap interval (None for a single map); maps: how many."""

    value: float
    low: float | None
    high: float | None
    maps: int


def bootstrap(
    values: Sequence[Sequence[float]],
    combine: Callable[[np.ndarray], np.ndarray] | None = None,
    seed: int = 0,
) -> Estimate:
    """Resamples maps with replacement.

    values: per map, numbers that are averaged over maps and then combined: [maps, k] means
    [..., k] -> [...]; the first of them by default. A map without numbers does not belong here.
    """
    table = np.asarray([np.atleast_1d(row) for row in values], np.float64)
    combine = combine or (lambda means: means[..., 0])
    value = float(combine(table.mean(axis=0)))
    if len(table) == 1:
        return Estimate(value, None, None, 1)
    rng = np.random.default_rng(seed)
    drawn = rng.integers(len(table), size=(RESAMPLES, len(table)))
    spread = combine(table[drawn].mean(axis=1))
    low, high = np.percentile(spread, (2.5, 97.5))
    return Estimate(value, float(low), float(high), len(table))


def ratio(means: np.ndarray) -> np.ndarray:
    """First over second, for `bootstrap`: a ratio of means, not a mean of ratios."""
    return means[..., 0] / means[..., 1]


@dataclass(frozen=True)
class Direction:
    """What the keys and the engine's truth say about a chunk's motion.

    turn: degrees a frame, positive to the left, or None where it changes within the chunk.
    step: forward, back, left or right where it moves that way in every frame, or None.
    """

    turn: float | None
    step: str | None

    @property
    def judged(self) -> bool:
        """Whether there is a turn or a step to get right."""
        return bool(self.turn) or (self.turn is not None and self.step is not None)


def true_direction(episode: Episode, first: int, frames: int) -> Direction:
    """Of frames first ... first + frames - 1; the step is what the engine did, walls included."""
    span = slice(first, first + frames)
    poses = episode.poses[first - 1 : first + frames].astype(np.float64)
    turns = (np.diff(poses[:, 2]) + 180) % 360 - 180
    angle = np.radians(poses[:-1, 2])
    dx, dy = np.diff(poses[:, 0]), np.diff(poses[:, 1])
    forward = dx * np.cos(angle) + dy * np.sin(angle)
    left = dy * np.cos(angle) - dx * np.sin(angle)
    steady = np.ptp(episode.keys[span, 4:6], axis=0).max() == 0
    turn = float(np.round(turns.mean() / 7.5) * 7.5) if steady else None
    moves = {"forward": forward, "back": -forward, "left": left, "right": -left}
    across = {"forward": left, "back": left, "left": forward, "right": forward}
    step = next(
        (
            way
            for way, size in moves.items()
            if bool((size > SEEN_STEP).all()) and bool((size > 2 * np.abs(across[way])).all())
        ),
        None,
    )
    return Direction(turn, step)


def directions_right(costs: torch.Tensor, wanted: Direction) -> bool:
    """Whether a chunk's pictures turned and stepped as wanted. costs: of its transitions."""
    right = True
    if wanted.turn:
        right = np.sign(turn_of(costs)) == np.sign(wanted.turn)
    if wanted.step is not None and wanted.turn is not None:
        right = right and step_evidence(costs, wanted.turn, wanted.step) > EVIDENCE
    return bool(right)


def judge_motion(
    frames: np.ndarray,
    episode: Episode,
    first: int,
    per_chunk: int,
    device: torch.device | str = "cpu",
) -> list[bool]:
    """Per judged chunk, whether it went where truth went.

    frames: uint8 [1 + n * per_chunk, H, W, 3]: the frame before episode frame `first`, then the
    chunks from there.
    """
    costs = motion_costs(frames, device)
    found = []
    for start in range(0, len(frames) - 1, per_chunk):
        wanted = true_direction(episode, first + start, per_chunk)
        if wanted.judged:
            found.append(directions_right(costs[start : start + per_chunk], wanted))
    return found

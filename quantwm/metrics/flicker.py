"""Flicker: change from frame to frame, its excess over a reference, VBench's score of it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from quantwm.errors import UserError
from quantwm.metrics.fidelity import PEAK, check_pair

STILL_LEVELS = 2.0
"""Mean grey levels of change a frame below which a reference counts as standing still. The
embedded world's BF16 lane changes by 1.0 without keys and by 14.6 on a turn of 7.5 degrees a frame
(weights ed4f7efde4b3, docs/evidence.md)."""


def change(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """|after - before| in grey levels, float32, of two uint8 frames."""
    return np.abs(np.subtract(after, before, dtype=np.float32))


def temporal_difference(frames: np.ndarray) -> np.ndarray:
    """Mean absolute change from each frame to the next, in grey levels.

    frames: uint8 [T, H, W, 3]. Returns float64 [T - 1]. On a still scene this is flicker; on a
    moving one it holds the motion too, so compare it with a reference.
    """
    return np.asarray([change(a, b).mean(dtype=np.float64) for a, b in pairwise(frames)])


def temporal_excess(frames: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Excess flicker: mean over pixels of | D_t(frames) - D_t(reference) |, D_t = |x_t - x_(t-1)|.

    In grey levels, float64 [T - 1]; 0 where both change alike.
    """
    check_pair(frames, reference)
    pairs = zip(pairwise(frames), pairwise(reference), strict=True)
    return np.asarray(
        [np.abs(change(*own) - change(*other)).mean(dtype=np.float64) for own, other in pairs]
    )


def vbench_temporal_flickering(frames: np.ndarray) -> float:
    """VBench's temporal flickering: (255 - mean |x_t - x_(t-1)|) / 255, 1 for no change at all.

    VBench asks for static videos: on a moving one it measures the motion. Check with
    `is_standing_still` first. frames: uint8 [T, H, W, 3], T >= 2.
    """
    if len(frames) < 2:
        raise UserError(f"flicker needs at least 2 frames, got {len(frames)}")
    return float((PEAK - temporal_difference(frames).mean()) / PEAK)


def is_standing_still(reference: np.ndarray, levels: float = STILL_LEVELS) -> bool:
    """Whether the reference hardly changes, so that change in the other video is flicker."""
    return len(reference) > 1 and float(temporal_difference(reference).mean()) < levels

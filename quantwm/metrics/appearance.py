"""Sharpness and colour of frames: what a cache may lose without any flicker."""

from __future__ import annotations

import numpy as np

from quantwm.metrics.fidelity import check_pair


def sharpness(frames: np.ndarray) -> np.ndarray:
    """Gradient energy of each frame: mean squared step to the right and down neighbour together.

    frames: uint8 [T, H, W, 3]. In squared grey levels, float64 [T]; falls as a picture blurs.
    """
    return np.asarray([_gradient_energy(frame) for frame in frames], dtype=np.float64)


def colour_drift(frames: np.ndarray) -> np.ndarray:
    """How far the mean colour of each frame is from the first frame's, in grey levels.

    Euclidean over R, G, B. frames: uint8 [T, H, W, 3]. Returns float64 [T]. A walk changes the mean
    colour too: set it beside the same figure of a reference, or use `colour_difference`.
    """
    means = mean_colour(frames)
    return np.linalg.norm(means - means[0], axis=1)


def colour_difference(frames: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """How far the mean colour of each frame is from that of the reference's frame, grey levels."""
    check_pair(frames, reference)
    return np.linalg.norm(mean_colour(frames) - mean_colour(reference), axis=1)


def mean_colour(frames: np.ndarray) -> np.ndarray:
    """Mean R, G, B of each frame, float64 [T, 3]."""
    return np.asarray([frame.mean(axis=(0, 1), dtype=np.float64) for frame in frames])


def _gradient_energy(frame: np.ndarray) -> float:
    values = frame.astype(np.float32)
    right, down = np.diff(values, axis=1), np.diff(values, axis=0)
    # A picture one pixel wide has no neighbour to the right.
    return sum(float(np.square(step).mean(dtype=np.float64)) for step in (right, down) if step.size)

"""PSNR of frames to a reference: per frame, and pooled over the error of all frames."""

from __future__ import annotations

import math

import numpy as np

from quantwm.errors import UserError

PEAK = 255.0


def psnr_of_mse(mse: float) -> float:
    """10 log10(255^2 / MSE) in dB; infinite for identical pictures."""
    return math.inf if mse == 0 else 10.0 * math.log10(PEAK**2 / mse)


def frame_mse(frames: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Mean squared error of each frame over pixels and channels, in squared grey levels.

    frames, reference: uint8 [T, H, W, 3]. Returns float64 [T].
    """
    check_pair(frames, reference)
    # Frame by frame: a float copy of a whole recording would be 4 times its size.
    errors = [
        np.square(np.subtract(a, b, dtype=np.float32), dtype=np.float32).mean(dtype=np.float64)
        for a, b in zip(frames, reference, strict=True)
    ]
    return np.asarray(errors, dtype=np.float64)


def psnr_per_frame(frames: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """PSNR of each frame, float64 [T]; infinite where identical."""
    return np.asarray([psnr_of_mse(float(mse)) for mse in frame_mse(frames, reference)])


def psnr_pooled(frames: np.ndarray, reference: np.ndarray) -> float:
    """PSNR of the mean squared error over all frames (not the mean of per-frame PSNRs)."""
    return psnr_of_mse(float(frame_mse(frames, reference).mean()))


def check_pair(frames: np.ndarray, reference: np.ndarray) -> None:
    """UserError unless both are uint8 frames of one shape, at least one of them."""
    if frames.shape != reference.shape:
        raise UserError(
            f"two videos are compared frame by frame and must have one shape, "
            f"got {frames.shape} and {reference.shape}"
        )
    if frames.dtype != np.uint8 or reference.dtype != np.uint8:
        raise UserError(f"frames are uint8, got {frames.dtype} and {reference.dtype}")
    if frames.size == 0:
        raise UserError("nothing to compare: the videos hold no frame")

"""Fidelity and flicker of frames: PSNR per frame and pooled, temporal difference and its excess."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

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
    _check_pair(frames, reference)
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


def temporal_difference(frames: np.ndarray) -> np.ndarray:
    """Mean absolute change from each frame to the next, in grey levels.

    frames: uint8 [T, H, W, 3]. Returns float64 [T - 1]. On a still scene this is flicker; on a
    moving one it holds the motion too, so compare it with a reference.
    """
    return np.asarray([_change(a, b).mean(dtype=np.float64) for a, b in pairwise(frames)])


def temporal_excess(frames: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Excess flicker: mean over pixels of | D_t(frames) - D_t(reference) |, D_t = |x_t - x_(t-1)|.

    In grey levels, float64 [T - 1]; 0 where both change alike.
    """
    _check_pair(frames, reference)
    pairs = zip(pairwise(frames), pairwise(reference), strict=True)
    return np.asarray(
        [np.abs(_change(*own) - _change(*other)).mean(dtype=np.float64) for own, other in pairs]
    )


@dataclass
class FidelityMeter:
    """Compares two videos frame by frame without holding them.

    psnr: of each frame; temporal, temporal_reference, excess: of each step between two frames.
    """

    psnr: list[float] = field(default_factory=list)
    temporal: list[float] = field(default_factory=list)
    temporal_reference: list[float] = field(default_factory=list)
    excess: list[float] = field(default_factory=list)
    _squared: float = 0.0
    _last: tuple[np.ndarray, np.ndarray] | None = None

    def update(self, frame: np.ndarray, reference: np.ndarray) -> None:
        """Add one frame of each video, uint8 [H, W, 3]."""
        _check_pair(frame[None], reference[None])
        mse = float(frame_mse(frame[None], reference[None])[0])
        self._squared += mse
        self.psnr.append(psnr_of_mse(mse))
        if self._last is not None:
            change = _change(self._last[0], frame)
            change_reference = _change(self._last[1], reference)
            self.temporal.append(float(change.mean(dtype=np.float64)))
            self.temporal_reference.append(float(change_reference.mean(dtype=np.float64)))
            self.excess.append(float(np.abs(change - change_reference).mean(dtype=np.float64)))
        self._last = (frame.copy(), reference.copy())

    @property
    def psnr_pooled(self) -> float:
        """PSNR of the mean squared error over all frames seen so far."""
        return psnr_of_mse(self._squared / len(self.psnr)) if self.psnr else math.inf


def _change(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    return np.abs(np.subtract(after, before, dtype=np.float32))


def _check_pair(frames: np.ndarray, reference: np.ndarray) -> None:
    if frames.shape != reference.shape:
        raise UserError(
            f"two videos are compared frame by frame and must have one shape, "
            f"got {frames.shape} and {reference.shape}"
        )
    if frames.dtype != np.uint8 or reference.dtype != np.uint8:
        raise UserError(f"frames are uint8, got {frames.dtype} and {reference.dtype}")
    if frames.size == 0:
        raise UserError("nothing to compare: the videos hold no frame")

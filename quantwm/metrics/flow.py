"""Flow-warping error: how badly each frame agrees with its past moved along the optical flow.

The flow is OpenCV's DIS (no weights), found on the reference where there is one, so that a
flickering video cannot explain its flicker as motion. Pixels whose forward and backward flow do
not cancel (occlusions, and what enters the picture) are left out.
"""

from __future__ import annotations

import importlib.util
import math
from itertools import pairwise
from typing import Any

import numpy as np

from quantwm.errors import UserError
from quantwm.metrics.fidelity import check_pair

NO_OPENCV = "flow-warping error needs OpenCV; install it with: pip install opencv-python-headless"

RELATIVE, ABSOLUTE = 0.01, 0.5
"""A pixel counts where |f + b|^2 < 0.01 (|f|^2 + |b|^2) + 0.5, f and b the flow there and back
(Sundaram, Brox, Keutzer 2010)."""

SMALLEST = 16
"""Shortest side, in pixels, on which DIS finds flow."""


def has_flow() -> bool:
    """Whether OpenCV is installed."""
    return importlib.util.find_spec("cv2") is not None


def require_flow() -> None:
    """UserError that names the package when OpenCV is missing."""
    if not has_flow():
        raise UserError(NO_OPENCV)


def warping_error(frames: np.ndarray, reference: np.ndarray | None = None) -> np.ndarray:
    """Per step, mean |x_t - x_(t-1) moved along the flow| over pixels with a reliable flow.

    In grey levels, float64 [T - 1]; NaN for a step without any reliable pixel.

    Args:
        frames, reference: uint8 [T, H, W, 3]; the flow is the reference's, or frames' own.

    Raises:
        UserError: OpenCV is missing, or the frames are too small.
    """
    reference = frames if reference is None else reference
    check_pair(frames, reference)
    meter = FlowMeter()
    steps = zip(pairwise(frames), pairwise(reference), strict=True)
    return np.asarray([meter.step(*own, *other)[0] for own, other in steps])


class FlowMeter:
    """Warping error of one step after another; holds the flow estimator, no frame."""

    def __init__(self) -> None:
        require_flow()
        import cv2

        self._flow: Any = cv2.DISOpticalFlow.create(cv2.DISOPTICAL_FLOW_PRESET_MEDIUM)

    def step(
        self,
        before: np.ndarray,
        after: np.ndarray,
        reference_before: np.ndarray,
        reference_after: np.ndarray,
    ) -> tuple[float, float]:
        """(error of the video, error of the reference) from one frame to the next, grey levels.

        All uint8 [H, W, 3].
        """
        if min(before.shape[:2]) < SMALLEST:
            raise UserError(
                f"optical flow needs frames of at least {SMALLEST} pixels a side, "
                f"got {before.shape[1]} x {before.shape[0]}"
            )
        grid, reliable = self._backward(reference_before, reference_after)
        if not reliable.any():
            return math.nan, math.nan
        pair = (before, after), (reference_before, reference_after)
        errors = [
            float(np.abs(_warp(old, grid) - new)[reliable].mean(dtype=np.float64))
            for old, new in ((o.astype(np.float32), n.astype(np.float32)) for o, n in pair)
        ]
        return errors[0], errors[1]

    def _backward(self, before: np.ndarray, after: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where each pixel of `after` was in `before` [H, W, 2], and where that is reliable."""
        import cv2

        old, new = (cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY) for frame in (before, after))
        backward = self._flow.calc(new, old, None)
        forward = self._flow.calc(old, new, None)
        height, width = new.shape
        rows, columns = np.mgrid[:height, :width].astype(np.float32)
        grid = np.stack((columns + backward[..., 0], rows + backward[..., 1]), axis=-1)
        there = _warp(forward, grid)
        cancels = np.square(there + backward).sum(-1) < ABSOLUTE + RELATIVE * (
            np.square(there).sum(-1) + np.square(backward).sum(-1)
        )
        inside = (grid >= 0).all(-1) & (grid[..., 0] <= width - 1) & (grid[..., 1] <= height - 1)
        return grid, cancels & inside


def _warp(picture: np.ndarray, grid: np.ndarray) -> np.ndarray:
    import cv2

    return cv2.remap(
        picture, grid[..., 0], grid[..., 1], cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE
    )

"""x-t and y-t slices: the history of one line of pixels, a picture per lane.

Flicker shows as a hash across time in them, motion as slanted edges, a frozen lane as stripes.
"""

from __future__ import annotations

import numpy as np

from app.inspector.clips import Clip
from quantwm.errors import UserError

READ_BYTES = 64 * 2**20
"""Frames are read in pieces of this many bytes, so that a long clip costs no more memory."""

Point = tuple[float, float]


def line_points(start: Point, stop: Point, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Pixels along a line, one per step of the longer side: columns x and rows y, int64.

    Raises:
        UserError: an end lies outside the picture.
    """
    width, height = size
    for x, y in (start, stop):
        if not (0 <= x <= width - 1 and 0 <= y <= height - 1):
            raise UserError(
                f"a line lies between (0, 0) and ({width - 1}, {height - 1}), got ({x:g}, {y:g})"
            )
    count = int(max(abs(stop[0] - start[0]), abs(stop[1] - start[1]))) + 1
    x = np.rint(np.linspace(start[0], stop[0], count)).astype(np.int64)
    y = np.rint(np.linspace(start[1], stop[1], count)).astype(np.int64)
    return x, y


def slices(clip: Clip, start: Point, stop: Point) -> np.ndarray:
    """The line's pixels in every frame: uint8 [lanes, frames, points, 3]."""
    x, y = line_points(start, stop, clip.info.size)
    step = max(1, READ_BYTES // clip.info.frame_bytes)
    parts = [clip.read(at, at + step)[:, :, y, x] for at in range(0, clip.info.frames, step)]
    return np.ascontiguousarray(np.concatenate(parts).transpose(1, 0, 2, 3))


def slice_sheet(clip: Clip, start: Point, stop: Point) -> np.ndarray:
    """All lanes' slices side by side, time downwards: uint8 [frames, lanes * points, 3]."""
    lanes = slices(clip, start, stop)
    return np.ascontiguousarray(np.concatenate(list(lanes), axis=1))

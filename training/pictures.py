"""Picture grids: truth above rollout, so that a person can look at what a run learned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

GAP = 4


def save_grid(path: Path, groups: Sequence[Sequence[np.ndarray]], every: int) -> None:
    """One row per clip of a group: every n-th frame of the truth, below it the rollout's.

    groups: (truth, rollout, perhaps more of them), each uint8 [T, H, W, 3]. Written as a PNG.
    """
    import imageio.v3 as imageio

    rows = []
    for clips in groups:
        for clip in clips:
            rows.append(np.concatenate(list(clip[::every]), axis=1))
        rows.append(np.full((GAP, rows[-1].shape[1], 3), 255, np.uint8))
    imageio.imwrite(path, np.concatenate(rows[:-1]))

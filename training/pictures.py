"""Picture grids: truth above rollout, so that a person can look at what a run learned."""

from __future__ import annotations

from pathlib import Path

import numpy as np

GAP = 4


def save_grid(path: Path, pairs: list[tuple[np.ndarray, np.ndarray]], every: int) -> None:
    """One pair of rows per clip: every n-th frame of the truth, below it the rollout's.

    pairs: (truth, rollout), each uint8 [T, H, W, 3]. Written as a PNG.
    """
    import imageio.v3 as imageio

    rows = []
    for truth, rollout in pairs:
        for clip in (truth, rollout):
            rows.append(np.concatenate(list(clip[::every]), axis=1))
        rows.append(np.full((GAP, rows[-1].shape[1], 3), 255, np.uint8))
    imageio.imwrite(path, np.concatenate(rows[:-1]))

"""Whether a check's free frames turn and step as the keys say, by the acceptance table's judge."""

from __future__ import annotations

import numpy as np
import torch

from quantwm.evaluation.episodes import Episode
from quantwm.evaluation.measures import judge_motion


def keys_followed(
    free: list[np.ndarray],
    truth: list[np.ndarray],
    keys: torch.Tensor,
    poses: torch.Tensor,
    start: int,
    per_chunk: int,
    device: torch.device | str,
) -> dict[str, float]:
    """free, truth: clips uint8 [T, H, W, 3], free-running from frame `start` on; keys [E, T, 6]
    and poses [E, T, 3] of `reckoned_poses`.

    -> follows_keys: share of all judged chunks that went the right way, from 0 to 1;
    follows_keys_late: the same in the second half of the free frames; judged: how many in all.
    Nothing where no chunk has a direction. Walks into walls are not known to the reckoned pose,
    so some chunks are asked for a step that the truth did not take.
    """
    right: list[bool] = []
    late: list[bool] = []
    middle = start + (len(free[0]) - start) // (2 * per_chunk) * per_chunk
    for shown, true, held, pose in zip(free, truth, keys, poses, strict=True):
        episode = _episode(true, held, pose, start)
        for first, end, found in ((start, middle, right), (middle, len(shown), late)):
            if end > first:
                before = shown[first - 1 : end]
                found += judge_motion(before, episode, first, per_chunk, device)
    both = right + late
    if not both:
        return {}
    metrics = {"follows_keys": round(float(np.mean(both)), 3), "judged": len(both)}
    if late:
        metrics["follows_keys_late"] = round(float(np.mean(late)), 3)
    return metrics


def _episode(frames: np.ndarray, keys: torch.Tensor, poses: torch.Tensor, context: int) -> Episode:
    """What the judge reads of an episode: keys, and poses as x, y and degrees."""
    turned = poses.cpu().numpy()[:, [1, 2, 0]]
    turned[:, 2] = np.degrees(turned[:, 2])
    held = keys.cpu().numpy().astype(np.uint8)
    return Episode("walk", context, frames, np.arange(len(frames)), held, turned, {})

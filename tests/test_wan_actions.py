"""Live controls against the published helpers that make whole trajectories."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantwm.worlds.wan import lingbot_actions
from quantwm.worlds.wan.lingbot_actions import FRAME_MOVE, PITCH_LIMIT, VIDEO_FRAMES, Gaze

LETTERS = {"up": "i", "down": "k", "left": "j", "right": "l"}


def live(script: list[tuple[str, int]], chunk: int) -> tuple[torch.Tensor, Gaze]:
    """Poses of a script driven chunk by chunk; latent frame 0 does not move."""
    frames = [frozenset(), *(frozenset(keys.split("+")) for keys, count in script
                             for _ in range(count))]  # fmt: skip
    out, gaze = [], Gaze()
    for first in range(0, len(frames), chunk):
        poses, gaze = lingbot_actions.live_poses(frames[first : first + chunk], first, gaze)
        out.append(poses)
    return torch.cat(out), gaze


def published(script: list[tuple[str, int]]) -> torch.Tensor:
    """The same keys as the published helper reads them, one pose a latent frame."""
    text = ",".join(
        "".join(LETTERS.get(key, key) for key in keys.split("+")) + f"-{VIDEO_FRAMES * count}"
        for keys, count in script
    )
    c2w = lingbot_actions.key_trajectory(*lingbot_actions.parse_keys(text))
    sampled = torch.from_numpy(c2w[::VIDEO_FRAMES])
    return lingbot_actions.relative_poses(sampled, scale=FRAME_MOVE * VIDEO_FRAMES)


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize(
    "script",
    [
        [("w", 3), ("d", 2), ("s", 2)],
        [("right", 9), ("w", 3), ("left", 4), ("a", 2)],
        [("up", 5), ("w", 3), ("right", 6), ("w", 2), ("down", 9), ("left", 3), ("s", 2)],
        [("up", 14), ("w", 2), ("right", 4), ("w", 2)],
    ],
    ids=str,
)
def test_a_live_camera_goes_where_the_key_helper_goes(script, chunk: int) -> None:
    """Level walks, turns about the vertical, and a pitch that ends at 85 degrees."""
    torch.testing.assert_close(live(script, chunk)[0], published(script), atol=2e-6, rtol=0)


def test_turning_while_walking_stays_near_the_helper_s_arc() -> None:
    """A live step is straight, the helper's four small ones bend."""
    script = [("w+right", 10), ("s+left+up", 5)]
    mine, theirs = live(script, 4)[0], published(script)
    torch.testing.assert_close(mine[:, :3, :3], theirs[:, :3, :3], atol=2e-6, rtol=0)
    assert float((mine[:, :3, 3] - theirs[:, :3, 3]).norm(dim=-1).max()) < 0.07


def test_steps_are_of_length_one_and_opposite_keys_cancel() -> None:
    poses, gaze = live([("w+d", 3), ("w+s", 2), ("up", 40)], 4)
    lengths = poses[:, :3, 3].norm(dim=-1)
    np.testing.assert_allclose(lengths[1:4], 1.0, atol=1e-6)
    assert float(lengths[4:].max()) == 0.0 and gaze.pitch == pytest.approx(PITCH_LIMIT)

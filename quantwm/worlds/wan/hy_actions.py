"""HY-WorldPlay's conditioning: held keys to camera poses, intrinsics and action labels."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
import torch

from quantwm.errors import UserError
from quantwm.worlds.base import KeySet
from quantwm.worlds.wan.steering import KEYS, Axes, axes

MOVE = 0.08  # camera units per latent frame
TURN = math.radians(3.0)  # per latent frame
# Focal lengths over width and height, principal point in the middle.
FOCAL = (969.6969696969696 / 1920, 969.6969696969696 / 1080)

# Index of a pair of axis values in the label: none, the four single ones, the four pairs.
_PAIRS = {(0, 0): 0, (1, 0): 1, (-1, 0): 2, (0, 1): 3, (0, -1): 4,
          (1, 1): 5, (1, -1): 6, (-1, 1): 7, (-1, -1): 8}  # fmt: skip


def label(move: Axes) -> int:
    """Action label 0..80 of one latent frame: translation index * 9 + rotation index."""
    return _PAIRS[move.forward, move.right] * 9 + _PAIRS[move.yaw, move.pitch]


def step(c2w: np.ndarray, move: Axes) -> np.ndarray:
    """The next camera-to-world pose [4, 4]: turn first, then move along the turned axes.

    Axes are x right, y down, z forward.
    """
    pose = c2w.copy()
    yaw, pitch = TURN * move.yaw, TURN * move.pitch
    around_y = np.array(
        [[math.cos(yaw), 0, math.sin(yaw)], [0, 1, 0], [-math.sin(yaw), 0, math.cos(yaw)]]
    )
    around_x = np.array(
        [[1, 0, 0], [0, math.cos(pitch), -math.sin(pitch)], [0, math.sin(pitch), math.cos(pitch)]]
    )
    pose[:3, :3] = pose[:3, :3] @ around_y @ around_x
    pose[:3, 3] += pose[:3, :3] @ np.array([MOVE * move.right, 0.0, MOVE * move.forward])
    return pose


def trajectory(moves: Sequence[Axes]) -> tuple[np.ndarray, np.ndarray]:
    """n moves -> n + 1 poses [n + 1, 4, 4] in float64, identity first, and labels [n + 1]."""
    poses = [np.eye(4)]
    for move in moves:
        poses.append(step(poses[-1], move))
    labels = [0, *(label(move) for move in moves)]
    return np.stack(poses), np.array(labels, dtype=np.int64)


def parse_pose(text: str) -> list[Axes]:
    """HY's own pose string, "w-3, right-1": key and latent frames; keys may be joined by "+"."""
    moves: list[Axes] = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*([a-z+]+)\s*-\s*(\d+)\s*", item)
        keys = frozenset(match.group(1).split("+")) if match else frozenset()
        if match is None or not keys <= KEYS.keys():
            raise UserError(f'a pose string reads like "w-3, right-1", not {item.strip()!r}')
        moves += [axes(keys)] * int(match.group(2))
    return moves


def intrinsics(frames: int) -> torch.Tensor:
    """[frames, 3, 3] float64, normalised by width and height."""
    matrix = torch.eye(3, dtype=torch.float64)
    matrix[0, 0], matrix[1, 1] = FOCAL
    matrix[0, 2] = matrix[1, 2] = 0.5
    return matrix.expand(frames, 3, 3).clone()


def world_to_camera(c2w: np.ndarray) -> torch.Tensor:
    """[F, 4, 4] -> its inverse, float64."""
    return torch.from_numpy(np.linalg.inv(c2w))


class Walk:
    """The camera of one lane, advanced latent frame by latent frame from held keys."""

    def __init__(self) -> None:
        self.c2w: list[np.ndarray] = []
        self.labels: list[int] = []

    def copy(self) -> Walk:
        """The same walk, to be continued apart."""
        other = Walk()
        other.c2w, other.labels = list(self.c2w), list(self.labels)
        return other

    def advance(self, frames: Sequence[KeySet]) -> None:
        """Append one pose and label per latent frame; the first frame of all does not move."""
        for keys in frames:
            if not self.c2w:
                self.c2w.append(np.eye(4))
                self.labels.append(0)
                continue
            move = axes(keys)
            self.c2w.append(step(self.c2w[-1], move))
            self.labels.append(label(move))

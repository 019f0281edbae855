"""LingBot's conditioning: camera poses to frame-to-frame poses and a Pluecker embedding."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quantwm.errors import UserError
from quantwm.worlds.base import KeySet
from quantwm.worlds.wan.steering import axes

CELL = 8  # pixels folded into channels per latent cell, each way
INTRINSICS = (415.53, 415.69, 415.78, 239.78)  # fx, fy, cx, cy of a 480x832 frame
REFERENCE = (480, 832)
FRAME_MOVE = 0.05  # units per video frame of a held key
FRAME_TURN = math.radians(2.0)  # per video frame
PITCH_LIMIT = math.radians(85.0)
VIDEO_FRAMES = 4  # per latent frame


def scaled_intrinsics(values: Sequence[float], height: int, width: int) -> torch.Tensor:
    """fx, fy, cx, cy of a 480x832 frame -> of a height x width frame, float32 [4]."""
    x, y = width / REFERENCE[1], height / REFERENCE[0]
    fx, fy, cx, cy = values
    return torch.tensor([fx * x, fy * y, cx * x, cy * y], dtype=torch.float32)


def latent_poses(c2w: np.ndarray, chunk_frames: int) -> np.ndarray:
    """Poses per video frame [N, 4, 4] -> per latent frame [L, 4, 4], L a multiple of the chunk.

    The video is cut to 4n + 1 frames; L poses are spread over its whole range, translations
    interpolated linearly and rotations spherically.
    """
    count = (len(c2w) - 1) // VIDEO_FRAMES * VIDEO_FRAMES + 1
    latents = ((count - 1) // VIDEO_FRAMES + 1) // chunk_frames * chunk_frames
    if latents < 1:
        raise UserError(
            f"{len(c2w)} poses make less than one chunk of {chunk_frames} latent frames"
        )
    source = np.linspace(0, count - 1, count)
    target = np.linspace(0, count - 1, latents)
    out = np.tile(np.eye(4), (latents, 1, 1))
    for axis in range(3):
        out[:, axis, 3] = np.interp(target, source, c2w[:count, axis, 3])
    for index, place in enumerate(target):
        before = min(int(place), count - 2) if count > 1 else 0
        after = min(before + 1, count - 1)
        out[index, :3, :3] = slerp(c2w[before, :3, :3], c2w[after, :3, :3], place - before)
    return out


def slerp(first: np.ndarray, second: np.ndarray, share: float) -> np.ndarray:
    """The rotation that lies `share` of the way from one [3, 3] rotation to another."""
    turn = first.T @ second
    axis = np.array([turn[2, 1] - turn[1, 2], turn[0, 2] - turn[2, 0], turn[1, 0] - turn[0, 1]])
    sine = np.linalg.norm(axis)
    angle = math.atan2(sine, np.trace(turn) - 1.0)
    if sine < 1e-12:
        # No turn between the two; half a turn has no single axis and does not occur in 1/16 s.
        return first if share < 1.0 else second
    x, y, z = axis / sine
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    part = share * angle
    return first @ (np.eye(3) + math.sin(part) * cross + (1 - math.cos(part)) * cross @ cross)


def relative_poses(c2w: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """c2w [L, 4, 4] -> each pose seen from the one before, the first identity; float32.

    Translations are divided by `scale`, or by the largest norm of the whole trajectory.
    """
    poses = c2w.to(torch.float32)
    out = torch.linalg.inv(torch.cat([poses[:1], poses[:-1]])) @ poses
    out[0] = torch.eye(4)
    largest = float(out[:, :3, 3].norm(dim=-1).max()) if scale is None else scale
    if largest > 0:
        out[:, :3, 3] = out[:, :3, 3] / largest
    return out


def pluecker(
    poses: torch.Tensor, intrinsics: torch.Tensor, height: int, width: int
) -> torch.Tensor:
    """Ray origin and unit direction of every pixel centre: [L, height, width, 6], float32."""
    fx, fy, cx, cy = intrinsics.tolist()
    rows = torch.arange(height, dtype=torch.float32, device=poses.device) + 0.5
    columns = torch.arange(width, dtype=torch.float32, device=poses.device) + 0.5
    y, x = torch.meshgrid((rows - cy) / fy, (columns - cx) / fx, indexing="ij")
    rays = torch.stack([x, y, torch.ones_like(x)], dim=-1)
    rays = rays / rays.norm(dim=-1, keepdim=True)
    directions = torch.einsum("lij,hwj->lhwi", poses[:, :3, :3], rays)
    origins = poses[:, None, None, :3, 3].expand_as(directions)
    return torch.cat([origins, directions], dim=-1)


def folded(rays: torch.Tensor) -> torch.Tensor:
    """[L, H, W, 6] -> [384, L, H/8, W/8]: component outermost, then row and column of a cell."""
    frames, height, width, parts = rays.shape
    cells = rays.reshape(frames, height // CELL, CELL, width // CELL, CELL, parts)
    return cells.permute(5, 2, 4, 0, 1, 3).reshape(
        parts * CELL * CELL, frames, height // CELL, width // CELL
    )


@dataclass(frozen=True)
class Gaze:
    """Where a live camera looks: radians to the right about the vertical, and upwards."""

    yaw: float = 0.0
    pitch: float = 0.0

    def turned(self, yaw: float, pitch: float) -> Gaze:
        """Pitch stops short of straight up and down, as in `key_trajectory`."""
        return Gaze(self.yaw + yaw, min(max(self.pitch + pitch, -PITCH_LIMIT), PITCH_LIMIT))

    @property
    def rotation(self) -> np.ndarray:
        return _around_y(self.yaw) @ _around_x(self.pitch)


def live_poses(frames: Sequence[KeySet], first_frame: int, gaze: Gaze) -> tuple[torch.Tensor, Gaze]:
    """Held keys -> relative pose of each latent frame [F, 4, 4], and where the camera looks then.

    A recorded trajectory is scaled by its largest step, which a live one cannot know: a held
    direction is a step of length 1 here. Turning, and that a walk stays level however the camera
    is tilted, are those of the published key helper.
    """
    out = torch.eye(4).repeat(len(frames), 1, 1)
    for index, keys in enumerate(frames):
        if first_frame + index == 0:
            continue
        move, before = axes(keys), gaze.rotation
        turn = FRAME_TURN * VIDEO_FRAMES
        gaze = gaze.turned(turn * move.yaw, turn * move.pitch)
        out[index, :3, :3] = torch.from_numpy(before.T @ gaze.rotation)
        step = _around_y(gaze.yaw) @ np.array([move.right, 0.0, move.forward], dtype=np.float64)
        length = np.linalg.norm(step)
        if length:
            out[index, :3, 3] = torch.from_numpy(before.T @ step / length)
    return out, gaze


def _around_y(angle: float) -> np.ndarray:
    c, s = math.cos(angle), math.sin(angle)
    return np.array([[c, 0, s], [0, 1, 0], [-s, 0, c]])


def _around_x(angle: float) -> np.ndarray:
    c, s = math.cos(angle), math.sin(angle)
    return np.array([[1, 0, 0], [0, c, -s], [0, s, c]])


def parse_keys(text: str) -> tuple[np.ndarray, np.ndarray]:
    """The published key string, "w-12,wl-6,none-4" -> one-hots w,a,s,d and i,j,k,l per frame."""
    wasd, ijkl = [], []
    for item in text.split(","):
        match = re.fullmatch(r"\s*(none|[wasdijkl]+)\s*-\s*(\d+)\s*", item)
        if match is None:
            raise UserError(f'a key string reads like "w-12,wl-6,none-4", not {item.strip()!r}')
        keys = "" if match.group(1) == "none" else match.group(1)
        count = int(match.group(2))
        wasd += [[float(key in keys) for key in "wasd"]] * count
        ijkl += [[float(key in keys) for key in "ijkl"]] * count
    return np.array(wasd), np.array(ijkl)


def key_trajectory(wasd: np.ndarray, ijkl: np.ndarray) -> np.ndarray:
    """One-hots per video frame -> n + 1 camera-to-world poses, identity first, float64."""
    yaw = pitch = 0.0
    position = np.zeros(3)
    poses = [np.eye(4)]
    for (w, a, s, d), (i, j, k, l) in zip(wasd, ijkl, strict=True):  # noqa: E741
        yaw += FRAME_TURN * (l - j)
        pitch = float(np.clip(pitch + FRAME_TURN * (i - k), -PITCH_LIMIT, PITCH_LIMIT))
        forward = np.array([math.sin(yaw), 0.0, math.cos(yaw)])
        right = np.array([math.cos(yaw), 0.0, -math.sin(yaw)])
        position = position + FRAME_MOVE * ((w - s) * forward + (d - a) * right)
        pose = np.eye(4)
        pose[:3, :3] = _around_y(yaw) @ _around_x(pitch)
        pose[:3, 3] = position
        poses.append(pose)
    return np.stack(poses)


def segment_trajectory(
    keys: str, frames: int, segment_frames: int, speed: float = 0.02, taps: int = 8
) -> np.ndarray:
    """One key per segment, pure translation with a smoothed velocity -> poses [frames, 4, 4]."""
    velocity = np.zeros((frames, 3))
    directions = {"w": (0, 0, 1), "s": (0, 0, -1), "a": (-1, 0, 0), "d": (1, 0, 0)}
    for index in range(frames):
        key = keys[min(index // segment_frames, len(keys) - 1)].lower()
        velocity[index] = speed * np.array(directions[key])
    kernel = np.ones(taps) / taps
    smooth = np.stack(
        [np.convolve(velocity[:, axis], kernel, mode="same") for axis in range(3)], axis=1
    )
    positions = np.cumsum(smooth, axis=0)
    poses = np.tile(np.eye(4), (frames, 1, 1))
    poses[:, :3, 3] = positions - positions[0]
    return poses

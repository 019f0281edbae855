"""Which way a camera turned and stepped between two frames, from the pictures alone.

Each hypothesis (a turn, and a step direction or none) says where every block of a frame goes, up
to the block's depth, which it may choose freely: nearness = step / depth. The hypothesis under
which the blocks are found again at the lowest cost is the answer. A step forward spreads blocks
from the centre, a turn moves all of them, most at the sides; no weights, nothing is fitted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from quantwm.errors import UserError

if TYPE_CHECKING:
    import numpy as np

STEPS = ("none", "forward", "back", "left", "right")
_WAYS = {"none": (0, 0), "forward": (1, 0), "back": (-1, 0), "left": (0, 1), "right": (0, -1)}


@dataclass(frozen=True)
class CameraConfig:
    """The embedded world's camera at half its resolution, and the search.

    The picture is 90 degrees wide; rows are stretched by 1.2, as the game's pixels were. Turns in
    degrees a frame, positive to the left: the key's 7.5, half of it and none. reach: pixels
    searched each way (a turn moves the sides by 8.4). stop: nearness of the closest depth tried.
    block: side of the windows that are compared; smaller ones find false friends in textures that
    repeat (4 pixels: 92 % of turns right a frame, 8 pixels: 97 %). margin: blocks left out at each
    side, because a turn carries them out of the picture.
    """

    turns: tuple[float, ...] = (-7.5, -3.75, 0.0, 3.75, 7.5)
    nearness: tuple[float, ...] = (0.0, 0.02, 0.05, 0.09, 0.14, 0.2, 0.28, 0.38)
    field_degrees: float = 90.0
    row_stretch: float = 1.2
    reach: tuple[int, int] = (12, 6)
    stride: int = 4
    block: int = 8
    margin: tuple[int, int] = (3, 1)
    unknown: float = 0.12
    largest: float = 0.3


def motion_costs(
    frames: np.ndarray,
    device: torch.device | str = "cpu",
    config: CameraConfig = CameraConfig(),
    batch: int = 64,
) -> torch.Tensor:
    """Cost of every hypothesis for every transition: float32 [T - 1, turns, STEPS] on the CPU.

    frames: uint8 [T, H, W, 3]. Costs are mean colour distances, 0 for a perfect match.
    """
    if len(frames) < 2 or frames.shape[1] < 32 or frames.shape[2] < 32:
        raise UserError(f"motion needs 2 or more frames of 32 pixels a side, got {frames.shape}")
    parts = []
    for start in range(0, len(frames) - 1, batch):
        pictures = torch.from_numpy(frames[start : start + batch + 1].copy()).to(device)
        features = _features(pictures)
        volume = _volume(features[:-1], features[1:], config)
        parts.append(_costs(volume, config).cpu())
    return torch.cat(parts)


def turn_of(costs: torch.Tensor, config: CameraConfig = CameraConfig()) -> float:
    """Degrees a frame, positive to the left, that explain all of some transitions best.

    costs: [n, turns, STEPS] of transitions under the same keys. Steps to the side are left out:
    a far wall moves alike under them and under a turn.
    """
    best = costs[:, :, :3].amin(dim=2).sum(dim=0)
    return config.turns[int(best.argmin())]


def step_evidence(
    costs: torch.Tensor, turn: float, way: str, config: CameraConfig = CameraConfig()
) -> float:
    """How much better a step one way explains transitions than its opposite, as a share.

    costs: [n, turns, STEPS]; turn: degrees a frame, one of the config's. Positive where the
    pictures moved the way named; 0 where nothing moved.
    """
    opposite = {"forward": "back", "back": "forward", "left": "right", "right": "left"}[way]
    total = costs[:, config.turns.index(turn)].sum(dim=0)
    scale = float(total[0])
    if scale <= 0:
        return 0.0
    return float(total[STEPS.index(opposite)] - total[STEPS.index(way)]) / scale


def _features(pictures: torch.Tensor) -> torch.Tensor:
    """uint8 [T, H, W, 3] -> float [T, 6, H/2, W/2]: local colour and what stands out from it."""
    x = F.avg_pool2d(pictures.permute(0, 3, 1, 2).float() / 255, 2)
    local = F.avg_pool2d(F.pad(x, (4, 4, 4, 4), mode="replicate"), 9, 1)
    return torch.cat((x - local, local), dim=1)


def _volume(before: torch.Tensor, after: torch.Tensor, config: CameraConfig) -> torch.Tensor:
    """Cost of finding each block of `before` displaced in `after`: [n, dy, dx, rows, columns]."""
    (reach_x, reach_y), (height, width) = config.reach, before.shape[-2:]
    sides = (reach_x, reach_x, reach_y, reach_y)
    padded = F.pad(after, sides, mode="replicate")
    inside = F.pad(torch.ones(1, 1, height, width, device=before.device), sides)
    edge = (config.block - config.stride) // 2
    costs = []
    for dy in range(2 * reach_y + 1):
        for dx in range(2 * reach_x + 1):
            window = (..., slice(dy, dy + height), slice(dx, dx + width))
            distance = (before - padded[window]).square().sum(1, keepdim=True).sqrt()
            known = inside[window]
            distance = distance.clamp(max=config.largest) * known + config.unknown * (1 - known)
            distance = F.pad(distance, (edge,) * 4, mode="replicate")
            costs.append(F.avg_pool2d(distance, config.block, config.stride))
    return torch.cat(costs, dim=1).unflatten(1, (2 * reach_y + 1, 2 * reach_x + 1))


def _costs(volume: torch.Tensor, config: CameraConfig) -> torch.Tensor:
    """[n, turns, STEPS] from a volume: each block takes the best depth, blocks are averaged."""
    count, _, _, rows, columns = volume.shape
    flat = volume.permute(0, 3, 4, 1, 2).flatten(0, 2).unsqueeze(1)  # [n * blocks, 1, dy, dx]
    reach = torch.tensor(config.reach, device=volume.device)
    (left, top) = config.margin
    out = torch.empty(count, len(config.turns), len(STEPS), device=volume.device)
    for i, turn in enumerate(config.turns):
        for j, name in enumerate(STEPS):
            moves = _displacements(rows, columns, turn, _WAYS[name], config).to(volume.device)
            grid = (moves / reach).flatten(0, 1)  # [blocks, depths, 2]
            outside = (grid.abs() > 1).any(-1).repeat(count, 1)
            grid = grid.unsqueeze(2).repeat(count, 1, 1, 1)
            cost = F.grid_sample(flat, grid, padding_mode="border", align_corners=True)
            cost = cost[:, 0, :, 0].masked_fill(outside, config.unknown).amin(dim=1)
            kept = cost.view(count, rows, columns)[:, top : rows - top, left : columns - left]
            out[:, i, j] = kept.mean(dim=(1, 2))
    return out


def _displacements(
    rows: int, columns: int, turn: float, way: tuple[int, int], config: CameraConfig
) -> torch.Tensor:
    """Pixels (x, y) that each block moves at each depth: [rows, columns, depths, 2]."""
    width = columns * config.stride
    focal = width / 2 / math.tan(math.radians(config.field_degrees) / 2)
    tall = focal * config.row_stretch
    near = torch.tensor(config.nearness if way != (0, 0) else (0.0,))
    offset = (config.stride - 1) / 2
    x = (torch.arange(columns) * config.stride + offset - (width - 1) / 2) / focal
    y = (torch.arange(rows) * config.stride + offset - (rows * config.stride - 1) / 2) / tall
    x, y = x[None, :, None], y[:, None, None]
    forward, left = way
    side, depth = x + left * near, 1 - forward * near  # a step left moves what is seen right
    angle = math.radians(turn)
    new_side = side * math.cos(angle) + depth * math.sin(angle)
    new_depth = (depth * math.cos(angle) - side * math.sin(angle)).clamp(min=0.2)
    moved_x = (new_side / new_depth - x) * focal
    moved_y = (y / new_depth - y) * tall
    return torch.stack((moved_x.expand(rows, -1, -1), moved_y.expand(-1, columns, -1)), dim=-1)

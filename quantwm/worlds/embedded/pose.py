"""Where the keys alone say the camera is: heading and position, as features for every token.

The engine's walking is followed tic by tic (thrust, then motion, then friction), so heading is
exact and position is right until something is walked into. The model sees both as sines and
cosines of many wavelengths, whose products depend on differences only: where a session, or a
training clip, begins does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

TICS = 4
TURN_UNITS = (341, 341, 341, 342)
"""Of 65,536 a circle, in the four tics of a frame: 7.498 degrees."""
FORWARD_THRUST = 25 / 32  # map units a tic, a tic; at full speed 8.33 units a tic
SIDE_THRUST = 24 / 32
FRICTION = 0xE800 / 65536
STOP_SPEED = 0x1000 / 65536

YAW_RATES = (1, 2, 4, 8, 16)
WAVELENGTHS = (4096.0, 2048.0, 1024.0, 512.0, 256.0, 128.0)  # map units
DIRECTIONS = 4
YAW_FEATURES = 2 * len(YAW_RATES)
FEATURES = YAW_FEATURES + 2 * DIRECTIONS * len(WAVELENGTHS)
"""Per token: 10 of its column's direction, 48 of the position."""

Walk = tuple[int, float, float, float, float]
"""Heading in 1/65536 of a circle counter-clockwise, x and y in map units, speed along both."""

START: Walk = (0, 0.0, 0.0, 0.0, 0.0)


def advance(walk: Walk, keys: Sequence[float]) -> Walk:
    """One frame further; keys: of that frame, 0 or 1 for w, s, a, d, left, right."""
    heading, x, y, vx, vy = walk
    forward = (keys[0] - keys[1]) * FORWARD_THRUST
    aside = (keys[3] - keys[2]) * SIDE_THRUST
    turn = int(keys[4]) - int(keys[5])
    for units in TURN_UNITS:
        heading = (heading + turn * units) % 65536
        angle = heading * (2 * math.pi / 65536)
        cos, sin = math.cos(angle), math.sin(angle)
        vx += forward * cos + aside * sin
        vy += forward * sin - aside * cos
        x, y = x + vx, y + vy
        if forward == 0 and aside == 0 and max(abs(vx), abs(vy)) < STOP_SPEED:
            vx = vy = 0.0
        else:
            vx, vy = vx * FRICTION, vy * FRICTION
    return heading, x, y, vx, vy


def follow(walk: Walk, keys: Sequence[Sequence[float]]) -> tuple[list[Walk], Walk]:
    """The walk after every frame of keys, and the last of them."""
    walks = []
    for held in keys:
        walk = advance(walk, held)
        walks.append(walk)
    return walks, walk


def as_array(walks: Sequence[Walk]) -> np.ndarray:
    """float32 [frames, 3]: heading in radians, x and y in map units."""
    return np.array([(w[0] * (2 * math.pi / 65536), w[1], w[2]) for w in walks], np.float32)


def pose_features(poses: torch.Tensor, columns: int) -> torch.Tensor:
    """poses [..., 3] of `as_array` -> float32 [..., columns, FEATURES].

    columns: tokens of a row; the view is 90 degrees wide, so column c looks
    atan((c + 1/2 - columns/2) / (columns/2)) to the right of the heading. Positions become plane
    waves in four directions: the same for every way of laying the axes.
    """
    poses = poses.float()
    half = columns / 2
    offset = torch.atan((torch.arange(columns, device=poses.device) + 0.5 - half) / half)
    yaw = poses[..., :1] - offset  # [..., columns]
    rates = torch.tensor(YAW_RATES, device=poses.device, dtype=torch.float32)
    turned = yaw.unsqueeze(-1) * rates
    way = torch.arange(DIRECTIONS, device=poses.device) * (math.pi / DIRECTIONS)
    along = poses[..., 1:2] * way.cos() + poses[..., 2:3] * way.sin()  # [..., directions]
    waves = 2 * math.pi / torch.tensor(WAVELENGTHS, device=poses.device)
    phase = (along.unsqueeze(-1) * waves).flatten(-2)
    where = torch.cat((phase.cos(), phase.sin()), dim=-1)
    where = where.unsqueeze(-2).expand(*yaw.shape, -1)
    return torch.cat((turned.cos(), turned.sin(), where), dim=-1)

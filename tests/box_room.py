"""A textured box seen by a camera: frames and poses whose motion is known exactly."""

from __future__ import annotations

import math

import numpy as np

from quantwm.evaluation.episodes import Episode
from quantwm.worlds.embedded.config import KEYS

WIDTH, HEIGHT = 128, 96
FOCAL = WIDTH / 2  # 90 degrees wide
STRETCH = 1.2
HALF = 260.0  # map units from the middle to a wall
EYE, CEILING = 41.0, 90.0  # above the floor; above the eye
STEP = 24.0  # map units a frame
TURN = 7.5


def view(x: float, y: float, angle: float) -> np.ndarray:
    """What is seen from (x, y) under a heading in degrees: uint8 [96, 128, 3]."""
    columns = (np.arange(WIDTH) - (WIDTH - 1) / 2) / FOCAL
    rows = (np.arange(HEIGHT) - (HEIGHT - 1) / 2) / (FOCAL * STRETCH)
    ahead = np.array([math.cos(math.radians(angle)), math.sin(math.radians(angle))])
    right = np.array([ahead[1], -ahead[0]])
    ray = ahead[None] + columns[:, None] * right[None]  # [W, 2]
    with np.errstate(divide="ignore"):
        to_x = np.where(ray[:, 0] > 0, HALF - x, -HALF - x) / ray[:, 0]
        to_y = np.where(ray[:, 1] > 0, HALF - y, -HALF - y) / ray[:, 1]
    wall = np.minimum(to_x, to_y)[None].repeat(HEIGHT, 0)
    down = rows[:, None].repeat(WIDTH, 1)
    with np.errstate(divide="ignore"):
        flat = np.where(down > 0, EYE / down, CEILING / -down)
    depth = np.minimum(wall, flat)
    px, py = x + depth * ray[None, :, 0], y + depth * ray[None, :, 1]
    pz = depth * down
    on_floor = flat < wall
    colour = (
        np.stack([_noise(px, py, pz, seed) for seed in (1, 2, 3)], axis=-1)
        * np.where(on_floor, 0.6, 1.0)[..., None]
    )
    return np.clip(colour, 0, 255).astype(np.uint8)


def _noise(x: np.ndarray, y: np.ndarray, z: np.ndarray, seed: int) -> np.ndarray:
    """Blotches of many sizes that do not repeat, 0 to 255."""
    rng = np.random.default_rng(seed)
    total = np.zeros_like(x)
    for _ in range(24):
        wave = rng.normal(size=3)
        wave *= 2 * math.pi / rng.uniform(60, 240) / np.linalg.norm(wave)
        total += np.sin(wave[0] * x + wave[1] * y + wave[2] * z + rng.uniform(0, 6.3))
    return 128 + 12 * total


def move(pose: tuple[float, float, float], keys: frozenset[str]) -> tuple[float, float, float]:
    """One frame under keys: a turn, and a step without momentum."""
    x, y, angle = pose
    angle += TURN * (("left" in keys) - ("right" in keys))
    forward = STEP * (("w" in keys) - ("s" in keys))
    left = STEP * (("a" in keys) - ("d" in keys))
    c, s = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    return x + forward * c - left * s, y + forward * s + left * c, angle


def episode(
    kind: str,
    keys: list[frozenset[str]],
    context: int = 4,
    start: tuple[float, float, float] = (0.0, 0.0, 30.0),
    seed: int = 7,
) -> Episode:
    """Frames of a walk: keys are those of frames 1, 2, ...; frame 0 has none."""
    poses = [start]
    for held in keys:
        poses.append(move(poses[-1], held))
    rows = [frozenset(), *keys]
    return Episode(
        kind=kind,
        context=context,
        frames=np.stack([view(*pose) for pose in poses]),
        index=np.arange(len(poses)),
        keys=np.asarray([[name in held for name in KEYS] for held in rows], np.uint8),
        poses=np.asarray(poses, np.float32),
        origin={"map_seed": seed},
    )


def held(text: str, frames: int) -> list[frozenset[str]]:
    """The same keys ("w+left", "" for none) for some frames."""
    return [frozenset(text.split("+") if text else ())] * frames

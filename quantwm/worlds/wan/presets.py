"""Start pictures and prompts to begin with; the pictures are drawn by this file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quantwm.errors import UserError
from quantwm.worlds.base import Scene, Script

THUMBNAILS = Path(__file__).resolve().parents[3] / "assets" / "pictures"
Colour = tuple[int, int, int]

_SCRIPTS = (
    ("loop", "Forward, a look around, and back", "w-12, right-24, w-12, left-24, s-12"),
    ("turn", "Once around on the spot", "right-48"),
    ("still", "Stand still", "none-24"),
)

PROMPTS = (
    "A walk through a quiet landscape in clear daylight, seen through one's own eyes.",
    "A narrow lane between old brick houses after rain, warm light in the windows, a calm walk "
    "forward, seen through one's own eyes.",
    "A pine forest in morning mist, sunbeams between the trunks, a soft path of needles, the "
    "camera moves slowly forward.",
    "A long bright museum hall with marble floor and tall columns, nobody else there, a steady "
    "walk forward.",
)


@dataclass(frozen=True)
class Place:
    """A ground, walls on both sides and a sky, seen from a person's height of 1.

    Attributes:
        sky: colours of its top and of the horizon. ground, wall: two colours of a pattern each.
        cell: side of the ground's squares. wall_at: distance of the walls, 0 for none.
        wall_height, wall_cell: of the walls. lit: where the light comes from, -1 left to 1 right.
    """

    title: str
    sky: tuple[Colour, Colour]
    ground: tuple[Colour, Colour]
    wall: tuple[Colour, Colour]
    cell: float
    wall_at: float = 0.0
    wall_height: float = 2.0
    wall_cell: float = 0.8
    lit: float = 0.3


PLACES = {
    "lane": Place(
        "Lane", ((92, 142, 205), (214, 226, 236)), ((132, 120, 104), (148, 136, 118)),
        ((74, 104, 58), (94, 126, 70)), 0.9, 2.2, 1.3, 0.5,
    ),
    "hall": Place(
        "Hall", ((224, 216, 200), (244, 238, 226)), ((176, 164, 146), (214, 204, 188)),
        ((198, 188, 172), (166, 154, 138)), 1.2, 2.6, 3.4, 1.6, -0.4,
    ),
    "street": Place(
        "Street", ((120, 150, 186), (226, 208, 180)), ((92, 92, 96), (102, 102, 106)),
        ((158, 112, 88), (128, 88, 70)), 2.4, 4.0, 3.8, 1.1, 0.7,
    ),
    "shore": Place(
        "Shore", ((70, 128, 196), (236, 226, 206)), ((206, 186, 148), (198, 176, 138)),
        ((0, 0, 0), (0, 0, 0)), 1.5,
    ),
}  # fmt: skip


def scripts(keys: Mapping[str, str]) -> list[Script]:
    """The action scripts whose keys a world has."""
    return [
        Script(name, title, actions)
        for name, title, actions in _SCRIPTS
        if keys and all(part.rpartition("-")[0] in {*keys, "none"} for part in actions.split(", "))
    ]


def scenes() -> list[Scene]:
    """The start pictures, with the thumbnails in assets/pictures."""
    return [
        Scene(name, place.title, str(THUMBNAILS / f"{name}.webp")) for name, place in PLACES.items()
    ]


def scene_picture(name: str, size: tuple[int, int]) -> np.ndarray:
    """A start picture, uint8 [height, width, 3]; UserError on an unknown name."""
    if name not in PLACES:
        raise UserError(f"unknown scene {name[:40]!r}; there are {', '.join(PLACES)}")
    return draw(PLACES[name], size)


def draw(place: Place, size: tuple[int, int]) -> np.ndarray:
    """One picture: every pixel's ray meets the ground, a wall or the sky."""
    width, height = size
    x = (np.arange(width) + 0.5 - width / 2) / (0.9 * height)
    y = (height * 0.46 - np.arange(height) - 0.5) / (0.9 * height)
    x, y = np.meshgrid(x, y)
    far = 1e4
    to_ground = np.where(y < -1e-4, -1 / np.minimum(y, -1e-4), far)
    to_wall = np.full_like(x, far)
    if place.wall_at:
        to_wall = place.wall_at / np.maximum(np.abs(x), 1e-4)
        to_wall = np.where(to_wall * y + 1 > place.wall_height, far, to_wall)
    picture = _mix(place.sky[1], place.sky[0], np.clip(y / 0.5, 0, 1) ** 0.7)
    reach = np.minimum(to_ground, to_wall)
    on_wall = to_wall < to_ground
    depth, across, up = reach, x * reach, y * reach + 1
    ground = _tiles(depth / place.cell, across / place.cell)
    wall = _tiles(depth / place.wall_cell, up / (0.5 * place.wall_cell))
    colour = np.where(on_wall[..., None], _mix(*place.wall, wall), _mix(*place.ground, ground))
    light = np.where(on_wall, 1 + 0.22 * place.lit * np.sign(x), 1.0)
    haze = np.exp(-reach / 14)[..., None]
    hit = (reach < far)[..., None]
    seen = colour * light[..., None] * haze + np.asarray(place.sky[1]) * (1 - haze)
    return np.where(hit, seen, picture).round().clip(0, 255).astype(np.uint8)


def _mix(one: Colour, other: Colour, share: np.ndarray) -> np.ndarray:
    return np.asarray(one) + (np.asarray(other) - np.asarray(one)) * share[..., None]


def _tiles(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """0 to 1: squares in two shades, each a little different, with seams between them."""
    cell_a, cell_b = np.floor(a), np.floor(b)
    shade = np.abs(np.sin(cell_a * 12.9898 + cell_b * 78.233) * 43758.5453) % 1
    edge = np.minimum(a - cell_a, b - cell_b)
    return np.where(edge < 0.05, 0.0, 0.25 + 0.75 * (0.6 * ((cell_a + cell_b) % 2) + 0.4 * shade))

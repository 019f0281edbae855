"""Matrix-Game-2's conditioning: held keys to one-hots and mouse floats, per video frame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from quantwm.worlds.base import KeySet
from quantwm.worlds.wan.steering import KEYS, axes

LOOK = 0.1  # mouse value of a held look key
ROWS_PER_FRAME = 4  # action rows (video frames) per latent frame; the very first frame has one


@dataclass(frozen=True)
class Controls:
    """One mode's keys.

    Attributes:
        keys: physical key -> what it does, in words.
        keyboard: physical key of each keyboard value; "" stands for "no other key is held".
        mouse: whether the mode has a mouse (up, down, left and right look around).
        turn_with_a_d: the mouse follows a and d instead, as a steering wheel.
        same: keys that do what another does, so that all worlds take the same action strings.
    """

    keys: dict[str, str]
    keyboard: tuple[str, ...]
    mouse: bool
    turn_with_a_d: bool = False
    same: dict[str, str] = field(default_factory=dict)

    def means(self, keys: KeySet) -> KeySet:
        """Held keys with every key that stands for another replaced by it."""
        return frozenset(self.same.get(key, key) for key in keys)


CONTROLS = {
    "universal": Controls(keys=dict(KEYS), keyboard=("w", "s", "a", "d"), mouse=True),
    "gta_drive": Controls(
        keys={"w": "drive", "s": "brake, reverse", "a": "steer left", "d": "steer right",
              "up": "drive", "down": "brake, reverse", "left": "steer left",
              "right": "steer right"},
        keyboard=("w", "s"), mouse=True, turn_with_a_d=True,
        same={"up": "w", "down": "s", "left": "a", "right": "d"},
    ),
    "templerun": Controls(
        keys={"w": "jump", "s": "slide", "left": "turn left", "right": "turn right",
              "a": "left side", "d": "right side", "up": "jump", "down": "slide"},
        keyboard=("", "w", "s", "left", "right", "a", "d"), mouse=False,
        same={"up": "w", "down": "s"},
    ),
}  # fmt: skip


def action_row(mode: str, keys: KeySet) -> tuple[list[float], list[float]]:
    """Held keys -> keyboard values and mouse values [pitch, yaw] (empty without a mouse)."""
    controls = CONTROLS[mode]
    keys = controls.means(keys)
    move = axes(keys)
    idle = not any(name in keys for name in controls.keyboard if name)
    keyboard = [float(name in keys if name else idle) for name in controls.keyboard]
    if not controls.mouse:
        return keyboard, []
    if controls.turn_with_a_d:
        return keyboard, [0.0, LOOK * move.right]
    return keyboard, [LOOK * move.pitch, LOOK * move.yaw]


def action_rows(
    mode: str, frames: Sequence[KeySet], first_frame: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keys of consecutive latent frames -> their action rows [rows, dim] (mouse None without).

    Latent frame 0 has one row, every later one ROWS_PER_FRAME.
    """
    keyboard, mouse = [], []
    for offset, keys in enumerate(frames):
        held = action_row(mode, keys)
        count = ROWS_PER_FRAME if first_frame + offset else 1
        keyboard += [held[0]] * count
        mouse += [held[1]] * count
    rows = torch.tensor(keyboard, dtype=torch.float32)
    return rows, torch.tensor(mouse, dtype=torch.float32) if CONTROLS[mode].mouse else None


_LETTERS = {"i": "up", "k": "down", "j": "left", "l": "right", "z": "left", "c": "right"}


def parse_prompt(mode: str, answer: Sequence[str]) -> KeySet:
    """The published key prompt's answers -> held keys.

    universal: camera key (i k j l, u none) and movement key (w s a d, q none); gta_drive: one
    string of keys separated by spaces; templerun: w s a d, z and c turn, q none.
    """
    letters = [letter for part in answer for letter in part.split()]
    names = [_LETTERS.get(letter, letter) for letter in letters]
    return frozenset(name for name in names if name in CONTROLS[mode].keys)

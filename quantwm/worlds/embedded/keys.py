"""The action map: physical keys of each frame to the model's input vector."""

from __future__ import annotations

from quantwm.errors import UserError
from quantwm.worlds.base import ChunkAction, KeySet
from quantwm.worlds.embedded.config import KEYS

LEGEND = {
    "w": "forward",
    "s": "back",
    "a": "step left",
    "d": "step right",
    "left": "turn left",
    "right": "turn right",
    "up": "forward",
    "down": "back",
}
"""Every key that does something, in words."""

_SAME = {"up": "w", "down": "s"}
_OPPOSITES = (("w", "s"), ("a", "d"), ("left", "right"))

KeyVector = tuple[float, ...]


def frame_vector(keys: KeySet) -> KeyVector:
    """One frame's keys as 0 or 1 per entry of KEYS; opposite keys cancel each other."""
    unknown = sorted(keys - set(LEGEND))
    if unknown:
        raise UserError(f"unknown key {unknown[0]!r}; this world knows {', '.join(LEGEND)}")
    held = {_SAME.get(key, key) for key in keys}
    for one, other in _OPPOSITES:
        if {one, other} <= held:
            held -= {one, other}
    return tuple(float(key in held) for key in KEYS)


def action_map(action: ChunkAction, frames_per_chunk: int) -> tuple[KeyVector, ...]:
    """A chunk's keys as one vector per frame."""
    if len(action.frames) != frames_per_chunk:
        raise UserError(
            f"an action of this world holds keys for {frames_per_chunk} frames, "
            f"got {len(action.frames)}"
        )
    return tuple(frame_vector(keys) for keys in action.frames)

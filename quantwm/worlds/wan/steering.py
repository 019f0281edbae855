"""Held keys to axes, the same for every world of the family; opposite keys cancel."""

from __future__ import annotations

from dataclasses import dataclass

from quantwm.worlds.base import KeySet

KEYS = {
    "w": "forward",
    "s": "back",
    "a": "left",
    "d": "right",
    "up": "look up",
    "down": "look down",
    "left": "look left",
    "right": "look right",
}


@dataclass(frozen=True)
class Axes:
    """Each -1, 0 or 1: forward/back, right/left, turn right/left, look up/down."""

    forward: int
    right: int
    yaw: int
    pitch: int


def axes(keys: KeySet) -> Axes:
    """Keys of one latent frame -> axes."""

    def pair(plus: str, minus: str) -> int:
        return (plus in keys) - (minus in keys)

    return Axes(pair("w", "s"), pair("d", "a"), pair("right", "left"), pair("up", "down"))

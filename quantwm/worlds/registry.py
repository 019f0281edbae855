"""World names and where their adapters live; an adapter is imported when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from quantwm.errors import UserError
from quantwm.worlds.base import Scene, World, WorldSpec

Progress = Callable[[str, float], None]
"""(stage in words, fraction from 0 to 1)."""

_WAN = (
    "causal_forcing",
    "causal_forcing_framewise",
    "matrix_game2_universal",
    "matrix_game2_gta_drive",
    "matrix_game2_templerun",
    "lingbot_v2_1p3b",
    "lingbot_v2_14b",
    "hy_worldplay_wan5b",
)
WORLDS: dict[str, str] = {
    "embedded": "quantwm.worlds.embedded.entry",
    **{name: f"quantwm.worlds.wan.entry:{name}" for name in _WAN},
}
"""Name -> "module" or "module:object" with the functions of `WorldModule`."""


@dataclass(frozen=True)
class Presence:
    """Whether a world's weights are on this machine.

    Attributes:
        present: all files are there (their hashes are checked when they are loaded).
        where: their folder. weight_bytes: their size, 0 when unknown.
        problem: one line that says what is missing, None when present.
    """

    present: bool
    where: str
    weight_bytes: int
    problem: str | None = None


class WorldModule(Protocol):
    """What the module behind a name offers, as functions."""

    def world_spec(self) -> WorldSpec: ...

    def world_scenes(self) -> Sequence[Scene]: ...

    def presence(self) -> Presence: ...

    def load_world(self, device: torch.device, progress: Progress | None) -> World: ...


def world_spec(name: str) -> WorldSpec:
    """What a world is; nothing is loaded. UserError on an unknown name."""
    return _module(name).world_spec()


def world_scenes(name: str) -> Sequence[Scene]:
    """The start scenes that ship with a world; nothing is loaded."""
    return _module(name).world_scenes()


def world_presence(name: str) -> Presence:
    """Whether a world's weights are here; nothing is loaded."""
    return _module(name).presence()


def world_terms(name: str) -> str:
    """What a person must agree to before the weights are downloaded; "" where they are free."""
    found = getattr(_module(name), "terms", None)
    return "" if found is None else found()


def download_world(name: str, agreed: bool, progress: Progress | None = None) -> None:
    """Fetch a world's files; UserError where terms are not agreed to, or nothing is to be had."""
    found = getattr(_module(name), "download", None)
    if found is None:
        raise UserError(f"the world {name} is not downloaded; it comes with the repository")
    found(agreed, progress)


def load_world(
    name: str,
    device: torch.device | str,
    progress: Progress | None = None,
    dtype: torch.dtype | None = None,
) -> World:
    """Load a world's weights, checked against their hashes. UserError when that fails.

    dtype: to compute in, for a replay; None takes the world's own choice for the device.
    """
    module, device = _module(name), torch.device(device)
    load_as = getattr(module, "load_world_as", None)
    if dtype is None or load_as is None:
        world = module.load_world(device, progress)
    else:
        world = load_as(device, dtype, progress)
    if dtype not in (None, world.dtype):
        raise UserError(f"the world {name} computes in {world.dtype} on {device}, not in {dtype}")
    return world


def _module(name: str) -> WorldModule:
    if name not in WORLDS:
        raise UserError(f"unknown world {name[:40]!r}; there are {', '.join(WORLDS)}")
    module, _, attribute = WORLDS[name].partition(":")
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found  # type: ignore[return-value]

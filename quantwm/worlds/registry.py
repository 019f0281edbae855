"""World names and where their adapters live; an adapter is imported when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from quantwm.errors import UserError
from quantwm.worlds.base import Scene, Script, World, WorldSpec

Progress = Callable[[str, float], None]
"""(stage in words, fraction from 0 to 1)."""

OFFLOADS = ("auto", "none", "vae", "blocks")
_WAN = (
    "causal_forcing",
    "causal_forcing_framewise",
    "causal_forcing_long",
    "matrix_game2_universal",
    "matrix_game2_gta_drive",
    "matrix_game2_templerun",
    "lingbot_v2_1p3b",
    "lingbot_v2_14b",
    "hy_worldplay_wan5b",
    "hy_worldplay_wan5b_append",
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


@dataclass(frozen=True)
class Placement:
    """Where a large world's parts wait, and how its pictures are decoded.

    Attributes:
        offload: "blocks" keeps the transformer's blocks on the CPU and "vae" the autoencoder,
            each visiting the device for its work; "auto" does so where memory asks for it.
        tile: latent cells on a side of what the autoencoder decodes at once, 0 for whole frames.
        prompt: that will be the first, None for the world's own: where memory is short it is read
            before the transformer is loaded, and the text encoder released.
    """

    offload: str = "auto"
    tile: int = 0
    prompt: str | None = None

    def __post_init__(self) -> None:
        if self.offload not in OFFLOADS:
            raise UserError(f"offload is one of {', '.join(OFFLOADS)}, got {self.offload[:40]!r}")
        if isinstance(self.tile, bool) or not (self.tile == 0 or 16 <= self.tile <= 1024):
            raise UserError(f"a tile has 16 to 1024 latent cells a side, or 0, got {self.tile!r}")


class WorldModule(Protocol):
    """What the module behind a name offers, as functions."""

    def world_spec(self) -> WorldSpec: ...

    def world_scenes(self) -> Sequence[Scene]: ...

    def presence(self) -> Presence: ...

    def load_world(self, device: torch.device, progress: Progress | None) -> World: ...


def world_spec(name: str, size: tuple[int, int] | None = None) -> WorldSpec:
    """What a world is; nothing is loaded. UserError on an unknown name.

    size: width and height of another video that it was trained for.
    """
    return world_module(name, size).world_spec()


def world_scenes(name: str) -> Sequence[Scene]:
    """The start scenes that ship with a world; nothing is loaded."""
    return world_module(name).world_scenes()


def world_presence(name: str) -> Presence:
    """Whether a world's weights are here; nothing is loaded."""
    return world_module(name).presence()


def world_terms(name: str) -> str:
    """What a person must agree to before the weights are downloaded; "" where they are free."""
    found = getattr(world_module(name), "terms", None)
    return "" if found is None else found()


def world_prompts(name: str) -> tuple[str, ...]:
    """Prompts to begin with, the world's own first; () where a world takes none."""
    found = getattr(world_module(name), "prompts", None)
    return () if found is None else tuple(found())


def world_scripts(name: str) -> tuple[Script, ...]:
    """Action scripts that suit a world; () where there are none."""
    found = getattr(world_module(name), "scripts", None)
    return () if found is None else tuple(found())


def download_world(name: str, agreed: bool, progress: Progress | None = None) -> None:
    """Fetch a world's files; UserError where terms are not agreed to, or nothing is to be had."""
    found = getattr(world_module(name), "download", None)
    if found is None:
        raise UserError(f"the world {name} is not downloaded; it comes with the repository")
    found(agreed, progress)


def keep_weights_in(folder: Path | str) -> None:
    """Where downloaded worlds lie and are fetched to, instead of ~/.cache/quantwm."""
    from quantwm.worlds.wan.files import set_root

    set_root(folder)


def load_world(
    name: str,
    device: torch.device | str,
    progress: Progress | None = None,
    dtype: torch.dtype | None = None,
    placement: Placement | None = None,
) -> World:
    """Load a world's weights, checked against their hashes. UserError when that fails.

    dtype: to compute in, for a replay; None takes the world's own choice for the device.
    placement: what waits on the CPU and how pictures are decoded; small worlds have no choice.
    """
    module, device = world_module(name), torch.device(device)
    load_at = getattr(module, "load_world_at", None)
    if placement is not None and load_at is not None:
        return load_at(device, placement, progress)
    if placement not in (None, Placement()):
        raise UserError(f"the world {name} is small: it has nothing to offload and needs no tiles")
    load_as = getattr(module, "load_world_as", None)
    if dtype is None or load_as is None:
        world = module.load_world(device, progress)
    else:
        world = load_as(device, dtype, progress)
    if dtype not in (None, world.dtype):
        raise UserError(f"the world {name} computes in {world.dtype} on {device}, not in {dtype}")
    return world


def world_module(name: str, size: tuple[int, int] | None = None) -> WorldModule:
    """What stands behind a name. UserError on an unknown one, and on a size it does not run at."""
    if name not in WORLDS:
        raise UserError(f"unknown world {name[:40]!r}; there are {', '.join(WORLDS)}")
    path, _, attribute = WORLDS[name].partition(":")
    found = importlib.import_module(path)
    module = getattr(found, attribute) if attribute else found
    spec = None if size is None else module.world_spec()
    if spec is None or size == spec.video_size:
        return module  # type: ignore[return-value]
    if size not in spec.resolutions or not hasattr(module, "at"):
        sizes = ", ".join(f"{w}x{h}" for w, h in (spec.video_size, *spec.resolutions))
        raise UserError(f"{name} runs at {sizes}, not at {size[0]}x{size[1]}")
    return module.at(size)

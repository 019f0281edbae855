"""How the registry sees the embedded world before and while it is loaded."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quantwm.errors import UserError
from quantwm.worlds.base import Scene, Script, World, WorldSpec
from quantwm.worlds.embedded import adapter
from quantwm.worlds.embedded.scenes import list_scenes
from quantwm.worlds.embedded.scripts import list_scripts
from quantwm.worlds.embedded.weights import read_manifest
from quantwm.worlds.registry import Presence, Progress

FOLDER = "embedded"


def world_spec() -> WorldSpec:
    """Of the weights in assets/, or of the shipped sizes where there are none."""
    try:
        return adapter.world_spec(read_manifest(adapter.ASSETS / FOLDER).config)
    except UserError:
        return adapter.SPEC  # loading says what is wrong with the manifest


def world_scenes() -> Sequence[Scene]:
    """The start scenes in assets/."""
    return list_scenes(adapter.ASSETS / "scenes")


def scripts() -> Sequence[Script]:
    """The recorded action scripts in assets/."""
    return list_scripts(adapter.ASSETS / "scripts")


def presence() -> Presence:
    """Whether all weight files are there, with the sizes that the manifest gives."""
    folder = adapter.ASSETS / FOLDER
    try:
        manifest = read_manifest(folder)
    except UserError as error:
        return Presence(False, str(folder), 0, str(error))
    for name, size, _ in manifest.files:
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            problem = f"weight file {path} is missing or cut off; fetch the repository whole"
            return Presence(False, str(folder), manifest.bytes_total, problem)
    return Presence(True, str(folder), manifest.bytes_total)


def load_world(device: torch.device, progress: Progress | None) -> World:
    """Check and load the weights."""
    return adapter.load(device, progress=progress, assets=adapter.ASSETS)


def load_world_as(device: torch.device, dtype: torch.dtype, progress: Progress | None) -> World:
    """The same in a given dtype: a session replays in the one that it was made in, while the
    faster one of a CPU is found by timing and may come out otherwise on a busy machine."""
    return adapter.load(device, dtype, progress, adapter.ASSETS)

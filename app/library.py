"""The real backend: a world of the library, loaded once and shared by all visitors.

This is the only file of the page that asks the library to load or run something; which device and
which kernels is the library's decision.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from app import limits
from app.backend import LANES, Catalogue, LaneChoice, Progress, Settings
from app.controls import whole
from app.one_thread import OneThread, PinnedEngine
from quantwm.cli.common import names, pick_device
from quantwm.describe import session_info
from quantwm.engine import Engine
from quantwm.errors import UserError
from quantwm.lanes import lanes_for
from quantwm.session import SessionWriter
from quantwm.token_selection import QueryWatch, watched_layers
from quantwm.video import fit, has_pyav
from quantwm.worlds.base import World
from quantwm.worlds.registry import load_world, world_scenes, world_spec


class LibraryBackend:
    """Backend over one world.

    Args:
        world: a name that the library knows. lanes: names of formats, the first choice of lanes.
        device: where it runs. scene, seed, steps: what the page proposes; None takes the world's.

    Raises:
        UserError: unknown world, lane or scene; nothing is loaded to find out.
    """

    def __init__(
        self,
        world: str,
        lanes: Sequence[str],
        device: torch.device,
        *,
        scene: str | None = None,
        seed: int = 0,
        steps: int | None = None,
    ) -> None:
        spec = world_spec(world)
        lanes_for(spec, lanes)
        scenes = tuple(world_scenes(world))
        known = [known.name for known in scenes]
        if not known:
            raise UserError(_why_no_scenes(world))
        if scene is not None and scene not in known:
            raise UserError(f"unknown scene {scene[:40]!r}; choose one of {', '.join(known)}")
        offered = [*lanes, *(name for name in spec.format_settings if name not in lanes)]
        self._device = device
        self._thread = OneThread()
        self._world: World | None = None
        self._catalogue = Catalogue(
            world=spec,
            scenes=scenes,
            lanes=[LANES.get(name, LaneChoice(name, name, name, "")) for name in offered],
            chosen=tuple(lanes),
            steps=spec.default_steps[device.type] if steps is None else steps,
            seed=seed,
            scene=known[0] if scene is None else scene,
            device=str(device),
        )

    def catalogue(self) -> Catalogue:
        return self._catalogue

    def open(
        self, settings: Settings, picture: np.ndarray | None, progress: Progress
    ) -> PinnedEngine:
        watch = QueryWatch(watched_layers(self._catalogue.world.cache))
        inner = self._thread.run(lambda: self._open(settings, picture, progress, watch))
        return PinnedEngine(inner, self._thread, watch)

    def _open(
        self,
        settings: Settings,
        picture: np.ndarray | None,
        progress: Progress,
        watch: QueryWatch,
    ) -> Engine:
        spec = self._catalogue.world
        if self._world is None:
            self._world = load_world(
                spec.name, self._device, lambda stage, share: progress(stage, 0.7 * share)
            )
        progress("Setting up the caches", 0.7)
        engine = Engine(
            self._world,
            lanes_for(spec, settings.lanes),
            seed=settings.seed,
            scene=settings.scene if picture is None else None,
            image=None if picture is None else self._fitted(picture),
            mode=settings.mode,
            steps=settings.steps,
            watch=watch,
        )
        progress("Dreaming the first pictures", 0.85)
        return engine

    def record(
        self, folder: Path, settings: Settings, picture: np.ndarray | None, engine: PinnedEngine
    ) -> SessionWriter:
        start = None if picture is None else self._fitted(picture)
        return SessionWriter(
            folder, session_info(engine.inner), video=has_pyav(), start_picture=start
        )

    def _fitted(self, picture: np.ndarray) -> np.ndarray:
        """uint8 [H, W, 3] or [T, H, W, 3] -> uint8 [T, h, w, 3] at the world's size."""
        frames = picture if picture.ndim == 4 else picture[None]
        return np.stack([fit(frame, self._catalogue.world.video_size) for frame in frames])


def _why_no_scenes(world: str) -> str:
    if world == "embedded":
        return "assets/scenes is empty; fetch the repository whole"
    return (
        f"the page drives the world embedded; {world} needs published weights that do not come "
        "with the repository (docs/models.md)"
    )


def make_backend(flags: argparse.Namespace) -> LibraryBackend:
    """The backend that the command line of app.py asks for.

    Raises:
        UserError: a flag that does not fit.
    """
    return LibraryBackend(
        flags.world,
        names(flags.lanes),
        pick_device(flags.device),
        scene=flags.scene,
        seed=whole(flags.seed, "--seed", 0, limits.MAX_SEED),
        steps=None
        if flags.steps is None
        else whole(flags.steps, "--steps", 1, limits.MAX_DENOISING_STEPS),
    )

"""The real backend: worlds of the library, one loaded at a time and shared by all visitors.

This is the only file of the page that asks the library to load or run something; which device and
which kernels is the library's decision.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from app import limits
from app.address import is_loopback
from app.backend import Catalogue, Progress, Settings, WorldCard, methods
from app.controls import whole
from app.offers import WorldOffers
from app.one_thread import OneThread, PinnedEngine
from quantwm.cli.common import names, pick_device
from quantwm.describe import session_info
from quantwm.engine import Engine
from quantwm.errors import UserError
from quantwm.lanes import lanes_for
from quantwm.memory import free_bytes
from quantwm.session import SessionWriter
from quantwm.token_selection import QueryWatch, watched_layers
from quantwm.video import fit, has_pyav
from quantwm.worlds.base import World, WorldSpec
from quantwm.worlds.registry import Placement, download_world, keep_weights_in, load_world
from quantwm.worlds.room import world_room


class LibraryBackend:
    """Backend over the library's worlds, one of them in memory at a time.

    Args:
        world: the one that the page proposes. lanes: names of formats, the first choice of lanes.
        device: where it runs. scene, seed, steps: what the page proposes; None takes the world's.
        placement: what of a large world waits on the CPU. downloads: whether visitors may fetch
            worlds onto this machine.

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
        placement: Placement | None = None,
        downloads: bool = True,
    ) -> None:
        self.downloads = downloads
        self._device, self._placement = device, placement or Placement()
        self._thread = OneThread()
        self._world: World | None = None
        self._offers = WorldOffers(world, tuple(lanes), device, scene=scene, seed=seed, steps=steps)

    def worlds(self) -> Sequence[WorldCard]:
        return self._offers.cards()

    def catalogue(self, world: str = "") -> Catalogue:
        return self._offers.catalogue(world)

    def fits_beside(self, world: str) -> bool:
        """Whether the free memory takes the world's weights and its leanest lane."""
        free = free_bytes(self._device)
        lanes = methods(self._offers.catalogue(world).chosen)
        room = world_room(world, lanes, self._device)
        return free is None or min(room.total((lane,)) for lane in lanes) <= free

    def load(self, world: str, progress: Progress) -> None:
        self._thread.run(lambda: self._load(world, progress))

    def _load(self, world: str, progress: Progress) -> World:
        """The world in memory. A failure leaves the one before, unless it had to make room."""
        if self._world is not None and self._world.spec.name == world:
            return self._world
        spec = self._offers.catalogue(world).world
        if self._world is not None and not self.fits_beside(spec.name):
            self._forget()
        placement = None if spec.name == "embedded" else self._placement
        loaded = load_world(spec.name, self._device, progress, placement=placement)
        self._forget()
        self._world = loaded
        return loaded

    def _forget(self) -> None:
        self._world = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def download(self, world: str, agreed: bool, progress: Progress) -> None:
        if not self.downloads:
            raise UserError(
                "this server fetches no worlds for visitors; its owner starts it with --downloads"
            )
        download_world(world, agreed, progress)
        self._offers.forget()

    def open(
        self, settings: Settings, picture: np.ndarray | None, progress: Progress
    ) -> PinnedEngine:
        catalogue = self._offers.catalogue(settings.world)
        watch = QueryWatch(watched_layers(catalogue.world.cache))
        inner = self._thread.run(lambda: self._open(settings, picture, progress, watch))
        return PinnedEngine(inner, self._thread, watch)

    def _open(
        self,
        settings: Settings,
        picture: np.ndarray | None,
        progress: Progress,
        watch: QueryWatch,
    ) -> Engine:
        catalogue = self._offers.catalogue(settings.world)
        world, spec = self._load(catalogue.world.name, progress), catalogue.world
        progress("Setting up the caches", 0.0)
        if hasattr(world, "report"):
            world.report = progress
        return Engine(
            world,
            lanes_for(spec, methods(settings.lanes)),
            seed=settings.seed,
            scene=settings.scene if picture is None else None,
            image=None if picture is None else self._fitted(picture, spec),
            prompt=settings.prompt,
            mode=settings.mode,
            steps=settings.steps,
            watch=watch,
        )

    def record(
        self, folder: Path, settings: Settings, picture: np.ndarray | None, engine: PinnedEngine
    ) -> SessionWriter:
        spec = self._offers.catalogue(settings.world).world
        start = None if picture is None else self._fitted(picture, spec)
        info = self._thread.run(lambda: session_info(engine.inner))
        return SessionWriter(folder, info, video=has_pyav(), start_picture=start)

    def _fitted(self, picture: np.ndarray, spec: WorldSpec) -> np.ndarray:
        """uint8 [H, W, 3] or [T, H, W, 3] -> uint8 [T, h, w, 3] at the world's size."""
        frames = picture if picture.ndim == 4 else picture[None]
        return np.stack([fit(frame, spec.video_size) for frame in frames])


def make_backend(flags: argparse.Namespace) -> LibraryBackend:
    """The backend that the command line of app.py asks for.

    Raises:
        UserError: a flag that does not fit.
    """
    if flags.weights is not None:
        keep_weights_in(flags.weights)
    return LibraryBackend(
        flags.world,
        names(flags.lanes),
        pick_device(flags.device),
        scene=flags.scene,
        seed=whole(flags.seed, "--seed", 0, limits.MAX_SEED),
        steps=None
        if flags.steps is None
        else whole(flags.steps, "--steps", 1, limits.MAX_DENOISING_STEPS),
        placement=Placement(flags.offload, whole(flags.tile, "--tile", 0, 1024)),
        downloads=flags.downloads or (is_loopback(flags.host) and not flags.share),
    )

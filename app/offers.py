"""What the library's worlds offer a visitor: a card each for the picker, and a catalogue."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch

from app.backend import LANES, Catalogue, LaneChoice, WorldCard, page_name
from quantwm.cache import FORMATS
from quantwm.errors import UserError
from quantwm.lanes import CPU_MAX_TOKENS, lanes_for
from quantwm.worlds.base import WorldSpec
from quantwm.worlds.registry import (
    WORLDS,
    world_presence,
    world_prompts,
    world_scenes,
    world_scripts,
    world_spec,
    world_terms,
)
from quantwm.worlds.room import Fit, fit

LOOK_SECONDS = 5.0
"""How long what lies on the disk is believed: the picker asks every second while it waits."""


class WorldOffers:
    """Cards and catalogues; nothing is loaded.

    Raises:
        UserError: the proposed world, lanes or scene do not exist.
    """

    def __init__(
        self,
        world: str,
        lanes: tuple[str, ...],
        device: torch.device,
        *,
        scene: str | None,
        seed: int,
        steps: int | None,
    ) -> None:
        self._world, self._lanes, self._device = world, lanes, device
        self._scene, self._seed, self._steps = scene, seed, steps
        self._lock = threading.Lock()
        self._catalogues: dict[str, Catalogue] = {}
        self._fits: dict[str, Fit] = {}
        self._cards: list[WorldCard] = []
        self._looked = float("-inf")
        lanes_for(world_spec(world), lanes)
        self.catalogue(world)

    def catalogue(self, world: str = "") -> Catalogue:
        name = world or self._world
        with self._lock:
            if name not in self._catalogues:
                self._catalogues[name] = self._make_catalogue(name)
            return self._catalogues[name]

    def cards(self) -> Sequence[WorldCard]:
        with self._lock:
            if time.monotonic() - self._looked > LOOK_SECONDS:
                names = sorted(WORLDS, key=lambda name: name != self._world)
                self._cards = [self._make_card(name) for name in names]
                self._looked = time.monotonic()
            return self._cards

    def forget(self) -> None:
        """Look at the disk again next time."""
        with self._lock:
            self._looked = float("-inf")

    def _fit(self, name: str) -> Fit:
        if name not in self._fits:
            self._fits[name] = fit(name, self._lanes, self._device)
        return self._fits[name]

    def _make_catalogue(self, name: str) -> Catalogue:
        spec, proposed = world_spec(name), name == self._world
        scenes, prompts = tuple(world_scenes(name)), world_prompts(name)
        known = [scene.name for scene in scenes]
        if not known and not prompts:
            raise UserError("assets/scenes is empty; fetch the repository whole")
        scene = self._scene if proposed else None
        if scene is not None and scene not in known:
            raise UserError(f"unknown scene {scene[:40]!r}; choose one of {', '.join(known)}")
        known_lanes = [*FORMATS, *(name for name in LANES if name not in FORMATS)]
        proposed_lanes = [page_name(lane) for lane in self._lanes]
        offered = [*proposed_lanes, *(name for name in known_lanes if name not in proposed_lanes)]
        first = known[0] if known else None
        return Catalogue(
            world=spec,
            scenes=scenes,
            lanes=[LANES.get(lane, LaneChoice(lane, lane, lane, "")) for lane in offered],
            chosen=tuple(page_name(lane) for lane in self._fit(name).lanes or self._lanes),
            steps=self._steps
            if proposed and self._steps is not None
            else spec.default_steps[self._device.type],
            seed=self._seed,
            scene=first if scene is None else scene,
            device=str(self._device),
            accepts_picture=bool(scenes),
            prompts=prompts,
            scripts=world_scripts(name),
        )

    def _slow(self, spec: WorldSpec) -> str | None:
        """A CPU keeps fewer tokens than one chunk of a large world has."""
        least = (spec.policy.sink_frames + 2 * spec.cache.frames_per_chunk) * (
            spec.cache.tokens_per_frame
        )
        if self._device.type != "cpu" or least <= CPU_MAX_TOKENS:
            return None
        title = spec.title.partition(":")[0]
        return f"{title} is made for a GPU: on a CPU its history and a chunk do not fit"

    def _make_card(self, name: str) -> WorldCard:
        spec, presence, fitting = world_spec(name), world_presence(name), self._fit(name)
        title, _, note = spec.title.partition(": ")
        return WorldCard(
            name=name,
            title=title,
            note=note,
            licence=spec.licence,
            source=spec.source,
            terms=world_terms(name),
            weight_bytes=presence.weight_bytes,
            needed=fitting.needed,
            capacity=fitting.capacity,
            present=presence.present,
            problem=presence.problem,
            advice=fitting.advice or self._slow(spec),
            lanes=tuple(page_name(lane) for lane in fitting.lanes),
            offloads=fitting.offload,
        )

"""Which rollouts the report needs: scenes, seeds and scripts, by experiment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from quantwm.metrics.learned import SMALLEST_LPIPS, missing_for_lpips
from quantwm.report.jobs import Job, script
from quantwm.report.scale import SCRIPTS, SLOW_TURN, STILL, Scale
from quantwm.report.variants import ABLATION, ALL, FLOOR, METHODS, ROLES, SWEEPS, Variant, known
from quantwm.worlds.base import World

RECORDED = "attention"
"""The experiment whose BF16 rollouts are recorded and studied."""
LARGER = "larger"
"""The experiment at the larger of two resolutions."""
SHEET_FRAMES = 7
"""Pictures of a run in a contact sheet."""


@dataclass(frozen=True)
class Unit:
    """One "scene" of the report: a start scene, a seed of the noise and a script of keys."""

    scene: str | None
    seed: int
    script: str

    @property
    def label(self) -> str:
        walk = SCRIPTS.index(self.script) + 1
        return f"{self.scene or 'picture'}, seed {self.seed}, walk {walk}"


def units_of(world: World, scale: Scale) -> list[Unit]:
    """All of them, in an order whose beginning has as many start scenes as possible."""
    scenes: Sequence[str | None] = [scene.name for scene in world.scenes()] or [None]
    scenes = scenes[: scale.scenes]
    picked = product(SCRIPTS[: scale.scripts], range(scale.seeds), scenes)
    units = [Unit(scene, seed, text) for text, seed, scene in picked]
    missing = scale.scenes * scale.seeds * scale.scripts - len(units)
    # a world with fewer start scenes gets more seeds, so that the intervals keep their meaning
    extra = (Unit(scenes[i % len(scenes)], scale.seeds + i, SCRIPTS[0]) for i in range(missing))
    return [*units, *extra]


def standing_units(world: World, scale: Scale) -> list[Unit]:
    """Of clips whose keys are given, where a walk tells nothing apart: a seed and a start scene."""
    scenes = list(dict.fromkeys(unit.scene for unit in units_of(world, scale)))
    count, each = scale.flicker_scenes, len(scenes)
    return [Unit(scenes[i % each], i // each, SCRIPTS[0]) for i in range(count)]


def rollout_jobs(world: World, scale: Scale) -> list[Job]:
    """Every rollout but those on true episodes, the most wanted first: time may run out."""
    units, few = units_of(world, scale), few_of(scale)
    compared = (ALL["qvg"], ALL["quantwm"])
    swept, measured = (ALL["quantwm"], *SWEEPS), (FLOOR, *METHODS)
    flicker = standing_units(world, scale)
    return [
        *_jobs(world, "main", units, measured, scale.chunks, scale.contact_sheets),
        *_jobs(world, "short", units, (*compared, *ROLES, *ABLATION), scale.short_chunks, 1),
        *_jobs(world, "still", flicker, few, scale.flicker_chunks, 1),
        *_jobs(world, "turn", flicker, few, scale.flicker_chunks, 1),
        *_jobs(world, "minute", units[: scale.minute_scenes], few, scale.minute_chunks),
        *_jobs(world, "taught", units, measured, scale.taught, mode="teacher"),
        *_jobs(world, "sweep", units[: scale.sweep_scenes], swept, scale.sweep_chunks, 1),
        *_larger_jobs(world, units, measured, scale),
    ]


def larger_size(world: World) -> tuple[int, int] | None:
    """The largest of a world's resolutions; None where its own is that."""
    own = world.spec.video_size
    most = max((own, *world.spec.resolutions), key=lambda size: size[0] * size[1])
    return None if most == own else most


def _larger_jobs(
    world: World, units: Sequence[Unit], variants: Sequence[Variant], scale: Scale
) -> list[Job]:
    """Free runs at the larger resolution, as long as the teacher-forced ones."""
    size = larger_size(world)
    if size is None:
        return []
    jobs = _jobs(world, LARGER, units, variants, scale.taught, 1)
    return [replace(job, size=size) for job in jobs]


def few_of(scale: Scale) -> tuple[Variant, ...]:
    """The methods of the flicker, minute and revisit runs."""
    return tuple(v for v in (FLOOR, *METHODS) if not scale.few or v.name in scale.few)


def latency_job(world: World, scale: Scale) -> Job:
    """All methods in one rollout, to be timed while nothing else uses the device."""
    unit = units_of(world, scale)[0]
    return _jobs(world, "latency", [unit], METHODS, scale.timed_chunks)[0]


def recording_jobs(world: World, scale: Scale) -> list[Job]:
    """BF16 rollouts whose queries, keys and values are kept."""
    units = units_of(world, scale)[: scale.recorded_scenes]
    return _jobs(world, RECORDED, units, (), scale.recorded_chunks)


def studied() -> tuple[str, ...]:
    """The formats that recordings are encoded with, by name."""
    return tuple(variant.name for variant in known((*METHODS, *ROLES, *ABLATION)))


def _jobs(
    world: World,
    experiment: str,
    units: Sequence[Unit],
    variants: Sequence[Variant],
    chunks: int,
    sheets: int = 0,
    mode: str = "free",
) -> list[Job]:
    if chunks == 0:
        return []
    frames = chunks * world.spec.cache.frames_per_chunk * world.spec.frames_per_latent
    if experiment == "minute":
        sheets = 1
    keep = tuple(np.linspace(0, frames - 1, min(SHEET_FRAMES, frames)).round().astype(int).tolist())
    return [
        Job(
            experiment=experiment,
            label=unit.label,
            scene=unit.scene,
            seed=unit.seed,
            actions=script(_text(experiment, unit, chunks, world), chunks, world),
            lanes=tuple(variant.name for variant in known(variants)),
            mode=mode,
            keep=keep if number < sheets else (),
            consistency=experiment in ("main", "still", "turn", "minute"),
            lpips=experiment == "main" and has_lpips(world),
        )
        for number, unit in enumerate(units)
    ]


def has_lpips(world: World) -> bool:
    """Whether LPIPS can be measured: its weights are here, and the pictures are large enough."""
    return min(world.spec.video_size) >= SMALLEST_LPIPS and missing_for_lpips() is None


def _text(experiment: str, unit: Unit, chunks: int, world: World) -> str:
    if experiment == "still":
        return STILL
    if experiment == "turn":
        return SLOW_TURN
    frames = chunks * world.spec.cache.frames_per_chunk
    return ", ".join([unit.script] * (1 + frames // 88))

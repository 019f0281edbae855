"""The rollouts behind docs/beyond.md: which ones, and what they come to, lane by lane."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from quantwm.evaluation.episodes import Episode
from quantwm.metrics import WINDOWS, frames_of
from quantwm.report import plan, revisit
from quantwm.report.jobs import Job, JobResult, LaneSeries, script
from quantwm.report.numbers import (
    Figure,
    bytes_of,
    figure,
    paired,
    psnr_of,
    series_of,
    windows_of,
)
from quantwm.report.scale import PRESETS, SLOW_TURN, STILL, Scale
from quantwm.worlds.base import World

MODES = {"free": "free", "taught": "teacher"}
MOTIONS = {"standing still": STILL, "turning, 7.5 degrees a frame": SLOW_TURN}
"""Beside the walks, which the taught runs are of."""
WALKS = "walking and turning"


def scale_of(scenes: int, revisits: int) -> Scale:
    """The report's full scale with as many scenes as were asked for."""
    seeds = 2 if scenes > 8 else 1
    scripts = 2 if scenes > 16 else 1
    wanted = -(-scenes // (seeds * scripts))
    full = PRESETS["full"]
    return replace(full, scenes=wanted, seeds=seeds, scripts=scripts, revisits=revisits)


def jobs_of(
    world: World, scale: Scale, scenes: int, chunks: Mapping[str, int],
    lanes: Mapping[str, tuple[str, ...]],
) -> list[Job]:  # fmt: skip
    """Free and taught rollouts of every scene, and taught ones of the other motions.

    chunks, lanes: of "free", "taught" and "motion"; 0 chunks for none.
    """
    jobs = []
    units = plan.units_of(world, scale)[:scenes]
    for unit in units:
        for name, mode in MODES.items():
            if chunks[name]:
                frames = chunks[name] * world.spec.cache.frames_per_chunk
                text = ", ".join([unit.script] * (1 + frames // 88))
                actions = script(text, chunks[name], world)
                own = (unit.label, unit.scene, unit.seed, actions, lanes[name], mode)
                jobs.append(Job(name, *own))
    for motion, text in MOTIONS.items():
        for unit in units[:8] if chunks["motion"] else ():
            actions = script(text, chunks["motion"], world)
            own = (unit.label, unit.scene, unit.seed, actions, lanes["motion"], "teacher")
            jobs.append(Job(f"motion: {motion}", *own))
    return jobs


def recalls(
    world: World, episodes: Sequence[Episode], lanes: tuple[str, ...]
) -> list[Job]:  # fmt: skip
    """Rollouts along true episodes that come back to where they began, with the whole history."""
    found = revisit.revisit_jobs(world, episodes, ())
    return [replace(job, lanes=lanes) for job in found if job.experiment == "revisit-whole"]


def of_experiment(results: Sequence[JobResult], experiment: str) -> list[JobResult]:
    return [result for result in results if result.job.experiment == experiment]


def fidelity(
    results: Sequence[JobResult], experiment: str, lanes: Sequence[str], fps: float
) -> dict[str, Any]:
    """Per lane: bytes, windows, and the difference to QuantWM scene by scene."""
    base = series_of(results, experiment, "quantwm")
    found: dict[str, Any] = {}
    for lane in lanes:
        series = series_of(results, experiment, lane)
        if not series:
            continue
        found[lane] = bytes_of(series) | {
            "scenes": len(series),
            "windows": windows_of(series, fps),
            "whole": figure([psnr_of(s, slice(None)) for s in series]),
            "held": _held(series, fps),
        }
        if base and lane != "quantwm":
            found[lane]["over_quantwm"] = _differences(series, base, fps)
    return found


def _held(series: Sequence[LaneSeries], fps: float) -> dict[str, float]:
    """Bytes held as each window that the rollouts reach ends, and at their end; means."""
    frames = min(len(s.mse) for s in series)
    chunks = min(len(s.held) for s in series)
    parts = {w.name: frames_of(w, fps, frames) for w in WINDOWS} | {"whole": slice(0, frames)}
    return {
        name: fmean(s.held[(part.stop - 1) * chunks // frames] for s in series)
        for name, part in parts.items()
        if part.stop > part.start
    }


def _differences(
    series: Sequence[LaneSeries], base: Sequence[LaneSeries], fps: float
) -> dict[str, Figure | None]:
    """PSNR of a lane minus QuantWM's, of the same scene, per window and over all frames."""
    frames = min((len(s.mse) for s in (*series, *base)), default=0)
    parts = {window.name: frames_of(window, fps, frames) for window in WINDOWS}
    parts["whole"] = slice(0, frames)
    return {
        name: paired(series, base, lambda s, part=part: psnr_of(s, part))
        for name, part in parts.items()
        if part.stop > part.start
    }


def motions(results: Sequence[JobResult], lanes: Sequence[str]) -> dict[str, Any]:
    """Taught PSNR of each lane by motion, over as many chunks as the shortest has."""
    groups = {motion: of_experiment(results, f"motion: {motion}") for motion in MOTIONS}
    if not any(groups.values()):
        return {}
    groups[WALKS] = of_experiment(results, "taught")
    frames = min(
        len(series.mse) for found in groups.values() for r in found for series in r.series.values()
    )
    first = slice(0, frames)
    table: dict[str, Any] = {}
    for motion, found in groups.items():
        series = {lane: [r.series[lane] for r in found if lane in r.series] for lane in lanes}
        if not found or not all(series.values()):
            continue
        table[motion] = {
            "frames": frames,
            "scenes": len(found),
            "psnr": {
                lane: figure([psnr_of(s, first) for s in own]) for lane, own in series.items()
            },
            "over_quantwm": {
                lane: paired(own, series["quantwm"], lambda s: psnr_of(s, first))
                for lane, own in series.items()
                if lane != "quantwm" and "quantwm" in series
            },
        }
    return table

"""`beyond`: the evidence for qtc in one command: recorded tensors, rollouts, recall, intervals."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import beyond_study
from benchmarks.timing import device_named, hardware
from quantwm.cache.formats import split_methods
from quantwm.errors import UserError
from quantwm.metrics import WINDOWS, frames_of
from quantwm.report import plan, revisit
from quantwm.report.jobs import Job, JobResult, LaneSeries, run_job, script
from quantwm.report.numbers import (
    Figure,
    bytes_of,
    figure,
    mean_of,
    paired,
    psnr_of,
    series_of,
    windows_of,
)
from quantwm.report.pool import Task, WorldSource, reasons, run_tasks, task_of, whole
from quantwm.report.scale import PRESETS
from quantwm.report.variants import BEYOND
from quantwm.worlds.base import World

LANES = tuple(variant.name for variant in BEYOND)
MODES = {"free": "free", "taught": "teacher"}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("runs/beyond"), help="folder to write to")
    parser.add_argument("--scenes", type=int, default=32, help="start scenes x seeds x walks")
    parser.add_argument("--chunks", type=int, default=22, help="of a free run; 22 are 10 s")
    parser.add_argument("--taught", type=int, default=8, help="chunks of a teacher-forced run")
    parser.add_argument("--revisits", type=int, default=8, help="true episodes of each kind")
    parser.add_argument("--recorded", type=int, default=24, help="chunks recorded; 0 for none")
    parser.add_argument("--tensors", type=Path, nargs="*", default=[], help="more recordings")
    parser.add_argument("--methods", help="of the recordings, instead of all")
    parser.add_argument("--lanes", default="quantwm,qtc-small,qtc", help="of the free runs")
    parser.add_argument("--few", default="quantwm,qtc", help="of the taught runs and the recall")
    parser.add_argument("--truth", type=Path, default=Path("assets/truth"))
    parser.add_argument("--random", help="preset of random weights instead of the shipped ones")
    parser.add_argument("--processes", type=int, help="that share the device; 10 on a GPU")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing after")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def run(options: argparse.Namespace) -> dict[str, Any]:
    began, device = time.time(), device_named(options.device)
    lanes, few = _lanes(options.lanes), _lanes(options.few)
    source = WorldSource(random_preset=options.random)
    world = source.load(device)
    wanted = split_methods(options.methods) if options.methods else beyond_study.METHODS
    methods, missing = beyond_study.known_methods(wanted)
    processes = options.processes or (10 if device.type == "cuda" else 1)
    with tempfile.TemporaryDirectory(prefix="quantwm-beyond-") as folder:
        files = {path.name: path for path in options.tensors}
        if options.recorded:
            files["the world's own"] = beyond_study.record(world, Path(folder), options.recorded)
        studies = [(name, method) for name in files for method in methods]
        episodes, jobs = _jobs(world, options, {"free": lanes, "taught": few})
        tasks: list[Task[Any]] = [
            task_of(beyond_study.study_method, files[name], method) for name, method in studies
        ]
        tasks += [task_of(run_job, job) for job in jobs]
        stop = began + options.seconds
        finished = run_tasks(tasks, world, source, processes, stop, _say)
    for reason in reasons(finished):
        _say(f"failed: {reason}")
    done = whole(finished)
    rows = [(n, row) for (n, _), row in zip(studies, done[: len(studies)], strict=True) if row]
    rollouts = [found for found in done[len(studies) :] if found is not None]
    result = {
        "benchmark": "beyond",
        "weights": world.weights_sha256() if options.random is None else "random",
        "hardware": hardware(device),
        "steps": world.spec.default_steps[device.type],
        "missing_methods": missing,
        "not_begun": sum(found is None for found in done),
        "study": {name: [row for n, row in rows if n == name] for name in files},
        "free": _fidelity(rollouts, "free", lanes, world.spec.fps),
        "taught": _fidelity(rollouts, "taught", few, world.spec.fps),
        "recall": revisit.recall(world, episodes, _of(rollouts, "revisit-whole")),
        "seconds": round(time.time() - began, 1),
    }
    _write(options.out, result)
    return result


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _of(results: Sequence[JobResult], experiment: str) -> list[JobResult]:
    return [result for result in results if result.job.experiment == experiment]


def _lanes(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not set(names) <= set(LANES):
        raise UserError(f"--lanes and --few take {', '.join(LANES)}, got {text}")
    return names


def _jobs(
    world: World, options: argparse.Namespace, lanes: dict[str, tuple[str, ...]]
) -> tuple[list[Any], list[Job]]:
    """Rollouts by turns, free and taught, so that a limit on time takes scenes from both."""
    scale = _scale(options)
    jobs = []
    for unit in plan.units_of(world, scale)[: options.scenes]:
        for name, chunks in (("free", options.chunks), ("taught", options.taught)):
            if chunks:
                frames = chunks * world.spec.cache.frames_per_chunk
                text = ", ".join([unit.script] * (1 + frames // 88))
                actions = script(text, chunks, world)
                own = (unit.label, unit.scene, unit.seed, actions, lanes[name], MODES[name])
                jobs.append(Job(name, *own))
    episodes = revisit.load_tasks(options.truth, scale, world) if options.revisits else []
    recalls = revisit.revisit_jobs(world, episodes, ())
    few = lanes["taught"]
    jobs += [replace(job, lanes=few) for job in recalls if job.experiment == "revisit-whole"]
    return episodes, jobs


def _scale(options: argparse.Namespace) -> Any:
    """The report's full scale with as many scenes as were asked for."""
    seeds = 2 if options.scenes > 8 else 1
    scripts = 2 if options.scenes > 16 else 1
    scenes = -(-options.scenes // (seeds * scripts))
    full = PRESETS["full"]
    return replace(full, scenes=scenes, seeds=seeds, scripts=scripts, revisits=options.revisits)


def _fidelity(
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
            "ms": mean_of([mean_of(s.ms[len(s.ms) // 2 :]) for s in series]),
        }
        if base and lane != "quantwm":
            found[lane]["over_quantwm"] = _differences(series, base, fps)
    return found


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


def _write(folder: Path, result: dict[str, Any]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "beyond.json").write_text(json.dumps(result, indent=1))
        (folder / "beyond.txt").write_text(table(result) + "\n")
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror or error}") from error


def _interval(found: Figure | None, digits: int = 2) -> str:
    if found is None or found["mean"] is None:
        return "-"
    return f"{found['mean']:.{digits}f} [{found['low']:.{digits}f}, {found['high']:.{digits}f}]"


def table(result: dict[str, Any]) -> str:
    head = result["hardware"]["device"]
    lines = [
        f"{head}, torch {result['hardware']['torch']}, weights {result['weights'][:12]}, "
        f"{result['steps']} steps, {result['seconds']} s"
    ]
    if result["missing_methods"] or result["not_begun"]:
        lines.append(
            f"not there: {', '.join(result['missing_methods']) or 'nothing'}; "
            f"not begun for want of time: {result['not_begun']}"
        )
    for name, rows in result["study"].items():
        lines += beyond_study.study_table(f"q, k, v of {name}", rows)
    for mode in MODES:
        lines += _fidelity_table(mode, result[mode])
    for row in result["recall"]:
        lines.append(
            f"  {row['task']:44} {row['lane']:14} {_interval(row['psnr'])} dB to the truth, cosine "
            f"{_interval(row['cosine'], 3)}"
        )
    return "\n".join(lines)


def _fidelity_table(mode: str, lanes: dict[str, Any]) -> list[str]:
    lines = [f"{mode}: PSNR to BF16 in dB, SSIM, excess flicker in grey levels; mean [95 %]"]
    for lane, row in lanes.items():
        ratio = f"{row['ratio']:.2f}x" if row["ratio"] else "-"
        lines.append(
            f"  {lane}: {row['scenes']} scenes, {row['kv_bytes'] / 1e6:.2f} MB ({ratio} nominal, "
            f"{row['resident_ratio']:.2f}x resident), whole run {_interval(row['whole'])}, "
            f"{row['ms']:.0f} ms a chunk"
        )
        over = row.get("over_quantwm", {})
        for window in row["windows"]:
            gain = over.get(window["window"])
            more = f", over quantwm {_interval(gain)}" if gain else ""
            lines.append(
                f"      {window['window']:7} {window['label']:8} {_interval(window['psnr']):24} "
                f"SSIM {_interval(window['ssim'], 3):24} flicker {_interval(window['excess'])}"
                f"{more}"
            )
    return lines

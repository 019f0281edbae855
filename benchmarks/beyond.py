"""`beyond`: the evidence for qtc in one command: recorded tensors, rollouts, recall, intervals."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import beyond_rollouts as rollouts
from benchmarks import beyond_study, beyond_text
from benchmarks.timing import device_named, hardware
from quantwm.cache.formats import split_methods
from quantwm.errors import UserError
from quantwm.report import revisit
from quantwm.report.jobs import JobResult
from quantwm.report.pool import Task, Workers, WorldSource, reasons, task_of, whole
from quantwm.report.schedule import Size
from quantwm.report.together import batches, run_jobs
from quantwm.report.variants import BEYOND
from quantwm.worlds.base import World

LANES = tuple(variant.name for variant in BEYOND)
OWN = "the world's own"
SAVING = 30.0
"""Seconds between two writings of what is there so far."""
LONG = ("layers", "resident_bits")
"""Of a method's study, what is too much for a last line."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("runs/beyond"), help="folder to write to")
    parser.add_argument("--scenes", type=int, default=32, help="start scenes x seeds x walks")
    parser.add_argument("--chunks", type=int, default=22, help="of a free run; 22 are 10 s")
    parser.add_argument("--taught", type=int, default=8, help="chunks of a teacher-forced run")
    parser.add_argument("--motion", type=int, default=8, help="chunks of each other motion")
    parser.add_argument("--revisits", type=int, default=8, help="true episodes of each kind")
    parser.add_argument("--recorded", type=int, default=20, help="chunks recorded; 0 for none")
    parser.add_argument("--tensors", type=Path, nargs="*", default=[], help="more recordings")
    parser.add_argument("--methods", help="of the recordings, instead of all")
    parser.add_argument(
        "--lanes", default="quantwm,quantwm-half,qtc-small,qtc,qtc-large", help="of the free runs"
    )
    parser.add_argument(
        "--few",
        default="quantwm,quantwm-corrected,quantwm-half,quantwm-half-corrected,qtc,qtc-large",
        help="of the taught runs; other motions and recall take quantwm and qtc alone",
    )
    parser.add_argument("--truth", type=Path, default=Path("assets/truth"))
    parser.add_argument("--random", help="preset of random weights instead of the shipped ones")
    parser.add_argument("--processes", type=int, help="that share the device; 12 on a GPU")
    parser.add_argument("--together", type=int, default=8, help="rollouts in one pass")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="measure no longer")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--read", type=Path, help="a beyond.json; nothing is measured again")
    parser.add_argument("--docs", type=Path, help="put the tables between this page's markers")


def run(options: argparse.Namespace) -> dict[str, Any]:
    result = _read(options.read) if options.read else _measured(options)
    if not options.read:
        _write(options.out, result)
    if options.docs:
        beyond_text.put_into(options.docs, result)
    return slim(result)


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    began, device = time.time(), device_named(options.device)
    lanes = {"free": lanes_named(options.lanes), "taught": lanes_named(options.few)}
    lanes["motion"] = tuple(n for n in lanes["taught"] if n in ("quantwm", "qtc"))
    source = WorldSource(random_preset=options.random)
    wanted = split_methods(options.methods) if options.methods else beyond_study.METHODS
    methods, missing = beyond_study.known_methods(wanted)
    processes = options.processes or (12 if device.type == "cuda" else 1)
    scale = rollouts.scale_of(options.scenes, options.revisits)
    with (
        tempfile.TemporaryDirectory(prefix="quantwm-beyond-") as folder,
        Workers(source, [device], processes) as workers,
    ):
        world = workers.world
        episodes = revisit.load_tasks(options.truth, scale, world) if options.revisits else []
        files = {path.name: path for path in options.tensors}
        if options.recorded:
            files[OWN] = beyond_study.record(world, Path(folder), options.recorded)
        studies = [
            (name, method)
            for name in files
            for method in methods
            if beyond_study.suits(method, name == OWN)
        ]
        chunks = {"free": options.chunks, "taught": options.taught, "motion": options.motion}
        jobs = rollouts.jobs_of(world, scale, options.scenes, chunks, lanes)
        jobs += rollouts.recalls(world, episodes, lanes["motion"])
        # The longest first, so that no process is left with one of them at the end.
        groups = sorted(batches(jobs, options.together), key=_work, reverse=True)
        deadline = began + options.seconds
        tasks: list[Task[Any]] = [task_of(run_jobs, group, deadline) for group in groups]
        tasks += [task_of(beyond_study.study_method, files[n], m, n == OWN) for n, m in studies]
        sizes = [Size(group[0].experiment, _work(group)) for group in groups]
        sizes += [Size("study", 1.0)] * len(studies)
        _say(f"{len(tasks)} tasks in {processes} processes, {time.time() - began:.0f} s")

        def result(done: Sequence[Any]) -> dict[str, Any]:
            found: list[JobResult] = [r for batch in done[: len(groups)] for r in batch or ()]
            rows = zip(studies, done[len(groups) :], strict=True)
            of_methods = [(name, row) for (name, _), row in rows if row]
            told = {"methods": missing, "lanes": lanes, "files": list(files), "began": began}
            return _reduced(world, options, told, found, of_methods, episodes) | {
                "not_begun": sum(one is None for one in done)
            }

        saved = time.time()

        def seen(results: Mapping[int, Any]) -> None:
            nonlocal saved
            if time.time() - saved >= SAVING:
                _write(options.out, result(whole([results.get(i) for i in range(len(tasks))])))
                saved = time.time()

        finished = workers.run(tasks, deadline, _say, sizes=sizes, seen=seen)
        for reason in reasons(finished):
            _say(f"failed: {reason}")
        return result(whole(finished))


def _reduced(
    world: World,
    options: argparse.Namespace,
    told: dict[str, Any],
    found: Sequence[JobResult],
    rows: Sequence[tuple[str, Any]],
    episodes: Any,
) -> dict[str, Any]:
    """The document: what rollouts and studies come to."""
    lanes = told["lanes"]
    return {
        "benchmark": "beyond",
        "weights": world.weights_sha256() if options.random is None else "random",
        "hardware": hardware(world.device),
        "steps": world.spec.default_steps[world.device.type],
        "together": options.together,
        "missing_methods": told["methods"],
        "study": {name: [row for n, row in rows if n == name] for name in told["files"]},
        "free": rollouts.fidelity(found, "free", lanes["free"], world.spec.fps),
        "taught": rollouts.fidelity(found, "taught", lanes["taught"], world.spec.fps),
        "motions": rollouts.motions(found, lanes["motion"]),
        "recall": _recall(world, episodes, found),
        "seconds": round(time.time() - told["began"], 1),
    }


def _work(group: Sequence[Any]) -> int:
    """Chunks of lanes that a batch has to make, one after the other."""
    return max(len(job.actions) for job in group) * len(group[0].lanes)


def _recall(world: World, episodes: Any, found: Sequence[JobResult]) -> list[dict[str, Any]]:
    return revisit.recall(world, episodes, rollouts.of_experiment(found, "revisit-whole"))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def lanes_named(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not set(names) <= set(LANES):
        raise UserError(f"--lanes and --few take {', '.join(LANES)}, got {text}")
    return names


def slim(result: dict[str, Any]) -> dict[str, Any]:
    """Without what only the file needs: layers, heads and the growth of every method."""
    study = {
        name: [{k: v for k, v in row.items() if k not in LONG} for row in rows]
        for name, rows in result["study"].items()
    }
    return result | {"study": study}


def _read(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no beyond.json: {error}") from error
    if not isinstance(result, dict) or result.get("benchmark") != "beyond":
        raise UserError(f"{path} is no beyond.json: it was not written by this benchmark")
    lanes = [lane for mode in ("free", "taught") for lane in result[mode].values()]
    if not all("held" in lane for lane in lanes):
        raise UserError(f"{path} is of an earlier version of this benchmark; measure again")
    return result


def _write(folder: Path, result: dict[str, Any]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "beyond.json").write_text(json.dumps(result, indent=1))
        (folder / "beyond.txt").write_text(table(result) + "\n")
        (folder / "beyond.md").write_text(beyond_text.markdown(result))
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror or error}") from error


def table(result: dict[str, Any]) -> str:
    return beyond_text.table(result)

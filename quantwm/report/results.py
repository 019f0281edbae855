"""Runs everything that the report needs and reduces it to one JSON document and some pictures."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quantwm.cache import dispatch
from quantwm.describe import hardware, versions
from quantwm.report import numbers, plan, revisit
from quantwm.report.attention import LayerErrors, study_attention
from quantwm.report.jobs import REFERENCE, Job, JobResult, run_job
from quantwm.report.numbers import Figure, bytes_of, figure, paired, psnr_of, series_of
from quantwm.report.pool import Failure, Task, Workers, reasons, task_of, whole
from quantwm.report.scale import SCRIPTS, Scale
from quantwm.report.together import batches, run_jobs
from quantwm.report.variants import ABLATION, ALL, LANES, METHODS, ROLES, SWEEPS, known
from quantwm.worlds.base import World

Document = dict[str, Any]

SOONER = {"main": 0.6, "short": 0.6}
LONGEST = ("minute",)


@dataclass(frozen=True)
class Results:
    """numbers: JSON. pictures: name -> (caption of a row, frames uint8 [n, H, W, 3]) of a sheet."""

    numbers: Document
    pictures: Mapping[str, Sequence[tuple[str, np.ndarray]]]


@dataclass(frozen=True)
class Order:
    """What the report is told.

    Attributes:
        truth: folder of truth episodes, None without. processes: that share the devices, all of
        whose names are in `devices`.
        together: rollouts of one kind that a process runs side by side.
        seconds: after which no further rollout begins; infinity for no limit.
    """

    scale: Scale
    truth: Path | None = None
    processes: int = 1
    devices: tuple[str, ...] = ()
    together: int = 1
    seconds: float = float("inf")


def make_results(workers: Workers, order: Order, report: Callable[[str], None]) -> Results:
    """Run it all. report: told about progress, one line at a time."""
    began = time.time()
    scale, world = order.scale, workers.world
    report("starting processes")
    workers.ready()
    report("latency")
    latency = run_job(world, plan.latency_job(world, scale))
    episodes = revisit.load_tasks(order.truth, scale, world)
    rollouts = plan.rollout_jobs(world, scale)
    rollouts += revisit.revisit_jobs(world, episodes, plan.few_of(scale))
    errors, results, failures = _run(workers, order, rollouts, began + order.seconds, report)
    document = {
        "report": _about(world, order, results, len(rollouts), began),
        "attention": _attention(errors),
        "fidelity": _fidelity(results, world.spec.fps),
        "roles": _short(results, ROLES, "qvg"),
        "ablation": _short(results, ABLATION, "quantwm"),
        "sweep": _sweep(results),
        "latency": _latency(latency),
        "flicker": {name: _flicker(results, name) for name in ("still", "turn")},
        "minute": _minute(results, world.spec.fps),
        "revisit": revisit.recall(
            world, episodes, [r for r in results if r.job.experiment.startswith("revisit-")]
        ),
        "resolutions": [list(size) for size in (world.spec.video_size, *world.spec.resolutions)],
    }
    document["report"] |= {"seconds": round(time.time() - began, 1), "failures": failures}
    return Results(document, _pictures(results))


def _run(
    workers: Workers,
    order: Order,
    rollouts: Sequence[Job],
    deadline: float,
    report: Callable[[str], None],
) -> tuple[list[dict[str, dict[int, LayerErrors]]], list[JobResult], list[str]]:
    """Studies of recordings, results of rollouts in the plan's order, and reasons of failures."""
    recordings = plan.recording_jobs(workers.world, order.scale)
    studied = tuple(v.name for v in known((*METHODS, *ROLES, *ABLATION)))
    groups = _interleaved(batches(rollouts, order.together))
    longest = sum(group[0].experiment in LONGEST for group in groups)  # which come first
    tasks: list[tuple[list[Job], Task[Any]]] = [(g, task_of(run_jobs, g)) for g in groups]
    tasks[longest:longest] = [([], task_of(study_attention, job, studied)) for job in recordings]
    done = workers.run([task for _, task in tasks], deadline, report)
    found = list(zip((group for group, _ in tasks), done, strict=True))
    # What fails together may do alone: one scene's mistake must not cost the others.
    broken = [group for group, one in found if len(group) > 1 and isinstance(one, Failure)]
    singles = [[job] for group in broken for job in group]
    again = workers.run([task_of(run_jobs, job) for job in singles], deadline, report)
    found += zip(singles, again, strict=True)
    places = {(job.experiment, job.label): place for place, job in enumerate(rollouts)}
    kept = zip((group for group, _ in found), whole([one for _, one in found]), strict=True)
    errors: list[Any] = []
    results: list[JobResult] = []
    for group, one in kept:
        if one is not None and group:
            results.extend(one)
        elif one is not None:
            errors.append(one)
    results.sort(key=lambda r: places[r.job.experiment, r.job.label])
    return errors, results, reasons([*done, *again])


def _interleaved(groups: Sequence[list[Job]]) -> list[list[Job]]:
    """Experiments taking turns, so that a limit on time takes scenes from all and not one whole.

    The longest come first, or all would wait for them at the end. Those that most tables rest on
    come sooner: they are through after 60% of the time.
    """
    by_experiment: dict[str, list[list[Job]]] = {}
    for group in groups:
        by_experiment.setdefault(group[0].experiment, []).append(group)
    turns = [
        (
            experiment not in LONGEST,
            place / len(several) * SOONER.get(experiment, 1.0),
            order,
            group,
        )
        for order, (experiment, several) in enumerate(by_experiment.items())
        for place, group in enumerate(several)
    ]
    return [turn[-1] for turn in sorted(turns, key=lambda turn: turn[:3])]


def _about(
    world: World, order: Order, results: Sequence[JobResult], planned: int, began: float
) -> Document:
    spec = world.spec
    counts: dict[str, int] = {}
    for result in results:
        counts[result.job.experiment] = counts.get(result.job.experiment, 0) + 1
    return {
        "scale": order.scale.name,
        "world": spec.name,
        "title": spec.title,
        "weights_sha256": world.weights_sha256(),
        "steps": spec.default_steps[world.device.type],
        "device": str(world.device),
        "hardware": hardware(world.device),
        "versions": versions(),
        "kernels": dispatch.explain(world.device),
        "dtype": str(world.dtype).removeprefix("torch."),
        "policy": asdict(spec.policy),
        "fps": spec.fps,
        "scripts": list(SCRIPTS),
        "rollouts": counts,
        "rollouts_planned": planned,
        "rollouts_skipped": planned - len(results),
        "processes": order.processes,
        "devices": list(order.devices),
        "together": order.together,
        "missing": [v.title for v in ALL.values() if not v.known],
        "time": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(began)),
    }


def _attention(recordings: Sequence[Mapping[str, Mapping[int, LayerErrors]]]) -> Document:
    """Per variant: means over layers with intervals over recordings, and every layer by itself."""
    if not recordings:
        return {"recordings": 0, "variants": {}, "layers": []}
    names = list(LayerErrors.__dataclass_fields__)
    layers = list(next(iter(recordings[0].values())))
    return {
        "recordings": len(recordings),
        "layers": layers,
        "variants": {
            variant: {
                **{
                    name: figure([numbers.mean_errors(r[variant], name) for r in recordings])
                    for name in names
                },
                "by_layer": {
                    str(n): {
                        name: numbers.mean_of([getattr(r[variant][n], name) for r in recordings])
                        for name in names
                    }
                    for n in layers
                },
            }
            for variant in recordings[0]
        },
    }


def _fidelity(results: Sequence[JobResult], fps: float) -> Document:
    """Table 3: windows of free and teacher-forced runs, true bytes, and curves."""
    document: Document = {"lanes": {}, "paired": {}}
    early = slice(0, round(2 * fps))
    ours = series_of(results, "main", "quantwm")
    for variant in known(LANES):
        free = series_of(results, "main", variant.name)
        taught = series_of(results, "taught", variant.name)
        if not free:
            continue
        document["lanes"][variant.name] = {
            **bytes_of(free),
            "scenes": len(free),
            "free": numbers.windows_of(free, fps),
            "taught": numbers.windows_of(taught, fps) if taught else [],
            "consistency": numbers.consistency_of(free),
            "curve": numbers.curve_of(free, "psnr"),
            "curve_taught": numbers.curve_of(taught, "psnr") if taught else [],
            "excess_curve": numbers.curve_of(free, "excess"),
        }
        if variant.name not in ("bf16", "floor", "quantwm"):
            document["paired"][variant.name] = paired(ours, free, lambda s: psnr_of(s, early))
    return document


def _short(results: Sequence[JobResult], variants: Sequence[Any], published: str) -> Document:
    """PSNR and SSIM of a table's rows, QVG and QuantWM among them."""
    names = ("qvg", "quantwm", *(variant.name for variant in known(variants)))
    rows = {name: series_of(results, "short", name) for name in names}
    frames = min((len(s.mse) for series in rows.values() for s in series), default=0)
    part = slice(0, frames)
    return {
        "frames": frames,
        "scenes": len(rows["quantwm"]),
        "rows": {name: _quality(series, part) for name, series in rows.items() if series},
        "paired": {
            name: paired(rows[published], series, lambda s: psnr_of(s, part))
            for name, series in rows.items()
            if series and rows.get(published)
        },
        "between": _between(rows, part),
    }


def _between(rows: Mapping[str, Sequence[Any]], part: slice) -> dict[str, Figure | None]:
    """Paired differences that verdicts ask for: K16V2 less K2V16, and the affine row less QVG."""
    asked = {
        "qvg": ("qvg-values", "qvg-keys"),
        "quantwm": ("quantwm-values", "quantwm-keys"),
        "affine": ("affine", "qvg"),
    }
    return {
        name: paired(rows[a], rows[b], lambda s: psnr_of(s, part))
        for name, (a, b) in asked.items()
        if rows.get(a) and rows.get(b)
    }


def _quality(series: Sequence[Any], part: slice) -> dict[str, Figure | None]:
    return {
        "psnr": figure([psnr_of(s, part) for s in series]),
        "ssim": figure([numbers.mean_of(s.ssim[part]) for s in series]),
        "ratio": bytes_of(series)["ratio"],
    }


def _sweep(results: Sequence[JobResult]) -> Document:
    """Tables 9 to 11: each setting, and its difference to the published one, scene by scene."""
    names = ("quantwm", *(variant.name for variant in known(SWEEPS)))
    rows = {name: series_of(results, "sweep", name) for name in names}
    published = rows["quantwm"]
    frames = min((len(s.mse) for series in rows.values() for s in series), default=0)
    part = slice(0, frames)
    return {
        "frames": frames,
        "scenes": len(published),
        "rows": {
            name: {
                **_quality(series, part),
                "difference": paired(series, published, lambda s: psnr_of(s, part)),
            }
            for name, series in rows.items()
            if series
        },
    }


def _latency(result: JobResult) -> Document:
    """Milliseconds a chunk of each lane, alone on the device, the second half of the run.

    overhead: over the BF16 lane's same chunk, less 1, with an interval over chunks: on a machine
    that does other things as well it is wide.
    """
    exact = numbers.warm_ms(result.series[REFERENCE])
    return {
        name: {
            "ms": float(np.median(numbers.warm_ms(series))),
            "overhead": figure(
                [own / other - 1 for own, other in zip(numbers.warm_ms(series), exact, strict=True)]
            ),
            "tokens": series.tokens,
        }
        for name, series in result.series.items()
    }


def _flicker(results: Sequence[JobResult], experiment: str) -> Document:
    reference = series_of(results, experiment, REFERENCE)
    lanes = {v.name: series_of(results, experiment, v.name) for v in LANES}
    return {
        "scenes": len(reference),
        "lanes": {
            name: {
                **numbers.flicker_of(series, reference),
                "curve": numbers.curve_of(series, "excess"),
            }
            for name, series in lanes.items()
            if series
        },
    }


def _minute(results: Sequence[JobResult], fps: float) -> Document:
    lanes = {v.name: series_of(results, "minute", v.name) for v in LANES}
    found = {name: series for name, series in lanes.items() if series}
    return {
        "scenes": max((len(series) for series in found.values()), default=0),
        "seconds": max((len(s.mse) for series in found.values() for s in series), default=0) / fps,
        "lanes": {
            name: {
                "stretches": numbers.minute_of(series, fps),
                "consistency": numbers.consistency_of(series),
                "sharpness": figure([numbers.mean_of(s.sharpness) for s in series]),
                **bytes_of(series),
            }
            for name, series in found.items()
        },
    }


def _pictures(results: Sequence[JobResult]) -> dict[str, list[tuple[str, np.ndarray]]]:
    """Contact sheets: of each experiment's kept rollouts one, a row a lane."""
    sheets: dict[str, list[tuple[str, np.ndarray]]] = {}
    for result in results:
        if result.frames and not result.job.experiment.startswith("revisit-"):
            name = f"{result.job.experiment}: {result.job.label}"
            sheets[name] = [(ALL[lane].title, f) for lane, f in result.frames.items()]
    return sheets

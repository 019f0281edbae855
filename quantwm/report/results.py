"""Reduces rollouts and recordings to the report's one JSON document and some pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quantwm.evaluation.episodes import Episode
from quantwm.report import numbers, revisit
from quantwm.report.attention import LayerErrors
from quantwm.report.jobs import REFERENCE, JobResult
from quantwm.report.latency import latency_of
from quantwm.report.numbers import Figure, bytes_of, figure, paired, psnr_of, series_of
from quantwm.report.pictures import sheets_of
from quantwm.report.plan import LARGER
from quantwm.report.variants import ABLATION, LANES, ROLES, SWEEPS, known
from quantwm.worlds.base import World

Document = dict[str, Any]


@dataclass(frozen=True)
class Results:
    """numbers: JSON. pictures: name -> (caption of a row, frames uint8 [n, H, W, 3]) of a sheet."""

    numbers: Document
    pictures: Mapping[str, Sequence[tuple[str, np.ndarray]]]


@dataclass
class Found:
    """What a run has so far. latency: its rounds; errors: of each recording; results: in the
    plan's order."""

    latency: Sequence[JobResult]
    errors: Sequence[Mapping[str, Mapping[int, LayerErrors]]]
    results: Sequence[JobResult]


def results_of(world: World, about: Document, found: Found, episodes: Sequence[Episode]) -> Results:
    """The document and the pictures. about: of the run, `running.about`."""
    results = found.results
    document = {
        "report": about,
        "attention": _attention(found.errors),
        "fidelity": _fidelity(results, world.spec.fps),
        "roles": _short(results, ROLES, "qvg"),
        "ablation": _short(results, ABLATION, "quantwm"),
        "sweep": _sweep(results),
        "latency": latency_of(found.latency),
        "flicker": {name: _flicker(results, name) for name in ("still", "turn")},
        "minute": _minute(results, world.spec.fps),
        "larger": _larger(results, world.spec.fps),
        "revisit": revisit.recall(
            world, episodes, [r for r in results if r.job.experiment.startswith("revisit-")]
        ),
        "resolutions": [list(size) for size in (world.spec.video_size, *world.spec.resolutions)],
    }
    return Results(document, sheets_of(results, episodes))


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
            "whole": _whole(free),
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


def _whole(series: Sequence[Any]) -> dict[str, Figure | None]:
    """Over all frames, as the paper has it. LPIPS is None where its weights are not here."""
    return {
        "psnr": figure([psnr_of(s, slice(None)) for s in series]),
        "ssim": figure([numbers.mean_of(s.ssim) for s in series]),
        "lpips": figure([numbers.mean_of(s.lpips) for s in series if s.lpips]),
    }


def _short(results: Sequence[JobResult], variants: Sequence[Any], published: str) -> Document:
    """PSNR and SSIM of a table's rows, QVG and QuantWM among them."""
    names = ("qvg", "quantwm", *(variant.name for variant in known(variants)))
    rows = {name: series_of(results, "short", name) for name in names}
    frames = min((len(s.mse) for series in rows.values() for s in series), default=0)
    part = slice(0, frames)
    return {
        "frames": frames,
        "scenes": len(rows["quantwm"]),
        "rows": {
            name: {
                **_quality(series, part),
                "curve": numbers.curve_of(series, "psnr")[part],
            }
            for name, series in rows.items()
            if series
        },
        "paired": {
            name: paired(rows[published], series, lambda s: psnr_of(s, part))
            for name, series in rows.items()
            if series and rows.get(published)
        },
        "between": _between(rows, part),
    }


def _between(rows: Mapping[str, Sequence[Any]], part: slice) -> dict[str, Figure | None]:
    """Paired differences that verdicts ask for: K16V2 less K2V16, the affine row less QVG, and
    that less half of QuantWM's whole gain ("half")."""
    asked = {
        "qvg": ("qvg-values", "qvg-keys"),
        "quantwm": ("quantwm-values", "quantwm-keys"),
        "affine": ("affine", "qvg"),
    }
    found = {
        name: paired(rows[a], rows[b], lambda s: psnr_of(s, part))
        for name, (a, b) in asked.items()
        if rows.get(a) and rows.get(b)
    }
    if "affine" in found:
        together = zip(rows["affine"], rows["qvg"], rows["quantwm"], strict=False)
        scores = [[psnr_of(s, part) for s in three] for three in together]
        found["half"] = figure([affine - (qvg + ours) / 2 for affine, qvg, ours in scores])
    return found


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


def _flicker(results: Sequence[JobResult], experiment: str) -> Document:
    reference = series_of(results, experiment, REFERENCE)
    lanes = {v.name: series_of(results, experiment, v.name) for v in LANES}
    return {
        "scenes": len(reference),
        "lanes": {
            name: {
                **numbers.flicker_of(series, reference),
                "moved": numbers.moved_of(series, reference),
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


def _larger(results: Sequence[JobResult], fps: float) -> Document:
    """Table 7: free runs at the larger resolution; no lanes where there is none."""
    lanes = {v.name: series_of(results, LARGER, v.name) for v in LANES}
    early = slice(0, round(2 * fps))
    ours, theirs = lanes["quantwm"], lanes["qvg"]
    return {
        "size": next((list(r.job.size) for r in results if r.job.size), None),
        "lanes": {
            name: {**_whole(series), **bytes_of(series), "scenes": len(series)}
            for name, series in lanes.items()
            if series
        },
        "over_qvg": paired(ours, theirs, lambda s: psnr_of(s, early)),
    }

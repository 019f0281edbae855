"""Rollouts reduced to the report's numbers: per window, with bootstrap intervals over scenes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from quantwm.metrics import WINDOWS, bootstrap, divergence_frame, frames_of, psnr_of_mse
from quantwm.report.jobs import JobResult, LaneSeries

Figure = dict[str, Any]
"""An Interval as JSON: mean, low, high, count; None values where a PSNR is infinite."""

HIGHEST_DB = 99.0
"""Stands for the infinite PSNR of identical pictures, so that means over scenes exist."""


def series_of(results: Sequence[JobResult], experiment: str, lane: str) -> list[LaneSeries]:
    """One lane's series of all rollouts of an experiment that ran it, in the plan's order."""
    found = (r for r in results if r.job.experiment == experiment)
    return [r.series[lane] for r in found if lane in r.series]


def psnr_of(series: LaneSeries, frames: slice) -> float:
    """PSNR of the mean squared error over these frames of one rollout, at most HIGHEST_DB."""
    return min(psnr_of_mse(float(np.mean(series.mse[frames]))), HIGHEST_DB)


def figure(values: Sequence[float]) -> Figure | None:
    """Mean over scenes with its interval; None without a scene."""
    return bootstrap(values).to_json() if len(values) else None


def paired(
    first: Sequence[LaneSeries], second: Sequence[LaneSeries], measure: Callable[..., float]
) -> Figure | None:
    """Interval of the difference first - second, scene by scene."""
    pairs = list(zip(first, second, strict=False))
    return figure([measure(a) - measure(b) for a, b in pairs])


def windows_of(series: Sequence[LaneSeries], fps: float) -> list[dict[str, Any]]:
    """Per window of the run: PSNR, SSIM, excess flicker, and how many scenes had parted by then."""
    found = []
    for window in WINDOWS:
        frames = frames_of(window, fps, min((len(s.mse) for s in series), default=0))
        if frames.stop - frames.start < 1:
            continue
        middle = (frames.start + frames.stop) // 2
        parted = [_parted(s, middle) for s in series]
        steps = slice(max(frames.start - 1, 0), frames.stop - 1)
        found.append(
            {
                "window": window.name,
                "label": window.label,
                "frames": [frames.start, frames.stop],
                "psnr": figure([psnr_of(s, frames) for s in series]),
                "ssim": figure([float(np.mean(s.ssim[frames])) for s in series]),
                "excess": figure([mean_of(s.excess[steps]) for s in series]),
                "parted": float(np.mean(parted)),
            }
        )
    return found


def _parted(series: LaneSeries, frame: int) -> bool:
    first = divergence_frame([psnr_of_mse(mse) for mse in series.mse])
    return first is not None and first <= frame


def mean_of(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def bytes_of(series: Sequence[LaneSeries]) -> dict[str, Any]:
    """What a lane held at the end of its rollouts: the mean over scenes, they differ little."""
    ratios = [s.ratio for s in series if s.ratio is not None]
    return {
        "kv_bytes": mean_of([s.kv_bytes for s in series]),
        "ratio": mean_of(ratios) if ratios else None,
        "resident_ratio": mean_of([s.resident_ratio for s in series]),
        "tokens": mean_of([s.tokens for s in series]),
    }


def flicker_of(series: Sequence[LaneSeries], reference: Sequence[LaneSeries]) -> dict[str, Any]:
    """A lane over standing-still or slowly turning clips: what scores see, and what they do not.

    flickering: VBench's temporal flickering. retained: sharpness over the reference's.
    """
    return {
        "psnr": figure([psnr_of(s, slice(None)) for s in series]),
        "ssim": figure([float(np.mean(s.ssim)) for s in series]),
        "temporal": figure([mean_of(s.temporal) for s in series]),
        "flickering": figure([(255.0 - mean_of(s.temporal)) / 255.0 for s in series]),
        "consistency": consistency_of(series),
        "excess": figure([mean_of(s.excess) for s in series]),
        "retained": figure(
            [
                mean_of(s.sharpness) / max(mean_of(r.sharpness), 1e-9)
                for s, r in _pair(series, reference)
            ]
        ),
    }


def _pair(a: Sequence[LaneSeries], b: Sequence[LaneSeries]) -> list[tuple[LaneSeries, LaneSeries]]:
    return list(zip(a, b, strict=True))


def consistency_of(series: Sequence[LaneSeries]) -> Figure | None:
    """VBench's consistency formula, on the world's own features; None where it has none."""
    return figure([mean_of(s.consistency) for s in series if s.consistency])


def moved_of(series: Sequence[LaneSeries], reference: Sequence[LaneSeries]) -> Figure | None:
    """How much a lane's consistency is off the reference's, scene by scene, over the reference's
    mean; None where the world has no features."""
    pairs = [(s, r) for s, r in _pair(series, reference) if s.consistency and r.consistency]
    whole = mean_of([mean_of(r.consistency) for _, r in pairs])
    if not whole:
        return None
    return figure([(mean_of(s.consistency) - mean_of(r.consistency)) / whole for s, r in pairs])


def minute_of(series: Sequence[LaneSeries], fps: float) -> list[dict[str, Any]]:
    """Ten-second stretches of a long run, without a reference: consistency, sharpness, change."""
    frames = min((len(s.mse) for s in series), default=0)
    size = max(1, min(round(10 * fps), frames))
    found = []
    for start in range(0, frames - size // 2, size):
        part = slice(start, start + size)
        found.append(
            {
                "seconds": [round(start / fps, 1), round(min(start + size, frames) / fps, 1)],
                "sharpness": figure([mean_of(s.sharpness[part]) for s in series]),
                "temporal": figure([mean_of(s.temporal[part]) for s in series]),
                "consistency": figure(
                    [mean_of(s.consistency[part]) for s in series if s.consistency]
                ),
            }
        )
    return found


def curve_of(series: Sequence[LaneSeries], name: str) -> list[float]:
    """Mean curve over scenes; for "psnr", of the mean squared error over scenes, frame by frame."""
    if name == "psnr":
        rows = np.asarray([s.mse for s in series])
        return [min(psnr_of_mse(float(mse)), HIGHEST_DB) for mse in rows.mean(axis=0)]
    return np.asarray([getattr(s, name) for s in series]).mean(axis=0).tolist()


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def mean_errors(errors: Mapping[int, Any], name: str) -> float:
    """A figure of `attention.LayerErrors` averaged over layers."""
    return mean_of([getattr(layer, name) for layer in errors.values()])

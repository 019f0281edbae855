"""Two videos compared from their files: what can be compared, every metric, windows of time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from quantwm.errors import UserError
from quantwm.metrics import (
    WINDOWS,
    FidelityMeter,
    bootstrap,
    divergence_frame,
    frames_of,
    has_flow,
    psnr_of_mse,
)
from quantwm.metrics.fidelity import PEAK
from quantwm.metrics.flicker import STILL_LEVELS
from quantwm.metrics.flow import NO_OPENCV, SMALLEST
from quantwm.metrics.ssim import WINDOW
from quantwm.video_reader import VideoFacts, iter_video, probe_video, short_of

MAX_PIXELS_COMPARED = 24_000_000_000
"""Of both videos' common frames: an hour of 832 x 480 at 16 frames/s is 23 billion, and SSIM takes
about an hour for it on two cores. Ten minutes of 4K at 30 are 149."""

RATE_TOLERANCE = 0.01
"""Frame rates may differ by this share: 23.976 and 24 are paired frame by frame."""


@dataclass(frozen=True)
class Options:
    """What to measure.

    frames: at most this many from the start; None for all. flow: warping error, None for "where
    OpenCV is installed". device: where SSIM is computed.
    """

    frames: int | None = None
    flow: bool | None = None
    device: torch.device | str = "cpu"


def compare_files(
    name: str,
    a: Path,
    b: Path,
    options: Options,
    report: Callable[[int, int], None] = lambda done, total: None,
    extra: Sequence[Any] = (),
) -> dict[str, Any]:
    """Every metric of video a against its reference b, as JSON types.

    extra: meters with `update(frame, reference)` that want the same frames.

    Raises:
        UserError: the two cannot be compared; said before a pixel is decoded where the container
            tells, and with the number of the frame where one is damaged.
    """
    facts = probe_video(a), probe_video(b)
    total = check_comparable(*facts, options.frames)
    notes = _notes(*facts, options)
    meter = FidelityMeter(
        ssim=min(facts[0].size) >= WINDOW,
        flow=_with_flow(facts[0], options),
        appearance=True,
        device=options.device,
    )
    for done, (frame, reference) in enumerate(
        zip(iter_video(a, total), iter_video(b, total), strict=False), 1
    ):
        meter.update(frame, reference)
        for other in extra:
            other.update(frame, reference)
        report(done, total)
    if not meter.psnr:
        raise UserError(f"{a.name} and {b.name} have no frame in common")
    return _result(name, facts, meter, notes)


def check_comparable(a: VideoFacts, b: VideoFacts, frames: int | None = None) -> int:
    """How many frames are compared; UserError in one line where the videos do not fit."""
    if a.size != b.size:
        raise UserError(
            f"{a.name} is {_size(a)} and {b.name} is {_size(b)}: videos that are compared have "
            "one size; scale one of them first"
        )
    fixed = not a.variable_rate and not b.variable_rate
    if fixed and a.rate and b.rate and abs(a.rate / b.rate - 1) > RATE_TOLERANCE:
        raise UserError(
            f"{a.name} runs at {a.rate:.4g} frames/s and {b.name} at {b.rate:.4g}: videos that are "
            "compared have one rate; convert one of them first"
        )
    total = min(a.frames, b.frames, *(() if frames is None else (frames,)))
    pixels = total * a.size[0] * a.size[1]
    if pixels > MAX_PIXELS_COMPARED:
        fitting = MAX_PIXELS_COMPARED // (a.size[0] * a.size[1])
        raise UserError(
            f"{total:,} frames of {_size(a)} are {pixels / 1e9:.0f} billion pixels, at most "
            f"{MAX_PIXELS_COMPARED / 1e9:.0f} are compared: take the first ones with "
            f"--frames {fitting}"
        )
    return total


def over_scenes(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Intervals over several pairs of videos, window by window: means of per-video figures."""
    found: dict[str, Any] = {"videos": len(results), "windows": []}
    for key in ("psnr_pooled", "ssim", "temporal_excess", "warping_error"):
        values = [r[key] for r in results if r[key] is not None]
        found[key] = bootstrap(values).to_json() if values else None
    for window in WINDOWS:
        rows = [w for r in results for w in r["windows"] if w["window"] == window.name]
        if not rows:
            continue
        entry: dict[str, Any] = {"window": window.name, "label": window.label}
        for key in ("psnr_pooled", "ssim", "temporal_excess"):
            values = [row[key] for row in rows if row[key] is not None]
            entry[key] = bootstrap(values).to_json() if values else None
        entry["diverged"] = fmean(float(row["diverged"]) for row in rows)
        found["windows"].append(entry)
    return found


def _result(
    name: str, facts: tuple[VideoFacts, VideoFacts], meter: FidelityMeter, notes: list[str]
) -> dict[str, Any]:
    count, parted = len(meter.psnr), divergence_frame(meter.psnr)
    finite = [value for value in meter.psnr if math.isfinite(value)]
    still = _mean(meter.temporal_reference)
    return {
        "name": name,
        "frames": count,
        "surplus_frames": {"a": facts[0].frames - count, "b": facts[1].frames - count},
        "size": list(facts[0].size),
        "fps": facts[1].rate,
        "identical": not finite,
        "identical_frames": count - len(finite),
        "psnr_pooled": _finite(meter.psnr_pooled),
        "psnr_frame_mean": fmean(finite) if finite else None,
        "ssim": _mean(meter.ssim),
        "temporal_difference": _mean(meter.temporal),
        "temporal_difference_reference": still,
        "temporal_excess": _mean(meter.excess),
        "warping_error": _mean(meter.warping),
        "warping_error_reference": _mean(meter.warping_reference),
        "temporal_flickering": _flickering(meter) if _stands(still) else None,
        "sharpness": _mean(meter.sharpness),
        "sharpness_reference": _mean(meter.sharpness_reference),
        "colour_difference": _mean(meter.colour),
        "colour_drift": meter.drift[-1],
        "colour_drift_reference": meter.drift_reference[-1],
        "divergence_frame": parted,
        "windows": _windows(meter, facts[1].rate or 1.0, parted),
        "psnr_per_frame": [_finite(value) for value in meter.psnr],
        "curves": {key: [_finite(v) for v in line] for key, line in meter.columns().items()},
        "notes": notes,
    }


def _windows(meter: FidelityMeter, fps: float, parted: int | None) -> list[dict[str, Any]]:
    """PSNR, SSIM and excess of each window; after the videos have parted, PSNR is divergence."""
    found = []
    for window in WINDOWS:
        frames = frames_of(window, fps, len(meter.psnr))
        if frames.stop == frames.start:
            continue
        mse = [PEAK**2 / 10 ** (value / 10) for value in meter.psnr[frames]]
        steps = slice(max(frames.start - 1, 0), frames.stop - 1)
        middle = (frames.start + frames.stop) // 2
        found.append(
            {
                "window": window.name,
                "label": window.label,
                "frames": [frames.start, frames.stop],
                "psnr_pooled": _finite(psnr_of_mse(float(np.mean(mse)))),
                "ssim": _mean(meter.ssim[frames]),
                "temporal_excess": _mean(meter.excess[steps]),
                "diverged": parted is not None and parted <= middle,
            }
        )
    return found


def _notes(a: VideoFacts, b: VideoFacts, options: Options) -> list[str]:
    notes = [
        f"{facts.name} has a variable frame rate: frames are paired by their number"
        for facts in (a, b)
        if facts.variable_rate
    ]
    notes += [
        f"{facts.name} asks to be turned by {facts.rotation} degrees; it is compared upright"
        for facts in (a, b)
        if facts.rotation
    ]
    if a.pixel_format != b.pixel_format:
        notes.append(f"pixel formats differ ({a.pixel_format}, {b.pixel_format}): both become RGB")
    if a.frames != b.frames and options.frames is None:
        have = "1 frame" if a.frames == 1 else f"{a.frames} frames"
        notes.append(f"{a.name} has {have} and {b.name} {b.frames}: the common ones are compared")
    if options.frames is None:
        notes += [note for note in map(short_of, (a, b)) if note]
    if min(a.size) < WINDOW:
        notes.append(f"no SSIM: it needs frames of at least {WINDOW} x {WINDOW} pixels")
    if options.flow is None and not has_flow():
        notes.append(f"no flow-warping error: {NO_OPENCV}")
    return notes


def _with_flow(facts: VideoFacts, options: Options) -> bool:
    if options.flow is not None:
        return options.flow
    return has_flow() and min(facts.size) >= SMALLEST


def _size(facts: VideoFacts) -> str:
    return "{} x {}".format(*facts.size)


def _stands(change: float | None) -> bool:
    return change is not None and change < STILL_LEVELS


def _flickering(meter: FidelityMeter) -> float | None:
    change = _mean(meter.temporal)
    return None if change is None else (PEAK - change) / PEAK


def _mean(values: Sequence[float]) -> float | None:
    known = [value for value in values if not math.isnan(value)]
    return fmean(known) if known else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

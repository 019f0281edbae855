"""`compare`: fidelity and flicker between two recordings or two video files."""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean

from quantwm.cli.common import emit, number, say, table
from quantwm.errors import UserError
from quantwm.metrics import FidelityMeter
from quantwm.session_reader import load_session
from quantwm.totals import finite_or_none
from quantwm.video import iter_video


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `compare`."""
    text = "a session folder or a video file"
    parser.add_argument("a", type=Path, metavar="A", help=text)
    parser.add_argument("b", type=Path, metavar="B", help=f"{text}: the reference")


def run(arguments: argparse.Namespace) -> int:
    """Compare two videos, or lane by lane two sessions."""
    pairs = _pairs(arguments.a, arguments.b)
    results = [_compare(name, a, b) for name, a, b in pairs]
    rows = [["video", "frames", "PSNR pooled", "PSNR frame mean", "temporal A", "B", "excess"]]
    for result in results:
        rows.append(
            [
                str(result["name"]),
                str(result["frames"]),
                "identical" if result["identical"] else number(result["psnr_pooled"], 2, " dB"),
                number(result["psnr_frame_mean"], 2, " dB"),
                number(result["temporal_difference"], 3),
                number(result["temporal_difference_reference"], 3),
                number(result["temporal_excess"], 3),
            ]
        )
    say(table(rows))
    emit({"a": str(arguments.a), "b": str(arguments.b), "videos": results})
    return 0


def _pairs(a: Path, b: Path) -> list[tuple[str, Path, Path]]:
    if a.is_dir() != b.is_dir():
        raise UserError("compare two session folders or two video files, not one of each")
    if not a.is_dir():
        return [(a.name, a, b)]
    first, second = load_session(a), load_session(b)
    shared = [
        (lane.name, path, other)
        for lane in first.info.lanes
        if (path := first.video(lane.name)) and (other := second.video(lane.name))
    ]
    if not shared:
        raise UserError("the two sessions share no lane that has a video in both")
    return shared


def _compare(name: str, a: Path, b: Path) -> dict[str, object]:
    meter = FidelityMeter()
    first, second = iter_video(a), iter_video(b)
    surplus = {"a": 0, "b": 0}
    while True:
        frame, reference = next(first, None), next(second, None)
        if frame is None or reference is None:
            surplus["a"] = int(frame is not None) + sum(1 for _ in first)
            surplus["b"] = int(reference is not None) + sum(1 for _ in second)
            break
        meter.update(frame, reference)
    if not meter.psnr:
        raise UserError(f"{a.name} and {b.name} have no frame in common")
    finite = [value for value in meter.psnr if finite_or_none(value) is not None]
    return {
        "name": name,
        "frames": len(meter.psnr),
        "surplus_frames": surplus,
        "identical": not finite,
        "identical_frames": len(meter.psnr) - len(finite),
        "psnr_pooled": finite_or_none(meter.psnr_pooled),
        "psnr_frame_mean": fmean(finite) if finite else None,
        "psnr_per_frame": [finite_or_none(value) for value in meter.psnr],
        "temporal_difference": _mean(meter.temporal),
        "temporal_difference_reference": _mean(meter.temporal_reference),
        "temporal_excess": _mean(meter.excess),
    }


def _mean(values: list[float]) -> float | None:
    return fmean(values) if values else None

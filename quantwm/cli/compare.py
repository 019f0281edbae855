"""`compare`: fidelity and flicker between two recordings, two videos or two folders of videos."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

from quantwm.cli.common import (
    add_device,
    emit,
    integer,
    number,
    pick_device,
    progress,
    progress_done,
    say,
    table,
)
from quantwm.comparison import Options, compare_files, over_scenes
from quantwm.errors import UserError
from quantwm.metrics.learned import LearnedMeter
from quantwm.session import SESSION_FILE
from quantwm.session_zip import is_zip, open_session

VIDEOS = (".mkv", ".webm", ".mp4", ".mov", ".avi")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `compare`."""
    text = "a session (folder or zip), a video file, or a folder of videos"
    parser.add_argument("a", type=Path, metavar="A", help=text)
    parser.add_argument("b", type=Path, metavar="B", help=f"{text}: the reference")
    parser.add_argument("--frames", type=integer(1, 10**9), help="only this many from the start")
    parser.add_argument(
        "--no-flow", action="store_true", help="leave out the flow-warping error (the slowest)"
    )
    parser.add_argument(
        "--learned",
        action="store_true",
        help="LPIPS and VBench's scores through published models that are on this machine",
    )
    parser.add_argument("--models", type=Path, help="folder of those models (docs/metrics.md)")
    add_device(parser)


def run(arguments: argparse.Namespace) -> int:
    """Compare two videos, lane by lane two sessions, or name by name two folders."""
    device = pick_device(arguments.device)
    options = Options(arguments.frames, False if arguments.no_flow else None, device)
    with contextlib.ExitStack() as stack:
        pairs = _pairs(arguments.a, arguments.b, stack)
        results = [_compare(*pair, options, arguments) for pair in pairs]
    progress_done()
    say(_table(results))
    for note in dict.fromkeys(note for result in results for note in result["notes"]):
        say(note)
    document: dict[str, Any] = {"a": str(arguments.a), "b": str(arguments.b), "videos": results}
    if _is_folder_of_videos(arguments.a):
        document["over_videos"] = over_scenes(results)
        say(_scenes_table(document["over_videos"]))
    emit(document)
    return 0


def _compare(
    name: str, a: Path, b: Path, options: Options, arguments: argparse.Namespace
) -> dict[str, Any]:
    learned = None
    if arguments.learned:
        learned = LearnedMeter(arguments.models, options.device)
    result = compare_files(
        name,
        a,
        b,
        options,
        lambda done, total: progress(f"{name}: frame {done}/{total}"),
        () if learned is None else (learned,),
    )
    if learned is not None:
        result["learned"], missing = learned.scores()
        result["notes"] += missing
    return result


def _table(results: list[dict[str, Any]]) -> str:
    rows = [
        ["video", "frames", "PSNR pooled", "SSIM", "change A", "B", "excess", "warping A", "B",
         "sharp A/B", "parted at"]
    ]  # fmt: skip
    for result in results:
        sharp = result["sharpness_reference"]
        rows.append(
            [
                str(result["name"]),
                str(result["frames"]),
                _psnr(result["psnr_pooled"]),
                number(result["ssim"], 4),
                number(result["temporal_difference"]),
                number(result["temporal_difference_reference"]),
                number(result["temporal_excess"]),
                number(result["warping_error"]),
                number(result["warping_error_reference"]),
                number(result["sharpness"] / sharp if sharp else None, 2),
                "-" if result["divergence_frame"] is None else str(result["divergence_frame"]),
            ]
        )
    windows = [["video", "window", "PSNR pooled", "SSIM", "excess"]]
    for result in results:
        for window in result["windows"]:
            word = " (divergence, not quality)" if window["diverged"] else ""
            windows.append(
                [
                    str(result["name"]),
                    window["label"],
                    _psnr(window["psnr_pooled"]) + word,
                    number(window["ssim"], 4),
                    number(window["temporal_excess"]),
                ]
            )
    return f"{table(rows)}\n\n{table(windows)}"


def _psnr(value: float | None) -> str:
    return "identical" if value is None else number(value, 2, " dB")


def _scenes_table(found: dict[str, Any]) -> str:
    rows = [["window", "PSNR pooled, dB", "SSIM", "excess", "parted"]]
    for window in found["windows"]:
        cells = [window[key] for key in ("psnr_pooled", "ssim", "temporal_excess")]
        shown = [
            "-" if c is None or c["mean"] is None
            else f"{c['mean']:.3f} [{c['low']:.3f}, {c['high']:.3f}]"
            for c in cells
        ]  # fmt: skip
        rows.append([window["label"], *shown, f"{window['diverged']:.0%}"])
    return f"\nover {found['videos']} videos, 95% bootstrap intervals\n{table(rows)}"


def _pairs(a: Path, b: Path, stack: contextlib.ExitStack) -> list[tuple[str, Path, Path]]:
    kinds = _kind(a), _kind(b)
    if kinds[0] != kinds[1]:
        raise UserError(
            "compare two sessions, two video files or two folders of videos, not one of each"
        )
    if kinds[0] == "video":
        return [(a.name, a, b)]
    if kinds[0] == "folder":
        return _named_alike(a, b)
    first, second = (stack.enter_context(open_session(path)) for path in (a, b))
    for note in (*first.notes, *second.notes):
        say(note)
    shared = [
        (lane.name, path, other)
        for lane in first.info.lanes
        if (path := first.video(lane.name)) and (other := second.video(lane.name))
    ]
    if not shared:
        raise UserError("the two sessions share no lane that has a video in both")
    return shared


def _kind(path: Path) -> str:
    if _is_folder_of_videos(path):
        return "folder"
    return "session" if path.is_dir() or is_zip(path) else "video"


def _is_folder_of_videos(path: Path) -> bool:
    if not path.is_dir() or (path / SESSION_FILE).exists():
        return False
    return any(file.suffix.lower() in VIDEOS for file in path.iterdir())


def _named_alike(a: Path, b: Path) -> list[tuple[str, Path, Path]]:
    shared = [
        (file.name, file, b / file.name)
        for file in sorted(a.iterdir())
        if file.suffix.lower() in VIDEOS and (b / file.name).is_file()
    ]
    if not shared:
        raise UserError(f"{a} and {b} share no video of one name")
    return shared

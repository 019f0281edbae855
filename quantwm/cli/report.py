"""`report`: the paper's evidence on the embedded world, as an HTML report."""

from __future__ import annotations

import argparse
from pathlib import Path

from quantwm.cli.common import (
    add_device,
    emit,
    integer,
    pick_device,
    progress,
    progress_done,
    say,
    table,
)
from quantwm.errors import UserError
from quantwm.report.pool import WorldSource
from quantwm.report.results import Order, make_results
from quantwm.report.scale import PRESETS
from quantwm.report.writer import FILES, summary, write_report
from quantwm.worlds.embedded.adapter import ASSETS

TRUTH = ASSETS / "truth"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `report`."""
    parser.add_argument("--out", type=Path, required=True, help=f"folder for {', '.join(FILES)}")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--small", action="store_true", help="few scenes, for a CPU")
    size.add_argument("--minimal", action="store_true", help="the least that fills every section")
    parser.add_argument("--truth", type=Path, help="truth episodes; those in assets/ by default")
    parser.add_argument(
        "--random-weights",
        action="store_true",
        help="a tiny world with random weights: checks the report, says nothing about caches",
    )
    parser.add_argument("--processes", type=integer(1, 64), default=1, help="that share the device")
    parser.add_argument(
        "--seconds", type=integer(1, 86_400), help="begin no rollout after this long"
    )
    add_device(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run everything and write the files."""
    device = pick_device(arguments.device)
    preset = "minimal" if arguments.minimal else "small" if arguments.small else "full"
    truth = arguments.truth or (TRUTH if TRUTH.is_dir() else None)
    if arguments.truth is not None and not arguments.truth.is_dir():
        raise UserError(f"no such folder of truth episodes: {arguments.truth}")
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {arguments.out}: {error.strerror or error}") from error
    source = WorldSource(random_preset="tiny" if arguments.random_weights else None)
    say(f"loading the world on {device}")
    world = source.load(device)
    seconds = float("inf") if arguments.seconds is None else float(arguments.seconds)
    order = Order(PRESETS[preset], truth, arguments.processes, seconds)
    results = make_results(world, source, order, progress)
    progress_done()
    try:
        paths = write_report(arguments.out, results, _command(arguments))
    except OSError as error:
        raise UserError(f"cannot write to {arguments.out}: {error.strerror or error}") from error
    document = summary(results.numbers)
    say(table([["claim", "here"], *([c["claim"], c["here"]] for c in document["claims"])]))
    emit({**document, "files": [str(path) for path in paths]})
    return 0


def _command(arguments: argparse.Namespace) -> str:
    flags = [f"--out {arguments.out.name}"]
    flags += [f"--{name}" for name in ("small", "minimal") if getattr(arguments, name)]
    if arguments.truth is not None:
        flags.append(f"--truth {arguments.truth.name}")
    if arguments.processes > 1:
        flags.append(f"--processes {arguments.processes}")
    if arguments.seconds is not None:
        flags.append(f"--seconds {arguments.seconds}")
    return " ".join(["python -m quantwm report", *flags])

"""`report`: the paper's evidence on a world, the embedded one by default, as an HTML report."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from quantwm.cli.common import (
    add_device,
    emit,
    integer,
    open_folder,
    pick_device,
    progress,
    progress_done,
    say,
    table,
)
from quantwm.cli.download import add_weights
from quantwm.errors import UserError
from quantwm.report.pool import START_SECONDS, Workers, WorldSource
from quantwm.report.results import Results
from quantwm.report.running import STARTING, Order, make_results
from quantwm.report.scale import PRESETS
from quantwm.report.writer import FILES, summary, write_report
from quantwm.worlds.embedded.adapter import ASSETS
from quantwm.worlds.registry import world_spec

TRUTH = ASSETS / "truth"
PROCESSES_A_GPU = 5
TOGETHER = 8
"""Of the rollouts of a small world on a GPU, each launch costs the same; eight make a launch of the
embedded world as large as one of a world ten times its size."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `report`."""
    parser.add_argument("--out", type=Path, required=True, help=f"folder for {', '.join(FILES)}")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--small", action="store_true", help="few scenes, for a CPU")
    size.add_argument("--minimal", action="store_true", help="the least that fills every section")
    parser.add_argument(
        "--scenes", type=integer(1, 1024), help="instead of the preset's 32, or 2 with --small"
    )
    parser.add_argument(
        "--world", default="embedded", help="another world whose weights are here; see `worlds`"
    )
    add_weights(parser)
    parser.add_argument("--truth", type=Path, help="truth episodes; those in assets/ by default")
    parser.add_argument(
        "--random-weights",
        action="store_true",
        help="a tiny world with random weights: checks the report, says nothing about caches",
    )
    parser.add_argument(
        "--processes",
        type=integer(1, 64),
        help="that share the devices; 5 a GPU, 1 on a CPU or of a large world",
    )
    parser.add_argument(
        "--together",
        type=integer(1, 64),
        help="rollouts side by side; 8 on a GPU, 1 on a CPU or of a large world",
    )
    parser.add_argument(
        "--seconds",
        type=integer(1, 86_400),
        help="measure no longer; what is not through is left out",
    )
    add_device(parser)
    parser.add_argument("--devices", help="several, as in cuda:0,cuda:1, instead of --device")


def run(arguments: argparse.Namespace) -> int:
    """Run everything and write the files."""
    began = time.time()
    devices = _devices(arguments)
    preset = "minimal" if arguments.minimal else "small" if arguments.small else "full"
    truth = arguments.truth or (TRUTH if TRUTH.is_dir() else None)
    if arguments.truth is not None and not arguments.truth.is_dir():
        raise UserError(f"no such folder of truth episodes: {arguments.truth}")
    source, spec = _source(arguments), world_spec(arguments.world)
    open_folder(arguments.out, "--out")
    # A large world fills a device by itself, and runs one rollout at a time.
    gpu, ours = devices[0].type == "cuda", arguments.world == "embedded"
    a_gpu, together = (PROCESSES_A_GPU, TOGETHER) if gpu and ours else (1, 1)
    processes = arguments.processes or (a_gpu * len(devices) if gpu else 1)
    together = arguments.together or together
    seconds = float("inf") if arguments.seconds is None else float(arguments.seconds)
    names = tuple(map(str, devices))
    frames = spec.cache.frames_per_chunk * spec.frames_per_latent
    scale = PRESETS[preset].at_pace(frames / spec.fps)
    if arguments.scenes is not None:
        scale = scale.of_scenes(arguments.scenes)
    order = Order(scale, truth, processes, names, together, seconds, began)

    def save(results: Results) -> list[Path]:
        try:
            return write_report(arguments.out, results, _command(arguments))
        except OSError as error:
            raise UserError(
                f"cannot write to {arguments.out}: {error.strerror or error}"
            ) from error

    def keep(results: Results) -> None:
        save(results)
        about = results.numbers["report"]
        done = sum(about["rollouts"].values())
        say(f"{about['seconds']:.0f} s: {done} of {about['rollouts_planned']} rollouts, written")

    say(f"loading the world on {', '.join(names)}")
    patience = min(START_SECONDS, STARTING * seconds)
    with Workers(source, devices, processes, patience=patience) as workers:
        results = make_results(workers, order, progress, keep)
        paths = save(results)
    progress_done()
    document = summary(results.numbers)
    say(table([["claim", "here"], *([c["claim"], c["here"]] for c in document["claims"])]))
    emit({**document, "files": [str(path) for path in paths]})
    return 0


def _source(arguments: argparse.Namespace) -> WorldSource:
    if not arguments.random_weights:
        return WorldSource(arguments.world, folder=arguments.worlds_in)
    if arguments.world != "embedded":
        raise UserError("--random-weights makes a tiny embedded world; leave --world out")
    return WorldSource(random_preset="tiny")


def _devices(arguments: argparse.Namespace) -> list[torch.device]:
    if arguments.devices is None:
        return [pick_device(arguments.device)]
    if arguments.device != "auto":
        raise UserError("give --device or --devices, not both")
    devices = [pick_device(name.strip()) for name in arguments.devices.split(",")]
    if len(set(devices)) != len(devices):
        raise UserError(f"--devices names one twice: {arguments.devices}")
    return devices


def _command(arguments: argparse.Namespace) -> str:
    flags = [f"--out {arguments.out.name}"]
    flags += [f"--{name}" for name in ("small", "minimal") if getattr(arguments, name)]
    if arguments.world != "embedded":
        flags.append(f"--world {arguments.world}")
    if arguments.truth is not None:
        flags.append(f"--truth {arguments.truth.name}")
    if arguments.device != "auto":
        flags.append(f"--device {arguments.device}")
    for name in ("scenes", "processes", "together", "seconds", "devices"):
        if getattr(arguments, name) is not None:
            flags.append(f"--{name} {getattr(arguments, name)}")
    return " ".join(["python -m quantwm report", *flags])

"""`evaluate-world`: the acceptance table of the embedded world, or its statistics."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from quantwm.describe import hardware, versions
from quantwm.errors import UserError

if TYPE_CHECKING:
    import torch

    from quantwm.evaluation.episodes import Episode
    from quantwm.evaluation.sheet import Strip
    from quantwm.evaluation.table import Row
    from quantwm.worlds.embedded.adapter import EmbeddedWorld

SPEED_TOKENS = 2000
"""Rounded up to whole chunks: 2,112 with 192 a chunk."""
LEAST_MAPS = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `evaluate-world`."""
    parser.add_argument("--world", default="embedded", choices=("embedded",))
    parser.add_argument(
        "--weights", type=Path, help="folder with a manifest; the shipped weights by default"
    )
    parser.add_argument("--subset", default="small", choices=("small", "full"))
    parser.add_argument(
        "--truth",
        type=Path,
        help="folder of true episodes, for --subset full: python -m training.truth --out DIR",
    )
    parser.add_argument("--steps", type=integer(1, 64), help="denoising steps a chunk")
    parser.add_argument("--out", type=Path, help="folder for the contact sheet and the results")
    parser.add_argument("--no-speed", action="store_true", help="leave the row of speed out")
    parser.add_argument(
        "--statistics",
        action="store_true",
        help="measure what decides whether cache results carry over to big models instead",
    )
    parser.add_argument(
        "--strict", action="store_true", help="exit with 1 when a row misses what is wanted"
    )
    add_device(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table and its JSON."""
    if arguments.subset == "full" and arguments.truth is None:
        raise UserError(
            "--subset full needs --truth DIR; make it with python -m training.truth --out DIR"
        )
    began = time.monotonic()
    if arguments.out is not None:  # before a minute is spent on what could not be written then
        open_folder(arguments.out, "--out")
    device = pick_device(arguments.device)
    world = _load(arguments.weights, device)
    episodes = _episodes(arguments, world)
    if arguments.statistics:
        return _statistics(arguments, world, episodes)
    rows, strips = _measure(arguments, world, episodes)
    from quantwm.evaluation.sources import maps_of
    from quantwm.evaluation.table import HEAD

    lines = [HEAD, *(row.cells() for row in rows)]
    say(table(lines))
    wanted = [row for row in rows if row.ok is not None]
    missed = [row.spec.key for row in wanted if not row.ok]
    maps = maps_of(episodes)
    if maps < LEAST_MAPS:
        say(f"maps measured: {maps}; the table asks for {LEAST_MAPS} or more, see --subset full")
    say(f"{len(wanted) - len(missed)} of {len(wanted)} rows are as wanted")
    document = {
        **_about(arguments, world, episodes),
        "rows": [row.to_json() for row in rows],
        "missed": missed,
        "seconds": round(time.monotonic() - began, 1),
    }
    _write(arguments.out, "acceptance", document, lines, strips)
    emit(document)
    return 1 if arguments.strict and missed else 0


def _load(weights: Path | None, device: torch.device) -> EmbeddedWorld:
    import torch

    from quantwm.worlds.embedded import adapter
    from quantwm.worlds.embedded.dtypes import pick_cpu_dtype
    from quantwm.worlds.embedded.weights import load_models, read_manifest

    say(f"loading the embedded world on {device}")
    if weights is None:
        return adapter.load(device)
    dtype = pick_cpu_dtype() if device.type == "cpu" else torch.bfloat16
    manifest = read_manifest(weights)
    models = load_models(manifest, device, dtype)
    return adapter.EmbeddedWorld(manifest.config, *models, manifest.sha256, scenes=None)


def _episodes(arguments: argparse.Namespace, world: EmbeddedWorld) -> list[Episode]:
    from quantwm.evaluation.sources import full_episodes, small_episodes
    from quantwm.worlds.embedded.adapter import ASSETS

    spec = world.spec
    if arguments.truth is not None:
        return full_episodes(arguments.truth, spec.video_size, spec.cache.frames_per_chunk)
    return small_episodes(ASSETS, spec.video_size, spec.cache.frames_per_chunk)


def _measure(
    arguments: argparse.Namespace, world: EmbeddedWorld, episodes: list[Episode]
) -> tuple[list[Row], list[Strip]]:
    from quantwm.evaluation.acceptance import AMOUNTS, Evaluation
    from quantwm.evaluation.speed import frames_per_second
    from quantwm.evaluation.table import make_rows

    amount = AMOUNTS[arguments.subset]
    evaluation = Evaluation(world, amount, arguments.steps, progress)
    found = evaluation.run(episodes)
    progress_done()
    values = {"weights_mb": _weight_megabytes(arguments.weights)}
    if not arguments.no_speed:
        values["fps"] = frames_per_second(
            world, SPEED_TOKENS, amount.timed_chunks, evaluation.steps
        )
    return make_rows(found.estimates(), values), found.strips


def _weight_megabytes(weights: Path | None) -> float:
    """Of the files: a CPU may hold them in float32, at twice their size."""
    from quantwm.worlds.embedded.adapter import ASSETS
    from quantwm.worlds.embedded.weights import read_manifest

    return read_manifest(weights or ASSETS / "embedded").bytes_total / 1e6


def _statistics(
    arguments: argparse.Namespace, world: EmbeddedWorld, episodes: list[Episode]
) -> int:
    from quantwm.evaluation.statistics import cells, measure_statistics

    result = measure_statistics(world, episodes, progress)
    progress_done()
    lines = cells(result)
    say(table(lines))
    # of every episode that there is, whatever --subset says of the table's amounts
    subset = "small" if arguments.truth is None else "full"
    document = {**_about(arguments, world, episodes), "subset": subset, **result}
    _write(arguments.out, "statistics", document, lines, [])
    emit(document)
    return 0


def _about(
    arguments: argparse.Namespace, world: EmbeddedWorld, episodes: list[Episode]
) -> dict[str, Any]:
    from quantwm.evaluation.sources import maps_of

    steps = arguments.steps or world.spec.default_steps[world.device.type]
    return {
        "world": arguments.world,
        "weights_sha256": world.weights_sha256(),
        "subset": arguments.subset,
        "episodes": len(episodes),
        "maps": maps_of(episodes),
        "steps": steps,
        "dtype": str(world.dtype).removeprefix("torch."),
        "device": str(world.device),
        "hardware": hardware(world.device),
        "versions": versions(),
    }


def _write(
    folder: Path | None,
    name: str,
    document: dict[str, Any],
    lines: list[list[str]],
    strips: list[Strip],
) -> None:
    """NAME.json, NAME.md and the contact sheet."""
    from quantwm.evaluation.markdown import as_markdown
    from quantwm.evaluation.sheet import save_sheet

    if folder is None:
        return
    text = json.dumps(document, indent=1) + "\n"
    (folder / f"{name}.json").write_text(text, encoding="utf-8")
    (folder / f"{name}.md").write_text(as_markdown(document, lines), encoding="utf-8")
    if strips:
        say(f"wrote {save_sheet(folder, strips)}")

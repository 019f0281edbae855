"""`tradeoff`: bits against what attention loses, for all methods and spans, on a world's own run.

One BF16 run of the world is recorded (queries, keys and values of its clean passes); every method
then encodes the same recording causally, chunk by chunk, as `python -m quantwm study` does. With
--psnr the methods also run as lanes that are all taught the BF16 lane's history.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.scatter import Panel, Series, to_svg
from benchmarks.timing import device_named, hardware
from quantwm.actions import parse_actions
from quantwm.cache.formats import split_method, split_methods, takes
from quantwm.cli.common import clustered
from quantwm.engine import Engine
from quantwm.engine_types import LaneConfig
from quantwm.errors import UserError
from quantwm.lanes import lanes_for
from quantwm.metrics import frame_mse, psnr_of_mse
from quantwm.study import MethodResult, study
from quantwm.tensor_files import RecordedTensors, TensorRecorder, default_layers, load_tensors
from quantwm.worlds.base import ChunkAction, World
from quantwm.worlds.registry import load_world

METHODS = (
    "rtn:int2", "rtn:int4", "kivi:int2", "kivi:int4", "qvg", "qvg-pro", "quantwm",
    "quantwm:balanced-embedded", "quantwm:compact-embedded", "qtc:small", "qtc", "qtc:large",
)  # fmt: skip

ABLATIONS: dict[str, tuple[str, ...]] = {
    "parts": (
        "qvg",
        "quantwm:qsac=false,psac=false",
        "quantwm:psac=false",
        "quantwm:qsac=false",
        "quantwm",
    ),
    "rank": tuple(f"quantwm:rank={rank}" for rank in (2, 4, 8, 16, 32)),
    "candidates": tuple(f"quantwm:candidates={count}" for count in (1, 2, 4, 8, 16, 32)),
    "moment": ("quantwm:full_moment=false", "quantwm:full_moment=true"),
    "clip": tuple(f"quantwm:clip={clip}" for clip in (0.6, 0.7, 0.8, 0.9, 1.0)),
}
"""Tables 5, 9, 11 and 10 of the QuantWM paper, and the range clip, which it does not have."""

BITS = "resident bits an element (ratio: 16 / bits)"

ITEMS = "w-8, right-8, w-8, left-8"
"""Repeated for as long as the run is: walks and turns, so that views return."""

SMALL = {"frames": 16, "spans": (768, 3072)}
FULL = {"frames": 256, "spans": (768, 1536, 3072, 6144, 12288)}
"""What a CPU and a GPU run unless told otherwise; the GPU takes all layers, a CPU three."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--world", default="embedded")
    parser.add_argument("--methods", type=split_methods, help="instead of all of them")
    parser.add_argument("--ablation", choices=ABLATIONS, help="the methods of one of them")
    parser.add_argument("--frames", type=int, help="latent frames; 16 on a CPU, 256 on a GPU")
    parser.add_argument("--spans", help="tokens that share a codebook, comma-separated")
    parser.add_argument("--layers", help="of the recording; three on a CPU, all on a GPU")
    parser.add_argument("--centroids", type=int, default=64)
    parser.add_argument("--steps", type=int, help="denoising steps; the world's default without")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--psnr", action="store_true", help="also run the methods as lanes, taught")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True, help="folder for tradeoff.svg and .json")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Record, study every method at every span, plot; files lie in --out afterwards."""
    began = time.perf_counter()
    device = device_named(options.device)
    chosen = FULL if device.type == "cuda" else SMALL
    methods = options.methods or ABLATIONS.get(options.ablation, METHODS)
    spans = _numbers(options.spans, "--spans") or chosen["spans"]
    frames = options.frames or chosen["frames"]
    world = load_world(options.world, device)
    actions = _actions(world, frames)
    tensors = _record(world, actions, options, device)
    rows = []
    for method, span in _cases(methods, spans):
        print(f"{method}, spans of {span:,}", file=sys.stderr)
        rows.append(_studied(tensors, method, span, options, device))
    if options.psnr:
        _add_psnr(rows, world, actions, options)
    result = {
        "benchmark": "tradeoff",
        "world": options.world,
        "weights": world.weights_sha256(),
        "tokens": tensors.shape[1],
        "layers": sorted(tensors.layers),
        "frames": frames,
        "seed": options.seed,
        "centroids": options.centroids,
        "hardware": hardware(device),
        "seconds": round(time.perf_counter() - began, 1),
        "rows": rows,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "tradeoff.svg").write_text(_plot(result))
    (options.out / "tradeoff.json").write_text(json.dumps(result, indent=1))
    (options.out / "tradeoff.txt").write_text(table(result) + "\n")
    return result


def _numbers(text: str | None, name: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in (text or "").split(",") if part.strip())
    except ValueError:
        found = (-1,)
    if any(number < 0 for number in found):
        raise UserError(f"{name} takes whole numbers, for example 768,3072; got {text}")
    return found


def _actions(world: World, frames: int) -> tuple[ChunkAction, ...]:
    spec = world.spec
    size = spec.cache.frames_per_chunk
    chunks = max(frames // size, 2)
    once = parse_actions(ITEMS, spec.keys, size)
    return tuple(once[number % len(once)] for number in range(chunks))


def _record(
    world: World,
    actions: tuple[ChunkAction, ...],
    options: argparse.Namespace,
    device: torch.device,
) -> RecordedTensors:
    """q, k, v of one BF16 run, start scene included."""
    count = world.spec.cache.layers
    every = tuple(range(count)) if device.type == "cuda" else default_layers(count)
    layers = _numbers(options.layers, "--layers") or every
    if max(layers) >= count:
        raise UserError(f"--layers takes layers from 0 to {count - 1}")
    recorder = TensorRecorder(layers)
    lanes = lanes_for(world.spec, ["bf16"])
    engine = Engine(world, lanes, seed=options.seed, steps=options.steps, recorder=recorder)
    with engine, tempfile.TemporaryDirectory() as folder:
        engine.start()
        for action in actions:
            engine.step(action)
        path = Path(folder) / "recorded.safetensors"
        recorder.save(path)
        return load_tensors(path)


def _cases(methods: tuple[str, ...], spans: tuple[int, ...]) -> list[tuple[str, int]]:
    """Every method at every span; formats without codebooks at one."""
    return [
        (method, span)
        for method in methods
        for span in (spans if takes(split_method(method)[0], "centroids") else spans[-1:])
    ]


def _studied(
    tensors: RecordedTensors,
    method: str,
    span: int,
    options: argparse.Namespace,
    device: torch.device,
) -> dict[str, Any]:
    chunk = tensors.metadata_int("chunk_tokens") or 1
    settings = {method: clustered(method, options.centroids, options.centroids)}
    found: MethodResult = study(
        tensors,
        [method],
        chunk=chunk,
        span=span,
        settings=settings,
        device=device,
        seed=options.seed,
    )[0]
    return {**asdict(found), "span": span, "psnr": None}


def _add_psnr(
    rows: list[dict[str, Any]],
    world: World,
    actions: tuple[ChunkAction, ...],
    options: argparse.Namespace,
) -> None:
    """PSNR to BF16 of each row's lane, all of them taught: the history's quantization alone."""
    for row in rows:
        lane = lanes_for(world.spec, [row["method"]])[0]
        clusters = clustered(row["method"], options.centroids, options.centroids)
        settings = {**clusters, **split_method(row["method"])[1]}
        policy = replace(lane.policy, span_tokens=row["span"])
        lanes = [*lanes_for(world.spec, ["bf16"]), LaneConfig("it", lane.method, settings, policy)]
        engine = Engine(world, lanes, seed=options.seed, mode="teacher", steps=options.steps)
        errors: list[np.ndarray] = []
        with engine:
            engine.start()
            for action in actions:
                exact, its = (found.frames for found in engine.step(action).lanes)
                errors.append(frame_mse(its, exact))
        row["psnr"] = round(psnr_of_mse(float(np.concatenate(errors).mean())), 3)
        print(f"{row['method']}, spans of {row['span']:,}: {row['psnr']} dB", file=sys.stderr)


def _plot(result: dict[str, Any]) -> str:
    panels = [
        ("logit_mse", "Logit error (mean square)", True),
        ("token_shift", "Top-1 token shift", False),
        ("attention_output_rel_mse", "Attention output error (relative)", True),
        ("psnr", "PSNR to BF16, taught, dB", False),
    ]
    drawn = [
        Panel(name, BITS, name, _series(result["rows"], key, log), log) for key, name, log in panels
    ]
    device = result["hardware"]["device"]
    return to_svg(
        f"Bits against error, {result['world']}, {result['tokens']:,} tokens",
        drawn,
        f"weights {result['weights'][:12]}, layers {len(result['layers'])}, "
        f"{result['centroids']} centroids, {device}; numbers at points: tokens a span",
    )


def _series(rows: list[dict[str, Any]], key: str, log: bool) -> list[Series]:
    found = []
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [r for r in rows if r["method"] == method and r[key] is not None]
        own = [r for r in own if np.isfinite(r[key]) and (r[key] > 0 or not log)]
        points = [(row["resident_bits_per_element"], row[key]) for row in own]
        labels = [f"{row['span']:,}" if len(own) > 1 else "" for row in own]
        found.append(Series(method, points, labels))
    return found


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['hardware']['device']}, weights {result['weights'][:12]}, "
        f"{result['tokens']:,} tokens, layers {result['layers']}, {result['seconds']} s",
        f"{'method':32}{'span':>7}{'bits':>8}{'resident':>10}{'ratio':>8}{'logit':>10}{'shift':>8}"
        f"{'output':>10}{'PSNR':>8}",
    ]
    for row in result["rows"]:
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}x"
        psnr = "-" if row["psnr"] is None else f"{row['psnr']:.2f}"
        lines.append(
            f"{row['method']:32}{row['span']:>7,}{row['bits_per_element']:8.3f}"
            f"{row['resident_bits_per_element']:10.3f}{ratio:>8}{row['logit_mse']:10.4f}"
            f"{row['token_shift']:8.4f}{row['attention_output_rel_mse']:10.5f}{psnr:>8}"
        )
    return "\n".join(lines)

"""`codebooks`: bytes against quality when codebooks outlive spans, beside the published format."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.fidelity import ACTIONS
from benchmarks.timing import device_named, hardware
from quantwm.actions import parse_actions
from quantwm.cache import CachePolicy, CacheSpec, KVCache, make_format
from quantwm.cache.formats import split_method, split_methods
from quantwm.cache.statistics import QueryStatistics, moment
from quantwm.engine import Engine
from quantwm.errors import UserError
from quantwm.lanes import lanes_for
from quantwm.metrics import frame_mse, psnr_of_mse
from quantwm.study import study
from quantwm.tensor_files import load_tensors
from quantwm.worlds.base import World
from quantwm.worlds.registry import load_world

NATIVE = ("quantwm:published", "quantwm:compact")
NATIVE_HEADS = 2
METHODS = "quantwm:embedded,quantwm:balanced-embedded,quantwm:centroids=8,quantwm:compact-embedded"
"""Twice the published format and the one that takes no more bytes than it: at 64 centroids, and
with so few that it reaches the compact one's ratio."""

HEADS = {"cpu": (30,), "cuda": (30, 360, 1600)}
"""Of all layers: the embedded world, Matrix-Game-2, and 40 layers of 40."""

EARLY = ((0, 8), (8, 32))
"""Frames in which lanes have not yet parted: later PSNR of a free run is divergence."""

MARKS = (64, 256)
"""Generated frames after which bytes are read."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--file", type=Path, help="recorded q, k, v, as `study` takes them")
    parser.add_argument("--chunk", type=int, default=192, help="tokens of a chunk of the file")
    parser.add_argument("--span", type=int, default=3072, help="tokens of a span of the file")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--world", default="embedded", help="'none' leaves the world out")
    parser.add_argument("--frames", type=int, default=MARKS[-1], help="of the long run")
    parser.add_argument("--scenes", type=int, help="start scenes of the early windows; all without")
    parser.add_argument("--steps", type=int, help="denoising steps; the world's default without")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for codebooks.json and codebooks.txt")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def run(options: argparse.Namespace) -> dict[str, Any]:
    device, methods = device_named(options.device), split_methods(options.methods)
    result: dict[str, Any] = {"benchmark": "codebooks", "hardware": hardware(device)}
    result["bases"] = [_bases(count, device) for count in HEADS[device.type]]
    result["native"] = [_native(method, device) for method in NATIVE]
    if options.file is not None:
        settings = {"chunk": options.chunk, "span": options.span, "settings": {}}
        found = study(load_tensors(options.file), methods, device=device, **settings)
        result["file"] = {"name": options.file.name, "rows": [asdict(row) for row in found]}
    if options.world != "none":
        world = load_world(options.world, device)
        result["world"] = _world(world, methods, options)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "codebooks.json").write_text(json.dumps(result, indent=1))
        (options.out / "codebooks.txt").write_text(table(result) + "\n")
    return result


def _bases(heads: int, device: torch.device) -> dict[str, Any]:
    """Milliseconds that the host spends, waiting included, on the bases of all heads."""
    statistics_of = QueryStatistics(1, heads, 128, device)
    generator = torch.Generator().manual_seed(0)
    stretch = torch.linspace(3.0, 0.3, 128)
    q = (torch.randn(heads, 256, 128, generator=generator) * stretch).to(device)
    statistics_of.fold({0: moment(q)}, 256)
    basis, _ = statistics_of.bases(8)

    def timed(work: Callable[[], object]) -> float:
        times = []
        for _ in range(3):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            began = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append((time.perf_counter() - began) * 1e3)
        return statistics.median(times)

    return {
        "heads": heads,
        "cold": timed(lambda: statistics_of.bases(8)),
        "warm": timed(lambda: statistics_of.bases(8, basis)),
        "eigh": timed(lambda: torch.linalg.eigh(statistics_of.moments)),
    }


def _native(method: str, device: torch.device) -> dict[str, Any]:
    """Ratios after each of six chunks of 4,680 tokens x 128 whose scene changes all the time."""
    name, settings = split_method(method)
    spec = CacheSpec(1, NATIVE_HEADS, 128, tokens_per_frame=1560, frames_per_chunk=3)
    cache = KVCache(spec, make_format(name, **settings), CachePolicy(), device=device)
    rows = []
    for number in range(6):
        generator = torch.Generator().manual_seed(number)
        points = torch.randn(NATIVE_HEADS, 300, 128, generator=generator)
        places = torch.randint(0, 300, (4680,), generator=generator)
        noise = 0.5 * torch.randn(NATIVE_HEADS, 4680, 128, generator=generator)
        x = (points.index_select(1, places) + noise).to(device)
        cache.begin_chunk(3 * number, 3)
        cache.gather(0, x, x, q=noise[:, :256].to(device), clean=True)
        cache.finalize_chunk()
        ledger = cache.ledger()
        rows.append([cache.tokens, ledger.nominal_ratio, ledger.resident_ratio])
    return {"method": method, "rows": rows}


def _world(world: World, methods: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    scenes = [scene.name for scene in world.scenes()][: options.scenes]
    if not scenes:
        raise UserError("--scenes must be at least 1")
    errors: dict[str, list[np.ndarray]] = {method: [] for method in methods}
    marks: dict[str, dict[int, list[float]]] = {method: {} for method in methods}
    for number, scene in enumerate(scenes):
        print(f"{scene}", file=sys.stderr)
        frames = max(options.frames if number == 0 else 0, EARLY[-1][1])
        _play(world, methods, scene, frames, options, errors, marks)
    return {
        "name": options.world,
        "weights": world.weights_sha256(),
        "steps": options.steps or world.spec.default_steps[world.device.type],
        "seed": options.seed,
        "scenes": scenes,
        "rows": [
            {"method": m, "psnr": _windows(errors[m]), **_ratios(marks[m], options.frames)}
            for m in methods
        ],
    }


def _ratios(chunks: dict[int, list[float]], frames: int) -> dict[str, Any]:
    """Bytes at the marks, and the lowest nominal ratio of any chunk from the first mark on."""
    wanted = {EARLY[-1][1], *MARKS, frames}
    later = [row[0] for made, row in chunks.items() if made >= MARKS[0]]
    return {
        "ratios": {made: chunks[made] for made in sorted(wanted & chunks.keys())},
        "lowest": min(later) if later else None,
    }


def _play(
    world: World,
    methods: Sequence[str],
    scene: str,
    frames: int,
    options: argparse.Namespace,
    errors: dict[str, list[np.ndarray]],
    marks: dict[str, dict[int, list[float]]],
) -> None:
    """One free run of every method beside BF16; a history as long as the world's window."""
    spec = world.spec
    walk = parse_actions(ACTIONS, spec.keys, spec.cache.frames_per_chunk)
    lanes = lanes_for(spec, ["bf16", *methods])
    window = (spec.policy.window_frames or frames) * spec.cache.tokens_per_frame
    settings = {"seed": options.seed, "scene": scene, "steps": options.steps}
    parts: dict[str, list[np.ndarray]] = {method: [] for method in methods}
    with Engine(world, lanes, max_tokens=window, **settings) as engine:
        engine.start()
        made, index = 0, 0
        while made < frames:
            step = engine.step(walk[index % len(walk)])
            own, index = {lane.name: lane for lane in step.lanes}, index + 1
            made += len(own["bf16"].frames)
            for method, lane in zip(methods, lanes[1:], strict=True):
                found = own[lane.name]
                parts[method].append(frame_mse(found.frames, own["bf16"].frames))
                marks[method][made] = [found.ratio, found.resident_ratio, found.tokens]
    for method, chunks in parts.items():
        errors[method].append(np.concatenate(chunks))


def _windows(errors: list[np.ndarray]) -> list[dict[str, Any]]:
    rows = []
    for start, stop in EARLY:
        values = [psnr_of_mse(float(mse[start:stop].mean())) for mse in errors]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        rows.append({"frames": [start, stop], "psnr": statistics.fmean(values), "stdev": spread})
    return rows


def table(result: dict[str, Any]) -> str:
    lines = [result["hardware"]["device"], "", "bases of rank 8 of all heads together, ms"]
    for row in result["bases"]:
        lines.append(
            f"{row['heads']:>5} heads: first {row['cold']:.1f}, from the last ones "
            f"{row['warm']:.1f}, torch.linalg.eigh {row['eigh']:.1f}"
        )
    lines += ["", "chunks of 4,680 tokens x 128: nominal (resident)"]
    for native in result["native"]:
        cells = "  ".join(f"{t:,}: {n:.2f} ({r:.2f})" for t, n, r in native["rows"])
        lines.append(f"{native['method']:<28} {cells}")
    if "file" in result:
        lines += ["", f"{result['file']['name']}: ratio, bits with statistics, K and V rel. MSE, "
                  "logit MSE, token shift, output rel. MSE"]  # fmt: skip
        for row in result["file"]["rows"]:
            lines.append(
                f"{row['method']:<28} {row['ratio']:.2f}x  {row['resident_bits_per_element']:.3f}  "
                f"{row['k_rel_mse']:.4f}  {row['v_rel_mse']:.4f}  {row['logit_mse']:.4f}  "
                f"{row['token_shift']:.4f}  {row['attention_output_rel_mse']:.5f}"
            )
    if "world" in result:
        world = result["world"]
        named = f"{world['name']}, weights {world['weights'][:12]}, {world['steps']} steps"
        lines += ["", f"{named}, {len(world['scenes'])} scenes: PSNR to BF16 (stdev), ratios"]
        for row in world["rows"]:
            early = "  ".join(
                f"{w['frames'][0]}-{w['frames'][1] - 1}: {w['psnr']:.2f} ({w['stdev']:.2f})"
                for w in row["psnr"]
            )
            ratios = "  ".join(
                f"{made} frames: {n:.2f} ({r:.2f})" for made, (n, r, _) in row["ratios"].items()
            )
            if row["lowest"] is not None:
                ratios += f"  lowest from {MARKS[0]} frames on: {row['lowest']:.2f}"
            lines.append(f"{row['method']:<28} {early}  {ratios}")
    return "\n".join(lines)

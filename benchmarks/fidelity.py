"""`fidelity`: PSNR of every lane to BF16 on the start scenes, free-running and taught."""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

import numpy as np
import torch

from benchmarks.timing import device_named, hardware
from quantwm.actions import parse_actions
from quantwm.engine import Engine
from quantwm.errors import UserError
from quantwm.lanes import MODES, lanes_for
from quantwm.metrics import frame_mse, psnr_of_mse
from quantwm.worlds.base import ChunkAction, World
from quantwm.worlds.registry import load_world

ACTIONS = "w-16, right-24, w-16, left-24, w-16"
"""A walk with two turns: 96 frames, so that early rooms come back into view."""

WINDOWS = ((0, 8), (8, 32), (32, 96))
"""Frames of the run. Late in a free run the lanes have parted: that PSNR is divergence."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--world", default="embedded")
    parser.add_argument("--lanes", default="bf16,qvg,quantwm", help="the first must be bf16")
    parser.add_argument("--scenes", type=int, help="how many of the start scenes; all without")
    parser.add_argument("--actions", default=ACTIONS)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--steps", type=int, help="denoising steps; the world's default without")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def run(options: argparse.Namespace) -> dict[str, Any]:
    names = options.lanes.split(",")
    if names[0] != "bf16" or len(names) < 2:
        raise UserError(f"--lanes must begin with bf16 and name another, got {options.lanes}")
    device = device_named(options.device)
    world = load_world(options.world, device)
    spec = world.spec
    actions = parse_actions(options.actions, spec.keys, spec.cache.frames_per_chunk)
    scenes = [scene.name for scene in world.scenes()][: options.scenes]
    rows: list[dict[str, Any]] = []
    for mode in options.modes.split(","):
        errors: dict[str, list[np.ndarray]] = {name: [] for name in names[1:]}
        for scene in scenes:
            print(f"{mode}: {scene}", file=sys.stderr)
            for name, mse in _errors(world, names, scene, mode, actions, options).items():
                errors[name].append(mse)
        rows += [_row(mode, name, scenes, errors[name]) for name in names[1:]]
    return {
        "benchmark": "fidelity",
        "world": options.world,
        "weights": world.weights_sha256(),
        "steps": options.steps or spec.default_steps[device.type],
        "actions": options.actions,
        "seed": options.seed,
        "hardware": hardware(device),
        "rows": rows,
    }


def _errors(
    world: World,
    names: list[str],
    scene: str,
    mode: str,
    actions: tuple[ChunkAction, ...],
    options: argparse.Namespace,
) -> dict[str, np.ndarray]:
    """Lane -> squared error of each generated frame to the BF16 lane's, float64 [frames]."""
    lanes = lanes_for(world.spec, names)
    parts: dict[str, list[np.ndarray]] = {name: [] for name in names[1:]}
    engine = Engine(world, lanes, seed=options.seed, scene=scene, mode=mode, steps=options.steps)
    with engine:
        engine.start()
        for action in actions:
            frames = {lane.name: lane.frames for lane in engine.step(action).lanes}
            for name in parts:
                parts[name].append(frame_mse(frames[name], frames["bf16"]))
    return {name: np.concatenate(chunks) for name, chunks in parts.items()}


def _row(mode: str, name: str, scenes: list[str], errors: list[np.ndarray]) -> dict[str, Any]:
    """Per window: mean and spread over scenes of the PSNR pooled over the window's frames."""
    row: dict[str, Any] = {"mode": mode, "lane": name, "scenes": len(scenes), "windows": []}
    for start, stop in WINDOWS:
        values = [psnr_of_mse(float(mse[start:stop].mean())) for mse in errors if len(mse) > start]
        if values:
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            row["windows"].append(
                {
                    "frames": [start, stop],
                    "psnr": round(statistics.fmean(values), 2),
                    "stdev": round(spread, 2),
                    "by_scene": dict(zip(scenes, (round(v, 2) for v in values), strict=True)),
                }
            )
    return row


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['hardware']['device']}, weights {result['weights'][:12]}, "
        f"{result['steps']} steps, "
        f'"{result["actions"]}"; PSNR to BF16 in dB, mean over scenes (standard deviation)'
    ]
    for row in result["rows"]:
        cells = "  ".join(
            f"{w['frames'][0]}-{w['frames'][1] - 1}: {w['psnr']:.2f} ({w['stdev']:.2f})"
            for w in row["windows"]
        )
        lines.append(f"{row['mode']:<8} {row['lane']:<10} {cells}")
    return "\n".join(lines)

"""`frames`: frames per second of the embedded world in three lanes, and where the time goes."""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from typing import Any

import torch

from benchmarks.stopwatch import Target, split_time
from benchmarks.timing import device_named, hardware
from quantwm.cache import FORMATS, KVCache
from quantwm.cache import attention as attending
from quantwm.cache.reading import Reading
from quantwm.engine import Engine
from quantwm.lanes import lanes_for
from quantwm.worlds.base import ChunkAction, World
from quantwm.worlds.embedded.adapter import EmbeddedWorld
from quantwm.worlds.registry import load_world, world_presence


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lanes", default="bf16,qvg,quantwm")
    parser.add_argument("--history", default="1000,2000", help="tokens of history, at least")
    parser.add_argument("--chunks", type=int, default=8, help="chunks timed at each history")
    parser.add_argument("--steps", type=int, help="denoising steps; the world's default without")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--eager", action="store_true", help="op by op, without CUDA graphs")
    parser.add_argument("--profile", action="store_true", help="also the ops that cost the most")
    parser.add_argument("--preset", default="shipped", help="of random weights, where none are")


def run(options: argparse.Namespace) -> dict[str, Any]:
    device = device_named(options.device)
    world, weights = _world(options, device)
    result: dict[str, Any] = {
        "benchmark": "frames",
        "weights": weights,
        "dtype": str(world.dtype),
        "hardware": hardware(device),
    }
    _say(f"{result['hardware']['device']}, {world.dtype}, weights {weights[:12]}")
    if device.type == "cuda" and isinstance(world, EmbeddedWorld):
        result["ok"] = result["graphs_equal_eager"] = graphs_equal_eager(world)
        _say(f"graphs give the bits of the ops one by one: {result['ok']}")
        if options.eager:
            world = world.without_graphs()
    result["rows"] = []
    for tokens in options.history.split(","):
        result["rows"].append(_row(world, int(tokens), options))
        _say(_lines(result["rows"][-1]))
    return result


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def graphs_equal_eager(world: EmbeddedWorld, lanes: str = "bf16,quantwm", chunks: int = 3) -> bool:
    """Whether every prediction and every frame is the same with graphs and op by op."""
    runs = []
    for each in (world, world.without_graphs()):
        outcome: list[torch.Tensor] = []
        with Engine(each, lanes_for(each.spec, lanes.split(",")), seed=1, steps=2) as engine:
            engine.start()
            for keys in itertools.islice(itertools.cycle(({"w"}, {"left"}, {"w", "d"})), chunks):
                action = ChunkAction.held(frozenset(keys), each.spec.cache.frames_per_chunk)
                block = engine.step(action)
                for lane in block.lanes:
                    outcome += [torch.from_numpy(lane.frames), *block.x0[lane.name]]
        runs.append(outcome)
    return all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def _world(options: argparse.Namespace, device: torch.device) -> tuple[World, str]:
    """The shipped weights, or random ones of the same size: the same work either way."""
    if options.preset == "shipped" and world_presence("embedded").present:
        world = load_world("embedded", device)
        return world, world.weights_sha256()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return EmbeddedWorld.random(options.preset, device=device, dtype=dtype), "random"


def _row(world: World, history: int, options: argparse.Namespace) -> dict[str, Any]:
    """Steady state: a window that holds `history` tokens, in whole chunks, beside the current."""
    spec = world.spec
    per_chunk = spec.cache.tokens_per_chunk
    kept = -(-history // per_chunk) * per_chunk
    lanes = lanes_for(spec, options.lanes.split(","))
    action = ChunkAction.held(frozenset({next(iter(spec.keys))}), spec.cache.frames_per_chunk)
    with Engine(world, lanes, seed=0, steps=options.steps, max_tokens=kept + per_chunk) as engine:
        block = engine.start()
        while block.lanes[0].tokens < kept:
            block = engine.step(action)
            _say(f"  {block.lanes[0].tokens} tokens of history, {block.ms:.0f} ms a chunk")
        engine.step(action)
        seconds, by_lane = [], []
        for _ in range(options.chunks):
            began = time.perf_counter()
            block = engine.step(action)
            seconds.append(time.perf_counter() - began)
            by_lane.append({lane.name: lane.ms for lane in block.lanes})
        split = _split(engine, action, world, options.chunks)
        profile = _profile(engine, action) if options.profile else []
        explained, steps = engine.explain(), engine.steps
    ms = statistics.median(seconds) * 1e3
    frames = spec.cache.frames_per_chunk * spec.frames_per_latent
    return {
        "history_tokens": block.lanes[0].tokens,
        "steps": steps,
        "fps": round(frames / ms * 1e3, 2),
        "ms_per_chunk": round(ms, 2),
        "lane_ms": {
            name: round(statistics.median(lane[name] for lane in by_lane), 2) for name in by_lane[0]
        },
        "split_ms": split,
        "profile": profile,
        "kernels": explained,
    }


def _split(engine: Engine, action: ChunkAction, world: World, chunks: int) -> dict[str, float]:
    """Milliseconds per chunk by part, in a run of its own (watching costs time)."""
    kinds = {kind for kind, _, _ in FORMATS.values()}
    # All of a reading: decoders are launched together, or again as they were.
    targets: list[Target] = [(Reading, name, "decode history") for name in ("kept", "staged")]
    targets += [(kind, name, "encode") for kind in kinds for name in ("fit", "encode")]
    targets += [
        (attending, "attention", "attention"),
        (KVCache, "finalize_chunk", "grow spans, statistics"),
        (type(world), "decode", "autoencoder"),
    ]
    return split_time(world.device, targets, lambda: engine.step(action), chunks)


def _profile(engine: Engine, action: ChunkAction, top: int = 25) -> list[dict[str, Any]]:
    """The ops and launches of one chunk that cost the host the most, by their own time."""
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU]
    if engine.world.device.type == "cuda":
        kinds.append(ProfilerActivity.CUDA)
    with profile(activities=kinds) as watched:
        engine.step(action)
    rows = sorted(watched.key_averages(), key=lambda row: -row.self_cpu_time_total)
    return [
        {"op": row.key, "calls": row.count, "self_ms": round(row.self_cpu_time_total / 1e3, 2)}
        for row in rows[:top]
    ]


def table(result: dict[str, Any]) -> str:
    head = f"{result['hardware']['device']}, weights {result['weights'][:12]}, {result['dtype']}"
    return "\n".join([head, *map(_lines, result["rows"])])


def _lines(row: dict[str, Any]) -> str:
    whole = sum(row["split_ms"].values())
    lines = [
        f"{row['history_tokens']} tokens of history, {row['steps']} steps: {row['fps']} frames "
        f"a second, {row['ms_per_chunk']} ms a chunk; by lane {row['lane_ms']}",
        *(
            f"    {label:26} {ms:9.2f} ms {ms / whole:6.1%}"
            for label, ms in row["split_ms"].items()
        ),
        *(f"    {op['calls']:6} x {op['op'][:60]:60} {op['self_ms']} ms" for op in row["profile"]),
        f"    {row['kernels']}",
    ]
    return "\n".join(lines)

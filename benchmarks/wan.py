"""`wan`: a full-size Wan world with random weights: milliseconds and bytes per cache format."""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.host_time import by_stream, device_events, host_lines, host_time
from benchmarks.stopwatch import Target, split_time
from benchmarks.timing import device_named, hardware
from quantwm.cache import FORMATS, KVCache, batch
from quantwm.cache import attention as cache_attention
from quantwm.cache.beside import in_turn
from quantwm.cache.reading import Reading
from quantwm.cache.recorded import op_by_op
from quantwm.engine import Engine
from quantwm.engine_types import BlockResult
from quantwm.errors import UserError
from quantwm.lanes import lanes_for
from quantwm.worlds.base import ChunkAction, StartState
from quantwm.worlds.wan import attention as wan_attention
from quantwm.worlds.wan.catalog import ENTRIES
from quantwm.worlds.wan.offload import offload_blocks
from quantwm.worlds.wan.random_world import random_world
from quantwm.worlds.wan.world import WanWorld

VIDEO_FRAMES = 93  # 24 latent frames: the memory question of the issue


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--world", default="matrix_game2_universal", choices=ENTRIES)
    parser.add_argument("--lanes", default="bf16,qvg,quantwm", help="formats, one run each")
    parser.add_argument("--together", action="store_true", help="all lanes in lock-step instead")
    parser.add_argument("--rounds", type=int, default=0, help="before that, lanes' chunks in turn")
    parser.add_argument("--latent", help="height,width of a latent frame, e.g. 90,160 for 720p")
    parser.add_argument("--frames", type=int, default=VIDEO_FRAMES, help="video frames to fill")
    parser.add_argument("--chunks", type=int, default=3, help="chunks timed after that")
    parser.add_argument("--no-graphs", action="store_true", help="launch op by op")
    parser.add_argument("--in-turn", action="store_true", help="encode on the model's own stream")
    parser.add_argument("--op-by-op", action="store_true", help="encode batches without graphs")
    parser.add_argument("--alone", action="store_true", help="encode each layer by itself")
    parser.add_argument("--kernels", type=int, default=0, help="name so many of the costliest")
    parser.add_argument("--offload", action="store_true", help="blocks wait on the CPU")
    parser.add_argument("--brief", action="store_true", help="no chunk is watched, only timed")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def run(options: argparse.Namespace) -> dict[str, Any]:
    device = device_named(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    world = random_world(options.world, device, dtype, latent=_latent(options.latent))
    if options.offload:
        offload_blocks(world.model, device)
    if options.no_graphs or options.offload:
        world.forward = world.model
    names = options.lanes.split(",")
    spec = world.spec
    latents = (options.frames - 1) // spec.frames_per_latent + 1
    chunks = -(-latents // spec.cache.frames_per_chunk)
    walked = Walked(world, _held(world), chunks - 1)
    equal = _graphs_equal(walked, names[0])
    groups = [names] if options.together else [[name] for name in names]
    rounds, rows = _rounds(walked, names, options.rounds), []
    for name, ms in rounds.items():
        print(f"{name} in turn: {ms} ms a chunk", file=sys.stderr, flush=True)
    for group in groups:
        together = 0 if options.alone else batch.BATCH_BYTES
        with (
            in_turn() if options.in_turn else nullcontext(),
            op_by_op() if options.op_by_op else nullcontext(),
            patch.object(batch, "BATCH_BYTES", together),
        ):
            rows.append(_row(walked, group, options))
        # A run that is cut short has said what it knows.
        print("\n".join(_lines(rows[-1])), file=sys.stderr, flush=True)
    return {
        "benchmark": "wan",
        "world": options.world,
        "video": list(world.spec.video_size),
        "weights": "random",
        "weight_bytes": world.weight_bytes(),
        "dtype": str(dtype),
        "hardware": hardware(device),
        "graphs_equal": equal,
        "rounds_ms": rounds,
        "ok": equal is not False,
        "rows": rows,
    }


def _latent(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    parts = text.split(",")
    if len(parts) != 2 or not all(part.isdigit() for part in parts):
        raise UserError(f"--latent is height,width such as 90,160, got {text!r}")
    return int(parts[0]), int(parts[1])


class Walked:
    """A world whose start already holds a history, written by clean passes of random latents.

    A window is filled with one pass a chunk and no decoding; denoising it took Causal-Forcing
    six times as long, more than a whole minute for three lanes.
    """

    def __init__(self, world: WanWorld, action: ChunkAction, chunks: int) -> None:
        self._world, self._actions = world, (action,) * chunks
        self._started = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)

    def set_forward(self, forward: Any) -> None:
        self._world.forward = forward

    def start(self, *given: Any) -> StartState:
        """The picture and the prompt are encoded once: all lanes start from the same."""
        world = self._world
        if not self._started:
            world.start(*given)
            self._started = True
        if world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(world.device)
        frames = len(self._actions) * world.spec.cache.frames_per_chunk
        generator = torch.Generator(world.device).manual_seed(1)
        latents = torch.randn(
            frames, *world.spec.latent_shape, generator=generator, device=world.device
        )
        width, height = world.spec.video_size
        return StartState(latents, self._actions, np.zeros((1, height, width, 3), np.uint8))


def _rounds(world: Walked, lanes: list[str], count: int) -> dict[str, float]:
    """Median milliseconds a chunk, without the autoencoder, of one engine a lane, each stepped once
    a round: what is to be compared meets the same host, whose speed changes from minute to minute.
    """
    action, times = _held(world), {name: [] for name in lanes if count}
    with ExitStack() as stack:
        engines = {}
        for name in times:
            engines[name] = stack.enter_context(
                Engine(world, lanes_for(world.spec, [name]), seed=0)
            )
            stack.enter_context(patch.object(engines[name], "_decode", _no_picture))
            engines[name].start()
            for _ in range(2):
                engines[name].step(action)
        for _ in range(count):
            for name, engine in engines.items():
                times[name].append(_ms(engine.step(action), name))
    return {name: round(statistics.median(found), 2) for name, found in times.items()}


def _no_picture(lane: Any, latents: Any) -> np.ndarray:
    """In place of an engine's decoding of what a chunk made."""
    return np.zeros((1, 1, 1, 3), np.uint8)


def _row(world: Walked, lanes: list[str], options: argparse.Namespace) -> dict[str, Any]:
    spec, device = world.spec, world.device
    action = _held(world)
    _free(device)
    with Engine(world, lanes_for(spec, lanes), seed=0) as engine:
        engine.start()
        resident = engine.step(action)  # warms up, and is the last chunk of the 93 frames
        timed = [_timed(engine, action) for _ in range(options.chunks)]
        peak = _peak(device)  # from the second chunk on a video holds two states
        host = {} if options.brief else host_time(engine, lambda: engine.step(action), lanes)
        split = {} if options.brief else _split(engine, action, world, 1)
        costliest = _costliest(engine, action, options.kernels)
        explained = engine.explain()
    blocks = [block for _, block in timed]
    frames = spec.cache.frames_per_chunk * spec.frames_per_latent
    per_lane = {
        lane.name: statistics.median(_ms(block, lane.name) for block in blocks)
        for lane in blocks[0].lanes
    }
    total = sum(per_lane.values())
    wall = statistics.median(seconds for seconds, _ in timed) * 1e3
    return {
        "lanes": lanes,
        "history_tokens": resident.lanes[0].tokens,
        "ms_per_chunk": {name: round(ms, 2) for name, ms in per_lane.items()},
        "chunks_per_second": round(1e3 / total, 3),
        "frames_per_second": round(frames / total * 1e3, 2),
        "ms_with_decode": round(wall, 2),
        "decode_ms": round(max(wall - total, 0.0) / len(lanes), 2),
        "kv_bytes": {lane.name: lane.kv_bytes for lane in resident.lanes},
        "resident_ratio": {lane.name: round(lane.resident_ratio, 3) for lane in resident.lanes},
        "peak_bytes": peak,
        "host_ms": host,
        "split_ms": split,
        "kernels_ms": costliest,
        "kernels": explained,
    }


def _graphs_equal(world: Walked, lane: str) -> bool | None:
    """Whether a chunk of replayed graphs has the bits of one launched op by op; None without."""
    plain = world.model
    if world.forward is plain:
        return None
    graphed, seen = world.forward, []
    for forward in (graphed, plain):
        world.set_forward(forward)
        with Engine(world, lanes_for(world.spec, [lane]), seed=0) as engine:
            engine.start()
            seen.append(engine.step(_held(world)).x0[lane][-1])
    world.set_forward(graphed)
    return bool(torch.equal(*seen))


def _held(world: Any) -> ChunkAction:
    keys = frozenset({"w"}) & world.spec.keys.keys()
    return ChunkAction.held(frozenset(keys), world.spec.cache.frames_per_chunk)


def _timed(engine: Engine, action: ChunkAction) -> tuple[float, BlockResult]:
    began = time.perf_counter()
    block = engine.step(action)
    return time.perf_counter() - began, block


def _ms(block: BlockResult, name: str) -> float:
    return next(lane.ms for lane in block.lanes if lane.name == name)


def _split(engine: Engine, action: ChunkAction, world: Walked, chunks: int) -> dict[str, float]:
    """Milliseconds per chunk by part, in a run of its own (watching costs time)."""
    kinds = {kind for kind, _, _ in FORMATS.values()}
    targets: list[Target] = [
        (kind, name, "cache: encode")
        for kind in kinds
        for name in ("fit", "encode")
        if name in vars(kind)
    ]
    targets += [
        (Reading, "staged", "cache: decode history"),
        (Reading, "decode_heads", "cache: decode history"),
        (cache_attention, "attention", "attention"),
        (wan_attention, "softmax_attention", "attention"),
        (KVCache, "finalize_chunk", "cache: commit"),
        (WanWorld, "decode_chunk", "autoencoder"),
    ]
    return split_time(world.device, targets, lambda: engine.step(action), chunks)


def _costliest(engine: Engine, action: ChunkAction, count: int) -> dict[str, tuple[int, float]]:
    """What the device ran longest in a chunk, the autoencoder left out: name -> launches, ms.

    "idle" is what is left of the time between the first launch and the last end; streams overlap.
    """
    if not count or not torch.cuda.is_available():
        return {}
    with (
        patch.object(engine, "_decode", _no_picture),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile,
    ):
        engine.step(action)
        torch.cuda.synchronize()
    events = device_events(profile)
    if not events:
        return {}
    spent: dict[str, tuple[int, float]] = {}
    for event in events:
        launches, ms = spent.get(event.name, (0, 0.0))
        spent[event.name] = launches + 1, ms + event.time_range.elapsed_us() / 1e3
    begun = min(event.time_range.start for event in events)
    ended = max(event.time_range.end for event in events)
    streams = by_stream(events)
    most = sorted(spent, key=lambda name: -spent[name][1])
    rest = [spent[name] for name in most[count:]]
    found = {name[:90]: (spent[name][0], round(spent[name][1], 2)) for name in most[:count]}
    found["all others"] = sum(n for n, _ in rest), round(sum(ms for _, ms in rest), 2)
    found["idle"] = 0, round((ended - begun) / 1e3 - streams["any stream"][1], 2)
    return {**found, **streams}


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def table(result: dict[str, Any]) -> str:
    size = "x".join(map(str, result["video"]))
    graphs = {None: "none", True: "the same bits as op by op", False: "WRONG"}
    lines = [
        f"{result['world']} {size}, random weights {result['weight_bytes'] / 2**30:.1f} GiB, "
        f"{result['dtype']}, {result['hardware']['device']}, CUDA graphs: "
        f"{graphs[result['graphs_equal']]}"
    ]
    first = next(iter(result["rounds_ms"].values()), 1.0)
    lines += [
        f"{name} in turn: {ms} ms a chunk without the autoencoder, {ms / first - 1:+.1%}"
        for name, ms in result["rounds_ms"].items()
    ]
    for row in result["rows"]:
        lines += _lines(row)
    return "\n".join(lines)


def _lines(row: dict[str, Any]) -> list[str]:
    """One row for people."""
    peak = "" if row["peak_bytes"] is None else f", peak {row['peak_bytes'] / 2**30:.2f} GiB"
    held = {name: f"{count / 2**30:.3f} GiB" for name, count in row["kv_bytes"].items()}
    lines = [
        f"{','.join(row['lanes'])}: {row['ms_per_chunk']} ms a chunk without the autoencoder, "
        f"{row['frames_per_second']} frames a second; {row['history_tokens']} tokens held in "
        f"{held}, resident ratio {row['resident_ratio']}{peak}; decode {row['decode_ms']} ms"
    ]
    lines += host_lines(row["host_ms"])
    whole = sum(row["split_ms"].values())
    lines += [
        f"    {label:26} {ms:9.2f} ms {ms / whole:6.1%}" for label, ms in row["split_ms"].items()
    ]
    lines += [f"    {ms:9.2f} ms {n:6} x {name}" for name, (n, ms) in row["kernels_ms"].items()]
    return [*lines, f"    {row['kernels']}"]

"""`passes`: the kernels between a Wan pass's matrix products beside PyTorch's operations."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.agreement import Disagreement, relative_error, require
from benchmarks.timing import copy_ceiling, device_named, hardware
from kernels import passes
from quantwm.worlds.wan.layers import EPS, RMSNorm, layer_norm, split_heads
from quantwm.worlds.wan.rotary import angles, frame_angles, rotate

# Relative error of results that are rounded to BF16 (2^-9) once to four times, in whichever order
# float32 sums are added; PyTorch's attention rounds its weights too. The interpreter cuts bits off
# instead of rounding.
ERROR, CUT_ERROR = 6e-3, 2e-2


@dataclass(frozen=True)
class Sizes:
    """Of a chunk: frames of rows x columns tokens, heads of the stream and of its actions."""

    frames: int
    rows: int
    columns: int
    heads: int
    head_dim: int = 128
    action_heads: int = 16
    action_dim: int = 64
    seen: int = 6  # latent frames that the mouse attends to


SIZES = {
    "matrix_game2": Sizes(3, 22, 40, 12),
    "lingbot_14b": Sizes(4, 30, 52, 40),
    "odd": Sizes(2, 3, 7, 5, 64, 3, 32, 5),
}
READ = {"gate": 2.0, "cells over time": 1.0}
"""Tensors of the output's size that a kernel reads, 1 where nothing is said; keys and values of the
attention over time come on top."""

Pair = tuple[Callable[[], Tensor], Callable[[], Tensor]]
"""A kernel, and the operations that it stands for."""


def pairs(sizes: Sizes, device: torch.device | str, seed: int = 0) -> dict[str, Pair]:
    """Every kernel with its operations, on the same random BF16 inputs."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, torch.bfloat16)

    cells = sizes.rows * sizes.columns
    tokens, width = sizes.frames * cells, sizes.heads * sizes.head_dim
    x, update, vectors = (
        normal(tokens, width),
        normal(tokens, width),
        normal(sizes.frames, 6, width),
    )
    shift, scale, gate = vectors[:, :, None].unbind(1)[:3]
    norm = RMSNorm(width).to(device, torch.bfloat16).requires_grad_(False)
    norm.weight.copy_(normal(width))
    split = split_heads(x, sizes.heads)
    grid = (sizes.rows, sizes.columns)
    frames = torch.arange(5, 5 + sizes.frames, device=device)
    turns = tuple(part.float() for part in frame_angles(frames, grid, sizes.head_dim))
    table = angles(frames, 8, 256.0)
    action_turns = table.cos().float(), table.sin().float()
    inner = sizes.action_heads * sizes.action_dim
    q, k = (split_heads(part, sizes.action_heads) for part in normal(tokens, 2 * inner).chunk(2, 1))
    keys, values = (normal(sizes.action_heads, sizes.seen * cells, sizes.action_dim) for _ in "kv")

    def unit(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + EPS)

    def action() -> Tensor:
        by_frame = unit(k).unflatten(1, (sizes.frames, -1))
        cos, sin = action_turns
        return rotate(by_frame, cos[:, None], sin[:, None]).flatten(1, 2)

    def over_time() -> Tensor:
        parts = (t.unflatten(1, (-1, cells)).permute(2, 0, 1, 3) for t in (q, keys, values))
        return F.scaled_dot_product_attention(*parts).permute(1, 2, 0, 3).flatten(1, 2)

    def modulated() -> Tensor:
        normed = layer_norm(x).unflatten(0, (sizes.frames, -1))
        return (normed * (1 + scale) + shift).flatten(0, 1)

    def gated() -> Tensor:
        return x + (update.unflatten(0, (sizes.frames, -1)) * gate).flatten(0, 1)

    return {
        "norm and turn": (
            lambda: passes.turn(split, norm.weight, turns, EPS),
            lambda: rotate(split_heads(norm(x), sizes.heads), *turns),
        ),
        "norm": (
            lambda: passes.turn(split, norm.weight, None, EPS),
            lambda: split_heads(norm(x), sizes.heads).contiguous(),
        ),
        "turn": (
            lambda: passes.turn(split, None, turns, EPS), lambda: rotate(split, *turns)
        ),
        "norm and turn of an action": (
            lambda: passes.action_turn(k, action_turns, sizes.frames, EPS), action
        ),
        "cells over time": (
            lambda: passes.cell_attention(q, keys, values, sizes.frames), over_time
        ),
        "modulate": (lambda: passes.modulate(x, shift, scale, EPS), modulated),
        "gate": (lambda: passes.gated(x, update, gate), gated),
    }  # fmt: skip


def agree(sizes: Sizes, device: torch.device | str, limit: float = ERROR) -> dict[str, float]:
    """Relative error by kernel; Disagreement above the limit or where a bit pattern is wild."""
    found = {}
    for name, (kernel, operations) in pairs(sizes, device).items():
        mine, wanted = kernel(), operations()
        require(mine.shape == wanted.shape, f"{name}: {tuple(mine.shape)}, {tuple(wanted.shape)}")
        found[name] = relative_error(mine.unflatten(0, (-1, 1)), wanted.unflatten(0, (-1, 1)))
        require(found[name] <= limit, f"{name}: relative error {found[name]:.1e} above {limit:.0e}")
        largest = float((mine.float() - wanted.float()).abs().max())
        allowed = 10 * limit * float(wanted.float().abs().max())
        require(largest <= allowed, f"{name}: a value is off by {largest:.2g}")
    return found


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=50, help="calls in a CUDA graph")


def run(options: argparse.Namespace) -> dict[str, Any]:
    device = device_named("cuda", cpu=False)
    rows, ok = [], True
    ceiling = copy_ceiling(device)["copy_gb_s"]
    for size, sizes in SIZES.items():
        try:
            errors = agree(sizes, device)
        except Disagreement as wrong:
            rows.append({"size": size, "kernel": str(wrong), "error": None, "us": []})
            ok = False
            continue
        for name, both in pairs(sizes, device).items():
            us = [round(_microseconds(call, options.repeats), 1) for call in both]
            floor = moved_bytes(name, both[0]().nbytes, sizes) / ceiling / 1e3
            row = {"size": size, "kernel": name, "error": errors[name], "us": us}
            rows.append(row | {"floor_us": round(floor, 2), "of_floor": round(floor / us[0], 3)})
    found = {"hardware": hardware(device), "copy_gb_s": ceiling, "rows": rows}
    return {"benchmark": "passes", "ok": ok, **found}


def moved_bytes(name: str, written: int, sizes: Sizes) -> float:
    """What a kernel reads and writes at least; rows of a weight or a frame's vectors are few."""
    over_time = 2.0 * sizes.seen / sizes.frames if name == "cells over time" else 0.0
    return written * (1.0 + READ.get(name, 1.0) + over_time)


def _microseconds(call: Callable[[], Tensor], repeats: int) -> float:
    """Of one call in a CUDA graph of `repeats`, as in a pass: the host's launching is left out."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(3):
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream), torch.no_grad():
        for _ in range(repeats):
            call()
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / repeats)
    return statistics.median(times)


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{'size':14} {'kernel':28} {'error':>9} {'kernel us':>10} {'PyTorch us':>10}"
        f" {'floor us':>9} {'of floor':>9}   (8 MB tensors stay in the L2 cache)"
    ]
    for row in result["rows"]:
        if row["error"] is None:
            lines.append(f"{row['size']:14} WRONG: {row['kernel']}")
        else:
            mine, theirs = row["us"]
            lines.append(
                f"{row['size']:14} {row['kernel']:28} {row['error']:9.1e} {mine:10} {theirs:10}"
                f" {row['floor_us']:9} {row['of_floor']:9}"
            )
    return "\n".join(lines)

"""`low-memory`: what slabs by size and the fused kernel by launch row take, in one table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.agreement import relative_error
from benchmarks.attention import FUSED_BOUND
from benchmarks.histories import LayerHistory, clustered
from benchmarks.timing import device_named, hardware, measure
from kernels import fused, fused_hopper, tuning
from kernels.format import Side
from quantwm.cache import explain

SLABS = (
    (84_000_000, 0), (42_000_000, 20), (42_000_000, 0), (21_000_000, 10), (21_000_000, 20),
    (21_000_000, 0), (29_400_000, 14), (10_500_000, 10), (10_500_000, 5), (5_250_000, 10),
)  # fmt: skip
"""Bytes of a slab's keys and values, and its heads (0: all)."""

ROWS = (
    (64, 128, 8, 3, 0), (64, 128, 8, 1, 0), (64, 128, 8, 1, 128), (64, 128, 4, 1, 0),
    (32, 128, 4, 1, 0), (32, 128, 8, 1, 128), (128, 128, 8, 1, 0), (64, 64, 4, 1, 168),
    (64, 256, 16, 1, 0),
)  # fmt: skip
"""Tokens and queries of a program, warps, stages, registers (0: any), as in `kernels/tuning.py`: of
flash_kernel. An empty row is kernels.flash_hopper, where it runs."""

WITH_PSAC = 3  # rows, the fastest over QVG's format, that are timed over quantwm's too


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--heads", type=int, default=40)
    parser.add_argument("--queries", type=int, default=4680, help="tokens of the current chunk")
    parser.add_argument("--cached", type=int, default=28080, help="tokens of history")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder for low_memory.json and low_memory.txt")
    parser.add_argument("--device", default="cuda")


def run(options: argparse.Namespace) -> dict[str, Any]:
    device = device_named(options.device, cpu=False)
    generator = torch.Generator(device).manual_seed(0)
    shape = (options.heads, options.cached, options.head_dim)
    keys, values = clustered(shape, generator), clustered(shape, generator)
    own = [clustered((options.heads, options.queries, options.head_dim), generator)
           for _ in range(2)]  # fmt: skip
    q = torch.randn(own[0].shape, generator=generator, device=device) * 0.2
    given = q.to(keys.dtype), own
    plain = [torch.cat(pair, dim=1) for pair in zip((keys, values), own, strict=True)]
    sides = [(Side("plain", plain[0]), Side("plain", plain[1]), 0, plain[0].shape[1])]
    scale = options.head_dim**-0.5
    bf16 = measure(
        lambda: fused.fused(given[0], sides, scale), device, options.repeats, given[0].nbytes
    ).median
    print(f"own Triton, BF16: {bf16:.3f} ms", flush=True)
    rows: list[dict[str, Any]] = []
    hopper = () if fused_hopper.unsupported(given[0]) else ((),)
    launch_rows: tuple[tuple[int, ...], ...] = hopper + ROWS
    for method in ("qvg", "quantwm"):
        history = LayerHistory.prefilled(method, keys, values, options.queries)
        staged = history.attend(given[0], *own)
        rows += _slabs(method, history, given, staged, bf16, options, device)
        timed = _fused(method, history, given, staged, bf16, launch_rows, options, device)
        rows += timed
        ranked = sorted((r for r in timed if "ms" in r), key=lambda r: r["ms"])
        launch_rows = tuple(r["row"] for r in ranked[:WITH_PSAC])
    result = {
        "benchmark": "low-memory",
        "shape": [options.heads, options.queries, options.cached, options.head_dim],
        "hardware": hardware(device),
        "own_bf16_ms": round(bf16, 4),
        "rows": rows,
        "kernels": explain(device),
        "ok": all(row["ok"] for row in rows),
    }
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "low_memory.json").write_text(json.dumps(result, indent=1))
        (options.out / "low_memory.txt").write_text(table(result) + "\n")
    return result


def _slabs(
    method: str, history: LayerHistory, given: tuple[Tensor, list[Tensor]], staged: Tensor,
    bf16: float, options: argparse.Namespace, device: torch.device,
) -> list[dict[str, Any]]:  # fmt: skip
    """Every size of a slab, whose results must be the same bits."""
    (q, own), rows = given, []
    like: Tensor | None = None
    for limit, heads in SLABS:
        if heads > options.heads:
            continue
        other = history.with_workspace(mode="slabs", slab_bytes=limit, slab_heads=heads)
        out = other.attend(q, *own)
        like = out if like is None else like
        row = {
            "method": method, "how": f"slabs, {heads or options.heads} heads",
            "error": relative_error(out, staged), "same_bits": torch.equal(out, like),
        }  # fmt: skip
        row["ok"] = row["error"] < FUSED_BOUND and row["same_bits"]
        rows.append(row | _timed(other, given, bf16, options, device))
        print(_line(rows[-1]), flush=True)
    return rows


def _fused(
    method: str, history: LayerHistory, given: tuple[Tensor, list[Tensor]], staged: Tensor,
    bf16: float, launch_rows: tuple[tuple[int, ...], ...], options: argparse.Namespace,
    device: torch.device,
) -> list[dict[str, Any]]:  # fmt: skip
    """Every launch row of the fused kernel, each in two runs that must be the same bits."""
    (q, own), rows = given, []
    other = history.with_workspace(mode="fused")
    for launch_row in launch_rows:
        row: dict[str, Any] = {
            "method": method, "how": f"fused {list(launch_row) or 'flash_hopper'}",
            "row": launch_row, "ok": True,
        }  # fmt: skip
        with _trying(launch_row, options.head_dim):
            try:
                out = other.attend(q, *own)
                row["same_bits"] = torch.equal(out, other.attend(q, *own))
                row["error"] = relative_error(out, staged)
                row["ok"] = row["error"] < FUSED_BOUND and row["same_bits"]
                row |= _timed(other, given, bf16, options, device)
            except Exception as refused:  # too much shared memory, a layout ptxas refuses, ...
                row["refused"] = f"{type(refused).__name__}: {refused}"[:90]
        rows.append(row)
        print(_line(row), flush=True)
    return rows


@contextmanager
def _trying(launch_row: tuple[int, ...], head_dim: int) -> Iterator[None]:
    if not launch_row:
        yield
        return
    shipped = tuning.FLASH_PACKED[head_dim]
    block_n, block_m, warps, stages, registers = launch_row
    tried = tuning.Launch(block_n, block_m, warps, stages, "being tried", registers)
    tuning.FLASH_PACKED[head_dim] = tried
    try:
        with fused_hopper.switched_off():
            yield
    finally:
        tuning.FLASH_PACKED[head_dim] = shipped


def _timed(
    history: LayerHistory, given: tuple[Tensor, list[Tensor]], bf16: float,
    options: argparse.Namespace, device: torch.device,
) -> dict[str, Any]:  # fmt: skip
    q, own = given
    timing = measure(lambda: history.attend(q, *own), device, options.repeats, q.nbytes)
    return {
        "ms": round(timing.median, 4), "eager_ms": round(timing.eager, 4),
        "own_over": round(bf16 / timing.median, 3), "beyond_bytes": timing.peak_bytes,
        "scratch_bytes": history.cache.workspace.nbytes,
    }  # fmt: skip


def _line(row: dict[str, Any]) -> str:
    head = f"{row['method']:8} {row['how']:28}"
    if "refused" in row:
        return f"{head} {row['refused']}"
    beyond = "-" if row["beyond_bytes"] is None else f"{row['beyond_bytes'] / 1e6:.0f} MB"
    return (
        f"{head}{row['ms']:9.3f}{row['eager_ms']:9.3f}{row['own_over']:9.3f}"
        f"{row['scratch_bytes'] / 1e6:9.1f} MB{beyond:>9}  {row['error']:.5f}"
        f"{'' if row['ok'] else '  WRONG'}"
    )


def table(result: dict[str, Any]) -> str:
    heads, queries, cached, dim = result["shape"]
    return "\n".join([
        f"{result['hardware']['device']}: {queries} queries over {cached:,} cached tokens, {heads} "
        f"heads of {dim}; our kernel on BF16 that lies there: {result['own_bf16_ms']} ms",
        f"{'method':8} {'how':28}{'ms':>9}{'eager':>9}{'own over':>9}{'scratch':>12}{'beyond':>9}"
        "  error",
        *map(_line, result["rows"]), result["kernels"],
    ])  # fmt: skip

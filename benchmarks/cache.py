"""`cache`: encode and decode of every method; syncs and compilations of a long run."""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import Any

import torch

from benchmarks import codec
from benchmarks.chunk_syncs import counted_syncs
from benchmarks.codec import GROUP_SIZE, RANK, Inputs
from benchmarks.histories import clustered
from benchmarks.timing import copy_ceiling, device_named, hardware
from quantwm.cache import CachePolicy, CacheSpec, KVCache, explain, make_format
from quantwm.cache.formats import QueryGuide, takes
from quantwm.cache.spec import RopeLayout

METHODS = "bf16,rtn,kivi,qvg,qvg-pro,qtc,quantwm"
NEEDS_A_CACHE = ("qtc",)  # encoded by what past chunks taught: timed in a long run alone
FRAME, GROWING_LAYERS, WARM_UP = (5, 12), 2, 8
"""Rows and columns of tokens of a frame: chunks of 1 to 3 frames have lengths that no block
divides. The first chunks may compile: the sink of a run, its first span and its first join, the
second span, whose bases start from the first one's, and qtc's first codes in a basis."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--heads", type=int, default=40)
    parser.add_argument("--tokens", default="4680,18720", help="of a chunk: encoded at the first")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--centroids", type=int, default=256)
    parser.add_argument("--iterations", type=int, default=2, help="k-means iterations")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--chunks", type=int, default=20, help="growing lengths, after warm-up")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=50.0, help="after these, no further runs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--qvg-path", type=Path, help="a checkout of svg-project/Quant-VideoGen")


def run(options: argparse.Namespace) -> dict[str, Any]:
    began = time.perf_counter()
    device = device_named(options.device)
    methods = options.methods.split(",")
    lengths = [int(text) for text in options.tokens.split(",")]
    if device.type == "cuda":
        _compile_ahead(methods, options)
        _say(began, "compiled")
    ceiling = copy_ceiling(device)
    rows: list[dict[str, Any]] = []
    says, skipped = "not run", []
    for place, tokens in enumerate(lengths):
        options.tokens = tokens
        inputs = make_inputs(options, device)
        for name in (method for method in methods if method not in NEEDS_A_CACHE):
            fmt = codec.format_of(name, options)
            found = codec.format_rows(name, fmt, inputs, options, device, encoded=place == 0)
            rows += [row | {"tokens": tokens} for row in found]
            _say(began, f"{name}, {tokens} tokens: {_said(found)}")
        peer, says = codec.qvg_rows(inputs, options, device)
        rows += [row | {"tokens": tokens} for row in peer]
        del inputs
    for row in rows:
        row["gb_s"] = round(row["bytes_moved"] / row["median"] / 1e6, 1)
        row["floor_ms"] = round(row["bytes_moved"] / ceiling["copy_gb_s"] / 1e6, 4)
    lives = []
    for name in methods:
        if time.perf_counter() - began > options.seconds:
            skipped.append(name)
            continue
        lives.append(_life(name, options, device))
        _say(began, f"{name}: {lives[-1]}")
    return {
        "benchmark": "cache",
        "shape": [options.heads, options.head_dim],
        "centroids": options.centroids,
        "iterations": options.iterations,
        "ceiling": ceiling,
        "hardware": hardware(device),
        "rows": rows,
        "runs": lives,
        "runs_left_out": skipped,
        "qvg_public": says,
        "kernels": explain(device),
        "ok": all(life["compiled_after_warm_up"] == 0 for life in lives),
    }


def _say(began: float, text: str) -> None:
    """A run that is cut short has said what it knows."""
    print(f"{time.perf_counter() - began:5.1f} s  {text}", file=sys.stderr, flush=True)


def _compile_ahead(methods: list[str], options: argparse.Namespace) -> None:
    """All kernels into Triton's cache on disk, every method in a process of its own, at once.

    One behind the other, compiling took longer than all that is measured here.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(methods), context) as pool:
        list(pool.map(_compile_method, methods, repeat(options, len(methods))))


def _compile_method(name: str, options: argparse.Namespace) -> None:
    """What is measured of a method, small and once."""
    torch.set_num_threads(1)
    device = torch.device(options.device)
    small = argparse.Namespace(**vars(options))
    small.heads, small.tokens, small.repeats, small.chunks = 2, 640, 1, 2
    if name not in NEEDS_A_CACHE:
        fmt, inputs = codec.format_of(name, small), make_inputs(small, device)
        codec.format_rows(name, fmt, inputs, small, device)
    _life(name, small, device)


def _said(rows: list[dict[str, Any]]) -> str:
    return ", ".join(f"{row['step']} {row['median']} ms" for row in rows)


def make_inputs(options: argparse.Namespace, device: torch.device) -> Inputs:
    """Clustered keys and values, and a guide as after some chunks."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (options.heads, options.tokens, options.head_dim)
    keys, values = clustered(shape, generator), clustered(shape, generator)
    heads, _, dim = shape
    weights = torch.rand(heads, dim, generator=generator, device=device) + 0.05
    noise = torch.randn(heads, dim, RANK, generator=generator, device=device)
    basis = torch.linalg.qr(noise)[0].to(torch.bfloat16).contiguous()
    eigenvalues = torch.rand(heads, RANK, generator=generator, device=device)
    return Inputs(
        keys, values, QueryGuide(weights / weights.mean(1, keepdim=True), basis, eigenvalues)
    )


def _life(name: str, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """A run of growing chunks: syncs, compilations and peak of a chunk, after warm-up."""
    heads, dim, frame = min(options.heads, 8), options.head_dim, FRAME[0] * FRAME[1]
    third = 2 * (dim // 6)
    spec = CacheSpec(
        layers=GROWING_LAYERS, heads=heads, head_dim=dim, tokens_per_frame=frame,
        frames_per_chunk=3, rope=RopeLayout((dim - 2 * third, third, third), FRAME),
    )  # fmt: skip
    policy = CachePolicy(sink_frames=1, window_frames=24, span_tokens=10 * frame)
    fmt = make_format(name, **({"group_size": GROUP_SIZE} if takes(name, "group_size") else {}))
    cache = KVCache(spec, fmt, policy, device=device, dtype=torch.bfloat16)
    generator = torch.Generator(device).manual_seed(1)
    chunks: list[dict[str, Any]] = []
    for number in range(WARM_UP + options.chunks):
        frames = 1 + number % 3
        x = clustered((heads, frames * frame, dim), generator, 32)
        with _counted(device) as counts:
            held = _allocated(device)
            began = time.perf_counter()
            _one_chunk(cache, frames, x)
            counts["ms"] = (time.perf_counter() - began) * 1e3
        counts["transient"] = _peak(device) - max(held, _allocated(device))
        chunks.append(counts)
    after = chunks[WARM_UP:]
    return {
        "method": name,
        "chunks": len(after),
        "compiled_in_warm_up": sum(c["compiled"] for c in chunks[:WARM_UP]),
        "compiled_after_warm_up": sum(c["compiled"] for c in after),
        "compiled_names": sorted({n for c in after for n in c["names"]}),
        "last_chunk_that_compiled": max(
            (n for n, c in enumerate(chunks, 1) if c["compiled"]), default=0
        ),
        "syncs_per_chunk": max(c["syncs"] for c in after),
        "synced_at": sorted({place for c in after for place in c.get("places", ())}),
        "host_ms_per_chunk": round(statistics.median(c["ms"] for c in after), 2),
        "transient_bytes": max(c["transient"] for c in after),
    }


def _one_chunk(cache: KVCache, frames: int, x: torch.Tensor) -> None:
    """One denoising pass and the clean pass in every layer, then the commit."""
    cache.begin_chunk(cache.next_frame or 0, frames)
    for clean in (False, True):
        for layer in range(cache.spec.layers):
            cache.attend(layer, x, x, x, clean=clean)
    cache.finalize_chunk()


@contextmanager
def _counted(device: torch.device) -> Iterator[dict[str, Any]]:
    """Host synchronisations and compilations while it lasts."""
    counts: dict[str, Any] = {"syncs": 0, "compiled": 0, "names": []}
    if device.type != "cuda":
        yield counts
        return
    from triton import knobs

    def note(**event: Any) -> None:
        counts["compiled"] += 1
        counts["names"].append(str(event["fn"].name))

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    previous = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = note
    try:
        with counted_syncs() as seen:
            yield counts
    finally:
        knobs.runtime.jit_post_compile_hook = previous
    counts["syncs"], counts["places"] = len(seen), seen


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def table(result: dict[str, Any]) -> str:
    heads, dim = result["shape"]
    text: Callable[[dict[str, Any]], str] = lambda row: (  # noqa: E731
        "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.1f} MB"
    )
    lines = [
        f"{result['hardware']['device']}: {heads} heads of {dim}, K and V together, "
        f"{result['centroids']} centroids, {result['iterations']} k-means iterations",
        f"ceilings {result['ceiling']}; floor: BF16 and packed bytes once at the copy ceiling",
        f"{'method':18}{'tokens':>7} {'step':24}{'ms':>8}{'eager':>8}{'floor':>8}{'GB/s':>8}"
        f"{'beyond':>10}",
    ]
    for row in result["rows"]:
        lines.append(
            f"{row['method']:18}{row['tokens']:7} {row['step']:24}{row['median']:8.3f}"
            f"{row['eager']:8.3f}{row['floor_ms']:8.3f}{row['gb_s']:8.1f}{text(row):>10}"
        )
    lines.append(
        f"a run of growing chunks, {GROWING_LAYERS} layers: compiled in the first {WARM_UP} chunks "
        "/ after, the last chunk that compiled, syncs a chunk, host ms a chunk, "
        "memory beyond what is held"
    )
    for life in result["runs"]:
        lines.append(
            f"  {life['method']:16}{life['compiled_in_warm_up']:5} /"
            f"{life['compiled_after_warm_up']:3}{life['last_chunk_that_compiled']:6}"
            f"{life['syncs_per_chunk']:6}{life['host_ms_per_chunk']:10.2f}"
            f"{life['transient_bytes'] / 1e6:10.1f} MB  {', '.join(life['compiled_names'])}"
        )
    if result["runs_left_out"]:
        lines.append(f"  out of time, not run: {', '.join(result['runs_left_out'])}")
    return "\n".join([*lines, f"QVG's public code: {result['qvg_public']}", result["kernels"]])

"""`memory`: what `plan` says a cache takes beside what a run of it then takes, method by method.

Each method runs in a process of its own: chunks with one denoising pass and a clean one, until the
window is full and one more. Then three numbers are compared: bytes stored between two chunks (by
the ledger and by the allocator), the scratch, and the allocator's peak while a chunk is made.
Inputs are not the cache's and are taken off. On a CPU, whose allocator does not say, the ledger
alone is compared.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.histories import clustered
from benchmarks.timing import device_named, hardware
from quantwm.cache import CachePolicy, CacheSpec, KVCache, make_format
from quantwm.cache.formats import split_method, split_methods, takes
from quantwm.cache.plan import Workload, plan
from quantwm.cache.spec import RopeLayout
from quantwm.errors import UserError

WITHIN = 0.02
"""Of what a run takes: how far a plan may be from it."""

METHODS = ("bf16", "rtn:int2", "kivi:int2", "qvg", "qvg-pro", "quantwm", "qtc")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--methods", type=split_methods, default=METHODS)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--heads", type=int, default=40)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--grid", default="30,52", help="rows and columns of a frame's tokens")
    parser.add_argument("--chunk-frames", type=int, default=3)
    parser.add_argument("--window", type=int, default=18, help="latent frames")
    parser.add_argument("--sink", type=int, default=0, help="latent frames in BF16")
    parser.add_argument("--recent", type=int, default=0, help="chunks in BF16")
    parser.add_argument("--span", type=int, help="tokens; a chunk by default")
    parser.add_argument("--centroids", type=int, default=256)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--at-once", type=int, default=1, help="methods that run beside each other")
    parser.add_argument("--out", type=Path, help="folder for memory.json and memory.txt")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Every method in a process of its own, whose allocator is its own whoever runs beside it."""
    device = device_named(options.device)
    if options.at_once < 1:
        raise UserError(f"--at-once must be at least 1, got {options.at_once}")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.at_once, context, max_tasks_per_child=1) as pool:
        rows = list(pool.map(partial(measured, options=options), options.methods))
    worst = max(abs(apart) for row in rows for apart in row["apart"].values())
    result = {"benchmark": "memory", "hardware": hardware(device), "rows": rows}
    result |= {"worst": worst, "ok": worst <= WITHIN}
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "memory.json").write_text(json.dumps(result, indent=1))
        (options.out / "memory.txt").write_text(table(result) + "\n")
    return result


@torch.no_grad()
def measured(method: str, options: argparse.Namespace) -> dict[str, Any]:
    """One method: planned and found."""
    device = device_named(options.device)
    rows, columns = (int(part) for part in options.grid.split(","))
    third = options.head_dim // 6 * 2
    spec = CacheSpec(
        options.layers,
        options.heads,
        options.head_dim,
        rows * columns,
        options.chunk_frames,
        rope=RopeLayout((options.head_dim - 2 * third, third, third), (rows, columns)),
    )
    policy = CachePolicy(
        sink_frames=options.sink,
        recent_chunks=options.recent,
        window_frames=options.window,
        span_tokens=options.span or spec.tokens_per_chunk,
    )
    name, settings = split_method(method)
    if takes(name, "centroids"):
        settings = {"centroids": options.centroids, **settings}
    shape = (spec.heads, spec.tokens_per_chunk, spec.head_dim)
    generator = torch.Generator(device).manual_seed(1)
    inputs = [clustered(shape, generator, 32) for _ in range(3)]
    # A model multiplies on the same stream, so what cuBLAS keeps for it is not the cache's.
    torch.mm(inputs[0][0, :64], inputs[0][0, :64].T)
    before = _allocated(device)
    cache = KVCache(spec, make_format(name, **settings), policy, device=device)
    itemsize = cache.dtype.itemsize
    for _ in range(options.window // options.chunk_frames + 2):
        _chunk(cache, inputs)
    held = cache.ledger()
    stored = _allocated(device) - before - held.scratch_bytes
    peaks = _chunk(cache, inputs)
    load = Workload.of_policy(spec, policy, tokens=cache.tokens, itemsize=itemsize)
    planned = plan({name: settings}, load).methods[0]
    found = {
        "stored": held.total,
        "stored_by_allocator": stored if device.type == "cuda" else None,
        "scratch": held.scratch_bytes,
        "peak": max(peaks.values()) - before if peaks else None,
        "peak_by_step": {step: peak - before for step, peak in peaks.items()},
    }
    wanted = {
        "stored": planned.bytes_total,
        "scratch": planned.scratch_bytes,
        "pending": planned.pending_bytes,
        "peak": planned.peak_bytes,
    }
    apart = {
        part: round(wanted[part] / found[part] - 1, 4)
        for part in ("stored", "scratch", "peak")
        if found[part]
    }
    ratios = {"nominal": held.nominal_ratio, "resident": held.resident_ratio}
    return {"method": method, "planned": wanted, "found": found, "apart": apart, "ratios": ratios}


def _chunk(cache: KVCache, inputs: list[torch.Tensor]) -> dict[str, int]:
    """One chunk; the allocator's peak in each of its steps, on a GPU."""
    device, peaks = cache.device, {}
    cache.begin_chunk(cache.next_frame or 0, cache.spec.frames_per_chunk)

    def every_layer(clean: bool) -> None:
        for layer in range(cache.spec.layers):
            cache.attend(layer, *inputs, clean=clean)

    steps = {
        "attend": partial(every_layer, False),
        "clean": partial(every_layer, True),
        "finalize": cache.finalize_chunk,
    }
    for step, call in steps.items():
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            peaks[step] = torch.cuda.max_memory_allocated(device)
    return peaks


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['hardware']['device']}; MB, planned / found (difference of the plan)",
        f"{'method':12}{'stored':>32}{'scratch':>30}{'peak':>32}{'nominal':>9}{'resident':>9}",
    ]
    for row in result["rows"]:
        cells = []
        for part, width in (("stored", 32), ("scratch", 30), ("peak", 32)):
            found = row["found"][part]
            shown = "-" if found is None else f"{found / 1e6:,.1f}"
            apart = f" ({row['apart'][part]:+.1%})" if part in row["apart"] else ""
            cells.append(f"{row['planned'][part] / 1e6:,.1f} / {shown}{apart}".rjust(width))
        nominal = row["ratios"]["nominal"]
        cells.append(("-" if nominal is None else f"{nominal:.2f}x").rjust(9))
        cells.append(f"{row['ratios']['resident']:.2f}x".rjust(9))
        lines.append(f"{row['method']:12}" + "".join(cells))
        steps = ", ".join(f"{s} {b / 1e6:,.1f}" for s, b in row["found"]["peak_by_step"].items())
        if steps:
            lines.append(f"{'':12}peak by step: {steps}; planned pending "
                         f"{row['planned']['pending'] / 1e6:,.1f}")  # fmt: skip
    return "\n".join(lines)

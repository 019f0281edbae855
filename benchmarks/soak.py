"""`soak`: ten thousand chunks through one cache; nothing may grow: bytes, objects or kernels.

The geometry is the embedded world's: chunks of 192 tokens, 3 heads of 128, a window of 12 latent
frames, spans of 3,072 tokens. Every chunk is attended once, cleaned once, committed and evicted.
The data is a few random chunks in turn. What is held is looked at every `every` chunks, at the same
place of a span, and the second half of the run must hold no more than the first half did.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import device_named, hardware
from quantwm.cache import CachePolicy, CacheSpec, KVCache, explain, make_format
from quantwm.cache.formats import split_method, split_methods, takes
from quantwm.cache.formats.qtc_worker import wait_until_idle
from quantwm.errors import UserError

HEADS, HEAD_DIM, FRAME, CHUNK_FRAMES = 3, 128, 48, 4
WINDOW_FRAMES, SPAN_TOKENS, CENTROIDS = 12, 3072, 64
CHUNKS_A_SPAN = SPAN_TOKENS // (FRAME * CHUNK_FRAMES)
POOL = 7
"""Random chunks; no divisor of a span's 16, so that spans differ."""

SLACK = {"process_bytes": 16 << 20, "tensors": 8, "objects": 400}
"""What the second half may hold beyond the first half's most: the process keeps arenas, and a
report or a log line is an object. 400 objects over 5,000 chunks are no leak of one a chunk."""

VARYING = ("cache_bytes", "device_bytes")
"""These may differ by half a percent: PSAC's gate keeps more rows in one span than in another."""


@dataclass(frozen=True)
class Look:
    """What is held at one moment.

    Attributes:
        chunk: chunks committed so far.
        cache_bytes: the ledger's total.
        scratch_bytes: of the workspace.
        device_bytes: that torch's allocator has given out on a GPU; 0 on a CPU.
        process_bytes: resident set of the process; 0 where the system does not say.
        tensors, objects: that the garbage collector knows.
        segments: of the cache. kernels: compiled so far.
    """

    chunk: int
    cache_bytes: int
    scratch_bytes: int
    device_bytes: int
    process_bytes: int
    tensors: int
    objects: int
    segments: int
    kernels: int


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--chunks", type=int, default=10_000)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--methods", type=split_methods, default=("quantwm",))
    parser.add_argument("--every", type=int, default=10, help="spans between two looks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="folder for soak.json and soak.txt")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Every method in turn; `ok` says whether nothing grew in any."""
    if options.chunks < 4 * CHUNKS_A_SPAN:
        raise UserError(f"--chunks must be at least {4 * CHUNKS_A_SPAN}, got {options.chunks}")
    device = device_named(options.device)
    rows = [_soaked(method, options, device) for method in options.methods]
    result = {
        "benchmark": "soak",
        "ok": all(row["ok"] for row in rows),
        "layers": options.layers,
        "kernels": explain(device),
        "hardware": hardware(device),
        "rows": rows,
    }
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "soak.json").write_text(json.dumps(result, indent=1))
        (options.out / "soak.txt").write_text(table(result) + "\n")
    return result


def _soaked(method: str, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    name, settings = split_method(method)
    if takes(name, "centroids") and "preset" not in settings:
        settings = {"centroids": CENTROIDS, **settings}
    spec = CacheSpec(options.layers, HEADS, HEAD_DIM, FRAME, CHUNK_FRAMES)
    policy = CachePolicy(window_frames=WINDOW_FRAMES, span_tokens=SPAN_TOKENS)
    cache = KVCache(spec, make_format(name, **settings), policy, device=device, seed=options.seed)
    pool = _pool(device, options.seed)
    looks: list[Look] = []
    began = time.perf_counter()
    with _compilations(device) as compiled:
        for number in range(options.chunks):
            _chunk(cache, pool, number)
            done = number + 1
            if done % CHUNKS_A_SPAN == 0 and done // CHUNKS_A_SPAN % options.every == 0:
                looks.append(_look(cache, done, sum(compiled.values())))
    grown = growth(looks)
    seconds = time.perf_counter() - began
    print(f"{method}: {options.chunks:,} chunks in {seconds:.0f} s", file=sys.stderr)
    return {
        "method": method,
        "ok": not grown,
        "grown": grown,
        "chunks": options.chunks,
        "seconds": round(seconds, 1),
        "looks": [asdict(look) for look in looks],
    }


def _pool(device: torch.device, seed: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shape = (3, HEADS, FRAME * CHUNK_FRAMES, HEAD_DIM)
    chunks = [torch.randn(shape, generator=generator).to(torch.bfloat16) for _ in range(POOL)]
    return [tuple(chunk.to(device).unbind(0)) for chunk in chunks]  # type: ignore[misc]


@torch.no_grad()
def _chunk(cache: KVCache, pool: list[tuple[Tensor, Tensor, Tensor]], number: int) -> None:
    cache.begin_chunk(number * CHUNK_FRAMES, CHUNK_FRAMES)
    for clean in (False, True):
        for layer in range(cache.spec.layers):
            q, k, v = pool[(number + layer) % POOL]
            cache.attend(layer, q, k, v, clean=clean)
    cache.finalize_chunk()


def _look(cache: KVCache, chunk: int, kernels: int) -> Look:
    wait_until_idle()  # qtc's worker holds a few tensors while it makes a basis
    gc.collect()
    ledger = cache.ledger()
    found = gc.get_objects()
    device = torch.cuda.memory_allocated() if cache.device.type == "cuda" else 0
    return Look(
        chunk=chunk,
        cache_bytes=ledger.total,
        scratch_bytes=ledger.scratch_bytes,
        device_bytes=device,
        process_bytes=_resident(),
        tensors=sum(issubclass(type(thing), Tensor) for thing in found),
        objects=len(found),
        segments=len(cache._segments),
        kernels=kernels,
    )


def _resident() -> int:
    path = Path("/proc/self/status")
    lines = path.read_text().splitlines() if path.is_file() else []
    found = next((line for line in lines if line.startswith("VmRSS:")), "VmRSS: 0 kB")
    return int(found.split()[1]) * 1024


@contextmanager
def _compilations(device: torch.device) -> Iterator[Counter[str]]:
    """Kernels that Triton compiles meanwhile, by name."""
    compiled: Counter[str] = Counter()
    if device.type != "cuda":
        yield compiled
        return
    from triton import knobs

    def note(**event: Any) -> None:
        compiled[str(event["fn"].name)] += 1

    previous = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = note
    try:
        yield compiled
    finally:
        knobs.runtime.jit_post_compile_hook = previous


def growth(looks: list[Look]) -> list[str]:
    """What the second half held more of than the first half's most, in words; nothing is well."""
    half = len(looks) // 2
    first, second = looks[:half], looks[half:]
    if not first or not second:
        return ["too few looks: more chunks, or a smaller --every"]
    grown = []
    for name in (field.name for field in fields(Look) if field.name != "chunk"):
        before, after = (max(getattr(look, name) for look in part) for part in (first, second))
        slack = before // 200 if name in VARYING else SLACK.get(name, 0)
        if after > before + slack:
            grown.append(f"{name} from {before:,} to {after:,}")
    return grown


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['hardware']['device']}: {result['kernels']}; {result['layers']} layers",
        f"{'method':28}{'chunk':>8}{'cache':>12}{'scratch':>12}{'device':>14}{'process':>14}"
        f"{'tensors':>9}{'objects':>9}{'segments':>9}{'kernels':>8}",
    ]
    for row in result["rows"]:
        shown = row["looks"][:: max(len(row["looks"]) // 8, 1)]
        for look in shown:
            lines.append(
                f"{row['method']:28}{look['chunk']:>8,}{look['cache_bytes']:>12,}"
                f"{look['scratch_bytes']:>12,}{look['device_bytes']:>14,}"
                f"{look['process_bytes']:>14,}{look['tensors']:>9,}{look['objects']:>9,}"
                f"{look['segments']:>9}{look['kernels']:>8}"
            )
        verdict = "nothing grew" if row["ok"] else "; ".join(row["grown"])
        lines.append(f"{row['method']}: {row['chunks']:,} chunks, {row['seconds']} s: {verdict}")
    return "\n".join(lines)

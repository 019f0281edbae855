"""`stress-fused`: which ingredient of the fused kernel makes two runs differ, all in one go."""

from __future__ import annotations

import argparse
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.agreement import make_case, relative_error
from benchmarks.agreement_fused import affine_side, plain_side, staged, ternary_side
from benchmarks.timing import device_named, hardware
from kernels import fused, tuning

WORKERS = 10  # processes, of the 16 cores that compile while one GPU runs


class Variant(NamedTuple):
    """One fused attention. launch: tokens, queries, warps, stages, registers; None as shipped.

    keys, values: plain, ternary, affine or corrected (the last two thirds, by PSAC).
    chained, packed_math: as in kernels/fused.py. whole_tiles: no tile is cut by a chunk's end.
    """

    keys: str = "corrected"
    values: str = "affine"
    rank: int = 8
    launch: tuple[int, int, int, int, int] | None = None
    chained: bool = False
    packed_math: bool = True
    whole_tiles: bool = False


VARIANTS: dict[str, Variant] = {
    "as shipped": Variant(),
    "product in the accumulators (first build)": Variant(chained=True),
    "plain keys and values": Variant("plain", "plain"),
    "ternary": Variant("ternary", "ternary"),
    "affine without PSAC": Variant("affine", "affine"),
    "PSAC, values plain": Variant(values="plain"),
    "rank 2": Variant(rank=2),
    "rank 4": Variant(rank=4),
    "rank 32": Variant(rank=32),
    "whole tiles only": Variant(whole_tiles=True),
    "float32 decoding": Variant(packed_math=False),
    "1 stage": Variant(launch=(64, 128, 8, 1, 0)),
    "2 stages": Variant(launch=(64, 128, 8, 2, 0)),
    "1 stage, in the accumulators": Variant(launch=(64, 128, 8, 1, 0), chained=True),
    "2 stages, in the accumulators": Variant(launch=(64, 128, 8, 2, 0), chained=True),
    "one warp group": Variant(launch=(64, 64, 4, 2, 0)),
    "one warp group, 1 stage": Variant(launch=(64, 64, 4, 1, 0)),
    "32 tokens a tile": Variant(launch=(32, 128, 8, 2, 0)),
    "at most 128 registers": Variant(launch=(32, 128, 8, 3, 128)),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--heads", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=4680)
    parser.add_argument("--queries", type=int, default=2000)
    parser.add_argument("--runs", type=int, default=12, help="of each variant, compared")
    parser.add_argument("--only", default="", help="variants whose names contain this")
    parser.add_argument("--out", type=Path, help="folder for stress_fused.json")
    parser.add_argument("--device", default="cuda")


def run(options: argparse.Namespace) -> dict[str, Any]:
    device_named(options.device)
    wanted = [name for name in VARIANTS if options.only in name]
    rows: dict[str, dict[str, Any]] = {}
    size = (options.heads, options.tokens, options.queries, options.runs, options.device)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(WORKERS, len(wanted)), context) as pool:
        running = {pool.submit(_outcome, name, *size): name for name in wanted}
        for finished in as_completed(running):
            name = running[finished]
            try:
                rows[name] = finished.result()
            except BrokenProcessPool as died:
                rows[name] = {"failure": str(died)}
            print(_line(name, rows[name]), flush=True)
    result = {
        "benchmark": "stress-fused",
        "hardware": hardware(torch.device(options.device)),
        "rows": {name: rows[name] for name in wanted},
        "ok": all(row.get("same") for row in rows.values()),
    }
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "stress_fused.json").write_text(json.dumps(result, indent=1))
    return result


def _outcome(
    name: str, heads: int, tokens: int, queries: int, runs: int, device: str
) -> dict[str, Any]:
    torch.set_num_threads(2)
    try:
        return try_variant(VARIANTS[name], heads, tokens, queries, runs, torch.device(device))
    except Exception as error:  # named in the table; the other variants still run
        return {"failure": f"{type(error).__name__}: {error}"[:160]}


def try_variant(
    variant: Variant, heads: int, tokens: int, queries: int, runs: int, device: torch.device
) -> dict[str, Any]:
    """Runs that differ from the first in bits, and where; error to float64 attention."""
    head_dim = 128
    fused.CHAINED, fused.PACKED_MATH = variant.chained, variant.packed_math
    if variant.launch is not None:
        for table in (tuning.FLASH_PACKED, tuning.FLASH):
            block_n, block_m, warps, stages, registers = variant.launch
            table[head_dim] = tuning.Launch(block_n, block_m, warps, stages, name(variant),
                                            registers)  # fmt: skip
    if variant.whole_tiles:
        tokens = tokens // 1536 * 1536 or tokens  # halves and thirds of it are whole tiles too
    shape = (heads, tokens, head_dim, 256, 64, variant.rank)
    k_case, v_case = (make_case(*shape, device, seed, extremes=False) for seed in (1, 2))
    kinds = {
        "plain": plain_side,
        "ternary": ternary_side,
        "affine": lambda case: affine_side(case, False),
        "corrected": lambda case: affine_side(case, True),
    }
    keys, values = kinds[variant.keys](k_case), kinds[variant.values](v_case)
    generator = torch.Generator(device).manual_seed(3)
    q = torch.randn(heads, queries, head_dim, generator=generator, device=device) * 0.2
    q = q.to(k_case.x.dtype)
    segments = [(keys[0], values[0], 0, tokens)]
    first = fused.fused(q, segments, head_dim**-0.5)
    wanted = staged(q, keys[1], values[1])
    differing, elements, largest, places = 0, 0, 0.0, []
    for number in range(runs):
        if number % 2:  # what other work leaves in the caches and in shared memory
            torch.randn(1 << 22, device=device).sort()
        again = fused.fused(q, segments, head_dim**-0.5)
        off = _different(again, first)
        count = int(off.sum())
        differing, elements = differing + (count > 0), elements + count
        if count:
            largest = max(largest, float((again.float() - first.float()).abs().max()))
            places += off.nonzero()[:3].tolist()
    return {
        "same": differing == 0,
        "runs_that_differ": differing,
        "elements": elements,
        "largest": largest,
        "places": places[:6],
        "not_finite": int((~first.isfinite()).sum()),
        "error": relative_error(first, wanted),
    }


def name(variant: Variant) -> str:
    return next(text for text, each in VARIANTS.items() if each == variant)


def _different(one: Tensor, other: Tensor) -> Tensor:
    """By bits, so that equal NaN are equal."""
    kind = torch.int16 if one.dtype == torch.bfloat16 else torch.int32
    return one.view(kind) != other.view(kind)


def _line(name: str, row: dict[str, Any]) -> str:
    if "failure" in row:
        return f"{name:42} {row['failure']}"
    verdict = "same" if row["same"] else f"DIFFER in {row['runs_that_differ']} runs"
    return (
        f"{name:42} {verdict:18} {row['elements']:9} elements, by {row['largest']:.4f}; "
        f"not finite {row['not_finite']}; error {row['error']:.5f} {row['places'] or ''}"
    )


def table(result: dict[str, Any]) -> str:
    return "\n".join(_line(name, row) for name, row in result["rows"].items())

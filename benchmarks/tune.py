"""`tune`: device time of every launch row worth trying; what kernels/tuning.py is filled from."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from benchmarks.agreement import make_case
from benchmarks.agreement_fused import agree_fused
from benchmarks.timing import copy_ceiling, device_named, hardware, measure
from kernels import fused, fused_hopper
from kernels.format import Side
from quantwm.cache.dispatch import Ops, ops_for

Axes = tuple[tuple[int, ...], ...]
"""Tokens a program, centroids a tile (attention: queries; decoding: tokens a step or, with PSAC,
channels a pass; of keys and values together, tokens a step of values), warps, pipeline stages and,
in attention and decoding, the most registers a thread may have (0: any)."""

KEYS = ("block_n", "block_k", "num_warps", "num_stages", "registers")
SEARCH: dict[str, Axes] = {
    "ASSIGN": ((64, 128), (64, 128, 256), (4, 8), (2, 3)),
    "ASSIGN_RANGE": ((32, 64), (32, 64, 128), (4, 8), (1, 2)),
    "UPDATE": ((64, 128), (32, 64, 128), (4, 8), (2, 3)),
    "ENCODE": ((8, 16, 32, 64), (0,), (2, 4, 8), (1,)),
    "ENCODE_PSAC": ((16, 32, 64, 128), (0,), (4, 8), (1,)),
    "DECODE": ((32, 64, 128, 256), (4, 8, 16), (1, 2, 4), (1,)),
    "DECODE_AFFINE": ((32, 64, 128, 256), (4, 8, 16), (1, 2, 4), (1,)),
    "DECODE_PSAC": ((16, 32, 48, 64, 96, 128, 256), (64, 128), (1,), (1,), (0, 128)),
    "DECODE_PAIR": ((32, 48, 64, 96, 128, 192), (4, 8, 16), (1,), (1,), (0, 128)),
    "ENCODE_TOKENS": ((8, 16, 32, 64), (0,), (2, 4, 8), (1,)),
    "ENCODE_CHANNELS": ((1024, 2048, 4096, 8192), (0,), (1, 2, 4, 8), (1,)),
    "DECODE_TOKENS": ((8, 16, 32, 64), (0,), (2, 4, 8), (1,)),
    "DECODE_CHANNELS": ((8, 16, 32), (0,), (1, 2, 4, 8), (1,)),
    "DECODE_STAGES": ((4, 8, 16, 32), (0,), (2, 4, 8), (1,)),
    "FLASH": ((64, 128), (128,), (8,), (2, 3), (0, 128)),
    "FLASH_PACKED": ((32, 64, 128), (128, 256), (4, 8, 16), (1, 2), (0, 128)),
    "FLASH_INT8": ((64, 128), (128,), (8,), (2, 3), (0, 128)),
}
FASTEST: dict[str, tuple[tuple[int, ...], ...]] = {
    "ASSIGN": ((128, 64, 4, 2), (128, 64, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3)),
    "ASSIGN_RANGE": ((64, 64, 4, 2), (64, 64, 4, 1), (64, 32, 4, 2), (64, 128, 4, 1)),
    "UPDATE": ((128, 64, 4, 3), (128, 64, 4, 4), (64, 64, 4, 4), (128, 64, 8, 3), (256, 64, 8, 2)),
    "ENCODE": ((32, 0, 2, 1), (64, 0, 4, 1), (16, 0, 2, 1), (32, 0, 4, 1)),
    "ENCODE_PSAC": ((32, 0, 4, 1), (16, 0, 4, 1), (64, 0, 4, 1), (128, 0, 8, 1)),
    "DECODE": ((64, 4, 1, 1), (32, 4, 1, 1), (128, 4, 1, 1), (64, 8, 1, 1), (128, 8, 1, 1),
               (64, 8, 4, 1), (128, 8, 4, 1), (128, 16, 4, 1), (128, 8, 2, 1)),
    "DECODE_AFFINE": ((64, 4, 1, 1), (32, 4, 1, 1), (128, 4, 1, 1), (64, 8, 1, 1), (128, 8, 1, 1),
                      (64, 8, 4, 1), (128, 8, 4, 1), (128, 16, 4, 1), (128, 8, 2, 1)),
    "DECODE_PSAC": ((64, 128, 1, 1, 0), (16, 128, 1, 1, 0), (32, 128, 1, 1, 0),
                    (48, 128, 1, 1, 0), (96, 128, 1, 1, 0), (128, 128, 1, 1, 0),
                    (256, 128, 1, 1, 0), (64, 128, 1, 1, 128), (64, 64, 1, 1, 0)),
    "DECODE_PAIR": ((64, 8, 1, 1), (64, 16, 1, 1), (64, 4, 1, 1), (96, 8, 1, 1), (96, 16, 1, 1),
                    (128, 8, 1, 1), (128, 16, 1, 1), (48, 8, 1, 1), (32, 8, 1, 1)),
    "ENCODE_TOKENS": ((32, 0, 4, 1), (16, 0, 4, 1), (32, 0, 8, 1), (8, 0, 2, 1)),
    "ENCODE_CHANNELS": ((8192, 0, 4, 1), (8192, 0, 8, 1), (2048, 0, 4, 1), (1024, 0, 1, 1),
                        (1024, 0, 4, 1)),
    "DECODE_TOKENS": ((16, 0, 4, 1), (8, 0, 4, 1), (32, 0, 4, 1), (8, 0, 2, 1)),
    "DECODE_CHANNELS": ((32, 0, 4, 1), (16, 0, 4, 1), (16, 0, 2, 1), (32, 0, 8, 1)),
    "DECODE_STAGES": ((8, 0, 4, 1), (16, 0, 4, 1), (8, 0, 2, 1), (32, 0, 4, 1)),
    "FLASH": ((64, 128, 8, 2, 128), (64, 128, 8, 3, 128), (64, 64, 4, 3, 168)),
    "FLASH_PACKED": ((64, 128, 8, 1, 0), (64, 128, 8, 1, 128), (64, 128, 4, 1, 0),
                     (32, 128, 4, 1, 0), (128, 128, 8, 1, 0)),
    "FLASH_INT8": ((64, 128, 8, 3, 0), (64, 128, 8, 2, 128), (128, 128, 8, 2, 0)),
}  # fmt: skip
"""Rows at head dim 128 that were among the fastest of SEARCH, or that a count of instructions
makes likely to be; what is swept without --all."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--heads", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=4680)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--centroids", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--tables", default=",".join(SEARCH))
    parser.add_argument("--all", action="store_true", help="every row of the search, minutes")
    parser.add_argument("--device", default="cuda")


def run(options: argparse.Namespace) -> dict[str, Any]:
    device = device_named(options.device, cpu=False)
    shape = (options.heads, options.tokens, options.head_dim, options.centroids, 64, 8)
    runs = _runs(ops_for(device), make_case(*shape, device, extremes=False))
    rows: list[dict[str, Any]] = []
    for name in options.tables.split(","):
        swept = _sweep(name, runs[name], options, device)
        rows += swept
        print("\n".join(_lines(swept)), flush=True)  # a sweep that is cut short still says this
    return {
        "benchmark": "tune",
        "shape": list(shape),
        "ceiling": copy_ceiling(device),
        "hardware": hardware(device),
        "rows": rows,
    }


def _runs(ops: Ops, case: Any) -> dict[str, Callable[[], object]]:
    """What is launched to time each table; values held by the closures are made once."""
    x, centroids, group = case.x.contiguous(), case.centroids, case.group_size
    means = centroids.float()
    ids = ops.assign(x, centroids)
    codes, scales = ops.encode_qvg(x, ids, centroids, group)
    packed = ops.encode_quantwm(x, ids, centroids, group, 1.0, case.basis, case.eigenvalues)
    tokens, out, other = x.shape[1], torch.empty_like(x), torch.empty_like(x)
    stops = torch.tensor([tokens], dtype=torch.int32, device=x.device)
    quantwm = (packed[0], ids, centroids, packed[1], packed[2].unsqueeze(1), stops, packed[3])
    correction = (packed[4], packed[5], case.basis, 0)

    def decode_ternary() -> None:
        # Prepared anew: the launch row is fixed when a decoder is made.
        ops.prepare_qvg(codes, ids, centroids, scales, group)(out, 0, 0, tokens)

    def decode_affine() -> None:
        ops.prepare_quantwm(*quantwm, group, None, None, None, 0)(out, 0, 0, tokens)

    def decode_corrected() -> None:
        ops.prepare_quantwm(*quantwm, group, *correction)(out, 0, 0, tokens)

    def decode_both() -> None:
        keys = ops.prepare_quantwm(*quantwm, group, *correction)
        values = ops.prepare_quantwm(*quantwm, group, None, None, None, 0)
        sides = ([(keys, 0, 0, tokens)], [(values, 0, 0, tokens)])
        ops.decode_spans(sides, (out, other))

    def fused_corrected() -> None:
        held = (*quantwm[:5], (tokens,), quantwm[6])
        side = Side("affine", None, *held, *correction)
        with fused_hopper.switched_off():
            fused.fused(x, [(side, Side("affine", None, *held), 0, tokens)], 0.01)

    return {
        **_group_runs(ops, x, ids, centroids),
        "FLASH": lambda: fused.fused(x, [(Side("plain", x), Side("plain", x), 0, tokens)], 0.01),
        "FLASH_PACKED": fused_corrected,
        "FLASH_INT8": lambda: fused.attend_int8(x, x, x, 0.01),
        "ASSIGN": lambda: ops.assign(x, means),
        "ASSIGN_RANGE": lambda: ops.assign_qsac(x, centroids, case.weights, group, 4),
        "UPDATE": lambda: ops.update(x, ids, means),
        "ENCODE": lambda: ops.encode_qvg(x, ids, centroids, group),
        "ENCODE_PSAC": lambda: ops.encode_quantwm(
            x, ids, centroids, group, 1.0, case.basis, case.eigenvalues
        ),
        "DECODE": decode_ternary,
        "DECODE_AFFINE": decode_affine,
        "DECODE_PSAC": decode_corrected,
        "DECODE_PAIR": decode_both,
    }


def _group_runs(
    ops: Ops, x: Tensor, ids: Tensor, centroids: Tensor
) -> dict[str, Callable[[], object]]:
    """The same of kivi's two sides at their published groups, and of four stages."""
    tokens, out = x.shape[1], torch.empty_like(x)
    of_tokens, of_channels = (
        encode(x, 32, 2) for encode in (ops.encode_token_groups, ops.encode_channel_groups)
    )
    lengths = [b - a for a, b in pairwise((0, *of_channels[3].tolist()))]
    codes, scales = ops.encode_qvg(x, ids, centroids, 16)
    staged = (codes, torch.stack([ids] * 4, dim=-1), torch.cat([centroids] * 4, dim=1), scales)
    return {
        "ENCODE_TOKENS": lambda: ops.encode_token_groups(x, 32, 2),
        "ENCODE_CHANNELS": lambda: ops.encode_channel_groups(x, 32, 2),
        "DECODE_TOKENS": lambda: ops.prepare_token_groups(*of_tokens, 2)(out, 0, 0, tokens),
        "DECODE_CHANNELS": lambda: ops.prepare_channel_groups(*of_channels, lengths, 2)(
            out, 0, 0, tokens
        ),
        "DECODE_STAGES": lambda: ops.prepare_stages(*staged, 16)(out, 0, 0, tokens),
    }


def _sweep(
    name: str, launch: Callable[[], object], options: argparse.Namespace, device: torch.device
) -> list[dict[str, Any]]:
    rows = []
    tried = itertools.product(*SEARCH[name]) if options.all else FASTEST[name]
    for values in tried:
        row: dict[str, Any] = {
            "table": name,
            "registers": 0,
            **dict(zip(KEYS, values, strict=False)),
        }
        with _trying(name, options.head_dim, row):
            try:
                if name.startswith("FLASH"):
                    agree_fused(device, 4, 700, 300)
                timing = measure(launch, device, options.repeats)
            except Exception as refused:  # too much shared memory, a layout ptxas refuses, ...
                row["refused"] = f"{type(refused).__name__}: {refused}"[:90]
            else:
                row |= {"ms": round(timing.median, 4), "eager": round(timing.eager, 4)}
        rows.append(row)
    return sorted(rows, key=lambda row: row.get("ms", float("inf")))


@contextmanager
def _trying(name: str, head_dim: int, row: dict[str, Any]) -> Iterator[None]:
    from kernels import tuning

    table = getattr(tuning, name)
    shipped = table[head_dim]
    table[head_dim] = tuning.Launch(
        row["block_n"], row["block_k"], row["num_warps"], row["num_stages"], "being tried",
        row["registers"],
    )  # fmt: skip
    row["shipped"] = all(getattr(shipped, key) == row[key] for key in KEYS)
    try:
        yield
    finally:
        table[head_dim] = shipped


def _lines(swept: list[dict[str, Any]]) -> list[str]:
    """The six fastest rows of one table, and the shipped one."""
    lines = []
    for place, row in enumerate(swept):
        if place < 6 or row["shipped"]:
            tried = [row[key] for key in KEYS]
            lines.append(
                f"{row['table']:13} {tried!s:18} {row.get('ms', row.get('refused'))!s:>10} ms"
                f"{'  <- shipped' if row['shipped'] else ''}"
            )
    return lines


def table(result: dict[str, Any]) -> str:
    return f"{result['hardware']}\nceilings {result['ceiling']}, shape {result['shape']}"

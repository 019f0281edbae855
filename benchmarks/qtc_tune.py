"""Launch rows of qtc's kernels: what each takes, and whether it computes the same."""

from __future__ import annotations

import argparse
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.apart import OneByOne
from benchmarks.qtc_case import ROPE, Case
from benchmarks.timing import measure
from quantwm.cache.formats.qtc_tokens import Tokens

DECODE_ROWS = (
    (256, 4, 168), (128, 4, 168), (512, 4, 168), (1024, 4, 168), (256, 4, 0), (256, 4, 128),
    (512, 8, 168),
)  # fmt: skip
ENCODE_ROWS = ((16, 4, 0), (32, 4, 0), (32, 8, 0), (32, 4, 168), (16, 2, 0))
"""Tokens of a program, warps, registers of a thread (0: any); the shipped row first, with which the
others are compared. Encoding 64 tokens is not tried: kernels/qtc_tuning.py says why."""

Row = tuple[int, int, int]


def tune(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds of launch rows, or why there are none: each row may end its process."""
    found: list[dict[str, Any]] = []
    given = (options.heads, options.frames, options.layers, options.chunks, options.device)
    with OneByOne() as process:
        for row in DECODE_ROWS:
            for role in ("keys", "values"):
                result = process(_decoded, given, row, role)
                found.append({"decode": list(row), "role": role, **_told(result)})
        for row in ENCODE_ROWS:
            found.append({"encode": list(row), **_told(process(_encoded, given, row))})
    return found


def _told(result: dict[str, Any] | RuntimeError) -> dict[str, Any]:
    return {"failure": str(result)} if isinstance(result, RuntimeError) else result


@lru_cache(maxsize=1)
def _case(given: tuple[int, int, int, int, str]) -> Case:
    heads, frames, layers, _, device = given
    options = argparse.Namespace(heads=heads, frames=frames, layers=layers, device=device)
    return Case(options, "medium")


def _set(table: dict[int, Any], row: Row) -> None:
    from kernels.tuning import Launch

    table[128] = Launch(row[0], 0, row[1], 1, "", row[2])


def _decoded(given: tuple[int, int, int, int, str], row: Row, role: str) -> dict[str, Any]:
    """One row's time, and the part of its results that differ from the shipped row's."""
    from kernels import qtc_tuning

    case, chunks = _case(given), given[3]
    size = (case.heads, chunks * case.tokens, 128)
    outs: list[Tensor] = []
    for tried in (DECODE_ROWS[0], row):
        _set(qtc_tuning.DECODE, tried)
        span = case.span(role, chunks)
        outs.append(torch.zeros(size, dtype=torch.bfloat16, device=case.device))
        work = partial(span.decode, outs[-1], 0, 0, size[1])
        work()
    differ = float((outs[0] != outs[1]).double().mean())
    return {"ms": round(measure(work, case.device, 10).median, 4), "differ": differ}


def _encoded(given: tuple[int, int, int, int, str], row: Row) -> dict[str, Any]:
    """The same of encoding keys, metric and projection at hand."""
    from kernels import qtc_tuning

    case = _case(given)
    seen = Tokens.of(case.k, ROPE, case.positions)
    slot, mean = case.slot, torch.zeros(case.heads, 128, device=case.device)
    metric, projection = slot.metric(), slot.projection("keys")
    work = partial(seen.encoded, mean, slot.keys, metric, 2, True, projection)
    codes: list[Tensor] = []
    for tried in (ENCODE_ROWS[0], row):
        _set(qtc_tuning.ENCODE, tried)
        codes.append(work()[0])
    differ = float((codes[0] != codes[1]).double().mean())
    return {"ms": round(measure(work, case.device, 10).median, 4), "differ": differ}


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """Fastest first; what failed, last."""
    ordered = sorted(rows, key=lambda row: row.get("ms", float("inf")))
    return ["  ".join(f"{key} {value}" for key, value in row.items()) for row in ordered]

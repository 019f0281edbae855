"""qtc's kernels against the PyTorch code on a GPU, for `gpu-check`: sizes, presets, two runs."""

from __future__ import annotations

import argparse

import torch

from benchmarks.agreement import require
from benchmarks.qtc import compare, passed
from benchmarks.qtc_case import Case
from quantwm.cache.formats.qtc_tokens import Tokens

SIZES = ((40, 3, 2), (3, 1, 9), (7, 2, 1))  # heads, frames of 1,560 tokens, layers
PRESETS = ("small", "medium", "large")


def agree_qtc(device: torch.device) -> None:
    """Codes and gains but for ties, decoded tokens to BF16's rounding; the same bits twice."""
    for heads, frames, layers in SIZES:
        for preset in PRESETS:
            options = argparse.Namespace(
                heads=heads, frames=frames, layers=layers, device=str(device)
            )
            case = Case(options, preset)
            found = compare(case)
            print(f"    qtc:{preset} {heads} x {case.tokens}: {found}")
            require(passed(found), f"qtc:{preset} at {heads} x {case.tokens}: {found}")
            _same_bits_twice(case)


def _same_bits_twice(case: Case) -> None:
    """Of a chunk's codes and of what it teaches, for every layer of a run."""
    for role in ("keys", "values"):
        first, second = case.encode(role, case.layers - 1), case.encode(role, 0)
        require(torch.equal(first.codes, second.codes), f"{role}: layers alike differ in codes")
        require(torch.equal(first.gains, second.gains), f"{role}: layers alike differ in gains")
    tokens = Tokens.of(case.k, None, case.positions)
    runs = [(*tokens.centre(), tokens.second_moment()) for _ in range(2)]
    same = all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    require(same, "two runs' statistics differ")

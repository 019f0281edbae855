"""`qtc`: its kernels against the PyTorch code at full size on a GPU, and what they take."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from benchmarks import qtc_tune
from benchmarks.qtc_case import ROPE, Case
from benchmarks.timing import copy_ceiling, device_named, hardware, measure
from quantwm.cache import explain
from quantwm.cache.formats import qtc_span, qtc_tokens
from quantwm.cache.formats.qtc_tokens import Tokens


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--heads", type=int, default=40)
    parser.add_argument("--frames", type=int, default=3, help="latent frames of a chunk")
    parser.add_argument("--chunks", type=int, default=4, help="chunks of the span that is decoded")
    parser.add_argument("--layers", type=int, default=8, help="layers encoded one after the other")
    parser.add_argument("--presets", default="small,medium,large")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--tune", action="store_true", help="also time other launch rows")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def plain_torch() -> Iterator[None]:
    """The PyTorch code in place of the kernels, for as long as it lasts."""
    kept = qtc_tokens.qtc_kernels, qtc_span.qtc_kernels
    qtc_tokens.qtc_kernels = qtc_span.qtc_kernels = lambda device, head_dim: None
    try:
        yield
    finally:
        qtc_tokens.qtc_kernels, qtc_span.qtc_kernels = kept


def compare(case: Case) -> dict[str, float]:
    """Shares of codes and gains that differ, and the largest relative errors of the rest."""
    found: dict[str, float] = {}
    for role in ("keys", "values"):
        spans, outs = [], []
        for plain in (False, True):
            if plain:
                with plain_torch():
                    spans.append(case.encode(role))
            else:
                spans.append(case.encode(role))
        for plain in (False, True):
            span = case.format.join(spans[0], spans[0])
            out = torch.zeros(case.heads, 2 * case.tokens, 128, dtype=torch.bfloat16,
                              device=case.device)  # fmt: skip
            if plain:
                with plain_torch():
                    span.decode(out, 0, 0, 2 * case.tokens)
            else:
                span.decode(out, 0, 0, 2 * case.tokens)
            outs.append(out.float())
        found[f"{role}: codes that differ"] = _share(spans[0].codes, spans[1].codes)
        found[f"{role}: gains that differ"] = _share(spans[0].gains, spans[1].gains)
        error = (outs[0] - outs[1]).norm(dim=-1) / outs[1].norm(dim=-1).clamp(min=1e-6)
        found[f"{role}: largest relative error of a decoded token"] = float(error.max())
    found |= _compare_moments(case)
    return found


def _compare_moments(case: Case) -> dict[str, float]:
    results = []
    for plain in (False, True):
        tokens = Tokens.of(case.k, ROPE, case.positions)
        if plain:
            with plain_torch():
                centre, weights = tokens.centre()
                results.append((centre, tokens.second_moment(centre, weights)))
        else:
            centre, weights = tokens.centre()
            results.append((centre, tokens.second_moment(centre, weights)))
    names = ("mean: relative error", "second moment: relative error")
    pairs = zip(*results, strict=True)
    return {n: float((a - b).norm() / b.norm()) for n, (a, b) in zip(names, pairs, strict=True)}


def _share(a: Tensor, b: Tensor) -> float:
    return float((a != b).double().mean())


LIMITS = {"codes": 2e-3, "gains": 2e-3, "error": 0.02, "mean": 1e-4, "second": 1e-4}
"""Ties of codes and gains fall either way; BF16's rounding of levels, rows and the sum."""


def passed(found: dict[str, float]) -> bool:
    def limit(name: str) -> float:
        if "moment" in name or "mean" in name:
            return LIMITS["mean"]
        return LIMITS["codes"] if "differ" in name else LIMITS["error"]

    return all(value <= limit(name) for name, value in found.items())


def run(options: argparse.Namespace) -> dict[str, Any]:
    device = device_named(options.device)
    result: dict[str, Any] = {
        "benchmark": "qtc",
        "hardware": hardware(device),
        "shape": [options.heads, options.frames * 1560, 128],
        "kernels": explain(device),
        "agreement": {},
        "rows": [],
    }
    for preset in options.presets.split(","):
        case = Case(options, preset)
        if device.type == "cuda":
            result["agreement"][preset] = compare(case)
        result["rows"] += timed(case, preset, options)
        if options.tune and preset == "medium" and device.type == "cuda":
            result["tuning"] = qtc_tune.tune(options)
    result["ok"] = all(passed(found) for found in result["agreement"].values())
    result["ceiling"] = copy_ceiling(device)
    return result


def timed(case: Case, preset: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []

    def add(name: str, work: Callable[[], object], written: int = 0, times: int = 1) -> None:
        timing = measure(work, case.device, options.repeats)
        row = {"preset": preset, "what": name, **timing.row()}
        for key in ("median", "p20", "p80", "eager"):
            row[key] = round(row[key] / times, 4)
        if written:
            row["gb_s"] = round(written / timing.median / 1e6, 1)
        rows.append(row)

    add("encode keys and values, whole", case.encode_all, times=case.layers)
    add("  keys, projection at hand", lambda: case.encode("keys"))
    add("  values, projection at hand", lambda: case.encode("values"))
    for name, work in parts(case).items():
        add(name, work)
    seen = case.encode("keys"), case.encode("values")
    add(
        "observe (statistics, error)",
        lambda: case.learner.observe(0, case.k, case.v, case.q, case.positions, seen),
    )
    add(
        f"new bases of {case.layers} layers, a layer",
        lambda: case.learner.with_chunk({}).lesson(None),
        times=case.layers,
    )
    tokens = options.chunks * case.tokens
    out = torch.empty(case.heads, tokens, 128, dtype=torch.bfloat16, device=case.device)
    for role in ("keys", "values"):
        span = case.span(role, options.chunks)
        written = out.numel() * out.element_size()
        add(f"decode {role}", lambda span=span: span.decode(out, 0, 0, tokens), written)
    return rows


def parts(case: Case) -> dict[str, Callable[[], object]]:
    """What encoding keys is made of, and what the encoder's own settings are tried on."""
    tokens = Tokens.of(case.k, ROPE, case.positions)
    slot, mean = case.slot, tokens.centre()[0]
    metric, projection = slot.metric(), slot.projection("keys")
    return {
        "  of which mean of keys": lambda: tokens.coded_mean(mean),
        "  of which codes of keys": lambda: tokens.encoded(
            mean, slot.keys, metric, 2, True, projection
        ),
        f"  metric, projections of {case.layers} layers": lambda: _made_ready(case),
        "  second moment of keys": lambda: tokens.second_moment(),
        "  codes of a first chunk, by feedback": lambda: tokens.encoded(mean, None, metric, 2),
    }


def _made_ready(case: Case) -> None:
    case.learned.forget()
    case.slot.metric()


def table(result: dict[str, Any]) -> str:
    lines = [f"{result['hardware']['device']}, {result['shape']}; {result['kernels']}"]
    for preset, found in result["agreement"].items():
        lines += [f"{preset:8} {name:52} {value:.2e}" for name, value in found.items()]
    for row in result["rows"]:
        rate = f"{row['gb_s']:8.1f} GB/s written" if "gb_s" in row else ""
        lines.append(
            f"{row['preset']:8} {row['what']:34} {row['median']:8.3f} ms "
            f"(host too {row['eager']:.3f}) {rate}"
        )
    lines += qtc_tune.lines(result.get("tuning", []))
    lines.append(f"ceiling {result['ceiling']}; agreement {'ok' if result['ok'] else 'FAILED'}")
    return "\n".join(lines)

"""`attention`: a chunk's queries over a long history, packed against BF16, in every mode."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.agreement import relative_error
from benchmarks.histories import LayerHistory, clustered
from benchmarks.timing import Timing, device_named, hardware, measure, measure_in_turn
from kernels.format import Side
from quantwm.cache import explain
from quantwm.cache.dispatch import fused_kernel

BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention-2": SDPBackend.FLASH_ATTENTION}
OWN = "own Triton"
FUSED_BOUND = 2e-2  # relative error that BF16 arithmetic may leave between fused and staged


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--heads", type=int, default=40)
    parser.add_argument("--queries", type=int, default=4680, help="tokens of the current chunk")
    parser.add_argument("--cached", default="28080,150000", help="tokens of history")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--methods", default="qvg,quantwm")
    parser.add_argument("--growing", type=int, default=6, help="new lengths that are planned for")
    parser.add_argument("--repeats", type=int, default=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def run(options: argparse.Namespace) -> dict[str, Any]:
    device = device_named(options.device)
    result: dict[str, Any] = {
        "benchmark": "attention",
        "shape": [options.heads, options.queries, options.head_dim],
        "hardware": hardware(device),
        "histories": [],
    }
    for tokens in (int(text) for text in options.cached.split(",")):
        result["histories"].append(_history(tokens, options, device))
        print("\n".join(_lines(result["histories"][-1])), file=sys.stderr, flush=True)
    if device.type == "cuda":
        result["planning"] = _planning(options, device)
    result["kernels"] = explain(device)
    result["ok"] = all(row["ok"] for part in result["histories"] for row in part["rows"])
    return result


def _history(tokens: int, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(0)
    shape = (options.heads, tokens, options.head_dim)
    keys, values = clustered(shape, generator), clustered(shape, generator)
    own = [clustered((options.heads, options.queries, options.head_dim), generator)
           for _ in range(2)]  # fmt: skip
    q = torch.randn(own[0].shape, generator=generator, device=device) * 0.2
    q = q.to(keys.dtype)
    k, v = torch.cat((keys, own[0]), dim=1), torch.cat((values, own[1]), dim=1)
    rows, fastest = _plain_rows(q, k, v, options, device)
    best = min(row["median"] for row in rows)
    given = (q, own, keys, values)
    own_triton = next((r["median"] for r in rows if r["how"] == OWN), best)
    for method in options.methods.split(","):
        rows += _method_rows(method, given, fastest, own_triton, options, device)
    for row in rows:
        row["of_best"] = round(row["median"] / row.get("bf16_beside_ms", best), 3)
    scale = 4.0 * options.heads * options.queries * (tokens + options.queries) * options.head_dim
    for row in rows:
        row["tflops"] = round(scale / row["median"] / 1e9, 1)
    return {"cached": tokens, "bf16_best_ms": best, "rows": rows}


def _plain_rows(
    q: Tensor, k: Tensor, v: Tensor, options: argparse.Namespace, device: torch.device
) -> tuple[list[dict[str, Any]], Callable[[], Tensor]]:
    """BF16 keys and values that lie behind one another, by backend; what the fastest calls."""
    backends = BACKENDS if device.type == "cuda" else {"PyTorch": None}
    calls = {name: partial(_sdpa, q, k, v, backend) for name, backend in backends.items()}
    rows = [_timed("bf16", name, call, options, device) for name, call in calls.items()]
    fastest = calls[min(rows, key=lambda row: row["median"])["how"]]
    exact = _sdpa(q, k, v, None)
    kernel = fused_kernel(device)
    if not isinstance(kernel, str):
        segments = [(Side("plain", k), Side("plain", v), 0, k.shape[1])]
        scale = q.shape[2] ** -0.5
        rows.append(_timed("bf16", OWN, lambda: kernel.fused(q, segments, scale),
                           options, device, exact))  # fmt: skip
        rows.append(_timed("bf16", "own Triton, INT8 scores",
                           lambda: kernel.attend_int8(q, k, v, scale), options, device, exact,
                           bound=5e-2))  # fmt: skip
    return rows, fastest


def _method_rows(
    method: str, given: tuple[Tensor, list[Tensor], Tensor, Tensor],
    fastest: Callable[[], Tensor], own_triton: float, options: argparse.Namespace,
    device: torch.device,
) -> list[dict[str, Any]]:  # fmt: skip
    """One format's history: read into the scratch, attended staged, in slabs and fused.

    fastest: BF16's attention, timed again in turn with the staged one, which a few percent part
    from it; own_triton: milliseconds of our own kernel on BF16.
    """
    q, own, keys, values = given
    history = LayerHistory.prefilled(method, keys, values, options.queries)
    staged = history.attend(q, *own)
    calls = [fastest, lambda: history.attend(q, *own)]
    beside, timing = measure_in_turn(calls, device, options.repeats)
    rows: list[dict[str, Any]] = [
        {"method": method, "how": "staged", "error": None, **timing.row()},
        _timed(method, "decode alone", lambda: history.decode(*own), options, device),
    ]
    rows[0]["bf16_beside_ms"] = beside.row()["median"]
    rows[0]["scratch_bytes"] = history.cache.workspace.nbytes
    small = history.with_workspace(max(rows[0]["scratch_bytes"] // 3, 1))  # heads take turns
    same = torch.equal(staged, small.attend(q, *own))
    rows[0] |= {"heads_in_turns_give_the_same_bits": same, "ok": same}
    del small
    for mode in () if isinstance(fused_kernel(device), str) else ("slabs", "fused"):
        other = history.with_workspace(mode=mode)
        row = _timed(method, mode, lambda o=other: o.attend(q, *own), options, device, staged)
        row["scratch_bytes"] = other.cache.workspace.nbytes
        again = torch.equal(other.attend(q, *own), other.attend(q, *own))
        row |= {"two_runs_give_the_same_bits": again, "ok": row["ok"] and again}
        if mode == "fused" and row["scratch_bytes"]:
            row["how"] = "fused: not to be had, slabs"
        rows.append(row)
        print(f"{method}, {row['how']}: {row['median']} ms", file=sys.stderr, flush=True)
    for row in rows:
        row["of_own"] = round(own_triton / row["median"], 3)
    return rows


def _timed(
    method: str, how: str, call: Callable[[], Tensor], options: argparse.Namespace,
    device: torch.device, like: Tensor | None = None, bound: float = FUSED_BOUND,
) -> dict[str, Any]:  # fmt: skip
    """like: what the result is compared with; ok: that it is near."""
    error = None if like is None else relative_error(call(), like)
    kept = 0 if like is None else like.nbytes
    timing: Timing = measure(call, device, options.repeats, kept)
    row = {"method": method, "how": how, "error": error, "ok": error is None or error < bound}
    return row | timing.row()


def _sdpa(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend | None) -> Tensor:
    with nullcontext() if backend is None else sdpa_kernel([backend]):
        return functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]


def _planning(options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Milliseconds of the host for the first call at lengths not seen yet, and for the next."""
    generator = torch.Generator(device).manual_seed(1)
    rows = []
    for step in range(options.growing):
        tokens = options.queries * (step + 1) + 13
        k = clustered((options.heads, tokens, options.head_dim), generator)
        q = k[:, : options.queries] * 0.05
        row: dict[str, Any] = {"tokens": tokens}
        for name, backend in BACKENDS.items():
            spent = []
            for _ in range(2):
                torch.cuda.synchronize()
                began = time.perf_counter()
                _sdpa(q, k, k, backend)
                spent.append(round((time.perf_counter() - began) * 1e3, 3))
            row[name] = spent
        rows.append(row)
    return rows


def _lines(part: dict[str, Any]) -> list[str]:
    lines = [
        f"{part['cached']:,} cached tokens, fastest BF16 backend {part['bf16_best_ms']} ms",
        f"  {'method':9}{'how':28}{'ms':>9}{'of best':>9}{'own over':>9}{'TFLOP/s':>9}"
        f"{'scratch':>10}{'beyond':>10}  error",
    ]
    for row in part["rows"]:
        scratch = "-" if "scratch_bytes" not in row else f"{row['scratch_bytes'] / 1e6:.0f} MB"
        beyond = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.0f} MB"
        error = "" if row["error"] is None else f"{row['error']:.5f}"
        lines.append(
            f"  {row['method']:9}{row['how']:28}{row['median']:9.3f}{row['of_best']:9.3f}"
            f"{row.get('of_own', 1.0):9.3f}{row['tflops']:9.1f}{scratch:>10}{beyond:>10}  {error}"
            f"{'' if row['ok'] else '  WRONG'}"
        )
    return lines


def table(result: dict[str, Any]) -> str:
    heads, queries, dim = result["shape"]
    lines = [
        f"{result['hardware']['device']}: {queries} queries in {heads} heads of {dim}; beyond: "
        "device memory of one call beside its output; own over: our BF16 kernel's time over this; "
        "staged is compared with BF16's fastest timed in turn with it",
        *(line for part in result["histories"] for line in _lines(part)),
    ]
    for row in result.get("planning", []):
        lines.append(
            f"  host ms, first call at {row['tokens']:,} tokens / next: "
            + ", ".join(f"{name} {row[name][0]} / {row[name][1]}" for name in BACKENDS)
        )
    return "\n".join([*lines, result["kernels"]])

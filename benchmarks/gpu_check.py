"""`gpu-check`: every kernel against the reference at real sizes on a GPU, then the codec bench."""

from __future__ import annotations

import argparse
import json
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks import codec, passes
from benchmarks.agreement import Disagreement, agree, make_case, require
from benchmarks.agreement_beside import agree_beside, agree_replays
from benchmarks.agreement_fused import agree_fused
from benchmarks.agreement_groups import agree_groups
from benchmarks.agreement_qtc import agree_qtc
from benchmarks.agreement_recorded import agree_recorded
from benchmarks.agreement_rows import agree_rows
from benchmarks.agreement_subspace import agree_subspace
from benchmarks.apart import all_at_once
from benchmarks.chunk_syncs import check_one_sync_a_chunk
from benchmarks.guards import guarded_allocations
from benchmarks.histories import LayerHistory, clustered
from benchmarks.timing import device_named, hardware
from kernels import decode_spans, fused, subspace
from kernels import rows as row_kernel
from quantwm.cache import explain, make_format
from quantwm.cache.dispatch import ops_for
from quantwm.cache.formats import QueryGuide, takes
from quantwm.cache.formats.base import Fusible
from quantwm.cache.reading import decode_visible
from quantwm.cache.segments import Segment
from quantwm.errors import UserError

FULL_SIZE = (40, 4680, 128, 256, 64, 8)  # heads, tokens, head dim, centroids, group size, rank
ODD_SIZES = (
    (3, 192, 128, 64, 64, 8),
    (2, 63, 64, 100, 16, 3),
    (1, 2000, 256, 256, 128, 32),
    (5, 1, 128, 3, 32, 1),
    (24, 880, 256, 256, 64, 8),
)

BASELINES = ("rtn", "kivi", "qvg-pro")


def check_full_size(device: torch.device) -> None:
    with guarded_allocations():
        agree(ops_for(device), make_case(*FULL_SIZE, device))


def check_odd_size(device: torch.device, shape: tuple[int, int, int, int, int, int]) -> None:
    for clip in (1.0, 0.65):
        with guarded_allocations():
            agree(ops_for(device), make_case(*shape, device, seed=7), clip)


def check_baselines(device: torch.device) -> None:
    """rtn, kivi and qvg-pro, bit for bit: the published groups at full size, others at odd ones."""
    published = [(*FULL_SIZE[:4], group_size, 1) for group_size in (32, 16)]
    for bits, shape in zip((2, 4) * 4, (*published, *ODD_SIZES), strict=False):
        with guarded_allocations():
            agree_groups(ops_for(device), make_case(*shape, device, seed=5), bits)


def check_two_runs_are_bit_equal(device: torch.device) -> None:
    """fit, encode and decode of every format with spans of its own, twice, other work between."""
    case = make_case(*FULL_SIZE, device, seed=3)
    guide = QueryGuide(case.weights, case.basis, case.eigenvalues)
    for name in ("qvg", "quantwm", *BASELINES):
        fmt = make_format(name)
        runs = []
        for _ in range(2):
            codebook = fmt.fit(case.x, torch.Generator().manual_seed(5), None)
            span = fmt.encode(case.x, codebook, "keys", guide)
            out = torch.empty(case.x.shape, dtype=torch.bfloat16, device=device)
            fmt.decode_into(span, out, 0, 0, case.x.shape[1])
            runs.append([t for part in fmt.parts(span).values() for t in part] + [out])
            torch.randn(1 << 24, device=device).sort()
        for first, second in zip(*runs, strict=True):
            same = torch.equal(first.view(torch.uint8), second.view(torch.uint8))
            require(same, f"{name}: two runs differ")


def check_offsets_past_2_31(device: torch.device) -> None:
    """40 heads x 430,000 tokens x 128 = 2.2e9 elements: the last head against itself alone."""
    heads, tokens, dim = 40, 430_000, 128
    require(heads * tokens * dim > 2**31, "the case does not pass 2^31")
    generator = torch.Generator(device=device).manual_seed(1)
    x = torch.empty(heads, tokens, dim, dtype=torch.bfloat16, device=device)
    x.normal_(generator=generator)
    case = make_case(heads, 8, dim, 64, 64, 8, device)
    ops, last = ops_for(device), slice(heads - 1, heads)
    given = (case.centroids, case.weights, case.basis, case.eigenvalues)
    alone = tuple(t[last].contiguous() for t in given)
    results = []
    for rows, (centroids, weights, basis, eigenvalues) in ((x, given), (x[last], alone)):
        ids = ops.assign_qsac(rows, centroids, weights, 64, 4)
        means = ops.update(rows, ids, centroids)
        packed = ops.encode_quantwm(rows, ids, centroids, 64, 1.0, basis, eigenvalues)
        codes, scales, secondary, zeros, coefficients, row_scales = packed
        stops = torch.tensor([tokens], dtype=torch.int32, device=device)
        out = torch.full_like(rows, torch.nan)
        ops.prepare_quantwm(
            codes, ids, centroids, scales, secondary.unsqueeze(1), stops, zeros, 64,
            coefficients, row_scales, basis, 0,
        )(out, 0, 0, tokens)  # fmt: skip
        ternary = ops.encode_qvg(rows, ids, centroids, 64)
        again = torch.full_like(rows, torch.nan)
        decode = ops.prepare_qvg(ternary[0], ids, centroids, ternary[1], 64)
        decode(again, 0, 0, tokens)
        parts = (ids, means, *packed, out, *ternary, again)
        results.append([t[-1:].clone() for t in parts if t is not None])
        require(not (out.isnan().any() or again.isnan().any()), "a token was left unwritten")
        del out, again, parts
    for many, one in zip(*results, strict=True):
        require(torch.equal(many.view(torch.uint8), one.view(torch.uint8)), "the last head differs")


def check_baselines_past_2_31(device: torch.device) -> None:
    """The same of rtn, kivi and qvg-pro as formats: encode, and decode of the last head."""
    heads, tokens, dim = 40, 430_000, 128
    generator = torch.Generator(device=device).manual_seed(2)
    x = torch.empty(heads, tokens, dim, dtype=torch.bfloat16, device=device)
    x.normal_(generator=generator)
    for name in BASELINES:
        fmt = make_format(name, **({"centroids": 16, "stages": 2} if name == "qvg-pro" else {}))
        book = fmt.fit(x[:, :500].contiguous(), torch.Generator().manual_seed(0), None)
        one = None if book is None else replace(book, centroids=book.centroids[-1:].contiguous())
        decoded = []
        for rows, own in ((x, book), (x[-1:], one)):
            span = fmt.encode(rows, own, "keys", QueryGuide())
            out = torch.full((1, tokens, dim), torch.nan, dtype=torch.bfloat16, device=device)
            fmt.decode_heads_into(span, out, 0, 0, tokens, rows.shape[0] - 1)
            decoded.append(out)
            del span
        require(not decoded[0].isnan().any(), f"{name}: a token was left unwritten")
        require(torch.equal(*decoded), f"{name}: the last head differs")


def check_no_recompilation(device: torch.device) -> None:
    """20 growing lengths, chunk after chunk: each kernel is compiled at most twice."""
    from triton import knobs

    compiled: Counter[str] = Counter()

    def note(**event: Any) -> None:
        compiled[str(event["fn"].name)] += 1

    previous = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = note
    try:
        for step in range(20):
            # A centroid count of its own, so that earlier checks cannot have compiled for it.
            case = make_case(2, 97 + 61 * step, 128, 48, 32, 5, device)
            guide = QueryGuide(case.weights, case.basis, case.eigenvalues)
            for name in ("qvg", "quantwm", *BASELINES):
                centroids = {"centroids": 48} if takes(name, "centroids") else {}
                fmt = make_format(name, group_size=32, **centroids)
                codebook = fmt.fit(case.x, torch.Generator().manual_seed(0), None)
                span = fmt.encode(case.x, codebook, "keys", guide)
                span = fmt.join(span, fmt.encode(case.x, codebook, "keys", guide))
                tokens = fmt.tokens(span)
                out = torch.empty(2, tokens + step, 128, dtype=torch.bfloat16, device=device)
                fmt.decode_into(span, out, step, step, tokens)
                values = (fmt.encode(case.x, codebook, "values", guide) for _ in range(2))
                both = Segment("packed", fmt, 0, (tokens,), (span,), (fmt.join(*values),))
                decode_visible([both], 0, out, torch.empty_like(out), 0)
                if isinstance(fmt, Fusible):
                    sides = (fmt.side(span), fmt.side(span))
                    fused.fused(case.x[:, : 50 + step], [(*sides, step, tokens)], 0.1)
    finally:
        knobs.runtime.jit_post_compile_hook = previous
    print(f"    compilations over 20 lengths: {dict(compiled)}")
    # assign_kernel has two variants in this walk: k-means (float32 centroids) and encoding, each
    # with and without QSAC's candidates; fused attention one for each format.
    for name, count in compiled.items():
        variants = 3 if "assign" in name or "prepare" in name else 2 if "flash" in name else 1
        require(count <= 2 * variants, f"{name} was compiled {count} times")


FUSED_SIZES = (
    (40, 4680, 700, 128, 64, 8, 256),
    (3, 130, 129, 64, 16, 3, 5),
    (5, 777, 64, 128, 32, 32, 100),
)
"""Heads, tokens, queries, head dim, group size, rank, centroids."""


def check_fused(device: torch.device) -> None:
    """Fused attention over all kinds of sides, and scores in INT8, against float64."""
    for shape in FUSED_SIZES:
        agree_fused(device, *shape)


def check_subspace(device: torch.device) -> None:
    """Leading directions in one launch, against an eigensolver; sparse rows spread again."""
    for problems, head_dim, rank in ((360, 128, 8), (30, 64, 4), (48, 256, 8), (40, 128, 24)):
        agree_subspace(subspace, problems, head_dim, rank, device)
    for heads, tokens, stored in ((12, 2640, 8), (40, 21_840, 8), (3, 77, 3)):
        agree_rows(row_kernel, heads, tokens, stored, device)


def check_beside(device: torch.device) -> None:
    """Encoding on a stream of its own changes no bit, nor does launching a reading again."""
    for method in ("bf16", "qvg", "qvg-pro", "quantwm"):
        agree_replays(method, device)
    for method in ("qvg", "quantwm", "quantwm:half-measures", *BASELINES):
        agree_beside(method, device)


def check_graphs(device: torch.device) -> None:
    """A clean pass that is replayed leaves what one leaves that is launched op by op."""
    for method in ("quantwm", "qvg", "qvg-pro:stages=2", "quantwm:centroid_bits=8,clip=0.8"):
        agree_recorded(method, device)


def check_staged(device: torch.device) -> None:
    """The scratch of an attention against the history decoded alone."""
    generator = torch.Generator(device).manual_seed(4)
    x = clustered((40, 10_000, 128), generator)
    own = x[:, :4680] + 1
    for name in ("bf16", "qvg", "quantwm", *BASELINES):
        cache = LayerHistory.prefilled(name, x, x.flip(1), 4680).cache
        wanted = cache.history(0)
        for mine, history in zip(cache.gather(0, own, own), wanted, strict=True):
            require(torch.equal(mine[:, : history.shape[1]], history), f"{name}: staged")
            require(torch.equal(mine[:, history.shape[1] :], own), f"{name}: the chunk's own")
        together = [t.clone() for t in cache.gather(0, own, own)]
        with mock.patch.object(decode_spans, "WORTHWHILE", 1 << 62):
            alone = cache.gather(0, own, own)
        for one, other in zip(together, alone, strict=True):
            require(torch.equal(one, other), f"{name}: spans in one launch and one by one")
    history = LayerHistory.prefilled("quantwm", x, x.flip(1), 4680)
    q = torch.randn(own.shape, generator=generator, device=device).to(own.dtype)
    whole = history.attend(q, own, own)
    for heads in (10, 7, 1):  # 10 as 7 and 3, whose attention runs beside the others' decoding
        room = heads * (x.shape[1] + own.shape[1]) * 128 * 2 * 2
        for _ in range(3):
            turns = history.with_workspace(room).attend(q, own, own)
            require(torch.equal(turns, whole), f"{heads} heads in turns")


def check_passes(device: torch.device) -> None:
    for sizes in passes.SIZES.values():
        passes.agree(sizes, device)


CHECKS: dict[str, Callable[[torch.device], None]] = {
    "full-size": check_full_size,
    **{"odd-size " + "x".join(map(str, s)): partial(check_odd_size, shape=s) for s in ODD_SIZES},
    "fused": check_fused,
    "staged": check_staged,
    "subspace": check_subspace,
    "beside": check_beside,
    "graphs": check_graphs,
    "passes": check_passes,
    "qtc": agree_qtc,
    "bit-equal": check_two_runs_are_bit_equal,
    "host-syncs": check_one_sync_a_chunk,
    "past-2^31": check_offsets_past_2_31,
    "baselines": check_baselines,
    "baselines-past-2^31": check_baselines_past_2_31,
    "no-recompilation": check_no_recompilation,
}


def arguments(parser: argparse.ArgumentParser) -> None:
    codec.arguments(parser)
    parser.add_argument("--out", type=Path, help="folder for gpu_check.json and gpu_check.txt")
    parser.add_argument("--only", help="names of checks, with commas; then nothing is timed")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All checks even when one fails, then the benchmark; `ok` says whether all held."""
    device = device_named("cuda", cpu=False)
    print(f"{hardware(device)}; {explain(device)}", flush=True)
    names = list(CHECKS) if options.only is None else options.only.split(",")
    if unknown := sorted(set(names) - set(CHECKS)):
        raise UserError(f"--only takes {', '.join(CHECKS)}; got {', '.join(unknown)}")
    checks = _all_checks(names)
    result: dict[str, Any] = {"benchmark": "gpu-check", "checks": checks}
    result["ok"] = all(check["ok"] for check in checks.values())
    options.skip_gate = result["ok"]
    try:
        result["codec"] = None if options.only else codec.run(options)
    except Disagreement as wrong:
        result["codec"] = None
        result["ok"] = False
        print(f"codec not timed: {wrong}", flush=True)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "gpu_check.json").write_text(json.dumps(result, indent=1))
        (options.out / "gpu_check.txt").write_text(table(result))
    return result


def _all_checks(names: list[str]) -> dict[str, dict[str, Any]]:
    """Every one in a process of its own, at once: most of their time is compiling on the CPU."""
    threads = max(1, (os.cpu_count() or 1) // 4)
    done: dict[str, dict[str, Any]] = {}
    for name, check in all_at_once(_outcome, names, threads):
        if isinstance(check, RuntimeError):
            check = {"ok": False, "seconds": 0.0, "failure": str(check)}
        done[name] = check
        verdict = "ok  " if check["ok"] else "FAIL"
        print(f"{verdict} {name} ({check['seconds']} s) {check['failure'] or ''}", flush=True)
    return {name: done[name] for name in names}


def _outcome(name: str, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    began, failure = time.perf_counter(), None
    try:
        CHECKS[name](torch.device("cuda"))
        torch.cuda.synchronize()
    except Exception as error:  # reported in full and counted; the other checks still run
        failure = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    return {
        "ok": failure is None, "seconds": round(time.perf_counter() - began, 1),
        "failure": failure,
    }  # fmt: skip


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{'ok  ' if check['ok'] else 'FAIL'} {name} {check['failure'] or ''}"
        for name, check in result["checks"].items()
    ]
    return "\n".join(lines) + ("\n" + codec.table(result["codec"]) if result["codec"] else "")

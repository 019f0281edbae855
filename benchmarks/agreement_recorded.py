"""What a clean pass replays against the same launched op by op: bits, chunk after chunk."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks import agreement_beside
from benchmarks.agreement import require
from quantwm.cache import CachePolicy, KVCache, make_format
from quantwm.cache.batch import batch_bytes
from quantwm.cache.formats import split_method
from quantwm.cache.recorded import op_by_op
from quantwm.cache.workspace import Workspace
from quantwm.errors import UserError

SPEC = replace(agreement_beside.SPEC, layers=14)
"""Matrix-Game-2's chunk in batches of 6, 6 and 2."""
POLICIES = (CachePolicy(window_frames=9, span_tokens=2640), agreement_beside.POLICY)
"""A span a chunk, as the world has it, and spans of two, so that every other chunk opens none."""
CHUNKS, WARM = 22, 6
BROKEN = 10
"""A chunk with a value that is not finite, which both refuse and then get again."""

ROUNDING = 4 << 20
"""Bytes by which the most that is taken beside the stored may differ between the first and the last
half of the chunks: the allocator rounds every tensor up to 512, and how many PSAC rows are stored
changes. From one chunk to the next it may change by more: every other one opens a span."""
WIDTH = 2048
"""Of the work between attentions."""


def agree_recorded(method: str, device: torch.device) -> None:
    """Disagreement unless every chunk leaves the same, nothing is recorded and no memory is taken
    after `WARM` chunks; on the default stream, then on one of the model's own."""
    for number, policy in enumerate(POLICIES):
        stream = torch.cuda.Stream(device) if number else None
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            _agree(method, policy, device)
        torch.cuda.synchronize(device)


def _agree(method: str, policy: CachePolicy, device: torch.device) -> None:
    name, settings = split_method(method)
    fmt, workspace = make_format(name, **settings), Workspace()
    plain = KVCache(SPEC, fmt, policy, device=device)
    lanes = [KVCache(SPEC, fmt, policy, device=device, workspace=workspace) for _ in range(2)]
    model, seen, taken, host = _Model(device), [], [], {}
    for chunk in range(CHUNKS):
        for cache in (plain, *lanes):
            with op_by_op() if cache is plain else nullcontext():
                if chunk == BROKEN:
                    _refused(method, model, cache, chunk)
                host[cache is plain] = model.clean_pass(cache, chunk)
        for lane in lanes:
            _require_equal(method, chunk, plain, lane)
        seen.append([(r.copying.count, r.encoding.count) for r in workspace.lent])
        stored = sum(cache.ledger().total for cache in (plain, *lanes))
        taken.append(torch.cuda.memory_allocated(device) - stored)
    require(seen[WARM:] == seen[-1:] * (CHUNKS - WARM), f"{method}: recorded anew: {seen}")
    require(all(count > 0 for count in seen[-1][0]), f"{method}: nothing was recorded")
    halves = taken[WARM : (WARM + CHUNKS) // 2], taken[(WARM + CHUNKS) // 2 :]
    require(max(halves[1]) - max(halves[0]) < ROUNDING, f"{method}: memory grows: {taken}")
    held = sum(t.nbytes for r in workspace.lent for t in r.tensors())
    share = SPEC.layers, SPEC.heads, SPEC.tokens_per_chunk, SPEC.head_dim
    print(
        f"    {method}, spans of {policy.span_tokens}: {seen[-1]} copies and batches recorded; "
        f"{held / 2**20:.0f} MiB of places, {workspace.hidden_bytes / 2**20:.0f} in pools, "
        f"planned {batch_bytes(fmt, *share) / 2**20:.0f}; the host's clean pass "
        f"{host[False]:.2f} ms, op by op {host[True]:.2f}"
    )


def _refused(method: str, model: _Model, cache: KVCache, chunk: int) -> None:
    refusal = None
    try:
        model.clean_pass(cache, chunk, broken=SPEC.layers // 2)
    except UserError as error:
        refusal = str(error)
    wanted = f"layer {SPEC.layers // 2} values (stream self) hold NaN or infinity"
    require(wanted in str(refusal), f"{method}: a value that is not finite: {refusal}")
    cache.abort_chunk()


def _require_equal(method: str, chunk: int, plain: KVCache, lane: KVCache) -> None:
    pairs: list[tuple[Tensor, Tensor]] = []
    for layer in range(SPEC.layers):
        pairs += zip(plain.history(layer), lane.history(layer), strict=True)
    pairs += zip(plain._statistics.tensors(), lane._statistics.tensors(), strict=True)
    for one, other in pairs:
        require(torch.equal(one, other), f"{method}: a replayed chunk {chunk} differs")
    require(plain.ledger().parts == lane.ledger().parts, f"{method}: other bytes are held")


class _Model:
    """Writes every layer's keys, values and queries to the same memory, between other work."""

    def __init__(self, device: torch.device) -> None:
        shape = (SPEC.heads, SPEC.tokens_per_chunk, SPEC.head_dim)
        self._qkv = [torch.empty(shape, dtype=torch.bfloat16, device=device) for _ in range(3)]
        self._rows = torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16, device=device)
        self._weights = torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16, device=device)

    def clean_pass(self, cache: KVCache, chunk: int, broken: int = -1) -> float:
        """Of one chunk, the same numbers for every cache; the host's milliseconds up to the commit.
        broken: a layer with a value that is not finite."""
        generator = torch.Generator(self._rows.device).manual_seed(chunk)
        torch.cuda.synchronize()
        cache.begin_chunk(chunk * SPEC.frames_per_chunk, SPEC.frames_per_chunk)
        began = time.perf_counter()
        for layer in range(SPEC.layers):
            for tensor in self._qkv:
                tensor.normal_(generator=generator)
            if layer == broken:
                self._qkv[2][1, 2, 3] = torch.inf
            cache.attend(layer, *self._qkv, clean=True, lasting=True)
            self._rows = torch.nn.functional.normalize(self._rows @ self._weights)
        ms = (time.perf_counter() - began) * 1e3
        cache.finalize_chunk()
        return ms

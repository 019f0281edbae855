"""Recorded q, k, v through the cache, causally, chunk by chunk: what each method does to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from quantwm.cache.formats import FORMATS, make_format, split_method
from quantwm.cache.kv_cache import KVCache
from quantwm.cache.spec import CachePolicy, CacheSpec
from quantwm.errors import UserError
from quantwm.tensor_files import PARTS, RecordedTensors


@dataclass(frozen=True)
class MethodResult:
    """What one method did; errors are means over layers, heads and chunks.

    Attributes:
        bits_per_element: everything stored for the tokens (codes, scales, zeros, ids, codebooks,
            bases, coefficients) over the elements of K and V; encoder-only query statistics are
            charged to no method here.
        resident_bits_per_element: the same with the query statistics.
        ratio: nominal, dense PSAC rows.
        k_rel_mse, v_rel_mse: |x - x^|^2 / |x|^2 over all tokens of a layer.
        logit_mse: of q.k/sqrt(D) over historical keys, each query's mean change taken out.
        token_shift: share of (head, query) whose highest-scoring historical token changes.
        attention_output_rel_mse: of the attention over history and the exact current chunk.
    """

    method: str
    bits_per_element: float
    resident_bits_per_element: float
    ratio: float | None
    k_rel_mse: float
    v_rel_mse: float
    logit_mse: float
    token_shift: float
    attention_output_rel_mse: float


def study(
    tensors: RecordedTensors,
    methods: Sequence[str],
    *,
    chunk: int,
    span: int,
    settings: Mapping[str, Mapping[str, object]],
    device: torch.device | str = "cpu",
    seed: int = 0,
    report: Callable[[str], None] = lambda text: None,
) -> list[MethodResult]:
    """Run every method over the recording.

    Everything is compressed (no sink, no recent chunk) and strictly causal: a chunk is encoded in
    its clean pass, from statistics of earlier chunks, and the queries of each chunk after the
    first meet the decoded keys of all earlier ones.

    Args:
        chunk: tokens of a chunk; must divide the recording's tokens.
        span: tokens that share a codebook.
        settings: per entry of `methods`, for `make_format`.
        report: told about progress, one line at a time.
    """
    spec = study_spec(tensors, chunk)
    policy = CachePolicy(span_tokens=span)
    for method in methods:
        if split_method(method)[0] not in FORMATS:
            raise UserError(f"unknown method {method!r}; there are {', '.join(FORMATS)}")
    results = []
    for method in methods:
        name, own = split_method(method)
        fmt = make_format(name, **{**settings.get(method, {}), **own})
        cache = KVCache(spec, fmt, policy, device=device, seed=seed)
        results.append(_study_method(method, cache, tensors, report))
    return results


def study_spec(tensors: RecordedTensors, chunk: int) -> CacheSpec:
    """Geometry of the recording; UserError when a chunk does not divide it."""
    heads, tokens, head_dim = tensors.shape
    if chunk < 1 or tokens % chunk or tokens // chunk < 2:
        raise UserError(
            f"chunk {chunk} does not cut the recording's {tokens:,} tokens into 2 or more equal "
            f"chunks; it was recorded with {tensors.metadata.get('chunk_tokens', 'unknown')}"
        )
    rope = tensors.rope()
    in_grid = chunk if rope is None else rope.grid[0] * rope.grid[1]
    frame = tensors.metadata_int("tokens_per_frame") or in_grid
    if chunk % frame:
        frame, rope = chunk, None  # chunks that cut frames: places in a frame mean nothing then
    return CacheSpec(
        layers=len(tensors.layers),
        heads=heads,
        head_dim=head_dim,
        tokens_per_frame=frame,
        frames_per_chunk=chunk // frame,
        rope=rope,
    )


@torch.no_grad()
def _study_method(
    method: str, cache: KVCache, tensors: RecordedTensors, report: Callable[[str], None]
) -> MethodResult:
    spec = cache.spec
    size, frames = spec.tokens_per_chunk, spec.frames_per_chunk
    chunks = tensors.shape[1] // size
    first = tensors.metadata_int("first_frame") or 0
    logit, shift, output = [], [], []
    for number in range(chunks):
        report(f"{method}: chunk {number + 1}/{chunks}")
        cache.begin_chunk(first + number * frames, frames)
        for slot, layer in enumerate(tensors.layers.values()):
            now = slice(number * size, (number + 1) * size)
            q, k, v = (layer[part][:, now].to(cache.device) for part in PARTS)
            if number:
                past = [layer[part][:, : now.start].to(cache.device) for part in ("k", "v")]
                found = compare_reads(q, (k, v), past, cache.history(slot))
                for values, value in zip((logit, shift, output), found, strict=True):
                    values.append(value)
            cache.attend(slot, q, k, v, clean=True)
        cache.finalize_chunk()
    errors = [
        [
            relative_error(a.to(cache.device), b)
            for a, b in zip((layer["k"], layer["v"]), kept, strict=True)
        ]
        for layer, kept in (
            (layer, cache.history(slot)) for slot, layer in enumerate(tensors.layers.values())
        )
    ]
    ledger = cache.ledger()
    elements = 2 * cache.tokens * spec.layers * spec.heads * spec.head_dim
    statistics = ledger.parts.get("statistics", 0)
    return MethodResult(
        method=method,
        bits_per_element=(ledger.total - statistics) * 8 / elements,
        resident_bits_per_element=ledger.total * 8 / elements,
        ratio=ledger.nominal_ratio,
        k_rel_mse=fmean(k for k, _ in errors),
        v_rel_mse=fmean(v for _, v in errors),
        logit_mse=fmean(logit),
        token_shift=fmean(shift),
        attention_output_rel_mse=fmean(output),
    )


def compare_reads(
    q: torch.Tensor,
    current: Sequence[torch.Tensor],
    past: Sequence[torch.Tensor],
    decoded: Sequence[torch.Tensor],
) -> tuple[float, float, float]:
    """Logit MSE, token shift and relative output error of one chunk's queries, in float32.

    q: [H, Nq, D]; current, past, decoded: (k, v), [H, N, D] each.
    """
    scale = q.shape[-1] ** -0.5
    q, (k, v) = q.float(), (x.float() for x in current)
    own = q @ k.transpose(1, 2) * scale
    exact, changed = (q @ keys.float().transpose(1, 2) * scale for keys in (past[0], decoded[0]))
    change = changed - exact
    change -= change.mean(dim=-1, keepdim=True)  # softmax does not see a common change
    shifted = exact.argmax(-1) != changed.argmax(-1)
    outputs = [
        torch.softmax(torch.cat((scores, own), -1), -1) @ torch.cat((values.float(), v), 1)
        for scores, values in ((exact, past[1]), (changed, decoded[1]))
    ]
    return (
        float(change.square().mean(dtype=torch.float64)),
        float(shifted.double().mean()),
        relative_error(*outputs),
    )


def relative_error(exact: torch.Tensor, approximate: torch.Tensor) -> float:
    """|approximate - exact|^2 / |exact|^2 over all elements, 0 where exact is."""
    exact = exact.float()
    error = (approximate.float() - exact).square().sum(dtype=torch.float64)
    power = exact.square().sum(dtype=torch.float64)
    return float(error / power) if float(power) else 0.0

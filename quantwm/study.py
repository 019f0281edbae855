"""Recorded q, k, v through the cache, causally, chunk by chunk: what each method does to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from quantwm.cache.formats import FORMATS, make_format, split_method
from quantwm.cache.kv_cache import KVCache
from quantwm.cache.spec import CachePolicy, CacheSpec
from quantwm.errors import UserError
from quantwm.tensor_files import PARTS, RecordedTensors

SCORE_ELEMENTS = 1 << 22
"""Scores of queries and keys held at once, 16 MB in float32."""


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
        chunk: tokens of a chunk; the last one may be shorter.
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
    """Geometry of the recording; UserError when it holds no second chunk.

    The last chunk may be shorter. Where a chunk or the last one cuts a latent frame, places in a
    frame mean nothing, and the tokens that both have whole numbers of take the place of frames.
    """
    heads, tokens, head_dim = tensors.shape
    if not 1 <= chunk < tokens:
        raise UserError(
            f"chunk {chunk} does not cut the recording's {tokens:,} tokens into 2 or more chunks; "
            f"it was recorded with {tensors.metadata.get('chunk_tokens', 'unknown')}"
        )
    rope = tensors.rope()
    in_grid = chunk if rope is None else rope.grid[0] * rope.grid[1]
    frame = tensors.metadata_int("tokens_per_frame") or in_grid
    whole = math.gcd(chunk, tokens % chunk)
    if whole % frame:
        frame, rope = whole, None
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
    spec, tokens = cache.spec, tensors.shape[1]
    starts = range(0, tokens, spec.tokens_per_chunk)
    first = tensors.metadata_int("first_frame") or 0
    logit, shift, output = [], [], []
    for number, start in enumerate(starts):
        report(f"{method}: chunk {number + 1}/{len(starts)}")
        now = slice(start, min(start + spec.tokens_per_chunk, tokens))
        cache.begin_chunk(
            first + start // spec.tokens_per_frame, (now.stop - start) // spec.tokens_per_frame
        )
        for slot, layer in enumerate(tensors.layers.values()):
            q, k, v = (layer[part][:, now].to(cache.device) for part in PARTS)
            if number:
                past = [layer[part][:, :start].to(cache.device) for part in ("k", "v")]
                found = compare_reads(q, (k, v), past, cache.history(slot))
                for values, value in zip((logit, shift, output), found, strict=True):
                    values.append(value)
            cache.attend(slot, q, k, v, clean=True)
        cache.finalize_chunk()
    return _result(method, cache, tensors, (fmean(logit), fmean(shift), fmean(output)))


def _result(
    method: str, cache: KVCache, tensors: RecordedTensors, found: tuple[float, float, float]
) -> MethodResult:
    """What the whole history became, and what was found on the way."""
    spec = cache.spec
    errors = []
    for slot, layer in enumerate(tensors.layers.values()):
        kept = cache.history(slot)
        pairs = zip((layer["k"], layer["v"]), kept, strict=True)
        errors.append([relative_error(exact.to(cache.device), decoded) for exact, decoded in pairs])
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
        logit_mse=found[0],
        token_shift=found[1],
        attention_output_rel_mse=found[2],
    )


def compare_reads(
    q: torch.Tensor,
    current: Sequence[torch.Tensor],
    past: Sequence[torch.Tensor],
    decoded: Sequence[torch.Tensor],
) -> tuple[float, float, float]:
    """Logit MSE, token shift and relative output error of one chunk's queries, in float32.

    q: [H, Nq, D]; current, past, decoded: (k, v), [H, N, D] each. Head by head and some queries at
    a time: whole score matrices of 40 heads, 4,680 queries and 28,080 tokens are 21 GB each.
    """
    heads, queries, _ = q.shape
    history = past[0].shape[1]
    rows = max(SCORE_ELEMENTS // (history + current[0].shape[1]), 1)
    sums = torch.zeros(4, dtype=torch.float64, device=q.device)
    for head in range(heads):
        parts = [[x[head].float() for x in pair] for pair in (current, past, decoded)]
        for start in range(0, queries, rows):
            sums += _block_sums(q[head, start : start + rows].float(), *parts)
    squares, shifted, error, power = sums.tolist()
    return (
        squares / (heads * queries * history),
        shifted / (heads * queries),
        error / power if power else 0.0,
    )


def _block_sums(
    q: torch.Tensor,
    current: Sequence[torch.Tensor],
    past: Sequence[torch.Tensor],
    decoded: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Of one head's queries: squared logit changes, queries that shift, squared output error and
    output, float64 [4]. q: [n, D]; the others: (k, v), [N, D] each, float32."""
    scale = q.shape[-1] ** -0.5
    own = q @ current[0].t() * scale
    exact, changed = (q @ keys.t() * scale for keys in (past[0], decoded[0]))
    shifted = (exact.argmax(-1) != changed.argmax(-1)).sum()
    outputs = [
        torch.softmax(torch.cat((scores, own), -1), -1) @ torch.cat((values, current[1]))
        for scores, values in ((exact, past[1]), (changed, decoded[1]))
    ]
    change = changed.sub_(exact)
    change -= change.mean(dim=-1, keepdim=True)  # softmax does not see a common change
    found = (
        change.square_().sum(dtype=torch.float64),
        shifted.double(),
        (outputs[1] - outputs[0]).square().sum(dtype=torch.float64),
        outputs[0].square().sum(dtype=torch.float64),
    )
    return torch.stack(found)


def relative_error(exact: torch.Tensor, approximate: torch.Tensor) -> float:
    """|approximate - exact|^2 / |exact|^2 over all elements, 0 where exact is."""
    exact = exact.float()
    error = (approximate.float() - exact).square().sum(dtype=torch.float64)
    power = exact.square().sum(dtype=torch.float64)
    return float(error / power) if float(power) else 0.0

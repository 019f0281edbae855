"""Recorded q, k, v through the cache, causally, chunk by chunk: what each method does to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from quantwm.cache.formats import FORMATS, make_format, split_method
from quantwm.cache.kv_cache import KVCache
from quantwm.cache.score_correction import ScoreCorrection
from quantwm.cache.spec import CachePolicy, CacheSpec
from quantwm.errors import UserError
from quantwm.tensor_files import PARTS, RecordedTensors

SCORE_ELEMENTS = 1 << 22
"""Scores of queries and keys held at once, 16 MB in float32."""


COLD_TOKENS = 1536
"""A history of at most this much is the cold start, a longer one the long run: 8 chunks of the
embedded world, by when every format has learned what it learns first."""


@dataclass(frozen=True)
class ReadErrors:
    """What attention notices; means over chunks, or over chunks and layers.

    Attributes:
        logit_mse: of q.k/sqrt(D) over historical keys, each query's mean change taken out.
        token_shift: share of (head, query) whose highest-scoring historical token changes.
        attention_output_rel_mse: of the attention over history and the exact current chunk.
        corrected_output_rel_mse: the same with cached scores corrected for what noise in keys adds
            to them (`ScoreCorrection`); the other two do not see that correction.
    """

    logit_mse: float
    token_shift: float
    attention_output_rel_mse: float
    corrected_output_rel_mse: float


@dataclass(frozen=True)
class LayerResult:
    """One layer. head_logit_mse, head_output_rel_mse: of each head, over all chunks."""

    k_rel_mse: float
    v_rel_mse: float
    errors: ReadErrors
    head_logit_mse: tuple[float, ...]
    head_output_rel_mse: tuple[float, ...]


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
        logit_mse, token_shift, attention_output_rel_mse, corrected_output_rel_mse: as in
            `ReadErrors`.
        cold, long: the same of chunks with at most `COLD_TOKENS` of history, and of the others;
            None where there are none.
        layers: by number, as text.
        resident_bits: (tokens held, resident bits an element) after each chunk.
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
    corrected_output_rel_mse: float
    cold: ReadErrors | None
    long: ReadErrors | None
    layers: Mapping[str, LayerResult]
    resident_bits: tuple[tuple[int, float], ...]


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
    output_weights: Callable[[int], torch.Tensor] | None = None,
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
        output_weights: number of a layer -> W^T W of the rows of its output weights that each
            head's values meet, [H, D, D], for methods that ask for it.
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
        if output_weights is not None and hasattr(fmt, "output_metric"):
            numbers, given = tuple(tensors.layers), output_weights
            fmt.output_metric = lambda slot, numbers=numbers, given=given: given(numbers[slot])
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


@dataclass(frozen=True)
class _Read:
    """What one layer's queries of one chunk noticed.

    history: tokens behind them. sums: float64 [H, 5], as `read_sums` gives. pairs: of a head's
    queries with tokens of the history; queries: of a head.
    """

    history: int
    queries: int
    sums: torch.Tensor

    def errors(self) -> tuple[float, float, float, float]:
        """In the order of `ReadErrors`."""
        heads = self.sums.shape[0]
        squares, shifted, error, power, corrected = self.sums.sum(0).tolist()
        return (
            squares / (heads * self.queries * self.history),
            shifted / (heads * self.queries),
            error / power if power else 0.0,
            corrected / power if power else 0.0,
        )


@torch.no_grad()
def _study_method(
    method: str, cache: KVCache, tensors: RecordedTensors, report: Callable[[str], None]
) -> MethodResult:
    spec, tokens = cache.spec, tensors.shape[1]
    starts = range(0, tokens, spec.tokens_per_chunk)
    first = tensors.metadata_int("first_frame") or 0
    layers = [[x[part].to(cache.device) for part in PARTS] for x in tensors.layers.values()]
    reads: list[list[_Read]] = [[] for _ in layers]
    correction, growth = ScoreCorrection(), []
    for number, start in enumerate(starts):
        report(f"{method}: chunk {number + 1}/{len(starts)}")
        now = slice(start, min(start + spec.tokens_per_chunk, tokens))
        cache.begin_chunk(
            first + start // spec.tokens_per_frame, (now.stop - start) // spec.tokens_per_frame
        )
        for slot, (q, k, v) in enumerate(layers):
            if start:
                last = slice(starts[number - 1], start)
                past, decoded = (k[:, :start], v[:, :start]), cache.history(slot)
                correction.learn(slot, "self", k[:, last], decoded[0][:, last])
                bias = correction(slot, "self", q[:, now].float(), start)
                found = read_sums(q[:, now], (k[:, now], v[:, now]), past, decoded, bias)
                reads[slot].append(_Read(start, now.stop - start, found))
            cache.attend(slot, q[:, now], k[:, now], v[:, now], clean=True)
        cache.finalize_chunk()
        growth.append((cache.tokens, cache.ledger().total * 8 / _elements(cache)))
    return _result(method, cache, tensors, layers, reads, tuple(growth))


def _elements(cache: KVCache) -> int:
    """Of keys and values that a cache holds."""
    spec = cache.spec
    return 2 * cache.tokens * spec.layers * spec.heads * spec.head_dim


def _result(
    method: str,
    cache: KVCache,
    tensors: RecordedTensors,
    layers: Sequence[Sequence[torch.Tensor]],
    reads: Sequence[Sequence[_Read]],
    growth: tuple[tuple[int, float], ...],
) -> MethodResult:
    """What the whole history became, and what was found on the way."""
    by_layer = {}
    for slot, (number, own) in enumerate(zip(tensors.layers, reads, strict=True)):
        k, v = (
            relative_error(exact, decoded)
            for exact, decoded in zip(layers[slot][1:], cache.history(slot), strict=True)
        )
        by_layer[str(number)] = LayerResult(k, v, _errors_of(own), *_by_head(own))
    ledger = cache.ledger()
    every = _errors_of([read for own in reads for read in own])
    statistics = ledger.parts.get("statistics", 0)
    return MethodResult(
        method=method,
        bits_per_element=(ledger.total - statistics) * 8 / _elements(cache),
        resident_bits_per_element=ledger.total * 8 / _elements(cache),
        ratio=ledger.nominal_ratio,
        k_rel_mse=fmean(layer.k_rel_mse for layer in by_layer.values()),
        v_rel_mse=fmean(layer.v_rel_mse for layer in by_layer.values()),
        logit_mse=every.logit_mse,
        token_shift=every.token_shift,
        attention_output_rel_mse=every.attention_output_rel_mse,
        corrected_output_rel_mse=every.corrected_output_rel_mse,
        cold=_some([r for own in reads for r in own if r.history <= COLD_TOKENS]),
        long=_some([r for own in reads for r in own if r.history > COLD_TOKENS]),
        layers=by_layer,
        resident_bits=growth,
    )


def _some(reads: Sequence[_Read]) -> ReadErrors | None:
    return _errors_of(reads) if reads else None


def _errors_of(reads: Sequence[_Read]) -> ReadErrors:
    return ReadErrors(*(fmean(v) for v in zip(*(read.errors() for read in reads), strict=True)))


def _by_head(reads: Sequence[_Read]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Logit MSE and relative output error of each head, over all chunks."""
    pairs = sum(read.queries * read.history for read in reads)
    squares, _, error, power, _ = torch.stack([read.sums for read in reads]).sum(0).unbind(1)
    return tuple((squares / pairs).tolist()), tuple((error / power.clamp(min=1e-30)).tolist())


def compare_reads(
    q: torch.Tensor,
    current: Sequence[torch.Tensor],
    past: Sequence[torch.Tensor],
    decoded: Sequence[torch.Tensor],
) -> tuple[float, float, float]:
    """Logit MSE, token shift and relative output error of one chunk's queries, in float32.

    q: [H, Nq, D]; current, past, decoded: (k, v), [H, N, D] each.
    """
    sums = read_sums(q, current, past, decoded, None)
    return _Read(past[0].shape[1], q.shape[1], sums).errors()[:3]


def read_sums(
    q: torch.Tensor,
    current: Sequence[torch.Tensor],
    past: Sequence[torch.Tensor],
    decoded: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Sums over one chunk's queries, float64 [H, 5]: squared logit changes, queries that shift,
    squared output error and output, squared output error with corrected scores.

    q: [H, Nq, D]; current, past, decoded: (k, v), [H, N, D] each; bias: what the correction adds to
    scores of cached tokens, [H, Nq, 1], or None for nothing. Head by head and some queries at a
    time: whole score matrices of 40 heads, 4,680 queries and 28,080 tokens are 21 GB each.
    """
    heads, queries, _ = q.shape
    history = past[0].shape[1]
    rows = max(SCORE_ELEMENTS // (history + current[0].shape[1]), 1)
    sums = torch.zeros(heads, 5, dtype=torch.float64, device=q.device)
    for head in range(heads):
        parts = [[x[head].float() for x in pair] for pair in (current, past, decoded)]
        for start in range(0, queries, rows):
            some = slice(start, start + rows)
            added = None if bias is None else bias[head, some].float()
            sums[head] += _block_sums(q[head, some].float(), *parts, added)
    return sums


def _block_sums(
    q: torch.Tensor,
    current: Sequence[torch.Tensor],
    past: Sequence[torch.Tensor],
    decoded: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """`read_sums` of some of a head's queries, float64 [5]. q: [n, D]; bias: [n, 1]; the others:
    (k, v), [N, D] each, float32."""
    scale = q.shape[-1] ** -0.5
    own = q @ current[0].t() * scale
    exact, changed = (q @ keys.t() * scale for keys in (past[0], decoded[0]))
    shifted = (exact.argmax(-1) != changed.argmax(-1)).sum()

    def output(scores: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.cat((scores, own), -1), -1) @ torch.cat((values, current[1]))

    wanted, found = output(exact, past[1]), output(changed, decoded[1])
    error = (found - wanted).square().sum(dtype=torch.float64)
    corrected = error
    if bias is not None:
        again = output(changed + bias, decoded[1])
        corrected = (again - wanted).square().sum(dtype=torch.float64)
    change = changed.sub_(exact)
    change -= change.mean(dim=-1, keepdim=True)  # softmax does not see a common change
    squares = change.square_().sum(dtype=torch.float64)
    power = wanted.square().sum(dtype=torch.float64)
    return torch.stack((squares, shifted.double(), error, power, corrected))


def relative_error(exact: torch.Tensor, approximate: torch.Tensor) -> float:
    """|approximate - exact|^2 / |exact|^2 over all elements, 0 where exact is."""
    exact = exact.float()
    error = (approximate.float() - exact).square().sum(dtype=torch.float64)
    power = exact.square().sum(dtype=torch.float64)
    return float(error / power) if float(power) else 0.0

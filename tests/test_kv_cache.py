"""KVCache: causality, determinism, windows, policies, forks, failures, companions."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from quantwm.cache import CachePolicy, CacheSpec, KVCache, LayerWrite, Workspace, make_format
from quantwm.cache.formats import FORMATS
from quantwm.cache.statistics import moment
from quantwm.errors import UserError
from tests.cache_helpers import SPEC, make_cache, packed_tensors, qkv, run_chunk, same_bytes

COMPRESSED = ["qvg", "quantwm"]


def _filled(name: str, chunks: int, policy: CachePolicy | None = None, **more: object) -> KVCache:
    cache = make_cache(name, policy, **more)
    for _ in range(chunks):
        run_chunk(cache)
    return cache


@pytest.mark.parametrize("name", FORMATS)
def test_the_first_chunk_attends_to_itself(name: str) -> None:
    cache = make_cache(name)
    cache.begin_chunk(0, 2)
    q, k, v = qkv(0, 6)
    wanted = torch.softmax(q @ k.transpose(1, 2) / 4.0, -1) @ v
    torch.testing.assert_close(cache.attend(0, q, k, v), wanted, atol=1e-5, rtol=1e-5)
    assert cache.tokens == 0 and cache.frames == 0


def test_bf16_history_is_what_was_written_rounded_once() -> None:
    cache = _filled("bf16", 2)
    k, v = cache.history(1)
    parts = [qkv(first * 100 + 1, 6) for first in (0, 2)]
    assert torch.equal(k, torch.cat([p[1] for p in parts], 1).bfloat16().float())
    assert torch.equal(v, torch.cat([p[2] for p in parts], 1).bfloat16().float())


@pytest.mark.parametrize("name", FORMATS)
def test_denoising_passes_leave_no_trace(name: str) -> None:
    once, often = make_cache(name), make_cache(name)
    for _ in range(3):
        run_chunk(once, passes=1)
        run_chunk(often, passes=3)
    assert same_bytes(once, often)


@pytest.mark.parametrize("name", FORMATS)
def test_same_seed_same_bytes_whatever_else_draws_random_numbers(name: str) -> None:
    first = _filled(name, 4)
    torch.manual_seed(12345)
    state = torch.random.get_rng_state()
    second = _filled(name, 4)
    assert same_bytes(first, second)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("name", COMPRESSED)
def test_the_seed_reaches_k_means(name: str) -> None:
    assert not same_bytes(_filled(name, 1, seed=0), _filled(name, 1, seed=1))


@pytest.mark.parametrize("name", FORMATS)
def test_reset_gives_the_same_bytes_again(name: str) -> None:
    cache, fresh = _filled(name, 3), _filled(name, 2)
    cache.reset()
    assert cache.tokens == 0 and cache.ledger().total == 0
    for _ in range(2):
        run_chunk(cache)
    assert same_bytes(cache, fresh)


@pytest.mark.parametrize("recent", [0, 1])
def test_a_chunk_s_own_and_future_queries_do_not_touch_its_bytes(recent: int) -> None:
    """Chunk 2's queries differ: what is stored of chunks 0 to 2 must not."""
    policy = CachePolicy(recent_chunks=recent, span_tokens=6)
    caches = [_filled("quantwm", 2, policy) for _ in range(2)]
    for factor, cache in zip((1.0, -30.0), caches, strict=True):
        cache.begin_chunk(4, 2)
        for layer in range(SPEC.layers):
            q, k, v = qkv(400 + layer, 6)
            cache.attend(layer, q * torch.linspace(1, factor, 16), k, v, clean=True)
        cache.finalize_chunk()
        if recent:
            run_chunk(cache)
    assert same_bytes(replaced_recent(caches[0]), replaced_recent(caches[1]))
    run_chunk(caches[0])
    run_chunk(caches[1])
    assert not same_bytes(*caches)  # chunk 3 does know chunk 2's queries


def replaced_recent(cache: KVCache) -> KVCache:
    """A fork without its recent BF16 chunks."""
    other = cache.fork()
    other._segments = [s for s in other._segments if s.kind != "recent"]
    return other


def test_recent_chunks_are_encoded_as_if_they_had_been_at_once() -> None:
    """Keeping chunks BF16 for a while changes when they are encoded, not how."""
    at_once = _filled("quantwm", 4, CachePolicy(span_tokens=12))
    later = _filled("quantwm", 6, CachePolicy(span_tokens=12, recent_chunks=2))
    assert same_bytes(at_once, replaced_recent(later))


def test_the_first_chunk_has_no_correction_and_later_ones_do() -> None:
    cache = _filled("quantwm", 4, CachePolicy(span_tokens=12))
    corrections = [segment.keys[0].correction for segment in cache._segments]
    assert [(c.first, c.count) for c in corrections] == [(6, 6), (0, 12)]
    assert all(s.values[0].correction is None for s in cache._segments)
    one = _filled("quantwm", 1)
    assert one._segments[0].keys[0].correction is None


def test_a_span_s_basis_is_of_the_queries_before_its_first_corrected_chunk() -> None:
    cache = _filled("quantwm", 3, CachePolicy(span_tokens=12))
    for segment, chunks in zip(cache._segments, (1, 2), strict=True):
        total = sum(moment(qkv(first * 200, 6)[0]) for first in range(chunks))
        _, vectors = torch.linalg.eigh(total)
        basis = segment.keys[0].correction.basis.float()
        overlap = (vectors[..., -2:].transpose(1, 2) @ basis).square().sum((1, 2))
        torch.testing.assert_close(overlap, torch.full((2,), 2.0), atol=0.02, rtol=0)


@pytest.mark.parametrize("name", COMPRESSED)
def test_spans_end_when_a_chunk_would_not_fit(name: str) -> None:
    cache = _filled(name, 7, CachePolicy(span_tokens=20))
    assert [s.tokens for s in cache._segments] == [18, 18, 6]
    assert [s.tokens for s in _filled(name, 3, CachePolicy(span_tokens=1))._segments] == [6, 6, 6]


@pytest.mark.parametrize("name", COMPRESSED)
def test_a_span_shares_one_codebook_and_the_next_starts_from_it(name: str) -> None:
    cache = _filled(name, 3, CachePolicy(span_tokens=12))
    books = [segment.keys[0].codebook.centroids for segment in cache._segments]
    assert len(books) == 2 and not torch.equal(*books)
    x = qkv(400, 6)[1].bfloat16()
    drawn = torch.Generator()
    again = cache.fmt.fit(x, drawn, cache._segments[0].keys[0].codebook)
    assert torch.equal(again.centroids, books[1])


@pytest.mark.parametrize("name", FORMATS)
def test_a_window_cuts_chunks_and_spans_and_counts_the_current_chunk(name: str) -> None:
    policy = CachePolicy(sink_frames=1, window_frames=6, span_tokens=12)
    cache = _filled(name, 5, policy)
    # The next chunk holds frames 10 and 11: it sees the sink and frames 7 to 9.
    held = [
        (s.kind, s.first_frame, s.frame_tokens, {s.fmt.tokens(span) for span in s.keys})
        for s in cache._segments
    ]
    assert held[0] == ("sink", 0, (3,), {3})
    assert [s.first_frame + i for s in cache._segments[1:] for i in range(len(s.frame_tokens))] == [
        7,
        8,
        9,
    ]
    assert cache.frames == 4 and cache.tokens == 12


@pytest.mark.parametrize("name", FORMATS)
def test_sink_and_recent_chunks_stay_bf16_bit_for_bit(name: str) -> None:
    cache = _filled(name, 5, CachePolicy(sink_frames=3, recent_chunks=1, span_tokens=12))
    k, _ = cache.history(0)
    first, second, last = (qkv(frame * 100, 6)[1].bfloat16().float() for frame in (0, 2, 8))
    assert torch.equal(k[:, :6], first) and torch.equal(k[:, 6:9], second[:, :3])
    assert torch.equal(k[:, -6:], last)
    kinds = [s.kind for s in cache._segments]
    assert kinds == ["sink", "sink", "packed", "packed", "recent"]


@pytest.mark.parametrize("name", FORMATS)
def test_a_keep_mask_drops_tokens_in_every_layer(name: str) -> None:
    cache, whole = make_cache(name), make_cache(name)
    mask = torch.tensor([1, 0, 1, 0, 0, 1], dtype=torch.bool)
    run_chunk(cache, keep_mask=mask)
    run_chunk(whole)
    assert cache.tokens == 3 and cache.frames == 2
    for layer in range(SPEC.layers):
        assert torch.equal(cache.history(layer)[0], whole.history(layer)[0][:, mask])
    run_chunk(cache, keep_mask=torch.zeros(6, dtype=torch.bool))
    run_chunk(cache)
    assert cache.tokens == 9 and cache.next_frame == 6
    cache.evict(4)  # frames 2 and 3 were dropped whole: the frames behind keep their numbers
    assert cache.tokens == 6


@pytest.mark.parametrize("name", FORMATS)
def test_prefill_writes_what_attend_writes(name: str) -> None:
    cache, filled = _filled(name, 3), make_cache(name)
    for first in (0, 2, 4):
        writes = (
            LayerWrite(layer, k, v, q)
            for layer in range(SPEC.layers)
            for q, k, v in [qkv(first * 100 + layer, 6)]
        )
        filled.prefill(first, 2, writes)
    assert same_bytes(cache, filled)


@pytest.mark.parametrize("name", FORMATS)
def test_gather_returns_what_attend_attends_to(name: str) -> None:
    cache, twin = _filled(name, 2), _filled(name, 2)
    q, k, v = qkv(5, 6)
    cache.begin_chunk(4, 2)
    twin.begin_chunk(4, 2)
    for layer in range(SPEC.layers):
        keys, values = cache.gather(layer, k, v, clean=True, q=q)
        history = twin.history(layer)
        assert torch.equal(keys, torch.cat((history[0], k), 1))
        assert torch.equal(values, torch.cat((history[1], v), 1))
        twin.attend(layer, q, k, v, clean=True)
    cache.finalize_chunk()
    twin.finalize_chunk()
    assert same_bytes(cache, twin)


def test_a_score_bias_reaches_cached_scores_only() -> None:
    cache = _filled("quantwm", 2)
    cache.begin_chunk(4, 2)
    q, k, v = qkv(5, 6)
    seen = []

    def forget(layer: int, stream: str, queries: Tensor, history: int) -> Tensor:
        seen.append((layer, stream, tuple(queries.shape), history))
        return torch.full((2, 1, history), -torch.inf)

    out = cache.attend(1, q, k, v, score_bias=forget)
    wanted = torch.softmax(q @ k.transpose(1, 2) / 4.0, -1) @ v
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)
    assert seen == [(1, "self", (2, 6, 16), 12)]


@pytest.mark.parametrize("name", FORMATS)
def test_a_fork_goes_its_own_way(name: str) -> None:
    cache = _filled(name, 3)
    other, twin = cache.fork(), cache.fork()
    run_chunk(other, salt=7)
    run_chunk(cache)
    run_chunk(twin)
    assert same_bytes(cache, twin) and not same_bytes(cache, other)
    other.reset()
    assert cache.tokens == 24


@pytest.mark.parametrize("name", COMPRESSED)
@pytest.mark.parametrize("where", ["fit", "encode"])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_write_that_runs_out_of_memory_can_be_tried_again(
    name: str, where: str, layer: int
) -> None:
    cache, twin = make_cache(name), make_cache(name)
    run_chunk(cache)
    run_chunk(twin)
    before = [t.clone() for t in packed_tensors(cache)]
    cache._span = twin._span = replace(cache._span, tokens=99)  # the next chunk opens a span
    cache.begin_chunk(2, 2)
    data = [qkv(200 + i, 6) for i in range(SPEC.layers)]
    for i in range(layer):
        cache.attend(i, *data[i], clean=True)
    failure = torch.OutOfMemoryError("injected")
    real = getattr(cache.fmt, where)
    calls = []

    def fail_on_values(*args: object) -> object:
        calls.append(args)
        if len(calls) == 2:
            raise failure
        return real(*args)

    with (
        mock.patch.object(cache.fmt, where, fail_on_values),
        pytest.raises(torch.OutOfMemoryError),
    ):
        cache.attend(layer, *data[layer], clean=True)
    assert all(torch.equal(a, b) for a, b in zip(before, packed_tensors(cache), strict=True))
    for i in range(layer, SPEC.layers):
        cache.attend(i, *data[i], clean=True)
    cache.finalize_chunk()
    run_chunk(twin)
    assert same_bytes(cache, twin)


@pytest.mark.parametrize("name", FORMATS)
def test_an_aborted_chunk_leaves_no_trace(name: str) -> None:
    cache, twin = make_cache(name), make_cache(name)
    cache.begin_chunk(0, 2)
    for layer in range(SPEC.layers):
        cache.attend(layer, *qkv(77 + layer, 6), clean=True)
    cache.abort_chunk()
    cache.abort_chunk()
    for each in (cache, twin):
        run_chunk(each)
    assert same_bytes(cache, twin)


def test_bfloat16_attention_stores_the_same_bytes() -> None:
    caches = [
        KVCache(SPEC, make_format("qvg", centroids=4, group_size=8), CachePolicy(), dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    for cache in caches:
        out = run_chunk(cache)
        assert out[0].dtype == cache.dtype
        run_chunk(cache)
    assert same_bytes(*caches)


def test_lanes_share_one_scratch_of_one_layer() -> None:
    shared = Workspace()
    caches = [
        KVCache(SPEC, make_format(n, **s), CachePolicy(), dtype=torch.float32, workspace=shared)
        for n, s in (("bf16", {}), ("qvg", {"centroids": 4, "group_size": 8}))
    ]
    alone = make_cache("qvg", CachePolicy())
    for _ in range(3):
        for cache in (*caches, alone):
            run_chunk(cache)
    assert same_bytes(caches[1], alone)
    assert shared.nbytes == 2 * SPEC.heads * 18 * SPEC.head_dim * 4
    assert {c.ledger().scratch_bytes for c in caches} == {shared.nbytes}


def test_streams_are_apart() -> None:
    spec = replace(SPEC, streams=("self", "text"))
    cache = make_cache("quantwm", spec=spec)
    cache.begin_chunk(0, 2)
    for i, stream in enumerate(spec.streams):
        for layer in range(spec.layers):
            cache.attend(layer, *qkv(10 * i + layer, 6), clean=True, stream=stream)
        if stream == "self":
            with pytest.raises(RuntimeError, match="layer 0 stream text, layer 1 stream text"):
                cache.finalize_chunk()
    cache.finalize_chunk()
    assert not torch.equal(cache.history(0)[0], cache.history(0, "text")[0])


def test_companions_of_another_geometry_follow_the_frames() -> None:
    mouse = CacheSpec(layers=1, heads=4, head_dim=8, tokens_per_frame=1, frames_per_chunk=2)
    spec = replace(SPEC, companions=(("mouse", mouse),))
    cache = make_cache("quantwm", CachePolicy(window_frames=4, span_tokens=12), spec=spec)
    for first in (0, 2, 4):
        cache.begin_chunk(first, 2)
        for layer in range(spec.layers):
            cache.attend(layer, *qkv(layer, 6), clean=True)
        if first == 0:
            with pytest.raises(RuntimeError, match="before the clean pass"):
                cache.finalize_chunk()
        _, k, v = qkv(first, 2, mouse)
        keys, _ = cache.gather(0, k, v, clean=True, stream="mouse")
        assert keys.shape == (4, 2 + min(first, 2), 8)
        cache.finalize_chunk()
    assert torch.equal(cache.history(0, "mouse")[0], k.bfloat16().float())
    assert cache.ledger().parts["bf16"] == 4 * 2 * 8 * 2 * 2


def test_clear_forgets_frames_and_keeps_what_queries_taught() -> None:
    cache = _filled("quantwm", 3)
    moments = cache._statistics.moments.clone()
    cache.clear()
    assert cache.tokens == 0 and cache.next_frame is None
    assert torch.equal(cache._statistics.moments, moments)
    cache.begin_chunk(40, 2)
    for layer in range(SPEC.layers):
        cache.attend(layer, *qkv(layer, 6), clean=True)
    cache.finalize_chunk()
    assert cache._segments[0].keys[0].correction is not None


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda c: c.attend(0, *qkv(0, 6)), RuntimeError, "attend needs an open chunk"),
        (lambda c: c.finalize_chunk(), RuntimeError, "finalize_chunk needs an open chunk"),
        (lambda c: c.begin_chunk(3, 2), UserError, "must begin at frame 2, got 3"),
        (lambda c: c.begin_chunk(2, 0), UserError, "at least 1 frame"),
        (lambda c: c.history(9), UserError, "layer must be 0 to 1, got 9"),
        (lambda c: c.history(0, "mouse"), UserError, "unknown stream 'mouse'"),
    ],
)
def test_misuse_between_chunks(call: object, error: type[Exception], says: str) -> None:
    cache = _filled("qvg", 1)
    with pytest.raises(error, match=says):
        call(cache)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda c: c.begin_chunk(2, 2), RuntimeError, "chunk at frame 2 is open"),
        (lambda c: c.fork(), RuntimeError, "fork while the chunk at frame 2 is open"),
        (lambda c: c.evict(1), RuntimeError, "evict while the chunk"),
        (lambda c: c.attend(0, *qkv(0, 5)), UserError, r"k must be \[2, 6, 16\].*got \[2, 5, 16\]"),
        (lambda c: c.attend(0, *(t[0] for t in qkv(0, 6))), UserError, "heads, tokens, head_dim"),
        (
            lambda c: c.finalize_chunk(torch.ones(5, dtype=torch.bool)),
            RuntimeError,
            "before the clean pass of layer 0 stream self, layer 1 stream self",
        ),
    ],
)
def test_misuse_inside_a_chunk(call: object, error: type[Exception], says: str) -> None:
    cache = _filled("qvg", 1)
    cache.begin_chunk(2, 2)
    with pytest.raises(error, match=says):
        call(cache)


def test_a_bad_mask_is_refused_and_the_chunk_stays_open() -> None:
    cache = make_cache("qvg")
    cache.begin_chunk(0, 2)
    for layer in range(SPEC.layers):
        cache.attend(layer, *qkv(layer, 6), clean=True)
    for mask in (torch.ones(5, dtype=torch.bool), torch.ones(6)):
        with pytest.raises(UserError, match=r"keep_mask must be bool \[6\]"):
            cache.finalize_chunk(mask)
    cache.finalize_chunk()
    assert cache.tokens == 6


@pytest.mark.parametrize("role", ["queries", "keys", "values"])
def test_not_finite_input_is_named_and_not_kept(role: str) -> None:
    cache = make_cache("quantwm")
    run_chunk(cache)
    cache.begin_chunk(2, 2)
    data = list(qkv(0, 6))
    data[["queries", "keys", "values"].index(role)][1, 2, 3] = torch.nan
    with pytest.raises(UserError, match=rf"layer 1 {role} \(stream self\) hold NaN"):
        cache.attend(1, *data, clean=True)
    assert cache.ledger().pending_bytes == 0
    cache.attend(1, *qkv(0, 6), clean=True)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_on_cuda_one_read_at_the_end_finds_what_is_not_finite(bad: float) -> None:
    """The CUDA path, with CPU tensors that say that they are on CUDA."""
    cache, twin = make_cache("quantwm"), make_cache("quantwm")
    for each in (cache, twin):
        run_chunk(each)
    with mock.patch("torch.Tensor.is_cuda", new_callable=mock.PropertyMock, return_value=True):
        cache.begin_chunk(2, 2)
        for layer in range(SPEC.layers):
            q, k, v = qkv(layer, 6)
            if layer == 1:
                v[0, 0, 0] = bad
            cache.attend(layer, q, k, v, clean=True)
        with pytest.raises(UserError, match=r"layer 1 values \(stream self\) hold NaN"):
            cache.finalize_chunk()
    cache.abort_chunk()
    for each in (cache, twin):
        run_chunk(each)
    assert same_bytes(cache, twin)


def test_group_and_dtype_are_checked_when_the_cache_is_made() -> None:
    with pytest.raises(UserError, match="group_size 64 does not divide head_dim 16"):
        KVCache(SPEC, make_format("qvg"), CachePolicy())
    with pytest.raises(UserError, match="dtype must be"):
        KVCache(SPEC, make_format("bf16"), CachePolicy(), dtype=torch.float16)

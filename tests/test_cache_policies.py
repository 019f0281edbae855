"""KVCache: causality, spans, windows, sinks, recent chunks, masks, streams, companions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quantwm.cache import CachePolicy, CacheSpec, KVCache, Workspace, make_format
from quantwm.cache.formats import FORMATS
from quantwm.cache.statistics import moment
from quantwm.errors import UserError
from tests.cache_helpers import SPEC, make_cache, qkv, run_chunk, same_bytes

COMPRESSED = ["qvg", "quantwm"]


def _filled(name: str, chunks: int, policy: CachePolicy | None = None, **more: object) -> KVCache:
    cache = make_cache(name, policy, **more)
    for _ in range(chunks):
        run_chunk(cache)
    return cache


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

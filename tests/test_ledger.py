"""Ledger: equal to the live storages, by part, and its two ratios."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantwm.cache import CachePolicy
from quantwm.cache.formats import FORMATS
from tests.cache_helpers import (
    LASTING,
    SPEC,
    finish_work,
    live_bytes,
    make_cache,
    qkv,
    run_chunk,
)

POLICIES = {
    "all packed": CachePolicy(span_tokens=12),
    "sink, recent, window": CachePolicy(
        sink_frames=1, recent_chunks=1, window_frames=9, span_tokens=12
    ),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", FORMATS)
def test_total_is_the_live_storage(name: str, policy: str) -> None:
    cache = make_cache(name, POLICIES[policy])
    for _ in range(6):
        run_chunk(cache)
        finish_work(cache)
        ledger = cache.ledger()
        assert ledger.total == sum(ledger.parts.values())
        assert ledger.total + ledger.making_bytes == live_bytes(cache)
        assert not ledger.making_bytes or name == "qtc"
        assert ledger.pending_bytes == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", FORMATS)
def test_pending_bytes_are_the_open_chunk_s(name: str, policy: str) -> None:
    cache = make_cache(name, POLICIES[policy])
    for _ in range(3):
        run_chunk(cache)
    held = cache.ledger().total
    cache.begin_chunk(6, 2)
    cache.attend(0, *qkv(0, 6), clean=True)
    ledger = cache.ledger()
    assert ledger.total == held
    assert ledger.total + ledger.pending_bytes == live_bytes(cache)
    cache.abort_chunk()
    assert cache.ledger().pending_bytes == 0


def test_parts_of_a_quantwm_cache() -> None:
    cache = make_cache("quantwm", CachePolicy(span_tokens=12))
    for _ in range(4):
        run_chunk(cache)
    heads_layers, tokens = SPEC.heads * SPEC.layers, 24
    parts = cache.ledger().parts
    assert parts["codes"] == 2 * heads_layers * tokens * 4
    assert parts["scales"] == 2 * heads_layers * tokens * 2
    assert parts["zeros"] == 2 * heads_layers * tokens * 2 // 4
    assert parts["ids"] == 2 * heads_layers * tokens
    assert parts["codebooks"] == 2 * 2 * heads_layers * 4 * 16 * 2
    assert parts["bases"] == 2 * heads_layers * 16 * 2 * 2
    assert parts["coefficients"] == heads_layers * (tokens - 6) * (2 + 2)
    assert parts["secondary_scales"] == 2 * 4 * (2 * heads_layers + 4 * SPEC.layers)
    assert parts["statistics"] == heads_layers * (16 * 16 + 2) * 4


def test_ratios_are_of_different_things() -> None:
    cache = make_cache("qvg", CachePolicy(recent_chunks=1, span_tokens=12))
    assert cache.ledger().nominal_ratio is None and cache.ledger().resident_ratio == 1.0
    run_chunk(cache)
    ledger = cache.ledger()
    assert ledger.nominal_ratio is None and ledger.resident_ratio == 1.0
    run_chunk(cache)
    run_chunk(cache)
    ledger = cache.ledger()
    bf16 = 12 * SPEC.bf16_bytes_per_token
    packed = sum(n for part, n in ledger.parts.items() if not part.startswith("bf16"))
    assert ledger.nominal_ratio == bf16 / packed
    assert ledger.resident_ratio == 18 * SPEC.bf16_bytes_per_token / ledger.total


def test_bf16_has_ratio_one() -> None:
    cache = make_cache("bf16")
    run_chunk(cache)
    assert cache.ledger().nominal_ratio == cache.ledger().resident_ratio == 1.0


def test_an_evicted_span_s_codebook_is_still_counted() -> None:
    """It warm-starts the next span, so it is held."""
    cache = make_cache("qvg")
    run_chunk(cache)
    books = cache.ledger().parts["codebooks"]
    cache.evict(2)
    assert cache.tokens == 0 and cache.ledger().parts == {"codebooks": books}


@given(
    bits=st.sampled_from([0.0, 60.0, 150.0, 400.0]),
    centroid_bits=st.sampled_from([8, 16]),
    compact=st.booleans(),
    span=st.sampled_from([6, 12, 20]),
    policy=st.builds(
        lambda sink, recent, room: CachePolicy(
            sink_frames=sink,
            recent_chunks=recent,
            window_frames=None if room is None else sink + room,
        ),
        sink=st.integers(0, 3),
        recent=st.integers(0, 1),
        room=st.none() | st.integers(2, 9),
    ),
    salts=st.lists(st.integers(0, 3), min_size=8, max_size=8),
)
def test_codebooks_that_spans_share_are_counted_once(
    bits: float, centroid_bits: int, compact: bool, span: int, policy: CachePolicy, salts: list[int]
) -> None:
    """Held and nominal bytes, chunk after chunk, while codebooks are fitted again and evicted."""
    changed = {"book_bits": bits, "centroid_bits": centroid_bits, "compact_statistics": compact}
    policy = replace(policy, span_tokens=span)
    cache = make_cache("quantwm", policy, settings={**LASTING, **changed})
    for salt in salts:
        run_chunk(cache, salt=salt)
        ledger = cache.ledger()
        assert ledger.total == live_bytes(cache)
        spans = [t for s in cache._segments if s.encoded for t in (*s.keys, *s.values)]
        shared = {t.data_ptr(): t.nbytes for s in spans for t in cache.fmt.shared(s)}
        rows = sum(s.correction.dense_bytes() for s in spans if s.correction is not None)
        own = sum(
            t.nbytes
            for s in spans
            for part, tensors in cache.fmt.parts(s).items()
            if part not in ("codebooks", "bases", "coefficients")
            for t in tensors
        )
        assert ledger.nominal_bytes == own + rows + sum(shared.values())

"""Ledger: equal to the live storages, by part, and its two ratios."""

from __future__ import annotations

import gc

import pytest
import torch

from quantwm.cache import CachePolicy, KVCache
from quantwm.cache.formats import FORMATS
from tests.cache_helpers import SPEC, make_cache, qkv, run_chunk

POLICIES = {
    "all packed": CachePolicy(span_tokens=12),
    "sink, recent, window": CachePolicy(
        sink_frames=1, recent_chunks=1, window_frames=9, span_tokens=12
    ),
}


def _live_bytes(cache: KVCache) -> int:
    """Bytes of every tensor reachable from the cache, scratch and generator aside."""
    gc.collect()
    pending: list[object] = [cache]
    seen: set[int] = set()
    storages: dict[int, int] = {}
    skipped = {id(cache.workspace), id(cache._generator), id(cache.fmt)}
    while pending:
        found = pending.pop()
        if id(found) in seen or id(found) in skipped:
            continue
        seen.add(id(found))
        if isinstance(found, torch.Tensor):
            storages[found.untyped_storage().data_ptr()] = found.untyped_storage().nbytes()
        elif isinstance(found, dict):
            pending.extend(found.values())
        elif isinstance(found, (list, tuple, set)):
            pending.extend(found)
        elif hasattr(found, "__dict__") and not isinstance(found, type):
            pending.extend(vars(found).values())
    return sum(storages.values())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", FORMATS)
def test_total_is_the_live_storage(name: str, policy: str) -> None:
    cache = make_cache(name, POLICIES[policy])
    for _ in range(6):
        run_chunk(cache)
        ledger = cache.ledger()
        assert ledger.total == sum(ledger.parts.values()) == _live_bytes(cache)
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
    state = cache._open.generator_state.untyped_storage().nbytes()
    assert ledger.total + ledger.pending_bytes == _live_bytes(cache) - state
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

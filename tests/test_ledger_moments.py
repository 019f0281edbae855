"""The ledger against live storage after every call: passes, writes, masks, eviction, forks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from quantwm.cache import CachePolicy, CacheSpec, KVCache
from quantwm.cache.formats import FORMATS
from tests.cache_helpers import (
    HALF_MEASURES,
    LASTING,
    ROPE,
    SETTINGS,
    SPEC,
    finish_work,
    live_bytes,
    make_cache,
    qkv,
)

TURNED = replace(SPEC, rope=ROPE)
CASES: dict[str, tuple[str, dict[str, object], CacheSpec]] = {
    **{name: (name, SETTINGS[name], SPEC) for name in FORMATS},
    "qtc, un-rotated": ("qtc", SETTINGS["qtc"], TURNED),
    "quantwm, lasting": ("quantwm", LASTING, SPEC),
    "quantwm, un-rotated, INT4 rows": ("quantwm", HALF_MEASURES, TURNED),
    "qvg, INT8 centroids": ("qvg", {**SETTINGS["qvg"], "centroid_bits": 8}, SPEC),
}
POLICY = CachePolicy(sink_frames=1, recent_chunks=1, window_frames=9, span_tokens=12)


def agrees(cache: KVCache, when: str) -> None:
    finish_work(cache)
    ledger = cache.ledger()
    said = ledger.total + ledger.pending_bytes + ledger.making_bytes
    assert said == live_bytes(cache), when


@pytest.mark.parametrize("policy", [POLICY, CachePolicy(span_tokens=12)], ids=["window", "all"])
@pytest.mark.parametrize("case", CASES)
def test_after_every_call(case: str, policy: CachePolicy) -> None:
    name, settings, spec = CASES[case]
    cache = make_cache(name, policy, spec, settings)
    for number in range(6):
        cache.begin_chunk(cache.next_frame or 0, 2)
        agrees(cache, "begun")
        for clean in (False, True):
            for layer in range(spec.layers):
                cache.attend(layer, *qkv(number, 6, spec), clean=clean)
                agrees(cache, f"chunk {number}, layer {layer}, clean {clean}")
        mask = torch.tensor([True, False, True, True, False, True]) if number == 3 else None
        cache.finalize_chunk(mask)
        agrees(cache, f"chunk {number} committed")
        cache.history(0)
        agrees(cache, f"chunk {number} read")
    cache.begin_chunk(cache.next_frame or 0, 2)
    cache.attend(0, *qkv(9, 6, spec), clean=True)
    cache.abort_chunk()
    agrees(cache, "aborted")
    cache.evict((cache.next_frame or 0) - 3)
    agrees(cache, "evicted")
    other = cache.fork()
    agrees(other, "forked")
    for call in ("clear", "reset"):
        getattr(cache, call)()
        agrees(cache, call)
    agrees(other, "the fork of a cache that was reset")


def test_what_a_closure_keeps_is_seen() -> None:
    """The count itself: a decoder of the reference holds its span's tensors in a closure."""
    cache: Any = make_cache("kivi")
    before = live_bytes(cache)
    kept = torch.zeros(100)
    cache.leak = lambda: kept
    assert live_bytes(cache) == before + 400

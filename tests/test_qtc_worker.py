"""What qtc's worker is making: counted while it is made, before it is asked for, and forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from unittest import mock

import pytest
import torch

from quantwm.cache import CachePolicy, KVCache
from quantwm.cache.formats import qtc_basis, qtc_worker
from quantwm.errors import UserError
from tests.cache_helpers import (
    SPEC,
    finish_work,
    live_bytes,
    make_cache,
    qkv,
    run_chunk,
    same_bytes,
)

ROWS = 16 * (16 + 2) + 2 * 16 + 1
"""Bytes of a head's basis of 16 rows in 16 channels: codes, scales, mean, widths."""
BASES = SPEC.layers * SPEC.heads * 2 * ROWS


@contextmanager
def _worker_busy() -> Iterator[None]:
    """Nothing new is made until the block ends."""
    stop = Event()
    held = qtc_worker._pool().submit(stop.wait, 30.0)
    try:
        yield
    finally:
        stop.set()
        held.result()


def _about_to_learn() -> KVCache:
    """Of 12 tokens, where 16 make a first basis: the next chunk starts the worker."""
    cache = make_cache("qtc", CachePolicy(span_tokens=100))
    for _ in range(2):
        run_chunk(cache)
    assert cache.ledger().making_bytes == 0
    return cache


def test_a_basis_is_counted_before_during_and_after_it_is_made() -> None:
    cache = _about_to_learn()
    with _worker_busy():
        run_chunk(cache)
        held = cache.ledger()
        assert held.making_bytes == BASES and "bases" not in held.parts
        assert held.total == live_bytes(cache)
    finish_work(cache)
    made = cache.ledger()
    assert (made, made.making_bytes) == (held, BASES)
    assert made.total + made.making_bytes == live_bytes(cache)
    run_chunk(cache)
    assert cache.ledger().parts["bases"] == BASES


def test_only_a_clean_write_waits() -> None:
    cache = _about_to_learn()
    with _worker_busy():
        run_chunk(cache)
        cache.begin_chunk(6, 2)
        for layer in range(SPEC.layers):
            cache.attend(layer, *qkv(layer, 6))
        assert cache._learner._job[1].running
    cache.attend(0, *qkv(0, 6), clean=True)
    assert not cache._learner._job[1].running and cache._open.guide.span.lesson is not None


def test_an_adopted_basis_is_pending_and_waits_again_after_an_abort() -> None:
    cache = _about_to_learn()
    run_chunk(cache)
    finish_work(cache)
    before = cache.ledger()
    cache.begin_chunk(6, 2)
    cache.attend(0, *qkv(0, 6), clean=True)
    opened = cache.ledger()
    assert opened.making_bytes == 0 and opened.pending_bytes > BASES
    assert opened.total + opened.pending_bytes == live_bytes(cache)
    cache.abort_chunk()
    after = cache.ledger()
    assert after.parts == before.parts and after.pending_bytes == 0
    assert after.making_bytes == before.making_bytes == BASES
    assert after.total + after.making_bytes == live_bytes(cache)


def test_bases_that_will_do_take_nothing_more() -> None:
    """The worker was asked and keeps the present ones: counted whole until it has said so."""
    cache = _about_to_learn()
    for _ in range(2):
        run_chunk(cache)
    finish_work(cache)
    kept = mock.patch("quantwm.cache.formats.qtc_learner.QtcLearner._pays", return_value=False)
    with kept:
        while True:
            with _worker_busy():
                run_chunk(cache)
                asked = cache._learner._job is not None
                assert cache.ledger().making_bytes == (BASES if asked else 0)
            finish_work(cache)
            if asked:
                break
    ledger, generation = cache.ledger(), cache._span.lesson.generation
    assert ledger.making_bytes == 0 and ledger.total == live_bytes(cache)
    run_chunk(cache)
    assert cache._span.lesson.generation == generation


def test_forks_hold_what_is_made_and_a_reset_or_loaded_cache_does_not(tmp_path: Path) -> None:
    cache = _about_to_learn()
    run_chunk(cache)
    finish_work(cache)
    other = cache.fork()
    assert other.ledger().making_bytes == cache.ledger().making_bytes == BASES
    cache.save(tmp_path / "cache.safetensors")
    loaded = KVCache.load(
        tmp_path / "cache.safetensors", SPEC, cache.fmt, cache.policy, dtype=torch.float32
    )
    assert loaded.ledger().making_bytes == 0 and loaded.ledger().total == cache.ledger().total
    cache.reset()
    assert cache.ledger().total + cache.ledger().making_bytes == 0 == live_bytes(cache)
    assert other.ledger().total + other.ledger().making_bytes == live_bytes(other)
    for going_on in (other, loaded):
        run_chunk(going_on)
    assert same_bytes(other, loaded)


def test_a_failed_work_holds_nothing_and_is_done_again() -> None:
    """Memory may be free later; the error's traceback would hold what the work held."""
    cache, untroubled = _about_to_learn(), _about_to_learn()
    failure = torch.OutOfMemoryError("injected")
    with mock.patch.object(qtc_basis, "fit_basis", side_effect=failure):
        run_chunk(cache)
        finish_work(cache)
        assert cache.ledger().making_bytes == 0
        cache.begin_chunk(6, 2)
        with pytest.raises((torch.OutOfMemoryError, UserError)):
            cache.attend(0, *qkv(0, 6), clean=True)
        cache.abort_chunk()
        assert cache._learner._job is None and cache.ledger().total == live_bytes(cache)
    run_chunk(cache)
    for _ in range(2):
        run_chunk(untroubled)
    assert same_bytes(cache, untroubled)

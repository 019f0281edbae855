"""Codebooks and bases that outlive spans: when they are fitted again, bytes, bits, failures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from quantwm.cache import CachePolicy, CacheSpec, KVCache, make_format
from quantwm.cache.codebook import Codebook, codebook_bytes
from quantwm.cache.codebook_life import BookFit, CodebookLife, outliving, shared_bytes
from quantwm.cache.plan import Workload, plan_method
from quantwm.errors import UserError
from quantwm.study import study
from quantwm.tensor_files import load_tensors
from tests.cache_helpers import (
    LASTING,
    SPEC,
    make_cache,
    packed_tensors,
    qkv,
    run_chunk,
    same_bytes,
)

WIDE = replace(SPEC, tokens_per_frame=24)
"""48 tokens a chunk: enough for 4 centroids to fit the next chunk as well as this one."""


def _lasting(policy: CachePolicy | None = None, **changed: object) -> KVCache:
    """Spans of two chunks without a policy."""
    policy = CachePolicy(span_tokens=96) if policy is None else policy
    return make_cache("quantwm", policy, spec=WIDE, settings={**LASTING, **changed})


def _scene(cache: KVCache, seed: int, chunks: int = 1, noise: float = 0.1) -> None:
    """Chunks whose tokens lie around 4 points, which the seed places."""
    spec = cache.spec
    points = torch.randn(
        spec.heads, 4, spec.head_dim, generator=torch.Generator().manual_seed(seed)
    )
    for _ in range(chunks):
        first = cache.next_frame or 0
        generator = torch.Generator().manual_seed(1000 + first)
        cache.begin_chunk(first, spec.frames_per_chunk)
        for layer in range(spec.layers):
            shape = (spec.heads, spec.tokens_per_chunk, spec.head_dim)
            q, k, v = (noise * torch.randn(shape, generator=generator) for _ in range(3))
            near = points.index_select(1, torch.arange(spec.tokens_per_chunk) % 4)
            cache.attend(layer, q, k + near, v + near, clean=True)
        cache.finalize_chunk()


def _books(cache: KVCache) -> list[int]:
    """Distinct key codebooks of each layer in the history."""
    packed = [segment for segment in cache._segments if segment.encoded]
    return [
        len({id(segment.keys[layer].codebook) for segment in packed})
        for layer in range(cache.spec.layers)
    ]


def test_int8_centroids_are_within_half_a_step_and_take_their_bytes() -> None:
    fitted = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    book = Codebook.of(fitted, bits=8)
    step = fitted.abs().amax(-1, keepdim=True) / 127
    # Half a step, the rounding of the scale to BF16 at the far end, and of the widened number.
    assert bool(((book.dense().float() - fitted).abs() <= 1.1 * step).all())
    held = sum(t.untyped_storage().nbytes() for t in book.tensors())
    assert held == 2 * codebook_bytes(5, 16, bits=8) == 2 * 5 * 18
    plain = Codebook.of(fitted)
    assert plain.dense() is plain.centroids and codebook_bytes(5, 16, bits=16) == 160
    assert not Codebook.of(torch.zeros(1, 2, 8), bits=8).dense().any()


def test_a_codebook_is_kept_while_it_fits_and_spans_share_it() -> None:
    cache = _lasting(refit_above=1.3, book_bits=1e6)
    _scene(cache, 0, chunks=8)
    assert len(cache._segments) == 4 and _books(cache) == [1, 1]
    shared = {s.keys[0].codebook.centroids.data_ptr() for s in cache._segments}
    assert shared == {cache._books.pairs[0][0].centroids.data_ptr()}


def test_a_codebook_that_no_longer_fits_is_fitted_again_one_chunk_later() -> None:
    """What the host learns of a chunk, it learns when the chunk is committed."""
    cache = _lasting(refit_above=2.0, book_bits=1e6)
    _scene(cache, 0, chunks=4)
    _scene(cache, 9)
    assert _books(cache) == [1, 1]
    _scene(cache, 9)
    assert _books(cache) == [2, 2]
    poor, better = (cache._segments[-2], cache._segments[-1])
    assert poor.keys[0].codebook is not better.keys[0].codebook
    fit = cache._fit
    assert all(fit.newest[place] < 2.0 * power for place, power in fit.fitted.items())
    _scene(cache, 9, chunks=4)
    assert _books(cache) == [2, 2]


def test_a_span_holds_some_tokens_before_fitting_again_ends_it() -> None:
    policy = CachePolicy(span_tokens=960)
    cache = _lasting(policy, refit_above=0.01, book_bits=1e6, refit_after=144)
    _scene(cache, 0, chunks=9)
    # The first chunks' codebooks may be replaced sooner: a span then holds half of what was seen.
    assert [segment.tokens for segment in cache._segments] == [48, 48, 96, 144, 96]


@pytest.mark.parametrize("bits", [8.0, 20.0, 60.0])
def test_codebooks_and_bases_stay_within_their_bits(bits: float) -> None:
    """But for the first of each."""
    cache = _lasting(CachePolicy(span_tokens=48), refit_above=0.01, book_bits=bits)
    counts = []
    for number in range(12):
        _scene(cache, number)
        spans = [span for s in cache._segments for span in (*s.keys, *s.values)]
        held = shared_bytes(cache.fmt, spans)
        first = SPEC.layers * SPEC.heads * (2 * 4 * 18 + 2 * 16 * 2)
        assert held <= max(first, bits * cache.tokens * SPEC.layers * SPEC.heads / 8)
        counts.append(held)
    assert counts[-1] > counts[0]


def test_bits_ahead_are_paid_back() -> None:
    life = CodebookLife(book_bits=40.0, book_ahead=100)
    assert life.allowed_bits(held=10, seen=0) == 40.0 * 110
    assert life.allowed_bits(held=50, seen=200) == 40.0 * 100
    assert life.allowed_bits(held=50, seen=400) == life.allowed_bits(50, 900) == 40.0 * 50


def test_the_neediest_are_fitted_first() -> None:
    fit = BookFit().after({0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}, fitted=[0, 1, 2, 3])
    fit = fit.after({0: 3.0, 1: 1.1, 2: 9.0, 3: 3.0}, fitted=[])
    assert fit.wanted(above=1.2, room=2) == (0, 2)
    assert fit.wanted(above=1.2, room=9) == (0, 2, 3)
    assert fit.wanted(above=1.2, room=-1) == ()
    again = fit.after({0: 2.0, 2: 1.0}, fitted=[0])
    assert again.wanted(above=1.2, room=9) == (3,) and again.fitted[0] == 2.0


def test_a_basis_is_made_anew_when_queries_turn_elsewhere() -> None:
    def queries(cache: KVCache, channel: int, chunks: int) -> None:
        for _ in range(chunks):
            first = cache.next_frame or 0
            cache.begin_chunk(first, 2)
            for layer in range(SPEC.layers):
                q = 0.01 * torch.ones(SPEC.heads, 48, SPEC.head_dim)
                q[..., channel] = 3.0
                k = torch.randn(q.shape, generator=torch.Generator().manual_seed(first))
                cache.attend(layer, q, k, k, clean=True)
            cache.finalize_chunk()

    cache = _lasting(CachePolicy(span_tokens=48), rank=1, book_bits=100.0)
    queries(cache, 0, 5)
    first = cache._span.basis
    assert len(cache._segments) == 5 and cache._span.basis_span == 1
    assert bool((first[..., 0, 0].abs() > 0.9).all())
    queries(cache, 1, 9)
    assert cache._span.basis is not first and cache._span.basis_span > 5
    assert bool((cache._span.basis[..., 1, 0].abs() > 0.9).all())


def test_published_settings_fit_with_every_span() -> None:
    cache = make_cache("quantwm", CachePolicy(span_tokens=96), spec=WIDE)
    assert outliving(cache.fmt) is None
    _scene(cache, 0, chunks=4)
    assert _books(cache) == [2, 2] and cache._fit == BookFit()


@pytest.mark.parametrize(
    "policy",
    [
        CachePolicy(span_tokens=96, window_frames=9),
        CachePolicy(span_tokens=96, recent_chunks=1, sink_frames=1),
    ],
)
def test_runs_forks_resets_and_aborts_give_the_same_bytes(policy: CachePolicy) -> None:
    cache, twin = _lasting(policy), _lasting(policy)
    for number in range(9):
        run_chunk(cache)
        twin.begin_chunk(twin.next_frame or 0, 2)
        twin.abort_chunk()
        run_chunk(twin)
        if number == 4:
            fork = cache.fork()
            run_chunk(fork, salt=3)
            run_chunk(fork, salt=3)
    assert same_bytes(cache, twin) and cache._fit == twin._fit
    assert not same_bytes(cache, fork)
    twin.reset()
    for _ in range(9):
        run_chunk(twin)
    assert same_bytes(cache, twin)


def test_what_is_decoded_does_not_change_when_codebooks_are_fitted_again() -> None:
    cache = _lasting(refit_above=0.01, book_bits=1e6)
    seen: list[Tensor] = []
    for number in range(8):
        _scene(cache, number)
        keys, _ = cache.history(0)
        if seen:
            torch.testing.assert_close(keys[:, : seen[-1].shape[1]], seen[-1])
        seen.append(keys)


def test_clear_keeps_codebooks_for_worlds_that_rebuild_their_memory() -> None:
    cache = _lasting(refit_above=2.0)
    _scene(cache, 0, chunks=2)
    book = cache._books.pairs[0][0]
    cache.clear()
    _scene(cache, 0, chunks=2)
    assert cache._segments[0].keys[0].codebook is book
    assert cache._segments[0].keys[0].correction is not None


def test_a_cache_that_is_saved_goes_on_with_its_codebooks(tmp_path: Path) -> None:
    policy = CachePolicy(span_tokens=96, window_frames=9)
    cache = _lasting(policy, refit_above=1.001)
    for _ in range(5):
        run_chunk(cache)
    cache.save(tmp_path / "cache.safetensors")
    again = KVCache.load(
        tmp_path / "cache.safetensors", cache.spec, cache.fmt, policy, dtype=torch.float32
    )
    assert again.ledger().parts == cache.ledger().parts and again._fit == cache._fit
    for _ in range(4):
        run_chunk(cache)
        run_chunk(again)
    assert same_bytes(cache, again)


@pytest.mark.parametrize("preset", ["compact", "published"])
def test_nominal_ratio_at_native_sizes(preset: str) -> None:
    """28,080 tokens in chunks of 4,680, D = 128, 256 centroids; the scene changes all the time."""
    spec = CacheSpec(1, 1, 128, 1560, 3)
    cache = KVCache(spec, make_format("quantwm", preset=preset, iterations=1), CachePolicy())
    for number in range(6):
        generator = torch.Generator().manual_seed(number)
        points = torch.randn(1, 200, 128, generator=generator)
        places = torch.randint(0, 200, (4680,), generator=generator)
        noise = 0.3 * torch.randn(1, 4680, 128, generator=generator)
        x = points.index_select(1, places) + noise
        cache.begin_chunk(3 * number, 3)
        cache.gather(0, x, x, q=noise[:, :64], clean=True)
        cache.finalize_chunk()
    ledger = cache.ledger()
    assert cache.tokens == 28_080
    if preset == "published":
        assert ledger.nominal_ratio < 4.8
        return
    assert ledger.nominal_ratio >= 6.2 and ledger.resident_ratio >= 6.1
    load = Workload(1, 1, 128, 28_080, 4680, 4680)
    planned = plan_method("compact", cache.fmt, load)
    assert planned.ratio >= 6.2
    assert abs(planned.bytes_total / ledger.total - 1) < 0.02


def test_recorded_tensors_more_ratio_at_less_error(shared_dir: Path) -> None:
    """Against the published format with 64 centroids for 3,072 tokens: 5.19x here."""
    tensors = load_tensors(shared_dir / "tensors" / "doom_rooms_a.safetensors")
    tensors = replace(tensors, layers={5: tensors.layers[5]})
    methods = ["quantwm:embedded", "quantwm:compact-embedded", "quantwm:balanced-embedded"]
    published, compact, balanced = study(tensors, methods, chunk=192, span=3072, settings={})
    assert compact.ratio >= 6.0 and balanced.ratio >= 5.5
    assert compact.token_shift < published.token_shift
    assert compact.logit_mse < published.logit_mse
    assert balanced.token_shift < 0.95 * published.token_shift
    assert balanced.logit_mse < 0.85 * published.logit_mse


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"centroid_bits": 4}, "centroid_bits must be 8 or 16, got 4"),
        ({"book_bits": -1.0}, "book_bits must be 0 or more"),
        ({"refit_above": 0.0}, "refit_above must be above 0"),
        ({"refit_after": 0}, "refit_after must be at least 1"),
        ({"book_ahead": -1}, "book_ahead must be 0 or more"),
    ],
)
def test_bad_settings_are_refused(setting: dict[str, object], says: str) -> None:
    for name in ("qvg", "quantwm"):
        with pytest.raises(UserError, match=says):
            make_format(name, **setting)


def test_qvg_codebooks_last_too() -> None:
    settings = {"centroids": 4, "group_size": 8, "centroid_bits": 8, "book_bits": 9.0}
    cache = make_cache("qvg", CachePolicy(span_tokens=48), spec=WIDE, settings=settings)
    _scene(cache, 0, chunks=5)
    assert len(cache._segments) == 5 and _books(cache) == [1, 1]
    assert len(packed_tensors(cache)) == 5 * 4 * 5


@pytest.mark.parametrize("where", ["chunk.residual_power", "kv_cache.moment"])
def test_a_write_that_fails_after_fitting_can_be_made_again(where: str) -> None:
    """The first codebooks draw their start, and the draw is taken back with the write."""
    cache, twin = _lasting(), _lasting()
    cache.begin_chunk(0, 2)
    q, k, v = qkv(0, 48, cache.spec)
    failure = torch.OutOfMemoryError("injected")
    with (
        mock.patch(f"quantwm.cache.{where}", side_effect=failure),
        pytest.raises(torch.OutOfMemoryError),
    ):
        cache.attend(0, q, k, v, clean=True)
    cache.abort_chunk()
    for each in (cache, twin):
        run_chunk(each)
    assert same_bytes(cache, twin)
    again, other = _lasting(), _lasting()
    again.begin_chunk(0, 2)
    other.begin_chunk(0, 2)
    with (
        mock.patch(f"quantwm.cache.{where}", side_effect=failure),
        pytest.raises(torch.OutOfMemoryError),
    ):
        again.attend(0, q, k, v, clean=True)
    for each in (again, other):
        for layer in range(each.spec.layers):
            each.attend(layer, q, k, v, clean=True)
        each.finalize_chunk()
    assert same_bytes(again, other)

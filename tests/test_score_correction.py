"""The correction of cached scores: what noise adds to attention is taken off again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quantwm.cache import CachePolicy, CacheSpec, KVCache, make_format
from quantwm.cache.score_correction import LIMIT, CorrectedCache, ScoreCorrection
from quantwm.lanes import lanes_for, read_through
from quantwm.worlds.embedded.adapter import EmbeddedWorld


def _randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_mass_of_noisy_keys_comes_back() -> None:
    """Cached keys with noise against exact ones: their share of the attention, on average."""
    size, tokens = 16, 4000
    keys, own = _randn(1, tokens, size, seed=0), _randn(1, tokens, size, seed=1)
    q = 2 * _randn(1, 50, size, seed=2)
    noisy = keys + 0.6 * _randn(1, tokens, size, seed=3)
    correction = ScoreCorrection()
    correction.learn(0, "self", keys, noisy)
    bias = correction(0, "self", q, tokens)
    assert bias.shape == (1, 50, 1)

    def share(cached: torch.Tensor, added: torch.Tensor | float) -> torch.Tensor:
        scores = q @ cached.mT / 4 + added
        everything = torch.cat((scores, q @ own.mT / 4), dim=-1)
        return torch.softmax(everything, -1)[..., :tokens].sum(-1).mean()

    exact, plain, corrected = share(keys, 0.0), share(noisy, 0.0), share(noisy, bias)
    assert float(plain - exact) > 0.05
    assert abs(float(corrected - exact)) < 0.3 * float(plain - exact)


def test_nothing_is_corrected_before_anything_is_known() -> None:
    assert not ScoreCorrection()(3, "self", _randn(1, 4, 8, seed=0), 10).any()


def test_layers_and_streams_are_corrected_apart_and_never_too_much() -> None:
    correction = ScoreCorrection()
    exact = _randn(1, 20, 8, seed=0)
    correction.learn(0, "self", exact, exact + 100.0)
    correction.learn(1, "self", exact, exact)
    q = _randn(1, 4, 8, seed=1)
    assert torch.equal(correction(0, "self", q, 20), torch.full((1, 4, 1), -LIMIT))
    assert not correction(1, "self", q, 20).any() and not correction(0, "other", q, 20).any()


@pytest.mark.parametrize("method", ["bf16", "qvg", "qtc"])
def test_it_fits_the_cache_s_hook(method: str) -> None:
    """In `attend`, on top of any format: cached scores fall by it and the chunk's own do not."""
    settings = {"centroids": 2, "group_size": 16} if method == "qvg" else {}
    spec = CacheSpec(layers=1, heads=2, head_dim=16, tokens_per_frame=4, frames_per_chunk=2)
    cache = KVCache(spec, make_format(method, **settings), CachePolicy(), dtype=torch.float32)
    q, k, v = (_randn(2, 8, 16, seed=s) for s in (1, 2, 3))
    cache.begin_chunk(0, 2)
    cache.attend(0, q, k, v, clean=True)
    cache.finalize_chunk()
    correction = ScoreCorrection()
    correction.learn(0, "self", k, cache.history(0)[0] + 0.5)
    cache.begin_chunk(2, 2)
    found = cache.attend(0, q, k, v, score_bias=correction)
    keys, values = cache.history(0)
    scores = torch.cat((q @ keys.mT / 4 + correction(0, "self", q, 8), q @ k.mT / 4), -1)
    expected = torch.softmax(scores, -1) @ torch.cat((values, v), 1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def _chunk(cache: Any, seed: int, tokens: int = 8) -> list[torch.Tensor]:
    """One chunk denoised and committed; the outputs of both passes."""
    q, k, v = (_randn(2, tokens, 16, seed=seed + s) for s in (1, 2, 3))
    cache.begin_chunk(cache.next_frame or 0, 2)
    outputs = [cache.attend(0, q, k, v), cache.attend(0, q, k, v, clean=True)]
    cache.finalize_chunk()
    return outputs


def _corrected(**settings: Any) -> tuple[KVCache, CorrectedCache]:
    spec = CacheSpec(layers=1, heads=2, head_dim=16, tokens_per_frame=4, frames_per_chunk=2)
    fmt = make_format("quantwm", centroids=2, group_size=16, rank=2, **settings)
    cache = KVCache(spec, fmt, CachePolicy(span_tokens=16), dtype=torch.float32)
    return cache, CorrectedCache(cache)


def test_a_corrected_cache_learns_what_encoding_did_to_keys() -> None:
    """Outputs are those of `attend` with a correction that was told exact and decoded keys."""
    plain, lane = _corrected()[0], _corrected()[1]
    known, seen = ScoreCorrection(), 0
    for number in range(4):
        q, k, v = (_randn(2, 8, 16, seed=10 * number + s) for s in (1, 2, 3))
        plain.begin_chunk(2 * number, 2)
        wanted = plain.attend(0, q, k, v, clean=True, score_bias=known)
        plain.finalize_chunk()
        known.learn(0, "self", k.to(torch.bfloat16), plain.history(0)[0][:, seen:])
        seen += 8
        found = _chunk(lane, 10 * number)[1]
        torch.testing.assert_close(found, wanted, atol=2e-3, rtol=2e-3)
    assert not torch.equal(_chunk(lane, 50)[0], _chunk(plain, 50)[0])


def test_an_aborted_chunk_teaches_nothing_and_a_reset_cache_knows_nothing() -> None:
    lane = _corrected()[1]
    _chunk(lane, 0)
    known = lane._correction.nbytes
    errors = dict(lane._correction._errors)
    lane.begin_chunk(2, 2)
    lane.attend(0, *(_randn(2, 8, 16, seed=s) for s in (1, 2, 3)), clean=True)
    assert lane.ledger().pending_bytes > 0
    lane.abort_chunk()
    assert lane._correction._errors == errors and lane.ledger().pending_bytes == 0
    held = lane.ledger()
    assert (
        held.parts["statistics"] - lane._cache.ledger().parts["statistics"] == known == 2 * 16 * 4
    )
    assert held.total == sum(held.parts.values())
    other = lane.fork()
    _chunk(other, 7)
    assert lane._correction._errors == errors
    lane.reset()
    assert lane.ledger().total == 0 and lane._correction.nbytes == 0


def test_bf16_recent_chunks_and_sinks_teach_nothing() -> None:
    spec = CacheSpec(layers=1, heads=2, head_dim=16, tokens_per_frame=4, frames_per_chunk=2)
    fmt = make_format("quantwm", centroids=2, group_size=16, rank=2)
    for policy in (CachePolicy(recent_chunks=1), CachePolicy(sink_frames=2)):
        lane = CorrectedCache(KVCache(spec, fmt, policy, dtype=torch.float32))
        _chunk(lane, 0)
        assert lane._correction.nbytes == 0


def test_as_a_lane_s_setting_it_is_another_reading() -> None:
    spec = EmbeddedWorld.random("tiny").spec
    plain, corrected = lanes_for(spec, ["quantwm", "quantwm:corrected=true"])
    cache = _corrected()[0]
    assert read_through(plain, cache) is cache
    assert isinstance(read_through(corrected, cache), CorrectedCache)

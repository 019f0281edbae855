"""The correction of cached scores: what noise adds to attention is taken off again."""

from __future__ import annotations

import pytest
import torch

from quantwm.cache import CachePolicy, CacheSpec, KVCache, make_format
from quantwm.cache.score_correction import LIMIT, ScoreCorrection


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

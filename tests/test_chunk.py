"""Codebooks of keys and values fitted together: the same ones, in half the launches."""

from __future__ import annotations

import pytest
import torch

from quantwm.cache import CachePolicy, chunk
from quantwm.cache.kv_cache import KVCache
from tests.cache_helpers import LASTING, make_cache, run_chunk


def _run(name: str, settings: dict[str, object] | None = None, chunks: int = 5) -> KVCache:
    cache = make_cache(name, CachePolicy(span_tokens=6, window_frames=5), settings=settings)
    for _ in range(chunks):
        run_chunk(cache)
    return cache


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As on a GPU with kernels; notes how many heads are copied beside each other."""
    seen: list[int] = []
    genuine = chunk.Codebook.joined

    def joined(self: chunk.Codebook, other: chunk.Codebook) -> chunk.Codebook:
        found = genuine(self, other)
        seen.append(found.centroids.shape[0])
        return found

    monkeypatch.setattr(chunk, "kernels_in", lambda name, device: object())
    monkeypatch.setattr(chunk.Codebook, "joined", joined)
    return seen


@pytest.mark.parametrize("name", ["qvg", "qvg-pro", "quantwm"])
def test_codebooks_are_those_of_keys_and_values_alone(
    name: str, batches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    together = _run(name)
    assert batches == [4] * (2 * 4)  # 2 heads twice; 2 layers; the first chunk draws its own
    with monkeypatch.context() as apart:
        apart.setattr(chunk, "FITTED_TOGETHER", 0)
        alone = _run(name)
    assert len(batches) == 8 and together.ledger() == alone.ledger()
    for layer in range(2):
        for one, other in zip(together.history(layer), alone.history(layer), strict=True):
            assert torch.equal(one, other)


def test_codebooks_of_which_one_may_outlive_the_other_are_not(batches: list[int]) -> None:
    _run("quantwm", LASTING)
    assert not batches

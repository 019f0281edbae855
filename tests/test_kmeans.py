"""k-means: assignment, update, fitting, and QSAC against its formula written out."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quantwm.cache import kmeans


def _points(seed: int, heads: int, tokens: int, channels: int = 8) -> Tensor:
    return torch.randn(heads, tokens, channels, generator=torch.Generator().manual_seed(seed))


def _inertia(x: Tensor, centroids: Tensor) -> float:
    ids = kmeans.assign(x, centroids).long()
    nearest = centroids.gather(1, ids.unsqueeze(-1).expand(-1, -1, x.shape[2]))
    return float((x - nearest).square().sum())


@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 30), st.integers(1, 20))
def test_assign_is_the_nearest(seed: int, heads: int, tokens: int, k: int) -> None:
    x, centroids = _points(seed, heads, tokens), _points(seed + 1, heads, k)
    distances = torch.cdist(x.double(), centroids.double())
    ids = kmeans.assign(x, centroids)
    assert ids.dtype == torch.uint8 and int(ids.max()) < k
    chosen = distances.gather(-1, ids.long().unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(chosen, distances.amin(-1), atol=1e-5, rtol=1e-5)


def test_assign_ties_go_to_the_smaller_index() -> None:
    centroids = torch.ones(1, 4, 8)
    assert kmeans.assign(torch.zeros(1, 3, 8), centroids).tolist() == [[0, 0, 0]]


def test_update_is_the_mean_and_an_empty_cluster_stays() -> None:
    x = torch.tensor([[[1.0, 0.0], [3.0, 0.0], [5.0, 6.0]]])
    ids = torch.tensor([[0, 0, 2]], dtype=torch.uint8)
    centroids = torch.full((1, 3, 2), 9.0)
    assert kmeans.update(x, ids, centroids).tolist() == [[[2.0, 0.0], [9.0, 9.0], [5.0, 6.0]]]


@given(st.integers(0, 2**31), st.integers(8, 40), st.integers(1, 8))
def test_fit_never_gets_worse_with_iterations(seed: int, tokens: int, k: int) -> None:
    x = _points(seed, 2, tokens)
    fitted = [
        kmeans.fit(x, k, iterations, torch.Generator().manual_seed(seed)) for iterations in range(4)
    ]
    inertia = [_inertia(x, centroids) for centroids in fitted]
    for before, after in pairwise(inertia):
        assert after <= before * (1 + 1e-5) + 1e-5


@pytest.mark.parametrize(("tokens", "k"), [(1, 1), (1, 4), (3, 8), (8, 8), (9, 4)])
def test_fit_with_few_tokens_or_duplicates(tokens: int, k: int) -> None:
    x = _points(0, 2, tokens)
    x[:, -1] = x[:, 0]
    centroids = kmeans.fit(x, k, 3, torch.Generator().manual_seed(0))
    assert centroids.shape == (2, k, 8) and bool(torch.isfinite(centroids).all())
    if k >= tokens:
        assert _inertia(x, centroids) < 1e-6


def test_fit_draws_without_replacement() -> None:
    x = _points(0, 1, 12)
    centroids = kmeans.fit(x, 12, 0, torch.Generator().manual_seed(5))
    assert len({tuple(row) for row in centroids[0].tolist()}) == 12


def test_fit_is_seeded_and_leaves_the_global_generator_alone() -> None:
    x = _points(0, 2, 30)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first, second = (kmeans.fit(x, 4, 2, torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not torch.equal(first, kmeans.fit(x, 4, 2, torch.Generator().manual_seed(8)))


def test_warm_start_draws_nothing_and_starts_there() -> None:
    x, init = _points(0, 2, 30), _points(1, 2, 4)
    generator = torch.Generator().manual_seed(7)
    before = generator.get_state()
    assert torch.equal(kmeans.fit(x, 4, 0, generator, init), init)
    assert torch.equal(generator.get_state(), before)


def _qsac_written_out(
    x: Tensor, centroids: Tensor, weights: Tensor, group: int, candidates: int
) -> Tensor:
    heads, tokens, _ = x.shape
    ids = torch.zeros(heads, tokens, dtype=torch.uint8)
    for h in range(heads):
        for i in range(tokens):
            distance = [float((weights[h] * (x[h, i] - mu).square()).sum()) for mu in centroids[h]]
            nearest = sorted(range(len(distance)), key=lambda j: (distance[j], j))[:candidates]

            def score(j: int, h: int = h, i: int = i) -> float:
                parts = (x[h, i] - centroids[h, j]).split(group)
                ranges = [float(p.max() - p.min()) for p in parts]
                sums = [float(w.sum()) for w in weights[h].split(group)]
                return sum(w * r**2 for w, r in zip(sums, ranges, strict=True))

            ids[h, i] = min(nearest, key=score)
    return ids


@given(st.integers(0, 2**20), st.integers(1, 9), st.integers(1, 9))
def test_assign_qsac_follows_the_formula(seed: int, k: int, candidates: int) -> None:
    x, centroids = _points(seed, 2, 6), _points(seed + 1, 2, k)
    weights = _points(seed + 2, 2, 1).squeeze(1).square() + 0.1
    weights = weights / weights.mean(-1, keepdim=True)
    ids = kmeans.assign_qsac(x, centroids, weights, 4, candidates)
    assert torch.equal(ids, _qsac_written_out(x, centroids, weights, 4, candidates))


def test_assign_qsac_with_one_candidate_and_unit_weights_is_assign() -> None:
    x, centroids = _points(0, 2, 40), _points(1, 2, 16)
    unit = torch.ones(2, 8)
    assert torch.equal(kmeans.assign_qsac(x, centroids, unit, 4, 1), kmeans.assign(x, centroids))


def test_assign_qsac_prefers_the_smaller_range_among_candidates() -> None:
    """Token 0: centroid 0 is nearer, but leaves one large residual; centroid 1 a flat one."""
    x = torch.zeros(1, 1, 4)
    centroids = torch.tensor([[[2.0, 0.0, 0.0, 0.0], [1.5, 1.5, 1.5, 1.5]]])
    unit = torch.ones(1, 4)
    assert kmeans.assign(x, centroids).item() == 0
    assert kmeans.assign_qsac(x, centroids, unit, 4, 4).item() == 1

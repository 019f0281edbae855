"""Query statistics: the moment, mean-1 weights, leading eigenvectors."""

from __future__ import annotations

import torch

from quantwm.cache.statistics import QueryStatistics, moment

CPU = torch.device("cpu")


def _queries(seed: int, tokens: int = 30) -> torch.Tensor:
    return torch.randn(2, tokens, 8, generator=torch.Generator().manual_seed(seed))


def _filled(seeds: tuple[int, ...]) -> QueryStatistics:
    statistics = QueryStatistics(3, 2, 8, CPU)
    for seed in seeds:
        statistics.fold({slot: moment(_queries(seed + slot)) for slot in range(3)}, 30)
    return statistics


def test_moment_is_the_sum_of_outer_products() -> None:
    q = _queries(0).to(torch.bfloat16)
    wanted = torch.einsum("hnc,hnd->hcd", q.double(), q.double())
    torch.testing.assert_close(moment(q).double(), wanted, atol=1e-4, rtol=1e-5)


def test_nothing_is_known_before_the_first_query() -> None:
    statistics = QueryStatistics(3, 2, 8, CPU)
    assert statistics.weights() is None and statistics.bases(4) is None
    assert statistics.moments is None
    statistics.fold({}, 0)
    assert statistics.moments is None


def test_the_sum_is_plain() -> None:
    together = torch.cat([_queries(0), _queries(10)], dim=1)
    assert _filled((0, 10)).count == 60
    torch.testing.assert_close(_filled((0, 10)).moments[0], moment(together), atol=1e-4, rtol=1e-5)


def test_weights_have_mean_one_and_follow_the_diagonal() -> None:
    weights = _filled((0,)).weights()
    torch.testing.assert_close(weights.mean(-1), torch.ones(3, 2))
    energy = _queries(1).square().sum(1)
    torch.testing.assert_close(weights[1], energy / energy.mean(-1, keepdim=True))


def test_a_slot_without_queries_has_unit_weights() -> None:
    statistics = QueryStatistics(2, 2, 8, CPU)
    statistics.fold({0: moment(_queries(0))}, 30)
    assert torch.equal(statistics.weights()[1], torch.ones(2, 8))
    basis, eigenvalues = statistics.bases(3)
    assert bool(torch.isfinite(basis).all()) and not eigenvalues[1].any()


def test_bases_are_the_leading_directions() -> None:
    statistics = _filled((0,))
    basis, eigenvalues = statistics.bases(3)
    assert basis.shape == (3, 2, 8, 3) and basis.dtype == torch.bfloat16
    assert basis.is_contiguous() and eigenvalues.is_contiguous()
    mean = statistics.moments / 30
    wanted = torch.linalg.eigvalsh(mean.double()).flip(-1)[..., :3]
    torch.testing.assert_close(eigenvalues.double(), wanted, atol=1e-4, rtol=1e-4)
    directions = basis.float()
    captured = (directions * (mean @ directions)).sum(-2)
    torch.testing.assert_close(captured, eigenvalues, atol=2e-2, rtol=2e-2)


def test_a_copy_is_independent() -> None:
    statistics = _filled((0,))
    other = statistics.copy()
    before = statistics.moments.clone()
    other.fold({0: moment(_queries(5))}, 30)
    assert torch.equal(statistics.moments, before) and statistics.count == 30

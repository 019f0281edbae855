"""Query statistics: the moment, mean-1 weights, leading eigenvectors."""

from __future__ import annotations

import torch

from quantwm.cache.statistics import QueryStatistics, moment, moment_bytes

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


def _pair(seeds: tuple[int, ...]) -> tuple[QueryStatistics, QueryStatistics]:
    """The same queries kept whole and as triangles."""
    compact = QueryStatistics(3, 2, 8, CPU, compact=True)
    for seed in seeds:
        compact.fold({slot: moment(_queries(seed + slot)) for slot in range(3)}, 30)
    return _filled(seeds), compact


def test_triangles_say_what_whole_moments_say() -> None:
    whole, compact = _pair((0, 10, 20))
    torch.testing.assert_close(compact.weights(), whole.weights(), atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(compact.sensitivity(), whole.sensitivity(), atol=4e-3, rtol=4e-3)
    ours, theirs = compact.bases(2), whole.bases(2)
    torch.testing.assert_close(ours[1], theirs[1], atol=1e-2, rtol=2e-3)
    torch.testing.assert_close(compact.share(ours[0]), whole.share(theirs[0]), atol=2e-3, rtol=2e-3)
    held = sum(t.untyped_storage().nbytes() for t in compact.tensors())
    assert held == 3 * 2 * moment_bytes(8, compact=True)
    assert whole.moments.untyped_storage().nbytes() == 3 * 2 * moment_bytes(8, compact=False)


def test_triangles_still_learn_after_many_chunks() -> None:
    """The mean of 300 chunks of one kind and 300 of another is the mean of both."""
    statistics = QueryStatistics(1, 2, 8, CPU, compact=True)
    first, second = (moment(_queries(seed, 64) * scale) for seed, scale in ((0, 1.0), (7, 1.5)))
    for number in range(600):
        statistics.fold({0: first if number < 300 else second}, 64)
    wanted = (first + second) / 128
    got = statistics._whole(slice(None))[0]
    assert float((got - wanted).abs().max() / wanted.abs().max()) < 0.03


def test_triangles_of_a_slot_without_queries_stay_zero() -> None:
    statistics = QueryStatistics(2, 2, 8, CPU, compact=True)
    statistics.fold({0: moment(_queries(0))}, 30)
    assert torch.equal(statistics.weights()[1], torch.ones(2, 8))
    basis, eigenvalues = statistics.bases(3)
    assert bool(torch.isfinite(basis).all()) and not eigenvalues[1].any()


def test_the_share_of_a_basis_falls_when_queries_turn_elsewhere() -> None:
    statistics = QueryStatistics(1, 1, 8, CPU)
    q = torch.zeros(1, 10, 8)
    q[..., 0] = 1.0
    statistics.fold({0: moment(q)}, 10)
    basis, _ = statistics.bases(1)
    torch.testing.assert_close(statistics.share(basis), torch.tensor(1.0), atol=1e-3, rtol=0)
    statistics.fold({0: moment(q.roll(1, -1))}, 10)
    torch.testing.assert_close(statistics.share(basis), torch.tensor(0.5), atol=1e-3, rtol=0)


def test_a_prepared_chunk_is_not_in_before_it_is_committed() -> None:
    for compact in (False, True):
        statistics = QueryStatistics(1, 2, 8, CPU, compact)
        statistics.fold({0: moment(_queries(0))}, 30)
        before = [t.clone() for t in statistics.tensors()]
        commit = statistics.prepared({0: moment(_queries(5))}, 30)
        assert all(torch.equal(a, b) for a, b in zip(before, statistics.tensors(), strict=True))
        commit()
        assert statistics.count == 60 and not torch.equal(before[0], statistics.tensors()[0])

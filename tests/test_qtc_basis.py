"""Parts of qtc: positions, the metric of queries, the basis."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from qtc_helpers import CPU, SMALL_ROPE, positive_definite, randn
from torch import Tensor

from quantwm.cache import positions
from quantwm.cache.formats import (
    qtc_basis,
    qtc_coder,
    qtc_levels,
    qtc_metric,
)
from quantwm.cache.positions import TokenPositions, rotate_, turns
from quantwm.cache.spec import CacheSpec, RopeLayout
from quantwm.errors import UserError

# Positions.


def test_turning_by_places_is_rope() -> None:
    """Against a rotation written out for one token."""
    place = TokenPositions(5 * 6 + 4, 1)  # frame 5, row 1, column 1 of a grid of 2 x 3
    x = randn(1, 1, 16)
    turned = rotate_(x.clone(), turns(SMALL_ROPE, place, 0, 1, CPU))
    speeds = [10000 ** (-2 * j / 8) * 5 for j in range(4)]
    speeds += [10000 ** (-2 * j / 4) for j in range(2)] * 2
    for pair, angle in enumerate(speeds):
        a, b = x[0, 0, 2 * pair : 2 * pair + 2].tolist()
        expected = (
            a * math.cos(angle) - b * math.sin(angle),
            a * math.sin(angle) + b * math.cos(angle),
        )
        assert turned[0, 0, 2 * pair : 2 * pair + 2].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "places", [TokenPositions(17, 20), TokenPositions(3, 9).select(slice(2, 8))]
)
def test_turns_made_on_the_device_are_the_turns(places: TokenPositions) -> None:
    kept = places.select(torch.arange(0, places.count, 2))
    for own in (places, kept):
        found = positions._turns_there(SMALL_ROPE, own.tensor(0, own.count))
        torch.testing.assert_close(found, turns(SMALL_ROPE, own, 0, own.count, CPU))


@pytest.mark.parametrize("first", [0, 7, 10**7])
def test_turning_back_gives_the_key_at_any_place(first: int) -> None:
    positions = TokenPositions(first, 13)
    x = randn(2, 13, 20)  # 4 channels behind the split stay as they are
    turn = turns(SMALL_ROPE, positions, 0, 13, CPU)
    turned = rotate_(x.clone(), turn)
    assert torch.equal(turned[..., 16:], x[..., 16:])
    torch.testing.assert_close(rotate_(turned, turn, inverse=True), x, atol=1e-5, rtol=1e-5)


@given(data=st.data(), first=st.integers(0, 50), counts=st.lists(st.integers(1, 9), min_size=1))
def test_positions_follow_their_tokens(data: st.DataObject, first: int, counts: list[int]) -> None:
    """Selecting and joining do to positions what they do to a list of places."""
    held, places = TokenPositions(first, 0), []
    start = first
    for count in counts:
        held = held.joined(TokenPositions(start, count)) if places else TokenPositions(start, count)
        places += range(start, start + count)
        start += count + data.draw(st.integers(0, 1))
        mask = data.draw(st.lists(st.booleans(), min_size=len(places), max_size=len(places)))
        keep = torch.tensor(mask).nonzero().flatten()
        if len(keep):
            held, places = (
                held.select(keep),
                [p for p, kept in zip(places, mask, strict=True) if kept],
            )
        assert held.tensor(0, held.count).tolist() == places
    cut = data.draw(st.integers(0, len(places) - 1))
    part = held.select(slice(cut, None))
    assert part.tensor(0, part.count).tolist() == places[cut:]
    gapless = places[-1] - places[0] + 1 == len(places)
    assert (held.places is None) == gapless


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"split": (7, 4, 4), "grid": (2, 3)}, "even"),
        ({"split": (8, 4, 4), "grid": (0, 3)}, "rows and columns"),
        ({"split": (8, 4, 4), "grid": (2, 3), "theta": 1.0}, "theta"),
    ],
)
def test_a_wrong_layout_is_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        RopeLayout(**settings)


@pytest.mark.parametrize(("head_dim", "tokens"), [(8, 6), (16, 5)])
def test_a_layout_that_does_not_fit_the_cache_is_refused(head_dim: int, tokens: int) -> None:
    with pytest.raises(UserError, match="RoPE"):
        CacheSpec(1, 1, head_dim, tokens, 2, rope=SMALL_ROPE)


# Metric.


def test_the_closed_form_is_the_mean_over_offsets() -> None:
    """All offsets of a small grid and horizon, written out; 4 channels stay unturned."""
    horizon, moment = 5, positive_definite(3, 20, heads=2)
    total = torch.zeros_like(moment)
    cells = list(itertools.product(range(2), range(3)))
    for time, query, key in itertools.product(range(horizon), cells, cells):
        offsets = (time, query[0] - key[0], query[1] - key[1])
        total += _turned(moment, offsets) / (horizon * len(cells) ** 2)
    found = qtc_metric.mean_over_offsets(moment, SMALL_ROPE, horizon)
    torch.testing.assert_close(found, total, atol=1e-10, rtol=1e-8)


def _turned(moment: Tensor, offsets: tuple[int, int, int]) -> Tensor:
    """R M R^T with R written out as a matrix."""
    size = moment.shape[-1]
    turn = torch.eye(size, dtype=torch.float64)
    pair = 0
    for channels, offset in zip(SMALL_ROPE.split, offsets, strict=True):
        for j in range(channels // 2):
            angle = offset * 10000.0 ** (-2 * j / channels)
            c, s = math.cos(angle), math.sin(angle)
            block = torch.tensor([[c, -s], [s, c]], dtype=torch.float64)
            turn[2 * pair : 2 * pair + 2, 2 * pair : 2 * pair + 2] = block
            pair += 1
    return turn @ moment @ turn.T


def test_the_metric_is_the_mean_squared_logit_error() -> None:
    """Sampled: queries at later places read a key with an error; e M e^T is what they see."""
    size, horizon = 16, 4
    generator = torch.Generator().manual_seed(1)
    moment = positive_definite(5, size, heads=1)
    draws = 40_000
    root = torch.linalg.cholesky(moment[0])
    q0 = torch.randn(draws, size, generator=generator, dtype=torch.float64) @ root.T
    error = torch.randn(size, generator=generator, dtype=torch.float64)
    key_cell = torch.randint(0, 6, (draws,), generator=generator)
    query_cell = torch.randint(0, 6, (draws,), generator=generator)
    key = TokenPositions(0, draws, (7 * 6 + key_cell).int())
    ahead = torch.randint(0, horizon, (draws,), generator=generator)
    query = TokenPositions(0, draws, ((7 + ahead) * 6 + query_cell).int())
    e = rotate_(error.expand(1, draws, size).float().clone(), turns(SMALL_ROPE, key, 0, draws, CPU))
    q = rotate_(q0[None].float(), turns(SMALL_ROPE, query, 0, draws, CPU))
    seen = (q * e).sum(-1).square().mean()
    expected = error @ qtc_metric.mean_over_offsets(moment, SMALL_ROPE, horizon)[0] @ error
    assert float(seen) == pytest.approx(float(expected), rel=0.05)


@pytest.mark.parametrize("kind", ["zero", "rank one", "one dead channel", "huge"])
def test_the_metric_is_positive_definite_whatever_was_seen(kind: str) -> None:
    q = randn(1, 3 if kind == "rank one" else 50, 16)
    q[:, 1:] *= kind != "rank one"
    q *= {"zero": 0.0, "huge": 1e15}.get(kind, 1.0)
    if kind == "one dead channel":
        q[..., 3] = 0
    found = qtc_metric.metric(q.mT @ q, SMALL_ROPE, 8)
    assert torch.isfinite(found).all()
    assert float(torch.linalg.eigvalsh(found).min()) >= 0.9 * qtc_metric.RIDGE


# Basis.


def _cost(error: Tensor, metric: Tensor) -> float:
    return float(((error @ metric) * error).sum(-1).mean())


def test_channels_are_uncorrelated_and_errors_plain_in_the_basis() -> None:
    cov, metric = positive_definite(1), positive_definite(2)
    variances, rows = qtc_basis.eigen_rows(cov, metric)
    eye = torch.eye(32, dtype=torch.float64)
    torch.testing.assert_close(rows @ metric @ rows.mT, eye.expand(2, 32, 32), atol=1e-9, rtol=0)
    analysis = torch.linalg.inv(rows)
    spread = analysis.mT @ cov @ analysis
    torch.testing.assert_close(spread, torch.diag_embed(variances), atol=1e-8, rtol=0)
    assert bool((variances.diff(dim=-1) <= 0).all())


@given(
    variances=st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=3),
    words=st.integers(1, 6),
    most=st.integers(1, 3),
)
def test_greedy_widths_are_the_best_widths(variances: list[float], words: int, most: int) -> None:
    """Distortions of a Gaussian fall ever more slowly, so greedy is optimal: against all widths."""
    variances = sorted(variances, reverse=True)
    words = min(words, most * len(variances))

    def total(widths: tuple[int, ...]) -> float:
        return sum(v * qtc_levels.DISTORTIONS[w] for v, w in zip(variances, widths, strict=True))

    several = torch.tensor([variances, variances[::-1]]).sort(descending=True).values
    found = tuple(qtc_basis.allocate(several, words, most)[1].tolist())
    assert sum(found) == words and max(found) <= most
    assert list(found) == sorted(found, reverse=True)
    every = itertools.product(range(most + 1), repeat=len(variances))
    assert total(found) <= min(total(w) for w in every if sum(w) == words) * (1 + 1e-9)


def test_analysis_takes_rounding_of_the_rows_into_account() -> None:
    """Coordinates on the stored INT8 rows reproduce what lies in their span exactly."""
    cov, metric = positive_definite(1), positive_definite(2)
    basis, _ = qtc_basis.fit_basis(cov, metric, torch.zeros(2, 32), 64, 16, 6)
    coordinates = randn(2, 7, 16, seed=4)
    x = coordinates @ basis.matrix()
    found = x @ qtc_basis.analysis(basis, metric)
    torch.testing.assert_close(found, coordinates, atol=1e-3, rtol=1e-3)


def test_an_indefinite_metric_is_no_end() -> None:
    """As statistics from a file may be."""
    basis, _ = qtc_basis.fit_basis(positive_definite(1), None, torch.zeros(2, 32), 64, 16, 6)
    assert qtc_basis.analysis(basis, positive_definite(2) - 9 * torch.eye(32)).isfinite().all()


@pytest.mark.parametrize("kind", ["own metric", "later metric", "plain"])
def test_the_iterated_projection_is_the_projection(kind: str) -> None:
    """What runs on a GPU, products alone, against the factorization."""
    cov, metric = positive_definite(1, 64), positive_definite(2, 64)
    made_for = None if kind == "plain" else metric
    basis, _ = qtc_basis.fit_basis(cov, made_for, torch.zeros(2, 64), 128, 48, 6)
    read = 0.5 * metric + 0.5 * positive_definite(3, 64) if kind == "later metric" else made_for
    exact = qtc_basis.analysis(basis, read)
    found = qtc_basis._iterated(basis.matrix(), read)
    assert float((found - exact).norm(dim=1).div(exact.norm(dim=1)).max()) < 1e-4


@pytest.mark.parametrize("budget", [32, 64, 96])
def test_a_basis_keeps_its_promise_on_gaussian_data(budget: int) -> None:
    cov, metric = positive_definite(1), positive_definite(2)
    basis, promised = qtc_basis.fit_basis(cov, metric, torch.zeros(2, 32), budget, 32, 6)
    x = randn(2, 4000, 32, dtype=torch.float64) @ torch.linalg.cholesky(cov).mT
    codes, gains = qtc_coder.encode_in_basis(x.float(), basis, metric)
    assert codes.shape == (2, 4000, budget // 8) and gains.dtype == torch.uint8
    error = qtc_coder.decode_in_basis(codes, gains, basis).double() - x
    for head in range(2):
        # The promise is without gains; those of a token's few channels win up to a third here.
        part = _cost(error[head], metric[head]) / float(promised[head])
        assert 0.5 < part < 1.05


def test_the_query_metric_pays() -> None:
    """Coding for the metric costs less in the metric than coding for the plain error."""
    cov, metric = positive_definite(1), positive_definite(2)
    x = randn(2, 500, 32, dtype=torch.float64) @ torch.linalg.cholesky(cov).mT
    costs = []
    for read in (metric, None):
        basis, _ = qtc_basis.fit_basis(cov, read, torch.zeros(2, 32), 64, 32, 6)
        coded = qtc_coder.decode_in_basis(*qtc_coder.encode_in_basis(x.float(), basis, read), basis)
        costs.append(_cost(coded.double() - x, metric[:, None].squeeze(1)))
    assert costs[0] < 0.8 * costs[1]


def test_basis_bytes_are_the_bytes() -> None:
    basis, _ = qtc_basis.fit_basis(positive_definite(1), None, torch.zeros(2, 32), 64, 16, 6)
    held = sum(t.numel() * t.element_size() for t in basis.tensors())
    assert held == 2 * qtc_basis.basis_bytes(16, 32)


@pytest.mark.parametrize("kind", ["zero", "rank one", "indefinite"])
def test_singular_statistics_still_give_a_basis(kind: str) -> None:
    scatter = torch.zeros(1, 16, 16, dtype=torch.float64)
    if kind != "zero":
        scatter[0, 0, 0] = 1e4
    if kind == "indefinite":
        scatter[0, 1, 1] = -1e-3  # rounding can do that
    mean = torch.ones(1, 16)
    cov = qtc_basis.covariance(scatter / 100, mean, 0.05)
    assert float(torch.linalg.eigvalsh(cov).min()) > 0
    basis, _ = qtc_basis.fit_basis(cov, None, mean, 32, 16, 5)
    x = randn(1, 20, 16)
    decoded = qtc_coder.decode_in_basis(*qtc_coder.encode_in_basis(x, basis, None), basis)
    assert torch.isfinite(decoded).all()
    assert float(decoded.norm()) < 3 * float(x.norm())

"""Bad input to qtc: what it does instead is named by `explain`, or refused in one clear line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from qtc_helpers import SPEC, Lane, Source, learner_of
from torch import Tensor

from quantwm.cache import CachePolicy, CacheSpec, KVCache, dispatch, make_format
from quantwm.cache.formats.qtc_correlations import Correlations
from quantwm.cache.formats.qtc_doubts import doubts
from quantwm.cache.spec import RopeLayout
from quantwm.errors import UserError

FAR = "qtc learns less from {} that lie far from all others or overflow"
STILL = "qtc floors the variance of channels of {} that never change"
INDEFINITE = "qtc floors variances below zero: statistics of {} are indefinite"
FAR_FRAME = 3_000_000


@pytest.fixture(autouse=True)
def _notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_notes", {})


def _said() -> list[str]:
    return [part for part in dispatch.explain("cpu").split("; ")[1:] if part.startswith("qtc")]


def test_ordinary_input_says_nothing() -> None:
    lane = Lane().run(Source(), 12)
    assert lane.generation >= 1 and not _said()


@pytest.mark.parametrize("at", [0, 6])
@pytest.mark.parametrize("role", ["keys", "values"])
def test_an_outlier_token(role: str, at: int) -> None:
    def outlier(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, v = k.clone(), v.clone()
        (k if role == "keys" else v)[:, 7] = 1e5
        return q, k, v

    source = Source()
    lane = Lane().run(source, at).run(source, 1, edit=outlier).run(source, 13 - at)
    assert _said() == [FAR.format(role)]
    assert lane.errors(last=48)[role == "values"] < 0.2


def test_constant_channels() -> None:
    def constant(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, v = k.clone(), v.clone()
        k[..., 5:9], v[..., 5:9] = 0.0, 2.0
        return q, k, v

    spec = replace(SPEC, rope=None)
    lane = Lane(spec=spec).run(Source(spec), 9, edit=constant)
    assert _said() == [STILL.format("keys"), STILL.format("values")]
    assert max(lane.errors(last=48)) < 0.3


def _with_scatter(lane: Lane, change: Any) -> None:
    """Put another scatter of values into layer 1's statistics."""
    learner = learner_of(lane)
    known = learner.statistics[1]
    values = replace(known.values, scatter=change(known.values.scatter))
    lane.cache._learner = learner.with_chunk({1: replace(known, values=values)})


def test_indefinite_statistics() -> None:
    """A covariance with a negative direction: floored, said, and no channel explodes."""
    lane, source = Lane().run(Source(), 3), Source()

    def indefinite(scatter: Correlations) -> Correlations:
        matrix = scatter.matrix()
        own = scatter.deviations.square().mean() / 8
        matrix[:, :4, :4] = own * (2 * torch.eye(4) - 1)  # their sum has -2 own
        return Correlations.of(matrix)

    _with_scatter(lane, indefinite)
    lane.run(source, 6)
    assert lane.generation == 1
    assert INDEFINITE.format("values") in _said()
    assert max(lane.errors(last=48)) < 1.0


def test_singular_statistics() -> None:
    """Tokens of three directions only: no channel changes without the others, none is still."""

    def flat(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        few = torch.linalg.qr(torch.ones(32, 32) + torch.diag(torch.arange(32.0)))[0][:, :3]
        return q, k @ few @ few.T, v @ few @ few.T

    spec = replace(SPEC, rope=None)
    lane = Lane(spec=spec).run(Source(spec), 9, edit=flat)
    assert max(lane.errors(last=48)) < 0.05


def test_statistics_that_are_not_finite_keep_the_codes_without_a_basis() -> None:
    lane = Lane().run(Source(), 3)
    _with_scatter(lane, lambda known: replace(known, deviations=known.deviations * torch.nan))
    lane.run(Source(), 4)
    assert lane.generation == 0 and max(lane.errors()) < 0.3
    assert any("qtc codes without a basis: no basis comes of" in text for text in _said())


def test_one_token_chunks() -> None:
    """A chunk's mean is its token, so that nothing within chunks ever changes."""
    spec = CacheSpec(1, 2, 32, 1, 1, rope=RopeLayout((12, 10, 10), (1, 1)))
    lane = Lane(spec=spec).run(Source(spec), 110)
    assert max(lane.errors()) < 0.01
    assert _said() == [STILL.format("keys"), STILL.format("values")]


def test_positions_beyond_the_trained_range_are_exact() -> None:
    """Frame three million: un-rotated as well as frame 0, and nothing to be said."""
    lanes = []
    for first in (0, FAR_FRAME):
        lane, source = Lane(), Source(seed=4)
        lane.cache._next_frame = lane.cache._origin = first
        lanes.append(lane.run(source, 10).errors(last=48))
    assert lanes[1][0] == pytest.approx(lanes[0][0], rel=0.2) and not _said()


@pytest.mark.parametrize("place", range(3))
def test_nan_is_one_clear_line(place: int) -> None:
    def poisoned(*tensors: Tensor) -> tuple[Tensor, ...]:
        tensors[place][0, 0, 0] = torch.nan
        return tensors

    with pytest.raises(UserError, match="NaN or infinity") as caught:
        Lane().run(Source(), 1, edit=poisoned)
    assert "\n" not in str(caught.value)


def _saved(folder: Path, lane: Lane) -> Path:
    lane.cache.save(folder / "a.safetensors")
    return folder / "a.safetensors"


@pytest.mark.parametrize(
    ("spec", "preset"),
    [
        (replace(SPEC, heads=3), "medium"),
        (replace(SPEC, layers=1), "medium"),
        (replace(SPEC, rope=None), "medium"),
        (replace(SPEC, rope=RopeLayout((12, 10, 10), (3, 2))), "medium"),
        (SPEC, "small"),
    ],
)
def test_a_file_whose_bases_do_not_match_is_refused(
    spec: CacheSpec, preset: str, tmp_path: Path
) -> None:
    lane = Lane().run(Source(), 8)
    assert lane.generation == 1
    path, policy = _saved(tmp_path, lane), CachePolicy(span_tokens=10**6)
    with pytest.raises(UserError) as caught:
        KVCache.load(path, spec, make_format("qtc", preset=preset), policy, dtype=torch.float32)
    assert "\n" not in str(caught.value) and path.name in str(caught.value)


def test_doubts_of_nothing_are_none() -> None:
    assert doubts(learner_of(Lane()).statistics, (0.05, 0.03)) == []

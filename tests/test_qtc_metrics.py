"""qtc's metrics of errors: by queries, plain, by attention, by output weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from qtc_helpers import SPEC, Lane, Source, learner_of
from torch import Tensor

from quantwm.cache import CachePolicy, KVCache, dispatch, make_format
from quantwm.cache.formats.qtc_learner import attention_mass, weighed_by
from quantwm.cache.formats.qtc_lesson import SlotGuide
from quantwm.engine import Engine
from quantwm.errors import UserError
from quantwm.lanes import lanes_for
from quantwm.worlds.embedded.adapter import EmbeddedWorld

PLAIN = replace(SPEC, rope=None)


def _output_lane(metric: Tensor | None, **settings: object) -> Lane:
    lane = Lane(spec=PLAIN)
    fmt = make_format("qtc", **settings)
    if metric is not None:
        fmt.output_metric = lambda slot: metric
    lane.cache = KVCache(PLAIN, fmt, CachePolicy(span_tokens=10**6), dtype=torch.float32)
    return lane.run(Source(PLAIN, seed=4), 12)


def _cost(lane: Lane, metric: Tensor) -> float:
    """Cost of the errors of the last values, in a metric."""
    exact = torch.cat([v for _, v in lane.exact[0]], dim=1)[:, -96:]
    error = lane.cache.history(0)[1][:, -96:] - exact
    return float(((error @ metric) * error).sum())


def test_values_are_coded_for_what_the_output_makes_of_them() -> None:
    """Output weights that see few directions: errors go where they do not look."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(2, 8, 32, generator=generator)
    metric = weight.mT @ weight
    plain = _output_lane(None)
    weighed = _output_lane(metric, value_metric="output")
    assert _cost(weighed, metric) < 0.7 * _cost(plain, metric)
    assert weighed.errors(last=96)[1] > plain.errors(last=96)[1]


def test_without_output_weights_errors_are_plain_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "_notes", {})
    lane = _output_lane(None, value_metric="output")
    assert torch.equal(lane.cache.history(0)[1], _output_lane(None).cache.history(0)[1])
    assert "this world gives no output weights" in dispatch.explain("cpu")


def test_what_is_at_hand_for_plain_errors_is_not_taken_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A projection made before is one in the plain metric: values by output weights make theirs."""
    asked: list[str] = []
    monkeypatch.setattr(SlotGuide, "projection", lambda self, role: asked.append(role))
    _output_lane(torch.eye(32).expand(2, 32, 32), value_metric="output")
    assert set(asked) == {"keys"}
    _output_lane(None)
    assert set(asked) == {"keys", "values"}


def test_a_world_s_output_weights_reach_the_format() -> None:
    """W^T W of the rows that a head's values meet, for the right layer."""
    world = EmbeddedWorld.random("tiny")
    with Engine(world, lanes_for(world.spec, ["bf16", "qtc:by-output"]), seed=0) as engine:
        fmt = engine._make_lane(engine.lanes[1]).state.cache.fmt
        spec = world.spec.cache
        for layer in range(spec.layers):
            weight = world._transformer.blocks[layer].o.weight.float()
            own = weight[:, spec.head_dim : 2 * spec.head_dim]
            torch.testing.assert_close(fmt.output_metric(layer)[1], own.T @ own)


def test_attention_s_mass_is_what_the_queries_give() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 40, 16, generator=generator) for _ in range(2))
    expected = (torch.softmax(q @ k.mT / 4, -1).mean(1) * 40).clamp(max=8)
    torch.testing.assert_close(attention_mass(q, k), expected)


def test_tokens_that_queries_attend_to_shape_the_basis() -> None:
    """Half the tokens have values of one kind and all of the attention."""

    def edit(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        seen = (torch.arange(k.shape[1]) % 2 == 0)[None, :, None]
        ahead = torch.zeros(k.shape[-1])
        ahead[0] = 4.0
        first, second = v.clone(), v.clone()
        first[..., 16:], second[..., :16] = 0.0, 0.0
        v = torch.where(seen, first, second)
        return torch.zeros_like(q) + ahead, k + torch.where(seen, ahead, -ahead), v

    errors = []
    for metric in ("identity", "attention"):
        lane = Lane(spec=PLAIN, value_metric=metric).run(Source(PLAIN, seed=4), 12, edit=edit)
        exact = torch.cat([v for _, v in lane.exact[0]], dim=1)
        error = (lane.cache.history(0)[1] - exact)[:, -96:].square().sum(-1)
        errors.append([float(error[:, part::2].mean()) for part in (0, 1)])
    assert errors[1][0] < 0.8 * errors[0][0]
    assert errors[1][1] > errors[0][1]


def test_a_metric_of_output_weights_is_positive_definite() -> None:
    dead = torch.zeros(2, 16, 16)
    assert float(torch.linalg.eigvalsh(weighed_by(dead)).min()) > 0.9


def test_keys_can_be_coded_plainly() -> None:
    lane = Lane(key_metric="identity").run(Source(), 8)
    assert all(slot.queries.count == 0 for slot in learner_of(lane).statistics)


@pytest.mark.parametrize("settings", [{"key_metric": "energy"}, {"value_metric": "queries"}])
def test_an_unknown_metric_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(UserError, match="must be one of"):
        make_format("qtc", **settings)

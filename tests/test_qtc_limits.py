"""The qtc format in a cache: what it survives, what it refuses, what it costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from qtc_helpers import ROPE, SPEC, Lane, Source, learner_of
from torch import Tensor

from quantwm.cache import CachePolicy, CacheSpec, KVCache, dispatch, make_format
from quantwm.cache.spec import RopeLayout
from quantwm.errors import UserError

# What it survives.


def _outlier(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    k, v = k.clone(), v.clone()
    k[:, 7], v[:, 7] = 1e5, -1e5
    return q, k, v


def test_an_outlier_token_spoils_itself_only() -> None:
    clean = Lane().run(Source(), 12)
    lane = Lane()
    source = Source()
    lane.run(source, 6).run(source, 1, edit=_outlier).run(source, 5)
    others = [i for i in range(12 * 24) if i != 6 * 24 + 7]
    for role in range(2):
        exact = [torch.cat([pair[role] for pair in which.exact[0]], 1) for which in (clean, lane)]
        found = [which.cache.history(0)[role] for which in (clean, lane)]
        error = [
            float((f - e)[:, others].square().sum() / e[:, others].square().sum())
            for f, e in zip(found, exact, strict=True)
        ]
        assert error[1] < 1.5 * error[0]
        own = (found[1] - exact[1])[:, 6 * 24 + 7].norm() / exact[1][:, 6 * 24 + 7].norm()
        assert float(own) < 1.0


@pytest.mark.parametrize("outliers_at", [0, 2])
def test_outliers_in_what_teaches_the_first_basis(outliers_at: int) -> None:
    clean = Lane().run(Source(), 12)
    lane, source = Lane(), Source()
    lane.run(source, outliers_at).run(source, 1, edit=_outlier).run(source, 11 - outliers_at)
    assert lane.errors(last=96)[0] < 1.5 * clean.errors(last=96)[0]


def _constant_channels(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    k, v = k.clone(), v.clone()
    k[..., 5:9], v[..., 5:9] = 0.0, 2.0
    return q, k, v


def _all_constant(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q, torch.full_like(k, 3.0), torch.full_like(v, -1.0)


def _zero(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


@pytest.mark.parametrize("edit", [_constant_channels, _all_constant, _zero])
@pytest.mark.parametrize("rope", [ROPE, None], ids=["turned", "plain"])
def test_constant_channels(edit: Any, rope: RopeLayout | None) -> None:
    spec = replace(SPEC, rope=rope)
    lane = Lane(spec=spec).run(Source(spec), 9, edit=edit)
    keys, values = lane.cache.history(0)
    exact = [torch.cat([pair[role] for pair in lane.exact[0]], dim=1) for role in range(2)]
    if edit is _constant_channels:
        assert max(lane.errors(last=48)) < 0.3
        # In the basis a channel that never moves is all but exact.
        assert float((values - exact[1])[:, -48:, 5:9].abs().max()) < 0.3
    else:
        assert float((values - exact[1]).abs().max()) < 0.02
        assert rope is not None or float((keys - exact[0]).abs().max()) < 0.04


def test_data_after_a_dead_history() -> None:
    """A basis learned from zeros has floors, so what follows is coarse and not garbage."""
    lane = Lane().run(Source(), 8, edit=_zero)
    assert lane.generation == 1
    lane.run(Source(), 2)
    assert max(lane.errors(last=48)) < 1.0


@pytest.mark.parametrize("scale", [1e-6, 1e4])
def test_any_scale_of_keys(scale: float) -> None:
    lane = Lane().run(Source(), 9, edit=lambda q, k, v: (q / scale, scale * k, scale * v))
    assert max(lane.errors(last=48)) < 0.2


def test_one_token_chunks() -> None:
    spec = CacheSpec(1, 2, 32, 1, 1, rope=RopeLayout((12, 10, 10), (1, 1)))
    lane = Lane(spec=spec).run(Source(spec), 110)
    assert lane.generation >= 1
    # A chunk's mean is its token: INT8 of it is all that is lost.
    assert max(lane.errors()) < 0.01


def test_without_any_query() -> None:
    lane = Lane().run(Source(), 10, queries=False)
    assert lane.generation == 1 and lane.errors(last=48)[0] < 0.2


def test_one_query_direction_only() -> None:
    """A rank-one query moment."""

    def edit(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q[:, :1].expand_as(q).contiguous(), k, v

    lane = Lane().run(Source(), 10, edit=edit)
    assert lane.generation == 1 and max(lane.errors(last=48)) < 0.6


def test_keys_too_large_for_sums_keep_the_format_alive() -> None:
    lane = Lane(spec=replace(SPEC, rope=None))
    source = Source(replace(SPEC, rope=None))
    lane.run(source, 5).run(source, 1, edit=lambda q, k, v: (q, 1e25 * k, v)).run(source, 6)
    assert lane.errors(last=96)[0] < 0.3


def test_statistics_without_a_basis_fall_back_and_explain_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "_notes", {})
    lane = Lane().run(Source(), 3)
    learner = learner_of(lane)
    values = learner.statistics[1].values
    unknown = replace(values.scatter, deviations=torch.full((2, 32), torch.nan))
    broken = replace(values, scatter=unknown)
    lane.cache._learner = learner.with_chunk({1: replace(learner.statistics[1], values=broken)})
    lane.run(Source(), 4)
    assert lane.generation == 0 and max(lane.errors()) < 0.3
    assert "qtc codes without a basis: no basis comes of 96 tokens" in dispatch.explain("cpu")


def test_nan_is_refused_in_keys_values_and_queries() -> None:
    for place in range(3):
        lane, source = Lane(), Source()
        lane.run(source, 1)

        def edit(*tensors: Tensor, place: int = place) -> tuple[Tensor, ...]:
            tensors[place][0, 0, 0] = torch.nan
            return tensors

        with pytest.raises(UserError, match="NaN"):
            lane.run(source, 1, edit=edit)
        lane.cache.abort_chunk()
        assert lane.cache.tokens == 24


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"key_bits": 0.0}, "key_bits"),
        ({"value_bits": 5.0}, "value_bits"),
        ({"key_rows": 1.5}, "key_rows"),
        ({"key_width": 7}, "key_width"),
        ({"horizon_frames": 0}, "horizon_frames"),
        ({"basis_after": 0.0}, "basis_after"),
        ({"basis_after": float("inf")}, "basis_after"),
        ({"preset": "huge"}, "preset"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make_format("qtc", **settings)


def test_a_head_size_without_whole_blocks_is_refused() -> None:
    with pytest.raises(UserError, match="multiple of 16, got 24"):
        KVCache(CacheSpec(1, 1, 24, 2, 1), make_format("qtc"), CachePolicy())


# What it costs.


def test_ledger_parts_to_the_byte() -> None:
    lane = Lane().run(Source(), 10)
    parts, slots, heads = lane.cache.ledger().parts, 2, 2
    tokens, chunks, rows = 240, 10, 24 // 16 * 16
    assert rows == 16
    assert parts["codes"] == slots * heads * 2 * tokens * (32 * 2 // 8)
    assert parts["gains"] == slots * heads * 2 * tokens
    assert parts["means"] == slots * 2 * chunks * (heads * (32 + 2) + 4)
    corner = 32 * 33 // 2
    own = heads * (3 * (corner * 2 + 32 * 4) + 2 * 32 * 4 + 2 * 8)
    assert parts["statistics"] == slots * (own + 2 * 8)
    kept = make_format("qtc")._rows("keys", 32)
    assert parts["bases"] == slots * heads * 2 * (kept * 34 + 64 + kept // 16)


def test_streams_learn_apart() -> None:
    spec = replace(SPEC, layers=1, streams=("self", "other"))
    cache = KVCache(spec, make_format("qtc"), CachePolicy(span_tokens=10**6), dtype=torch.float32)
    sources = {"self": Source(seed=1), "other": Source(seed=2)}
    for _ in range(6):
        first = cache.next_frame or 0
        cache.begin_chunk(first, 4)
        for stream, source in sources.items():
            cache.attend(0, *source.chunk(first, 4), clean=True, stream=stream)
        cache.finalize_chunk()
    ours, theirs = (cache._learner.statistics[slot].keys.mean for slot in range(2))
    assert float((ours - theirs).norm()) > 1.0


def test_each_ingredient_can_be_left_out_and_is_worth_something() -> None:
    """Turned keys that queries see unevenly: every preset without one ingredient does worse."""
    whole = Lane().run(Source(seed=5), 14).logit_error(Source(seed=5), last=10 * 24)
    for preset in ("without-unrotation", "without-queries", "without-averaging"):
        part = Lane(preset=preset).run(Source(seed=5), 14)
        assert part.logit_error(Source(seed=5), last=10 * 24) > 1.02 * whole

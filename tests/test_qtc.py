"""The qtc format in a cache: what it wins, what it may know, where its tokens stand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from qtc_helpers import ROPE, SPEC, Lane, Source, learner_of

from quantwm.cache import CachePolicy, make_format
from quantwm.cache.formats.qtc_learner import QtcLearner

# What it wins.


def test_it_beats_quantwm_on_keys_with_a_spectrum() -> None:
    source = Source(seed=3)
    quantwm = Lane("quantwm", centroids=16, group_size=16, rank=4).run(source, 10)
    qtc = Lane(key_bits=1.75, value_bits=1.75).run(Source(seed=3), 10)
    assert qtc.cache.ledger().nominal_bytes < quantwm.cache.ledger().nominal_bytes
    ours, theirs = (
        [lane.logit_error(Source(seed=3), last) for last in (None, 6 * 24)]
        for lane in (qtc, quantwm)
    )
    # The whole history, 4 of whose 10 chunks came before the basis; and those coded in it.
    assert ours[0] < 0.7 * theirs[0] and ours[1] < 0.35 * theirs[1]


def test_a_flat_spectrum_wins_nothing_and_loses_nothing() -> None:
    """White keys and queries: the error of a 2-bit Lloyd quantizer, basis or not."""
    lane = Lane().run(Source(spread=0.0), 12)
    assert lane.generation >= 1
    key, value = lane.errors(last=48)
    assert 0.05 < key < 0.2 and 0.05 < value < 0.2


def test_unrotating_pays_on_keys_that_turn() -> None:
    """The same tensors with and without the layout: a basis of turned keys is blurred."""
    known = Lane().run(Source(seed=5), 12)
    blind = Lane(spec=replace(SPEC, rope=None)).run(Source(seed=5), 12)
    assert known.logit_error(Source(seed=5)) < 0.6 * blind.logit_error(Source(seed=5))


@pytest.mark.parametrize("preset", ["small", "medium", "large"])
def test_presets_spend_what_they_say(preset: str) -> None:
    """Per element at head_dim 128, 3,072 tokens in chunks of 192, everything counted."""
    fmt = make_format("qtc", preset=preset)
    bits = 0.0
    for role in ("keys", "values"):
        parts = {**fmt.packed_bytes(3072, 16, 3, 128, role), **fmt.shared_bytes(3, 128, role)}
        bits += 8 * sum(parts.values()) / (2 * 3 * 3072 * 128)
    assert bits == pytest.approx({"small": 1.70, "medium": 2.36, "large": 2.87}[preset], abs=0.01)


# What it may know.


def test_a_basis_comes_from_past_chunks_only() -> None:
    """Whatever a chunk holds, it is encoded by what was known before it."""
    lanes = [Lane().run(Source(seed=1), 5) for _ in range(2)]
    bases = []
    for lane, scale in zip(lanes, (1.0, 50.0), strict=True):
        lane.run(Source(seed=2), 1, edit=lambda q, k, v, s=scale: (s * q, s * k, s * v))
        bases.append(lane.cache._span.lesson)
    assert bases[0].generation == bases[1].generation == 1
    for ours, theirs in zip(bases[0].tensors(), bases[1].tensors(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_first_chunks_have_no_basis_and_the_first_basis_comes_in_time() -> None:
    lane, source = Lane(), Source()
    assert [lane.run(source, 1).generation for _ in range(6)] == [0, 0, 0, 0, 1, 1]
    kinds = [segment.keys[0].basis is None for segment in lane.cache._segments]
    assert kinds == [True, False]
    assert lane.cache._segments[0].tokens == 4 * 24  # 3 x head_dim tokens were seen


def test_a_basis_stays_while_nothing_changes() -> None:
    lane = Lane().run(Source(), 40)
    assert lane.generation == 1


def test_it_is_asked_at_growing_distances() -> None:
    """Half as many tokens more each time: 5 questions in 40 chunks, whatever the answer."""
    lane, source, asked = Lane(), Source(), []
    for _ in range(40):
        lesson = lane.run(source, 1).cache._span.lesson
        if lesson is not None and lesson.asked_at not in asked:
            asked.append(lesson.asked_at)
    assert asked[0] == 4 * 24 and len(asked) == 6
    assert all(later >= 1.5 * sooner for sooner, later in pairwise(asked))


def test_a_basis_is_renewed_when_the_keys_change_and_old_tokens_keep_theirs() -> None:
    lane = Lane().run(Source(seed=1), 8)
    before = lane.cache.history(0)
    old = lane.cache.tokens
    other = Source(seed=9)
    lane.run(other, 40)
    assert lane.generation >= 2
    for ours, theirs in zip(before, lane.cache.history(0), strict=True):
        assert torch.equal(ours, theirs[:, :old])
    stale = Lane()
    stale.run(Source(seed=1), 8)
    stale.cache._learner = _Never(learner_of(stale))
    stale.run(Source(seed=9), 40)
    assert lane.errors(last=96)[0] < 0.8 * stale.errors(last=96)[0]


class _Never(QtcLearner):
    """A learner that never renews a basis."""

    def __init__(self, known: QtcLearner) -> None:
        super().__init__(known.coding, known.rope, known.statistics, known.window_tokens)

    def lesson(self, current: Any) -> Any:
        return current

    def with_chunk(self, observed: Any) -> _Never:
        return _Never(super().with_chunk(observed))


def test_storage_spans_share_one_basis() -> None:
    lane = Lane(policy=CachePolicy(span_tokens=48)).run(Source(), 12)
    packed = [s for s in lane.cache._segments if s.keys[0].basis is not None]
    assert len(packed) >= 3
    assert len({id(s.keys[0].basis) for s in packed}) == 1
    one = Lane().run(Source(), 12)
    assert lane.cache.ledger().parts["bases"] == one.cache.ledger().parts["bases"]
    torch.testing.assert_close(lane.cache.history(1), one.cache.history(1))


# Where its tokens stand.


@pytest.mark.parametrize(
    "policy",
    [
        CachePolicy(span_tokens=100),
        CachePolicy(span_tokens=100, sink_frames=3),
        CachePolicy(span_tokens=100, recent_chunks=2),
        CachePolicy(span_tokens=100, sink_frames=1, recent_chunks=1, window_frames=26),
    ],
    ids=["all", "sink", "recent", "window"],
)
def test_keys_come_back_turned_by_their_own_place(policy: CachePolicy) -> None:
    """Dropped tokens, sinks, recent chunks and windows move no key to another place."""
    mask = torch.arange(24) % 5 != 3
    lane = Lane(policy=policy, key_bits=4.0, value_bits=3.0, key_rows=1.0, value_rows=1.0)
    source = Source()
    lane.run(source, 6).run(source, 4, keep_mask=mask).run(source, 2)
    exact = torch.cat([k for k, _ in lane.exact[1]], dim=1)
    found = lane.cache.history(1)[0]
    if policy.sink_frames and policy.window_frames:
        sink = policy.sink_frames * 6
        exact = torch.cat((exact[:, :sink], exact[:, sink - found.shape[1] :]), dim=1)
    assert exact.shape == found.shape
    error = (found - exact).square().sum(-1) / exact.square().sum(-1)
    assert float(error.mean()) < 0.06  # a key at a wrong place is off by about 1
    assert float(error[:, -150:].max()) < 0.2


def test_positions_are_kept_only_where_tokens_are_missing() -> None:
    lane = Lane().run(Source(), 2)
    assert "positions" not in lane.cache.ledger().parts
    mask = torch.arange(24) % 2 == 0
    lane.run(Source(seed=4), 1, keep_mask=mask)
    # 4 bytes a token, in the keys of both layers; the two whole chunks before are in the span.
    assert lane.cache.ledger().parts["positions"] == 2 * 4 * (48 + 12)


def test_keys_before_rope_are_not_turned() -> None:
    spec = replace(SPEC, rope=replace(ROPE, baked=False))
    lane = Lane(spec=spec).run(Source(spec), 10)
    assert lane.cache._segments[-1].keys[0].rope is None
    assert lane.errors(last=48)[0] < 0.2


def test_frames_far_beyond_any_table() -> None:
    """Angles are computed, in float64, for any place."""
    errors = []
    for first in (0, 10**6):
        lane, source = Lane(), Source()
        lane.cache.begin_chunk(first, 1)
        for layer in range(2):
            q, k, v = source.chunk(first, 1)
            lane.cache.attend(layer, q, k, v, clean=True)
            lane.exact[layer].append((k, v))
        lane.cache.finalize_chunk()
        lane.run(source, 8)
        errors.append(lane.errors()[0])
    assert errors[1] < 1.1 * errors[0]

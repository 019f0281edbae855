"""The qtc format in a cache: what it wins, what it may know, what it survives, what it costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quantwm.cache import CachePolicy, CacheSpec, KVCache, dispatch, make_format
from quantwm.cache.formats.qtc_learner import QtcLearner
from quantwm.cache.positions import TokenPositions, rotate_, turns
from quantwm.cache.spec import RopeLayout
from quantwm.errors import UserError

ROPE = RopeLayout((12, 10, 10), (2, 3))
SPEC = CacheSpec(layers=2, heads=2, head_dim=32, tokens_per_frame=6, frames_per_chunk=4, rope=ROPE)
CPU = torch.device("cpu")


class Source:
    """q, k, v of a stationary process: few strong directions, others for queries, RoPE baked."""

    def __init__(self, spec: CacheSpec = SPEC, seed: int = 0, spread: float = 1.5) -> None:
        self.spec, self.generator = spec, torch.Generator().manual_seed(seed)
        size, heads = spec.head_dim, spec.heads
        self.shapes = [self._shape(heads, size, spread) for _ in range(3)]
        self.means = [self._randn(heads, 1, size) for _ in range(3)]

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def _shape(self, heads: int, size: int, spread: float) -> Tensor:
        turn = torch.linalg.qr(self._randn(heads, size, size))[0]
        return turn * torch.logspace(spread / 2, -spread / 2, size)

    def chunk(self, first_frame: int, frames: int) -> tuple[Tensor, Tensor, Tensor]:
        tokens = frames * self.spec.tokens_per_frame
        q, k, v = (
            self._randn(self.spec.heads, tokens, self.spec.head_dim) @ shape.mT + mean
            for shape, mean in zip(self.shapes, self.means, strict=True)
        )
        rope = self.spec.rope
        if rope is not None and rope.baked:
            places = TokenPositions(first_frame * self.spec.tokens_per_frame, tokens)
            turn = turns(rope, places, 0, tokens, CPU)
            rotate_(q, turn)
            rotate_(k, turn)
        return tuple(t.to(torch.bfloat16).float() for t in (q, k, v))  # type: ignore[return-value]


class Lane:
    """A cache, and the exact keys and values of what it was given."""

    def __init__(
        self,
        name: str = "qtc",
        policy: CachePolicy | None = None,
        spec: CacheSpec = SPEC,
        **more: Any,
    ) -> None:
        policy = CachePolicy(span_tokens=10**6) if policy is None else policy
        self.cache = KVCache(spec, make_format(name, **more), policy, dtype=torch.float32)
        self.exact: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(spec.layers)]
        self.queries: list[Tensor] = []

    def run(
        self,
        source: Source,
        chunks: int,
        keep_mask: Tensor | None = None,
        edit: Any = None,
        queries: bool = True,
    ) -> Lane:
        spec = self.cache.spec
        for _ in range(chunks):
            first = self.cache.next_frame or 0
            self.cache.begin_chunk(first, spec.frames_per_chunk)
            for layer in range(spec.layers):
                q, k, v = source.chunk(first, spec.frames_per_chunk)
                if edit is not None:
                    q, k, v = edit(q, k, v)
                if queries:
                    self.cache.attend(layer, q, k, v, clean=True)
                else:
                    self.cache.gather(layer, k, v, clean=True)
                kept = slice(None) if keep_mask is None else keep_mask
                self.exact[layer].append((k[:, kept], v[:, kept]))
                self.queries.append(q)
            self.cache.finalize_chunk(keep_mask)
        return self

    def errors(self, layer: int = 0, last: int | None = None) -> tuple[float, float]:
        """Relative squared error of keys and of values over the last tokens."""
        found = self.cache.history(layer)
        errors = []
        for role in range(2):
            exact = torch.cat([pair[role] for pair in self.exact[layer]], dim=1)
            got = found[role]
            assert torch.isfinite(got).all()
            exact = exact[:, -got.shape[1] :]
            if last is not None:
                exact, got = exact[:, -last:], got[:, -last:]
            errors.append(float((got - exact).square().sum() / exact.square().sum()))
        return errors[0], errors[1]

    def logit_error(self, source: Source, last: int | None = None) -> float:
        """Mean squared error of q.k of the next chunk's queries, each query's mean taken out."""
        q, _, _ = source.chunk(self.cache.next_frame or 0, 4)
        exact = torch.cat([pair[0] for pair in self.exact[0]], dim=1)
        error = self.cache.history(0)[0] - exact
        change = q @ (error if last is None else error[:, -last:]).mT
        return float((change - change.mean(-1, keepdim=True)).square().mean())

    @property
    def generation(self) -> int:
        lesson = self.cache._span.lesson
        return 0 if lesson is None else lesson.generation


def _learner(lane: Lane) -> QtcLearner:
    learner = lane.cache._learner
    assert isinstance(learner, QtcLearner)
    return learner


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
    assert bits == pytest.approx({"small": 1.70, "medium": 2.36, "large": 2.82}[preset], abs=0.01)


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
    stale.cache._learner = _Never(_learner(stale))
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
    learner = _learner(lane)
    broken = replace(learner.statistics[1].values, scatter=torch.full((2, 528), torch.nan))
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
    assert parts["statistics"] == slots * heads * (3 * corner * 4 + 2 * 32 * 4 + 2 * 8)
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

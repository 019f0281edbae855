"""quantwm with un-rotated keys, a clipped range, INT4 rows: each alone, together, and refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from qtc_helpers import ROPE, SPEC, Lane, Source, randn
from torch import Tensor

from kernels.format import Side
from quantwm.cache import CachePolicy, CacheSpec, KVCache, dispatch, make_format, reference
from quantwm.cache.formats import split_method
from quantwm.cache.formats.correction import (
    Correction,
    row_bytes,
    settled_corrections,
    stored_rows,
)
from quantwm.cache.formats.quantwm_span import QuantWMSpan
from quantwm.cache.plan import plan_method
from quantwm.cache.positions import TokenPositions
from quantwm.cache.spec import RopeLayout
from quantwm.cache.statistics import moment
from quantwm.cache.unrotation import KeyTurns, query_moment, wants_unrotated
from quantwm.cache.workload import Workload
from quantwm.errors import UserError
from quantwm.report.one_role import OneRoleFormat

SMALL = {"centroids": 8, "group_size": 16, "rank": 4}
BF16_ROUNDING = 2.0**-8


def _lane(spec: Any = SPEC, policy: CachePolicy | None = None, **more: Any) -> Lane:
    return Lane("quantwm", policy or CachePolicy(span_tokens=96), spec, **{**SMALL, **more})


def _key_spans(lane: Lane) -> list[QuantWMSpan]:
    return [segment.keys[0] for segment in lane.cache._segments]


# Un-rotation.


@given(first=st.integers(0, 2**20), count=st.integers(1, 30))
def test_turning_undoes_un_rotation(first: int, count: int) -> None:
    x = randn(2, count, 32)
    turns = KeyTurns(ROPE, TokenPositions(first, count))
    plain, out = turns.undone(x), torch.empty_like(x)
    turns.redo(reference.prepare_copy(plain), out, 0, 0, count, 0)
    torch.testing.assert_close(out, x, atol=1e-5, rtol=1e-5)
    assert plain.norm() == pytest.approx(float(x.norm()), rel=1e-5)


def test_places_of_kept_tokens_go_with_them() -> None:
    turns = KeyTurns(ROPE, TokenPositions(12, 18))
    kept = turns.select(torch.tensor([0, 5, 17]))
    assert kept.positions.tensor(0, 3).tolist() == [12, 17, 29]
    later = KeyTurns(ROPE, TokenPositions(30, 2))
    assert kept.joined(later).positions.tensor(0, 5).tolist() == [12, 17, 29, 30, 31]
    assert kept.places() and not turns.places()


def test_the_query_moment_is_of_un_rotated_queries_at_all_offsets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As sampled: each query un-rotated, then turned by many offsets in time and space."""
    monkeypatch.setattr(dispatch, "_notes", {})
    count, first = 24, 240
    q = Source(SPEC, seed=3).chunk(40, 4)[0]
    places = TokenPositions(first, count)
    found = query_moment(q, ROPE, places, window_frames=8)
    plain = KeyTurns(ROPE, places).undone(q)
    wanted, offsets = torch.zeros_like(found), 0
    wide = RopeLayout(ROPE.split, (1, 1), ROPE.theta)
    for frames in range(8):
        # Rows and columns differ by -1..1 and -2..2; the weight is the number of such pairs.
        for row in range(-1, 2):
            for column in range(-2, 3):
                weight = (2 - abs(row)) * (3 - abs(column))
                wanted += weight * moment(_turned(plain, wide, (frames, row, column)))
                offsets += weight
    torch.testing.assert_close(found, wanted / offsets, atol=2e-3, rtol=1e-3)
    assert query_moment(q, None, places, None).equal(moment(q))
    assert query_moment(q[:, :5], ROPE, places, None) is None
    assert "un-rotated keys learn nothing from queries" in dispatch.explain("cpu")


def _turned(x: Tensor, layout: RopeLayout, steps: tuple[int, int, int]) -> Tensor:
    from quantwm.cache.positions import axes, frequencies

    angles = frequencies(layout) * torch.tensor(steps)[axes(layout)]
    turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn
    return torch.view_as_real(pairs).flatten(-2)


def test_un_rotated_keys_lose_less() -> None:
    """Keys of few directions, turned by RoPE: keys come back nearer, logits change less."""
    plain, other = (
        _lane(**more).run(Source(spread=3.0), 12) for more in ({}, {"keys": "unrotated"})
    )
    assert other.errors()[0] < 0.9 * plain.errors()[0]
    assert other.errors()[1] == pytest.approx(plain.errors()[1], rel=1e-6)
    logits = [lane.logit_error(Source(spread=3.0)) for lane in (plain, other)]
    assert logits[1] < 0.8 * logits[0]


def test_keys_cached_before_rope_are_not_turned_at_all() -> None:
    spec = replace(SPEC, rope=replace(ROPE, baked=False))
    lane = _lane(spec, keys="unrotated").run(Source(spec), 6)
    assert all(span.turns is None for span in _key_spans(lane))
    assert lane.errors()[0] < 0.2


def test_un_rotated_before_rope_is_un_rotated_after_it() -> None:
    """The same keys, once turned by RoPE and once not: what is stored differs by BF16 alone."""
    before = replace(SPEC, rope=replace(ROPE, baked=False))
    baked, bare = _lane(keys="unrotated"), _lane(before, keys="unrotated")
    source = Source()

    def unturned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = bare.cache._require_open("test").first_frame
        turns = KeyTurns(ROPE, TokenPositions(first * 6, 24))
        return turns.undone(q), turns.undone(k), v

    baked.run(Source(), 8)
    bare.run(source, 8, edit=unturned)
    ours, theirs = baked.errors()[0], bare.errors()[0]
    assert ours == pytest.approx(theirs, rel=0.1)


@pytest.mark.parametrize("mask", [False, True])
def test_windows_and_masks_keep_what_was_decoded(mask: bool) -> None:
    """Spans joined, cut and thinned decode each token to what it decoded to at first."""
    policy = CachePolicy(span_tokens=60, window_frames=11, sink_frames=1)
    lane = _lane(policy=policy, keys="unrotated", coefficients="int4")
    keep = torch.arange(24) % 5 != 2 if mask else None
    lane.run(Source(), 3, keep_mask=keep)
    before, held = lane.cache.history(0)[0], lane.cache.frame_tokens()
    lane.run(Source(seed=1), 1)
    after, kept = lane.cache.history(0)[0], dict(lane.cache.frame_tokens())
    place = found = 0
    for frame, tokens in held:
        if frame in kept:
            old, new = before[:, place : place + tokens], after[:, found : found + tokens]
            torch.testing.assert_close(old, new, atol=1e-5, rtol=1e-5)
            found += tokens
        place += tokens
    assert found and lane.cache.ledger().parts.get("positions", 0) == (
        4 * 2 * sum(s.tokens for s in _key_spans(lane) if _gaps(s)) if mask else 0
    )


def _gaps(span: Any) -> bool:
    return getattr(span, "turns", None) is not None and span.turns.positions.places is not None


def test_a_chunk_that_waits_as_bf16_is_un_rotated_where_it_stood() -> None:
    policy = CachePolicy(span_tokens=96, recent_chunks=1)
    late, now = _lane(policy=policy, keys="unrotated"), _lane(keys="unrotated")
    late.run(Source(), 5)
    now.run(Source(), 5)
    recent = late.cache._segments[-1].guide.learned
    assert recent.positions == TokenPositions(4 * 24, 24)
    error = late.cache.history(0)[0][:, :96] - torch.cat([k for k, _ in now.exact[0]], 1)[:, :96]
    assert float(error.square().sum()) < 0.2 * float(now.exact[0][0][0].square().sum() * 4)


def test_head_ranges_and_pieces_are_the_whole() -> None:
    lane = _lane(keys="unrotated", coefficients="int4").run(Source(), 4)
    span, fmt = _key_spans(lane)[0], lane.cache.fmt
    whole = torch.empty(2, span.tokens, 32)
    fmt.decode_into(span, whole, 0, 0, span.tokens)
    part = torch.zeros(1, 40, 32, dtype=torch.bfloat16)
    fmt.decode_heads_into(span, part, 3, 7, 31, 1)
    torch.testing.assert_close(
        part[:, 3:27].float(), whole[1:, 7:31], atol=1e-2, rtol=2 * BF16_ROUNDING
    )
    assert not part[:, :3].any() and not part[:, 27:].any()


def test_a_world_that_does_not_say_its_positions_is_named_by_explain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "_notes", {})
    lane = _lane(replace(SPEC, rope=None), keys="unrotated").run(Source(), 4)
    assert "quantwm keeps keys as they come" in dispatch.explain("cpu")
    assert all(span.turns is None for span in _key_spans(lane))


def test_of_values_alone_keys_stay_as_they_are() -> None:
    fmt = OneRoleFormat(make_format("quantwm", **SMALL, keys="unrotated"), "values")  # type: ignore[arg-type]
    assert not wants_unrotated(fmt)
    cache = KVCache(SPEC, fmt, CachePolicy(), dtype=torch.float32)  # type: ignore[arg-type]
    q, k, v = Source().chunk(0, 4)
    cache.begin_chunk(0, 4)
    for layer in range(2):
        cache.attend(layer, q, k, v, clean=True)
    cache.finalize_chunk()
    assert torch.equal(cache.history(0)[0], k)


# INT4 rows.


@given(rank=st.integers(1, 9), seed=st.integers(0, 99))
def test_int4_rows_come_back(rank: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(-7, 8, (2, 5, rank), generator=generator, dtype=torch.int8)
    stored = stored_rows(rows, "int4")
    assert stored.dtype == torch.uint8 and stored.shape == (2, 5, row_bytes(rank, "int4"))
    scales = torch.ones(2, 5, dtype=torch.float16)
    scales[0, 2] = 0.0
    held = Correction(0, 5, torch.zeros(2, 32, rank, dtype=torch.bfloat16), stored, scales, None)
    assert torch.equal(held.plain().coefficients, rows)
    (sparse,) = settled_corrections([held], [9])
    assert sparse.mask is None or torch.equal(sparse.dense().row_scales, scales)
    assert row_bytes(rank, "int8") == rank and stored_rows(rows, "int8") is rows


def test_int4_takes_half_and_gives_almost_as_much() -> None:
    lanes = {
        name: _lane(**settings).run(Source(), 12)
        for name, settings in (
            ("off", {"psac": False}), ("int4", {"coefficients": "int4"}), ("int8", {}),
        )
    }  # fmt: skip
    errors = {name: lane.logit_error(Source(seed=0)) for name, lane in lanes.items()}
    gained = (errors["off"] - errors["int4"]) / (errors["off"] - errors["int8"])
    assert 0.9 < gained < 1.1
    parts = {n: lanes[n].cache.ledger().parts["coefficients"] for n in ("int4", "int8")}
    # 4 coefficients and a scale of 2 bytes: 4 against 6, where no row is left out.
    assert parts["int4"] == pytest.approx(parts["int8"] * 4 / 6, rel=0.02)


def test_the_fused_kernel_gets_int8() -> None:
    lane = _lane(coefficients="int4").run(Source(), 4)
    side: Side = lane.cache.fmt.side(_key_spans(lane)[0])  # type: ignore[attr-defined]
    assert side.coefficients.dtype == torch.int8


# As methods, planned, refused.


@pytest.mark.parametrize(
    "method",
    [
        "quantwm:keys=unrotated",
        "quantwm:clip=0.7",
        "quantwm:coefficients=int4",
        "quantwm:keys=unrotated,coefficients=int4,clip=0.7,qsac=false",
        "quantwm:half-measures",
    ],
)
def test_as_a_method_it_is_planned_to_the_byte(method: str) -> None:
    """One direction and one centroid, so that the gate keeps all; the first chunk has no rows."""
    name, settings = split_method(method)
    lane = _lane()
    fmt = make_format(name, **settings, centroids=1, group_size=16, rank=1)
    cache = lane.cache = KVCache(SPEC, fmt, CachePolicy(span_tokens=96), dtype=torch.float32)
    lane.run(Source(), 12)
    cache.evict(cache._segments[1].first_frame)
    load = Workload.of_policy(SPEC, cache.policy, cache.tokens, 4)
    assert cache.ledger().parts == plan_method(method, fmt, load).bytes


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"keys": "turned"}, "keys must be one of given, unrotated, got 'turned'"),
        ({"coefficients": "int2"}, "coefficients must be one of int8, int4, got 'int2'"),
        ({"keys": True}, "quantwm setting keys must be str, got True"),
        ({"clip": 0.0}, "clip must be above 0 and at most 1, got 0.0"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make_format("quantwm", **settings)


def test_on_a_gpu_it_is_what_it_is_on_a_cpu(cuda: torch.device) -> None:
    """The same chunks on both: keys decode alike but for ties of codes."""
    spec = CacheSpec(1, 3, 128, 48, 4, rope=RopeLayout((44, 42, 42), (6, 8)))
    fmt, source = make_format("quantwm", preset="half-measures", centroids=64), Source(spec)
    chunks = [source.chunk(4 * number, 4) for number in range(5)]
    found = []
    for device in (cuda, torch.device("cpu")):
        cache = KVCache(spec, fmt, CachePolicy(span_tokens=768), device=device)
        for number, chunk in enumerate(chunks):
            cache.begin_chunk(4 * number, 4)
            cache.attend(0, *(t.to(device, torch.bfloat16) for t in chunk), clean=True)
            cache.finalize_chunk()
        found.append(cache.history(0)[0].float().cpu())
        assert isinstance(_span_of(cache).turns, KeyTurns)
    exact = torch.cat([k for _, k, _ in chunks], 1)
    errors = [float((keys - exact).square().sum() / exact.square().sum()) for keys in found]
    assert errors[0] == pytest.approx(errors[1], rel=0.05)


def _span_of(cache: KVCache) -> QuantWMSpan:
    return cache._segments[0].keys[0]

"""Batches that are recorded once and replayed: no value of the recording is left in them."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import agreement_recorded
from benchmarks.agreement import Disagreement
from quantwm.cache import (
    CachePolicy,
    CacheSpec,
    KVCache,
    batch,
    dispatch,
    explain,
    kv_cache,
    make_format,
    recorded,
)
from quantwm.cache.recorded import NO_MEMORY
from quantwm.cache.workspace import Workspace
from tests.cache_helpers import SETTINGS, SPEC, live_bytes, make_cache, qkv, same_bytes
from tests.tape import Launches, Tape
from tests.test_beside import Streams

WIDE = replace(SPEC, layers=10, streams=("self", "other"))
TOKENS = SPEC.tokens_per_chunk
SLOT_BYTES = 4 * SPEC.heads * TOKENS * SPEC.head_dim
COPIES, BATCHES = 12, 3
"""Recorded of 20 slots in batches of 6, 6, 6 and 2, rooms in turn: copies to every place, batches
of 6 from both rooms and of 2 from one."""


SMALL = "quantwm:centroids=4,group_size=16,rank=2"


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> list[Tape]:
    found: list[Tape] = []

    def recorder(device: torch.device, on: str) -> Tape:
        found.append(Tape())
        return found[-1]

    monkeypatch.setattr(kv_cache, "streams_for", lambda device: Streams())
    monkeypatch.setattr(batch, "recorder_for", recorder)
    monkeypatch.setattr(batch, "BATCH_BYTES", 6 * SLOT_BYTES)
    return found


class Model:
    """Clean passes that write every layer's keys, values and queries to the same memory, or, not
    lasting, to memory of their own."""

    def __init__(self, lasting: bool = True, spec: CacheSpec = WIDE) -> None:
        self.lasting, self.spec = lasting, spec
        self._held = [torch.empty_like(t) for t in qkv(0, TOKENS, spec)]
        self._all: list[torch.Tensor] = []

    def slots(self, cache: KVCache, first: int = 0, stop: int = 20) -> None:
        frame = cache._require_open("a pass").first_frame
        for slot in range(first, stop):
            given = [t.bfloat16().float() for t in qkv(97 * frame + slot, TOKENS, self.spec)]
            if self.lasting:
                given = [held.copy_(new) for held, new in zip(self._held, given, strict=True)]
            else:
                self._all += given  # nothing else may come to lie there
            name = WIDE.streams[slot // WIDE.layers]
            layer = slot % WIDE.layers
            cache.attend(layer, *given, clean=True, stream=name, lasting=self.lasting)
            for tensor in given:
                tensor.fill_(torch.nan)

    def chunks(self, cache: KVCache, count: int = 1) -> KVCache:
        for _ in range(count):
            cache.begin_chunk(cache.next_frame or 0, SPEC.frames_per_chunk)
            self.slots(cache)
            cache.finalize_chunk()
        return cache


def _op_by_op(cache: KVCache, count: int, monkeypatch: pytest.MonkeyPatch) -> KVCache:
    with monkeypatch.context() as in_turn:
        in_turn.setattr(kv_cache, "streams_for", lambda device: None)
        return Model().chunks(cache, count)


def _lane(name: str, workspace: Workspace | None = None, span: int = 6) -> KVCache:
    fmt, policy = make_format(name, **SETTINGS[name]), CachePolicy(span_tokens=span)
    return KVCache(WIDE, fmt, policy, dtype=torch.float32, workspace=workspace)


def _rooms(workspace: Workspace) -> list[batch.Rooms]:
    return list(workspace.lent)


def _counts(workspace: Workspace) -> list[tuple[int, int]]:
    return [(rooms.copying.count, rooms.encoding.count) for rooms in _rooms(workspace)]


def _same(one: KVCache, other: KVCache) -> bool:
    same = one.ledger().parts == other.ledger().parts
    for moments in zip(one._statistics.tensors(), other._statistics.tensors(), strict=True):
        same = same and torch.equal(*moments)
    states = one._generator.get_state(), other._generator.get_state()
    return same and same_bytes(one, other) and torch.equal(*states)


@pytest.mark.parametrize(("span", "window"), [(6, 8), (12, 8), (18, None)])
@pytest.mark.parametrize("name", ["qvg", "qvg-pro", "quantwm"])
def test_replays_are_the_bits_of_one_after_the_other(
    name: str, span: int, window: int | None, tapes: list[Tape], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks with and without a new span, over lengths of history that grow or stay."""
    policy = CachePolicy(span_tokens=span, window_frames=window)
    model, there = Model(), make_cache(name, policy, WIDE)
    here = make_cache(name, policy, WIDE)
    counts, sizes = [], []
    for _ in range(10):
        model.chunks(there)
        _op_by_op(here, 1, monkeypatch)
        assert _same(there, here)
        counts.append(_counts(there.workspace))
        sizes.append(there.workspace.nbytes)
    assert there.ledger().total == live_bytes(there)
    kinds = 1 if span == 6 else 2
    assert counts[-1] == [(COPIES, kinds * BATCHES)]
    # Nothing is recorded after warming up, nor does anything grow; the attention's scratch does.
    assert counts[6:] == counts[-1:] * 4 and (window is None or sizes[6:] == sizes[-1:] * 4)
    assert sum(tape.replayed for tape in tapes) > 100


@pytest.mark.parametrize(
    "settings", [{"centroid_bits": 8}, {"coefficients": "int4", "clip": 0.8}, {"full_moment": True}]
)
def test_other_settings_too(
    settings: dict[str, Any], tapes: list[Tape], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = "quantwm", CachePolicy(span_tokens=12), WIDE, {**SETTINGS["quantwm"], **settings}
    there = Model().chunks(make_cache(*given), 7)
    assert _same(there, _op_by_op(make_cache(*given), 7, monkeypatch))
    assert _counts(there.workspace) == [(COPIES, 2 * BATCHES)]


def test_lanes_and_forks_share_what_was_recorded(
    tapes: list[Tape], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, model, names = Workspace(), Model(), ("quantwm", "qvg", "quantwm")
    lanes = [_lane(name, shared) for name in names]
    for _ in range(5):
        for lane in lanes:
            model.chunks(lane)
    lanes.append(lanes[0].fork())
    known = _counts(shared)
    assert known == [(2 * COPIES, 2 * BATCHES)]  # with queries and without
    for lane in lanes:
        model.chunks(lane, 2)
    assert _counts(shared) == known
    for lane, name in zip(lanes, (*names, "quantwm"), strict=True):
        assert _same(lane, _op_by_op(_lane(name), 7, monkeypatch))


def test_chunks_that_are_open_together_have_rooms_of_their_own(
    tapes: list[Tape], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, model = Workspace(), Model()
    lanes = [_lane("quantwm", shared) for _ in range(2)]
    for _ in range(5):
        for lane in lanes:
            lane.begin_chunk(lane.next_frame or 0, SPEC.frames_per_chunk)
        for slot in range(20):
            for lane in lanes:
                model.slots(lane, slot, slot + 1)
        for lane in lanes:
            lane.finalize_chunk()
    assert _counts(shared) == [(COPIES, BATCHES)] * 2
    other = _op_by_op(_lane("quantwm"), 5, monkeypatch)
    assert all(_same(lane, other) for lane in lanes)


def test_a_chunk_that_is_given_up_leaves_the_rooms_to_the_next(
    tapes: list[Tape], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    cache = model.chunks(_lane("quantwm"), 3)
    for stop in (1, 4, 6, 15):
        cache.begin_chunk(6, SPEC.frames_per_chunk)
        model.slots(cache, 0, stop)
        cache.abort_chunk()
    model.chunks(cache)
    cache.begin_chunk(8, SPEC.frames_per_chunk)
    model.slots(cache, 0, 3)
    assert cache.pending_keys(1) is not None  # encodes three, in a batch of their own
    model.slots(cache, 3)
    cache.finalize_chunk()
    assert len(_rooms(cache.workspace)) == 1
    assert _same(cache, _op_by_op(_lane("quantwm"), 5, monkeypatch))


def test_a_saved_lane_goes_on(
    tapes: list[Tape], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    cache = model.chunks(_lane("quantwm", span=12), 4)
    cache.save(tmp_path / "lane")
    shared = {"dtype": torch.float32, "workspace": cache.workspace}
    loaded = KVCache.load(tmp_path / "lane", WIDE, cache.fmt, cache.policy, **shared)
    model.chunks(loaded, 3)
    assert _same(loaded, _op_by_op(_lane("quantwm", span=12), 7, monkeypatch))
    assert len(_rooms(cache.workspace)) == 1


def test_tensors_that_do_not_last_are_copied_as_they_come(
    tapes: list[Tape], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Model(lasting=False).chunks(_lane("quantwm"), 5)
    assert _counts(there.workspace) == [(0, BATCHES)]
    assert _same(there, _op_by_op(_lane("quantwm"), 5, monkeypatch))


def test_nothing_is_recorded_op_by_op(tapes: list[Tape]) -> None:
    cache = _lane("quantwm")
    with recorded.op_by_op():
        Model().chunks(cache, 4)
    assert _counts(cache.workspace) == [(0, 0)] and not sum(tape.recorded for tape in tapes)


def test_without_memory_for_it_nothing_is_recorded_and_that_is_said_once(
    tapes: list[Tape], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatch, "_notes", {})
    model = Model()
    cache = model.chunks(_lane("quantwm"), 2)

    def fails(self: Tape, segment: Any) -> Any:
        try:
            segment()
            raise torch.OutOfMemoryError("out of memory")
        finally:
            raise RuntimeError("a capture that cannot be ended")

    with caplog.at_level(logging.WARNING):
        with monkeypatch.context() as full:
            full.setattr(Tape, "__call__", fails)
            model.chunks(cache, 2)
        model.chunks(cache, 2)
    assert NO_MEMORY in explain("cpu")
    assert [record.getMessage() for record in caplog.records] == [NO_MEMORY]
    assert _counts(cache.workspace) == [(0, 0)]
    rooms = _rooms(cache.workspace)[0]
    assert not rooms.copying.tensors() and not rooms.encoding.tensors()
    assert _same(cache, _op_by_op(_lane("quantwm"), 6, monkeypatch))


def test_what_cannot_be_recorded_is_said_too(
    tapes: list[Tape], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operation that waits for the device, as a path without kernels might."""
    monkeypatch.setattr(dispatch, "_notes", {})
    plain = batch.ends_of

    def waits(*given: Any) -> torch.Tensor:
        ends = plain(*given)
        ends.sum().item()
        return ends

    monkeypatch.setattr(batch, "ends_of", waits)
    cache = Model().chunks(_lane("quantwm"), 5)
    assert "recording it failed: _local_scalar_dense cannot be recorded" in explain("cpu")
    assert _counts(cache.workspace) == [(COPIES, 0)]
    assert _same(cache, _op_by_op(_lane("quantwm"), 5, monkeypatch))


def test_out_of_inference_mode_and_in(tapes: list[Tape], monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane of each kind; the first one's chunks are recorded. (The scratch is as it was made.)"""
    shared, model = Workspace(), Model()
    for inference in (False, True):
        with torch.inference_mode() if inference else torch.no_grad():
            cache = model.chunks(_lane("quantwm", shared), 4)
            assert _same(cache, _op_by_op(_lane("quantwm"), 4, monkeypatch))
    assert _counts(shared) == [(COPIES, BATCHES)]


def test_memory_is_counted_and_given_back(tapes: list[Tape]) -> None:
    cache = Model().chunks(_lane("quantwm"), 4)
    rooms, before = _rooms(cache.workspace)[0], cache.ledger().scratch_bytes
    assert before == cache.workspace.nbytes
    assert sum(t.nbytes for t in rooms.tensors()) > 12 * SLOT_BYTES
    rooms.encoding.hidden_bytes = 1000
    assert cache.ledger().scratch_bytes == cache.workspace.nbytes == before + 1000
    cache.workspace.release()
    assert not cache.workspace.nbytes
    Model().chunks(cache)
    assert rooms not in _rooms(cache.workspace)


@pytest.mark.parametrize("name", ["qvg", "quantwm"])
def test_a_batch_is_few_launches(
    name: str, tapes: list[Tape], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs to their places, the replay, results to what is kept. A copy of a slot's keys, values
    and its queries' moment is one."""
    wide = replace(WIDE, heads=16)  # so that every slot's parts begin where kernels read
    monkeypatch.setattr(batch, "BATCH_BYTES", 6 * SLOT_BYTES * 16 // SPEC.heads)
    model, policy = Model(spec=wide), CachePolicy(span_tokens=6)
    cache = model.chunks(make_cache(name, policy, wide), 4)
    cache.begin_chunk(8, SPEC.frames_per_chunk)
    chunk = cache._require_open("a test")
    cache._guide(chunk)
    replayed = sum(tape.replayed for tape in tapes)
    model.slots(cache, 0, 1)
    assert sum(tape.replayed for tape in tapes) == replayed + 1
    model.slots(cache, 1, 5)
    given = qkv(5, TOKENS, wide)
    chunk.batch.put(5, given[1], given[2], given[0] if name == "quantwm" else None, False)
    with Launches() as seen:
        cache._encode_batch(chunk, chunk.batch)
    assert seen.names == ["_foreach_copy_", "_foreach_copy_"]
    assert sum(tape.replayed for tape in tapes) == replayed + 6


@pytest.mark.parametrize("method", ["qvg:centroids=4,group_size=16", SMALL])
def test_the_check_for_a_gpu_passes_and_can_fail(
    method: str, tapes: list[Tape], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """`agreement_recorded` on a CPU, where tapes stand for graphs."""
    for name in ("synchronize", "Stream", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    spec = replace(WIDE, layers=14, streams=("self",), tokens_per_frame=4, frames_per_chunk=3)
    monkeypatch.setattr(agreement_recorded, "SPEC", spec)
    monkeypatch.setattr(agreement_recorded, "WIDTH", 8)
    monkeypatch.setattr(batch, "BATCH_BYTES", 12 * SLOT_BYTES)
    policies = CachePolicy(span_tokens=12, window_frames=9), CachePolicy(span_tokens=24)
    monkeypatch.setattr(agreement_recorded, "POLICIES", policies)
    agreement_recorded.agree_recorded(method, torch.device("cpu"))
    assert "[(12, 6)] copies and batches recorded" in capsys.readouterr().out

    replayed = recorded._Recording.replayed

    def stale(self: Any, inputs: Any) -> Any:
        """As if the codebooks of the values were still those of the recording."""
        mine = [*self.inputs[:1], *map(torch.clone, self.inputs[1:])]
        return replayed(replace(self, inputs=mine), inputs)

    monkeypatch.setattr(recorded._Recording, "replayed", stale)
    with pytest.raises(Disagreement, match="a replayed chunk 2 differs"):
        agreement_recorded.agree_recorded(method, torch.device("cpu"))

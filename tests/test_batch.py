"""Layers encoded in one go: the bits of one after the other, and a chunk that can be taken up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quantwm.cache import (
    CachePolicy,
    CacheSpec,
    KVCache,
    Workspace,
    batch,
    checks,
    commit,
    kv_cache,
    make_format,
)
from quantwm.cache.batch import BATCH_BYTES, batch_bytes, ends_of, slots_together
from quantwm.cache.chunk import LayerWrite
from quantwm.cache.codebook import Codebook
from quantwm.cache.formats.correction import Correction
from quantwm.cache.formats.rows import part_rows
from quantwm.cache.plan import Workload, plan
from quantwm.cache.remedy import CacheMemoryError
from quantwm.cache.segments import ChunkGuide, SpanPlan
from quantwm.cache.statistics import moment
from quantwm.errors import UserError
from tests.cache_helpers import LASTING, SETTINGS, SPEC, live_bytes, make_cache, qkv, same_bytes
from tests.host_syncs import HostSyncs
from tests.tape import Launches
from tests.test_beside import Streams

WIDE = replace(SPEC, layers=10)
TOKENS = SPEC.tokens_per_chunk
SLOT_BYTES = 4 * SPEC.heads * TOKENS * SPEC.head_dim


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Ten layers in batches of 4, 4 and 2."""
    found = Streams()
    monkeypatch.setattr(kv_cache, "streams_for", lambda device: found)
    monkeypatch.setattr(batch, "BATCH_BYTES", 4 * SLOT_BYTES)
    return found


def _given(first: int, layer: int) -> list[torch.Tensor]:
    return [t.to(torch.bfloat16).float() for t in qkv(97 * first + layer, TOKENS)]


def _attend(cache: KVCache, layers: range) -> None:
    """Clean passes of a model that overwrites its keys, values and queries in every layer."""
    for layer in layers:
        given = _given(cache._require_open("a pass").first_frame, layer)
        cache.attend(layer, *given, clean=True)
        for tensor in given:
            tensor.fill_(torch.nan)


def _chunks(cache: KVCache, count: int = 1) -> KVCache:
    for _ in range(count):
        cache.begin_chunk(cache.next_frame or 0, SPEC.frames_per_chunk)
        _attend(cache, range(WIDE.layers))
        cache.finalize_chunk()
    return cache


def _in_turn(cache: KVCache, count: int, monkeypatch: pytest.MonkeyPatch) -> KVCache:
    with monkeypatch.context() as in_turn:
        in_turn.setattr(kv_cache, "streams_for", lambda device: None)
        return _chunks(cache, count)


@pytest.mark.parametrize("span", [6, 12, 30])
@pytest.mark.parametrize("name", ["qvg", "qvg-pro", "quantwm"])
def test_the_bytes_are_those_of_one_layer_after_the_other(
    name: str, span: int, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = CachePolicy(span_tokens=span, window_frames=8)
    there = _chunks(make_cache(name, policy, WIDE), 6)
    here = _in_turn(make_cache(name, policy, WIDE), 6, monkeypatch)
    assert "mark" in streams.log
    assert same_bytes(there, here) and there.ledger().parts == here.ledger().parts
    assert torch.equal(there._generator.get_state(), here._generator.get_state())
    if name == "quantwm":
        assert torch.equal(*(c._statistics.moments for c in (there, here)))


@pytest.mark.parametrize("settings", [{"centroid_bits": 8}, {"coefficients": "int4", "clip": 0.8}])
def test_other_settings_too(
    settings: dict[str, object], streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**SETTINGS["quantwm"], **settings}
    there = _chunks(make_cache("quantwm", None, WIDE, settings), 4)
    here = _in_turn(make_cache("quantwm", None, WIDE, settings), 4, monkeypatch)
    assert "mark" in streams.log and same_bytes(there, here)


def test_a_room_is_filled_again_when_it_is_read_no_more(streams: Streams) -> None:
    cache = _chunks(make_cache("quantwm", CachePolicy(span_tokens=6), WIDE))
    streams.log.clear()
    _chunks(cache)
    encoded = ["beside", "back", "mark"]
    assert streams.log == [*encoded, *encoded, "wait 1", *encoded, "join"]


def test_what_waits_is_counted_and_is_gone_with_the_chunk(streams: Streams) -> None:
    cache = _chunks(make_cache("quantwm", CachePolicy(span_tokens=6), WIDE))
    before = cache.ledger()
    for layers in (1, 3, 4, 9):
        cache.begin_chunk(cache.next_frame or 0, SPEC.frames_per_chunk)
        _attend(cache, range(layers))
        ledger = cache.ledger()
        rooms = sum(t.nbytes for t in cache._require_open("a test").batch.rooms.tensors())
        assert ledger.total + ledger.pending_bytes + rooms == live_bytes(cache)
        assert 4 * SLOT_BYTES <= rooms <= ledger.scratch_bytes == cache.workspace.nbytes
        cache.abort_chunk()
        after = cache.ledger()
        assert streams.log[-1] == "join" and not after.pending_bytes
        assert after.parts == before.parts and live_bytes(cache) == before.total


def test_a_failure_can_be_taken_up_again(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = CachePolicy(span_tokens=6)
    cache = _chunks(make_cache("quantwm", policy, WIDE))
    cache.begin_chunk(2, SPEC.frames_per_chunk)
    _attend(cache, range(7))
    with monkeypatch.context() as short:
        short.setattr(cache.fmt, "encode", _no_memory)
        with pytest.raises(CacheMemoryError, match="is as it was"):
            _attend(cache, range(7, 8))
    chunk = cache._require_open("a test")
    assert [slot for slot in range(10) if chunk.written(slot)] == list(range(7))
    with pytest.raises(RuntimeError, match="layer 7 stream self"):
        cache.finalize_chunk()
    _attend(cache, range(7, 10))
    cache.finalize_chunk()
    assert same_bytes(cache, _in_turn(make_cache("quantwm", policy, WIDE), 2, monkeypatch))


def test_a_cache_that_is_dropped_leaves_its_rooms_to_others(streams: Streams) -> None:
    workspace = Workspace()
    for layers in (6, 9, 10):  # while some wait, and once all that came are encoded
        cache = KVCache(WIDE, make_format("qvg", **SETTINGS["qvg"]), CachePolicy(span_tokens=6),
                        workspace=workspace)  # fmt: skip
        _chunks(cache).begin_chunk(2, SPEC.frames_per_chunk)
        _attend(cache, range(layers))
        assert len(workspace.lent) == 1
        del cache


def _no_memory(*_: object) -> None:
    raise MemoryError("no memory")


def test_layers_that_wait_had_their_clean_pass(streams: Streams) -> None:
    cache = _chunks(make_cache("qvg", CachePolicy(span_tokens=6), WIDE))
    cache.begin_chunk(2, SPEC.frames_per_chunk)
    _attend(cache, range(2))
    with pytest.raises(RuntimeError, match="layer 1 stream self had its clean pass already"):
        _attend(cache, range(1, 2))
    with pytest.raises(RuntimeError, match="clean pass of layer 2 stream self, layer 3"):
        cache.finalize_chunk()


def test_pending_keys_do_not_wait_for_others(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = CachePolicy(span_tokens=6)
    cache = _chunks(make_cache("quantwm", policy, WIDE))
    cache.begin_chunk(2, SPEC.frames_per_chunk)
    _attend(cache, range(6))
    seen = [cache.pending_keys(layer) for layer in (0, 5)]
    _attend(cache, range(6, 10))
    cache.finalize_chunk()
    other = _in_turn(make_cache("quantwm", policy, WIDE), 2, monkeypatch)
    assert same_bytes(cache, other)
    for layer, keys in zip((0, 5), seen, strict=True):
        assert torch.equal(keys, other.history(layer)[0][:, TOKENS:])


def test_prefilled_layers_wait_too(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    def prefilled() -> KVCache:
        cache = make_cache("quantwm", CachePolicy(span_tokens=6), WIDE)
        for first in (0, 2):
            writes = (
                LayerWrite(layer, k, v, q)
                for layer, (q, k, v) in ((n, _given(first, n)) for n in range(10))
            )
            cache.prefill(first, 2, writes)
        return cache

    there = prefilled()
    assert "mark" in streams.log
    with monkeypatch.context() as in_turn:
        in_turn.setattr(kv_cache, "streams_for", lambda device: None)
        assert same_bytes(there, prefilled())


def test_chunks_with_bf16_in_them_and_lasting_codebooks_do_not_wait(streams: Streams) -> None:
    for policy, settings in (
        (CachePolicy(span_tokens=6, recent_chunks=1), SETTINGS["quantwm"]),
        (CachePolicy(span_tokens=6), LASTING),
    ):
        _chunks(make_cache("quantwm", policy, WIDE, settings), 3)
    assert "mark" not in streams.log


def test_extremes_name_the_layer() -> None:
    cache = make_cache("qvg", spec=WIDE)
    cache.begin_chunk(0, 2)
    chunk = cache._require_open("a test")
    keys = torch.zeros(3, *qkv(0, TOKENS)[0].shape)
    values = keys.clone()
    values[1, 0, 0, 0] = torch.inf
    queries = [torch.zeros_like(keys[0]) for _ in range(3)]
    queries[2][0, 1, 3] = torch.nan
    checks.keep_extremes(chunk, WIDE, (4, 5, 6), ends_of(keys, values, None))
    some = torch.stack([moment(q) for q in queries])
    checks.keep_extremes(chunk, WIDE, (1, 2, 3), ends_of(keys, keys, some))
    finite = torch.cat([flag.flatten() for flag in checks.flags(chunk)]).tolist()
    assert finite == [True, True, True, True, False, True, *([True] * 8), False]
    with pytest.raises(UserError, match=r"layer 5 values \(stream self\) hold NaN or infinity"):
        checks.check_flags(chunk, finite)
    finite[4] = True
    with pytest.raises(UserError, match="layer 3 queries"):
        checks.check_flags(chunk, finite)
    single = torch.tensor(0.0), torch.tensor(torch.inf)
    chunk.extremes.append((["layer 9 keys (stream self)"], *single))
    flags = torch.cat(checks.flags(chunk)).tolist()
    with pytest.raises(UserError, match="layer 9 keys"):
        checks.check_flags(chunk, flags)


def test_what_shares_a_storage_is_saved_cut_and_masked(streams: Streams, tmp_path: Path) -> None:
    policy = CachePolicy(span_tokens=12)
    cache = _chunks(make_cache("quantwm", policy, WIDE), 3)
    cache.save(tmp_path / "lane")
    known = WIDE, cache.fmt, policy
    loaded = KVCache.load(tmp_path / "lane", *known, dtype=torch.float32)
    assert same_bytes(cache, loaded)
    for one in (cache, loaded):
        one.evict(3)
        one.begin_chunk(6, SPEC.frames_per_chunk)
        _attend(one, range(WIDE.layers))
        one.finalize_chunk(torch.arange(TOKENS) % 3 > 0)
        assert one.ledger().total == live_bytes(one)
    assert same_bytes(cache, loaded)


def test_nothing_is_read_back(streams: Streams) -> None:
    cache = _chunks(make_cache("quantwm", CachePolicy(span_tokens=6), WIDE))
    cache.begin_chunk(2, SPEC.frames_per_chunk)
    _attend(cache, range(3))
    chunk = cache._require_open("a test")
    with HostSyncs() as seen:
        cache._encode_batch(chunk, chunk.batch)
    assert not seen.names and sorted(chunk.writes) == [0, 1, 2]


def test_little_is_launched_once_a_commit_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has nothing else to do then: kept rows and their scales, and the statistics."""
    monkeypatch.setattr(Correction, "sparse_is_smaller", lambda rows, kept: True)
    spec = replace(WIDE, tokens_per_frame=8)
    cache = make_cache("quantwm", CachePolicy(span_tokens=16), spec)
    for first in (0, 2, 4):
        cache.begin_chunk(first, SPEC.frames_per_chunk)
        for layer in range(spec.layers):
            cache.attend(layer, *qkv(97 * first + layer, 16, spec), clean=True)
        if first < 4:
            cache.finalize_chunk()
    read, launches = commit.read, Launches()

    def noted(questions: Sequence[torch.Tensor]) -> list[float]:
        found = read(questions)
        launches.names.clear()
        return found

    monkeypatch.setattr(commit, "read", noted)
    with launches:
        cache.finalize_chunk()
    assert launches.names == ["index_select", "index_select", "_foreach_add_"]


def test_the_last_batch_is_small(monkeypatch: pytest.MonkeyPatch, streams: Streams) -> None:
    """30 slots in sixes: 6, 6, 6, 6, 4 and 2; where all fit one room they are one batch."""
    for layers, most, expected in ((30, 6, [6, 6, 6, 6, 4, 2]), (10, 10, [10]), (13, 6, [6, 5, 2])):
        monkeypatch.setattr(batch, "BATCH_BYTES", most * SLOT_BYTES)
        cache = make_cache("qvg", CachePolicy(span_tokens=6), replace(SPEC, layers=layers))
        sizes: list[int] = []
        encode = kv_cache.encode_slots

        def counted(*given, sizes=sizes, encode=encode):
            sizes.append(len(given[2]))
            return encode(*given)

        with monkeypatch.context() as counting:
            counting.setattr(kv_cache, "encode_slots", counted)
            for _ in range(2):
                cache.begin_chunk(cache.next_frame or 0, SPEC.frames_per_chunk)
                _attend(cache, range(layers))
                cache.finalize_chunk()
        assert sizes == expected


def test_small_layers_are_encoded_together_and_large_ones_alone() -> None:
    qvg, quantwm = make_format("qvg"), make_format("quantwm")
    assert slots_together(quantwm, 30, 12, 2640, 128) == 6  # Matrix-Game-2
    assert slots_together(qvg, 10, 3, 640, 64) == 10
    assert slots_together(qvg, 30, 12, 4680, 128) == 1  # Causal-Forcing
    assert slots_together(qvg, 40, 40, 6240, 128) == 1  # LingBot 14B
    for name, settings in (("rtn", {}), ("bf16", {}), ("quantwm", {"keys": "unrotated"})):
        assert slots_together(make_format(name, **settings), 30, 12, 2640, 128) == 1
    assert 2 * 6 * 4 * 12 * 2640 * 128 < batch_bytes(quantwm, 30, 12, 2640, 128) < 4 * BATCH_BYTES


def test_a_plan_counts_what_waits() -> None:
    spec = CacheSpec(layers=30, heads=12, head_dim=128, tokens_per_frame=880, frames_per_chunk=3)
    load = replace(Workload.of_policy(spec, CachePolicy(window_frames=6)), current_tokens=2640)
    output = 12 * 2640 * 128 * 2
    scratch = plan({"bf16": {}}, load).methods[0].scratch_bytes
    for name in ("qvg", "quantwm"):
        found = plan({name: {}}, load).methods[0]
        waits = batch_bytes(make_format(name), 30, 12, 2640, 128)
        assert found.transient_bytes == output and found.scratch_bytes == scratch + waits


def test_parts_begin_where_kernels_read() -> None:
    whole = torch.arange(4 * 8, dtype=torch.uint8).view(4, 8)
    views, own = part_rows(whole, 2), part_rows(whole[:, :6].contiguous(), 2)
    assert [p.data_ptr() - whole.data_ptr() for p in views] == [0, 16]
    assert all(p.data_ptr() % 16 == 0 and p.untyped_storage().nbytes() == 12 for p in own)
    assert torch.equal(torch.cat(own), whole[:, :6])
    assert part_rows(whole[:, :6].contiguous(), 2, anywhere=True)[1].storage_offset() == 12


def test_neighbours_are_views_and_others_are_copies() -> None:
    whole = torch.arange(5 * 2 * 4 * 8.0).view(5, 2, 4, 8)
    guide = ChunkGuide(SpanPlan(0, 0, basis=whole), whole[..., 0].contiguous())
    for slots, shares in (((1, 2, 3), True), ((1, 3), False), ((3, 2), False)):
        basis = guide.of_slots(slots).basis
        assert torch.equal(basis, torch.cat([whole[slot] for slot in slots]))
        assert (basis.data_ptr() == whole[slots[0]].data_ptr()) is shares
    books = Codebook(whole.flatten(0, 1).to(torch.bfloat16)).parted(5)
    for some, shares in ((books[1:4], True), (books[1::2], False), (books[2:0:-1], False)):
        joined = Codebook.behind_each_other(some).centroids
        assert torch.equal(joined, torch.cat([book.centroids for book in some]))
        assert (joined.data_ptr() == some[0].centroids.data_ptr()) is shares

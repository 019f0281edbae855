"""Encoding beside the model: what waits for what, and that only copies are encoded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from quantwm.cache import CachePolicy, KVCache, beside, chunk, kv_cache
from tests.cache_helpers import HALF_MEASURES, ROPE, SPEC, make_cache, qkv
from tests.host_syncs import HostSyncs


class Streams:
    """Stands for two streams: notes what is asked of them."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def join(self) -> None:
        self.log.append("join")

    def mark(self) -> int:
        self.log.append("mark")
        return self.log.count("mark")

    def wait(self, mark: int) -> None:
        self.log.append(f"wait {mark}")

    @contextmanager
    def beside(self) -> Iterator[None]:
        self.log.append("beside")
        try:
            yield
        finally:
            self.log.append("back")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    found = Streams()
    monkeypatch.setattr(kv_cache, "streams_for", lambda device: found)
    return found


def _chunk(cache: KVCache, finish: bool = True) -> None:
    """One clean pass of a model that overwrites its keys, values and queries in every layer."""
    first = cache.next_frame or 0
    cache.begin_chunk(first, SPEC.frames_per_chunk)
    for layer in range(SPEC.layers):
        q, k, v = (t.to(torch.bfloat16).float() for t in qkv(97 * first + layer, 6))
        cache.attend(layer, q, k, v, clean=True)
        for given in (q, k, v):
            given.fill_(torch.nan)
    if finish:
        cache.finalize_chunk()


@pytest.mark.parametrize("name", ["rtn", "qvg", "qvg-pro", "quantwm"])
@pytest.mark.parametrize("recent", [0, 1])
def test_what_is_held_is_what_is_held_in_turn(
    name: str, recent: int, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = CachePolicy(span_tokens=6, window_frames=6, sink_frames=1, recent_chunks=recent)
    there, here = make_cache(name, policy), make_cache(name, policy)
    for _ in range(4):
        _chunk(there)
        with monkeypatch.context() as in_turn:
            in_turn.setattr(kv_cache, "streams_for", lambda device: None)
            _chunk(here)
    assert there.ledger() == here.ledger()
    for layer in range(SPEC.layers):
        for one, other in zip(there.history(layer), here.history(layer), strict=True):
            assert torch.equal(one, other)


def test_keys_that_are_turned_back_are_copies_too(streams: Streams) -> None:
    spec = chunk.replace(SPEC, rope=ROPE)
    cache = make_cache("quantwm", spec=spec, settings=HALF_MEASURES)
    for _ in range(3):
        _chunk(cache)
    assert all(bool(torch.isfinite(t).all()) for t in cache.history(0))


def test_layers_are_copied_when_the_last_is_encoded_and_all_are_joined(streams: Streams) -> None:
    _chunk(make_cache("quantwm"))
    assert streams.log == [*["join", "beside", "back"] * SPEC.layers, "join"]


def test_a_chunk_that_is_forgotten_is_joined(streams: Streams) -> None:
    cache = make_cache("qvg")
    for forget in (cache.abort_chunk, cache.reset):
        _chunk(cache, finish=False)
        streams.log.clear()
        forget()
        assert streams.log == ["join"]


def test_a_failure_leaves_the_stream(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache("qvg")
    state = cache._generator.get_state()

    def fails(*_: object) -> None:
        torch.randperm(5, generator=cache._generator)
        raise RuntimeError("no memory")

    monkeypatch.setattr(kv_cache.Encoder, "written", fails)
    with pytest.raises(RuntimeError, match="no memory"):
        _chunk(cache)
    assert streams.log[-1] == "back" and torch.equal(cache._generator.get_state(), state)


def test_formats_that_do_not_encode_stay_on_the_model_s_stream(streams: Streams) -> None:
    for name in ("bf16", "qtc"):
        _chunk(make_cache(name))
    assert not streams.log


def test_values_behind_keys_are_seen_without_a_copy() -> None:
    pair = torch.arange(2 * 3 * 5 * 4.0).view(6, 5, 4)
    k, v = pair.chunk(2)
    assert beside.adjacent(k, v).data_ptr() == pair.data_ptr()
    assert torch.equal(beside.adjacent(k[:, 2:], v[:, 2:]), pair[:, 2:])
    for one, other in ((v, k), (k, v.clone()), (k[:, 1:], v[:, :4]), (k[:2], v[:2])):
        assert beside.adjacent(one, other) is None


def test_a_cpu_has_one_stream_and_nothing_is_read_back() -> None:
    assert beside.streams_for(torch.device("cpu")) is None
    staging = beside.Staging(Streams())
    q, k, v = qkv(0, 6)
    with HostSyncs() as seen, staging.staged(k, v, q):
        pass
    assert not seen.names

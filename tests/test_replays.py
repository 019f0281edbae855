"""Readings that are launched again: when they are, and when the history is read anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from quantwm.cache import CachePolicy, KVCache, Workspace, reading, reference, replays
from quantwm.cache.formats import correction
from quantwm.cache.formats.correction import Correction
from quantwm.cache.formats.quantwm_span import QuantWMSpan
from tests.cache_helpers import SETTINGS, SPEC, make_cache, qkv


class Noted(list[tuple[Callable[..., Any], Any]]):
    """Calls with their arguments; `again` counts."""

    replayed = 0

    def addresses(self) -> set[int]:
        """Of something that no other slot has."""
        return {1 << 50}

    def again(self) -> None:
        Noted.replayed += 1
        for call, given in self:
            call(*given)


class Kernels:
    """Stands for `kernels.launch` and for `Ops`: a decoder and a copy are one launch each."""

    def __init__(self) -> None:
        self._of: list[Noted] = []

    @contextmanager
    def noted(self) -> Iterator[Noted]:
        self._of.append(Noted())
        try:
            yield self._of[-1]
        finally:
            self._of.pop()

    def _launch(self, call: Callable[..., Any], *given: Any) -> None:
        for noted in self._of:
            noted.append((call, given))
        call(*given)

    def decode_spans(self, parts: Any, out: Tensor, first_head: int = 0) -> None:
        for decode, *place in parts:
            self._launch(decode, out, *place, first_head)

    def copy_pair(self, *given: Any) -> None:
        self._launch(reference.copy_pair, *given)

    def spread_rows(
        self, mask: Tensor, rows: Tensor, scales: Tensor, tokens: int, into: tuple[Tensor, Tensor]
    ) -> None:
        self._launch(_spread, mask, rows, scales, tokens, into)

    def for_one_reading(self, span: QuantWMSpan, wide: dict[str, Tensor]) -> Callable[..., None]:
        decode = span.decoder(wide)
        return lambda *given: self._launch(decode, *given)


def _spread(
    mask: Tensor, rows: Tensor, scales: Tensor, tokens: int, into: tuple[Tensor, Tensor]
) -> None:
    kept = (mask.unsqueeze(-1) >> torch.arange(8)).bitwise_and(1).flatten(1)[:, :tokens].bool()
    for out, given in zip(into, (rows, scales), strict=True):
        out.zero_()
        out[kept] = given


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    kernels = Kernels()
    monkeypatch.setattr(Noted, "replayed", 0)
    monkeypatch.setattr(replays, "kernels_in", lambda name, device: kernels)
    monkeypatch.setattr(reading, "ops_for", lambda device: kernels)
    return kernels


def _held() -> list[Tensor]:
    """Queries, keys and values of every layer, where a model keeps them."""
    shape = (3, SPEC.heads, SPEC.tokens_per_chunk, SPEC.head_dim)
    return [torch.empty(shape) for _ in range(SPEC.layers)]


def _chunk(cache: KVCache, passes: int, held: list[Tensor]) -> Tensor:
    """Its passes, the last a clean one; what the last layer attended."""
    first = cache.next_frame or 0
    cache.begin_chunk(first, SPEC.frames_per_chunk)
    for number in range(passes):
        for layer, given in enumerate(held):
            given.copy_(torch.stack(qkv(97 * first + layer + 7 * number, SPEC.tokens_per_chunk)))
            out = cache.attend(layer, *given, clean=number == passes - 1)
    cache.finalize_chunk()
    return out


def _open(name: str = "qvg", chunks: int = 2) -> tuple[KVCache, Tensor]:
    """A cache with a chunk that is open, and one layer's queries, keys and values."""
    cache, held = make_cache(name, CachePolicy(span_tokens=6)), _held()
    for _ in range(chunks):
        _chunk(cache, 1, held)
    cache.begin_chunk(cache.next_frame or 0, SPEC.frames_per_chunk)
    return cache, held[0]


@pytest.mark.parametrize("name", ["bf16", "qvg", "qvg-pro"])
def test_later_passes_launch_again_and_give_the_same_bits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = CachePolicy(span_tokens=6, window_frames=6, sink_frames=1)
    cache, plain = make_cache(name, policy), make_cache(name, policy)
    monkeypatch.setattr(plain._replays, "read", lambda slot, place, device, read, origin: read())
    held, others = _held(), _held()
    for number in range(5):
        before = Noted.replayed
        assert torch.equal(_chunk(cache, 3, held), _chunk(plain, 3, others))
        assert Noted.replayed - before == (2 * SPEC.layers if number else 0)


def test_a_history_that_changed_is_read_anew() -> None:
    for change in (KVCache.reset, KVCache.clear, lambda cache: cache.evict(1)):
        cache, given = _open()
        cache.attend(0, *given)
        assert cache._replays._known
        cache.abort_chunk()
        assert cache._replays._known and not cache.fork()._replays._known
        change(cache)
        assert not cache._replays._known


def test_a_commit_is_read_anew() -> None:
    cache, given = _open()
    for layer in range(SPEC.layers):
        cache.attend(layer, *given, clean=True)
    cache.finalize_chunk()
    assert not cache._replays._known


def test_other_keys_and_another_scratch_are_read_anew() -> None:
    cache, (q, k, v) = _open()
    out = cache.attend(0, q, k, v)
    moved = torch.stack([k, k])[1]
    turned = k.transpose(0, 1).contiguous().transpose(0, 1)
    for keys in (moved, turned, k.to(torch.bfloat16)):
        cache.attend(0, q, keys, v)
        assert not Noted.replayed
    cache.attend(0, q, k, v)
    cache.attend(0, q, k, v)
    assert Noted.replayed == 1
    before, cache.workspace = cache.workspace, Workspace()
    assert torch.equal(cache.attend(0, q, k, v), out)
    assert Noted.replayed == 1 and before.nbytes


def test_sparse_rows_are_spread_again(_kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def wanted(self: Correction, kept: int) -> bool:
        sizes.append(self.row_scales.numel())
        return True

    monkeypatch.setattr(Correction, "sparse_is_smaller", wanted)
    policy = CachePolicy(span_tokens=6, window_frames=4)
    cache, plain = make_cache("quantwm", policy), make_cache("quantwm", policy)
    held, others = _held(), _held()
    for number in range(5):
        expected = _chunk(plain, 3, others)
        before = Noted.replayed
        with monkeypatch.context() as on_gpu:
            on_gpu.setattr(correction, "kernels_in", lambda name, device: _kernels)
            on_gpu.setattr(
                QuantWMSpan, "_for_one_reading", lambda *given: _kernels.for_one_reading(*given)
            )
            assert torch.equal(_chunk(cache, 3, held), expected)
        if number > 1:  # the first chunk has no rows
            assert Noted.replayed - before >= 2 * SPEC.layers - 1
    room = cache.workspace.room_at[1]
    assert (
        room
        and sizes
        and cache.workspace.nbytes == sum(t.nbytes for t in cache.workspace.tensors())
    )
    cache.workspace.release()
    assert cache.workspace.room_at == (0, 0) and not cache.workspace.nbytes


def test_what_does_not_last_is_not_launched_again() -> None:
    """INT8 centroids are widened for one reading: their decoder is of a tensor that goes."""
    cache = make_cache("qvg", None, SPEC, {**SETTINGS["qvg"], "centroid_bits": 8})
    held = _held()
    for _ in range(3):
        _chunk(cache, 3, held)
    assert not Noted.replayed


def test_a_reading_that_fails_is_not_launched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, given = _open()
    cache.attend(0, *given)

    def fails(*_: object) -> int:
        raise ValueError("no")

    with monkeypatch.context() as failing, pytest.raises(ValueError, match="no"):
        failing.setattr(reading, "decode_visible", fails)
        cache.attend(0, *(torch.stack([t, t])[1] for t in given))
    cache.attend(0, *given)
    assert not Noted.replayed

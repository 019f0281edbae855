"""Readings that are launched again: when they are, and when the history is read anew."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from quantwm.cache import CachePolicy, KVCache, Workspace, make_format, reading, reference, replays
from quantwm.cache.formats import correction, qvg
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

    def __init__(self, kind: type[Noted] = Noted) -> None:
        self._of: list[Noted] = []
        self._kind = kind

    @contextmanager
    def noted(self) -> Iterator[Noted]:
        self._of.append(self._kind())
        try:
            yield self._of[-1]
        finally:
            self._of.pop()

    def _launch(self, call: Callable[..., Any], *given: Any) -> None:
        for noted in self._of:
            noted.append((call, given))
        call(*given)

    def decode_spans(self, sides: Any, outs: Any, first_head: int = 0) -> int:
        for parts, out in zip(sides, outs, strict=True):
            for decode, *place in parts:
                self._launch(decode, out, *place, first_head)
        return len(sides[0]) + len(sides[1])

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


class ByAddress(Noted):
    """Holds where tensors were and not the tensors, as launches do."""

    def append(self, made: tuple[Callable[..., Any], Any]) -> None:
        call, given = made
        if isinstance(call, _Decoding):
            call = call.by_address()
        super().append((call, [Address(t) if isinstance(t, Tensor) else t for t in given]))

    def again(self) -> None:
        Noted.replayed += 1
        for call, given in self:
            call(*(t.read() if isinstance(t, Address) else t for t in given))


class Address:
    """Where a tensor is, whoever has that memory now."""

    def __init__(self, tensor: Tensor) -> None:
        self._at, self._shape, self._stride = tensor.data_ptr(), tensor.shape, tensor.stride()
        self._dtype = tensor.dtype
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        self._count = sum((size - 1) * step for size, step in steps) + 1

    def read(self) -> Tensor:
        memory = (ctypes.c_char * (self._count * self._dtype.itemsize)).from_address(self._at)
        flat = torch.frombuffer(memory, dtype=self._dtype)
        return flat.as_strided(self._shape, self._stride)


class _Decoding:
    """A decoder of a QVG span, from the span's tensors."""

    def __init__(self, codes: Tensor, ids: Tensor, book: Tensor, scales: Tensor, size: int) -> None:
        self._of, self._size = (codes, ids, book, scales), size

    def by_address(self) -> Callable[..., None]:
        places = [Address(t) for t in self._of]
        return lambda *given: _Decoding(*(t.read() for t in places), self._size)(*given)

    def __call__(self, *given: Any) -> None:
        reference.prepare_qvg(*self._of, self._size)(*given)


@hypothesis.settings(max_examples=25)
@hypothesis.given(
    moves=st.lists(
        st.sampled_from(["chunk", "short", "masked", "evict", "abort", "clear", "swap", "fork"]),
        min_size=4, max_size=9,
    ),
    window=st.sampled_from([None, 3, 5, 6]),
)  # fmt: skip
def test_two_lanes_whatever_happens_read_what_is_there(
    moves: list[str], window: int | None
) -> None:
    """Lanes share a scratch and what is freed is taken again; launches hold addresses only."""
    policy = CachePolicy(span_tokens=12, window_frames=window, sink_frames=1)
    kernels = Kernels(ByAddress)
    with ExitStack() as patches:
        patches.enter_context(patch.object(replays, "kernels_in", lambda name, device: kernels))
        patches.enter_context(patch.object(reading, "ops_for", lambda device: kernels))
        ops = SimpleNamespace(**{**vars(reference), "prepare_qvg": _Decoding})
        patches.enter_context(patch.object(qvg, "ops_for", lambda device: ops))
        shared = Workspace()
        lanes = [_lane(policy, shared, seed) for seed in (0, 1)]
        plain = [_lane(policy, Workspace(), seed) for seed in (0, 1)]
        for cache in plain:
            cache._replays.read = lambda slot, place, device, read, origin: read()
        held, before = _held(), Noted.replayed
        for number, move in enumerate(("chunk", "chunk", *moves)):
            if move == "swap":
                held = _held()
            for index, pair in enumerate(zip(lanes, plain, strict=True)):
                outs = []
                for column, cache in zip((lanes, plain), pair, strict=True):
                    if move == "fork":
                        read = cache._replays.read
                        column[index] = cache = cache.fork()
                        if column is plain:
                            cache._replays.read = read
                    outs.append(_moved(cache, move, 10 * number + index, held))
                assert torch.equal(*outs)
        assert Noted.replayed > before


def _lane(policy: CachePolicy, workspace: Workspace, seed: int) -> KVCache:
    made = make_format("qvg", **SETTINGS["qvg"])
    return KVCache(SPEC, made, policy, dtype=torch.float32, workspace=workspace, seed=seed)


def _moved(cache: KVCache, move: str, salt: int, held: list[Tensor]) -> Tensor:
    """Three passes of a chunk after a move; what all layers attended."""
    if move == "evict":
        cache.evict((cache.next_frame or 0) - 1)
    if move == "clear":
        cache.clear()
    frames = 1 if move == "short" else SPEC.frames_per_chunk
    tokens = frames * SPEC.tokens_per_frame
    keep = torch.arange(tokens) % 3 > 0 if move == "masked" else None
    seen = []
    for clean in (False, True):
        cache.begin_chunk(cache.next_frame or 0, frames)
        for number in range(1 if clean else 2):
            for layer, own in enumerate(held):
                given = own[:, :, :tokens]
                given.copy_(torch.stack(qkv(97 * salt + 7 * number + layer, tokens)))
                seen.append(cache.attend(layer, *given, clean=clean))
        if clean and move != "abort":
            cache.finalize_chunk(keep)
        cache.abort_chunk()
    return torch.cat(seen)


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

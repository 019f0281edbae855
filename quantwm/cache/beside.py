"""Encoding beside the model: what a clean pass writes is encoded on a CUDA stream of its own.

k-means of a small layer is some 30 short launches, one waiting for the other, that keep few of a
GPU's multiprocessors busy. The next layer does not need what they make, so it need not wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor

from quantwm.cache.dispatch import kernels_in, ops_for


class Streams:
    """The stream that a model runs on, whatever it is when asked, and one beside it."""

    def __init__(self, device: torch.device) -> None:
        self._beside = torch.cuda.Stream(device)

    def join(self) -> None:
        """What the model launches from here on comes after all that was launched beside it."""
        torch.cuda.current_stream(self._beside.device).wait_stream(self._beside)

    def mark(self) -> torch.cuda.Event:
        """What was launched beside the model so far, for `wait`."""
        return self._beside.record_event()

    def wait(self, mark: torch.cuda.Event) -> None:
        """As `join`, after what `mark` stands for only."""
        torch.cuda.current_stream(self._beside.device).wait_event(mark)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Launches inside come after all that the model has launched, and on the other stream.

        Memory needs no more than that: whatever was freed before is no longer read by then, and
        what is allocated inside is read by the model after `join` only.
        """
        self._beside.wait_stream(torch.cuda.current_stream(self._beside.device))
        with torch.cuda.stream(self._beside):
            yield


@lru_cache(maxsize=8)
def _streams(device: torch.device) -> Streams:
    """One pair for all caches of a device, so that their memory is one pool."""
    return Streams(device)


@contextmanager
def in_turn() -> Iterator[None]:
    """Inside, everything is encoded on the model's own stream: to compare with."""
    _in_turn.append(True)
    try:
        yield
    finally:
        _in_turn.pop()


_in_turn: list[bool] = []


def streams_for(device: torch.device) -> Streams | None:
    """None where encoding is not made of launches that nobody waits for."""
    return None if _in_turn or kernels_in("encode", device) is None else _streams(device)


class Staging:
    """Where a layer's keys, values and queries lie while they are encoded; of one open chunk.

    The model overwrites its own. One layer's are enough: the next one's are copied when the last
    one is encoded, which on the device is long before.
    """

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self._pair: Tensor | None = None
        self._queries: Tensor | None = None

    @contextmanager
    def staged(
        self, k: Tensor, v: Tensor, q: Tensor | None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """The same in memory of their own, keys and values in BF16, to be encoded inside."""
        self.streams.join()
        heads, tokens, head_dim = k.shape
        shape = (2 * heads, tokens, head_dim)
        if self._pair is None or self._pair.shape != shape:
            self._pair = torch.empty(shape, dtype=torch.bfloat16, device=k.device)
        keys, values = self._pair.chunk(2)
        ops_for(k.device).copy_pair(keys, values, 0, k, v)
        queries = None if q is None else self._held_queries(q)
        with self.streams.beside():
            yield keys, values, queries

    def _held_queries(self, q: Tensor) -> Tensor:
        held = self._queries
        if held is None or held.shape != q.shape or held.dtype != q.dtype:
            self._queries = held = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        return held.copy_(q)


def adjacent(k: Tensor, v: Tensor) -> Tensor | None:
    """[2H, N, D] without a copy, where values lie behind keys as `Staging` puts them."""
    heads, tokens, head_dim = k.shape
    alike = k.shape == v.shape and k.stride() == v.stride() and k.dtype == v.dtype
    behind = k.data_ptr() + heads * k.stride(0) * k.element_size()
    together = k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    if not (alike and together and v.data_ptr() == behind):
        return None
    return k.as_strided((2 * heads, tokens, head_dim), k.stride())

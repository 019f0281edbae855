"""Attention in slabs: a few thousand tokens are decoded at a time, attended, and forgotten.

Between staged and fused: packed keys are decoded once for all queries, as staged does, and the
scratch has a fixed size whatever the history, of all heads at once or of some. The running
softmax between slabs is exact and in float32: [H, Nq, D + 2], read and written once a slab, 0.05 ms
for 4,680 queries of 40 heads of 128 on an H200, against 0.8 ms for a slab of 4,096 tokens. Heads in
turns make both smaller, and the attention slower: 20 at a time take 1.05 times as long as all 40,
10 take 1.32 times (`benchmarks low-memory`, H200, 2026-11-30, 28,080 tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kernels.format import Side
from quantwm.cache.formats.base import Fusible, HeadRanges
from quantwm.cache.reading import Reading
from quantwm.cache.segments import Segment
from quantwm.cache.workspace import Workspace

SLAB_STEP = 128
"""A slab's tokens are a multiple of this, so that no tile of the kernel is half empty."""


class Running(Protocol):
    """`kernels.fused.Running`."""

    def add(self, keys: Side, values: Side, start: int, stop: int, last: bool) -> None: ...


def slab_tokens(packed: int, heads: int, head_dim: int, itemsize: int, limit: int) -> int:
    """Tokens of a slab: as few slabs as the bytes allow, and these as equal as they can be."""
    room = max(limit // (2 * heads * head_dim * itemsize) // SLAB_STEP, 1) * SLAB_STEP
    slabs = max(-(-packed // room), 1)
    return -(-packed // (slabs * SLAB_STEP)) * SLAB_STEP


def attend_slabs(
    reading: Reading, workspace: Workspace, out: Tensor, begin: Callable[[slice], Running]
) -> None:
    """All that the reading shows, added to the running softmax of some heads after the others.

    begin: starts heads' running softmax, whose result is their part of out [H, Nq, D].
    """
    heads = reading.shape[0]
    group = slab_heads(heads, workspace.slab_heads)
    if group < heads and not all(isinstance(s.fmt, HeadRanges) for s in reading.segments):
        group = heads
    for first in range(0, heads, group):
        some = slice(first, min(first + group, heads))
        _attend(reading, workspace, some, out.dtype, begin(some))


def slab_heads(heads: int, most: int) -> int:
    """Heads of a slab: the fewest turns of at most so many (0: all), these as equal as can be."""
    turns = -(-heads // (most or heads))
    return -(-heads // turns)


def _attend(
    reading: Reading, workspace: Workspace, heads: slice, dtype: torch.dtype, running: Running
) -> None:
    """Some heads' attention; the chunk's own tokens last.

    What lies there in the queries' own type is attended where it lies.
    """
    packed: list[tuple[Segment, int, int]] = []
    for segment in reading.segments:
        start, stop = segment.hidden_tokens(reading.first), segment.tokens
        sides = _plain(segment, reading.slot, dtype)
        if sides is None:
            packed.append((segment, start, stop))
        elif start < stop:
            keys, values = (Side("plain", side.values[heads]) for side in sides)
            running.add(keys, values, start, stop, last=False)
    if packed:
        _attend_packed(packed, reading, workspace, heads, dtype, running)
    own = (Side("plain", t[heads].to(dtype)) for t in (reading.k, reading.v))
    running.add(*own, 0, reading.k.shape[1], last=True)


def _attend_packed(
    packed: Sequence[tuple[Segment, int, int]], reading: Reading, workspace: Workspace,
    heads: slice, dtype: torch.dtype, running: Running,
) -> None:  # fmt: skip
    """Tokens start .. stop - 1 of each segment, decoded a slab at a time."""
    count, head_dim = heads.stop - heads.start, reading.shape[2]
    tokens = sum(stop - start for _, start, stop in packed)
    size = slab_tokens(tokens, count, head_dim, dtype.itemsize, workspace.slab_bytes)
    if not tokens:
        return
    keys, values = workspace.take((count, size, head_dim), dtype, reading.k.device)
    slab = Side("plain", keys), Side("plain", values)
    filled = 0
    for segment, start, stop in packed:
        spans = segment.keys[reading.slot], segment.values[reading.slot]
        while start < stop:
            some = min(stop - start, size - filled)
            for span, out in zip(spans, (keys, values), strict=True):
                place = (span, out, filled, start, start + some)
                if count == reading.shape[0]:
                    segment.fmt.decode_into(*place)
                else:
                    segment.fmt.decode_heads_into(*place, heads.start)
            start, filled = start + some, filled + some
            if filled == size:
                running.add(*slab, 0, filled, last=False)
                filled = 0
    if filled:
        running.add(*slab, 0, filled, last=False)


def _plain(segment: Segment, slot: int, dtype: object) -> tuple[Side, Side] | None:
    """Its keys and values where they lie as the kernel reads them."""
    if segment.fmt.compresses or not isinstance(segment.fmt, Fusible):
        return None
    sides = segment.fmt.side(segment.keys[slot]), segment.fmt.side(segment.values[slot])
    held = [side.values is not None and side.values.dtype == dtype for side in sides]
    return sides if all(held) else None

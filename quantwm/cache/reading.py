"""Reading a cache's segments: what a window shows of them, decoded one behind the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from quantwm.cache.dispatch import note_fallback, ops_for
from quantwm.cache.formats.base import HeadRanges, Movable, Prepared, Spreads
from quantwm.cache.formats.correction import Room
from quantwm.cache.replays import Origin, Place, Replays
from quantwm.cache.segments import Segment
from quantwm.cache.spec import CachePolicy
from quantwm.cache.workspace import Workspace


def first_visible(policy: CachePolicy, stop_frame: int) -> int:
    """First frame, the sink aside, that a chunk ending at stop_frame sees."""
    if policy.window_frames is None:
        return 0
    return stop_frame - (policy.window_frames - policy.sink_frames)


def visible_tokens(segments: Sequence[Segment], first: int) -> int:
    """Tokens of the sink and of the frames from `first` on."""
    return sum(s.tokens - s.hidden_tokens(first) for s in segments)


@lru_cache(maxsize=16)
def _spreads(kind: type) -> bool:
    return issubclass(kind, Spreads)


@lru_cache(maxsize=16)
def _moves(kind: type) -> bool:
    return issubclass(kind, Movable)


@lru_cache(maxsize=16)
def _prepares(kind: type) -> bool:
    """Whether a format is `Prepared`: asking takes 10 us, for every span in every pass."""
    return issubclass(kind, Prepared)


def decode_visible(
    segments: Sequence[Segment],
    slot: int,
    keys: Tensor,
    values: Tensor,
    first: int,
    first_head: int | None = None,
    room: Room | None = None,
) -> int:
    """One slot's visible tokens into the front of keys and values, both [H, tokens, D].

    first_head: of the heads that keys and values hold; None where they hold all of them. room: for
    rows that are spread first. Returns the number of launches, where all are of what lasts and of
    the room, 0 otherwise.
    """
    offset, prepared, spread, lasting = 0, ([], []), 0, True
    for segment in segments:
        fmt, start, stop = segment.fmt, segment.hidden_tokens(first), segment.tokens
        if start < stop:
            sides = (segment.keys[slot], keys), (segment.values[slot], values)
            for (span, out), parts in zip(sides, prepared, strict=True):
                decode = fmt.prepared(span) if _prepares(type(fmt)) else None
                if decode is not None:
                    parts.append((decode, offset, start, stop))
                    continue
                place = offset, start, stop
                may = room is not None and _spreads(type(fmt))
                if may and fmt.decode_spread(span, out, *place, room):
                    spread += 2
                    continue
                lasting = False
                if first_head is None:
                    fmt.decode_into(span, out, offset, start, stop)
                else:
                    fmt.decode_heads_into(span, out, offset, start, stop, first_head)
            offset += stop - start
    if not any(prepared):
        return spread if lasting else 0
    made = ops_for(keys.device).decode_spans(prepared, (keys, values), first_head or 0)
    return made + spread if lasting and made else 0


@dataclass(frozen=True)
class Reading:
    """What one layer's attention sees: the visible history of a slot, then the chunk's own.

    Attributes:
        segments, slot, first: of the history; first: its first visible frame, the sink aside.
        k, v: the chunk's own, [H, N, D].
        past: tokens of history.
        reserve: the most tokens that a window will ever need.
        replays: of the history's earlier readings.
    """

    segments: Sequence[Segment]
    slot: int
    first: int
    k: Tensor
    v: Tensor
    past: int
    reserve: int
    replays: Replays

    @property
    def shape(self) -> tuple[int, int, int]:
        """Heads, tokens and channels of all that is seen."""
        heads, tokens, head_dim = self.k.shape
        return heads, self.past + tokens, head_dim

    def heads_at_once(self, workspace: Workspace, dtype: torch.dtype) -> int:
        """Heads of one pass: all of them, or as many as the scratch's limit leaves."""
        heads = workspace.heads_at_once(self.shape, dtype)
        if heads < self.shape[0]:
            whole = sorted({s.fmt.name for s in self.segments if not isinstance(s.fmt, HeadRanges)})
            if whole:
                note_fallback(
                    f"the scratch holds all heads at once, beyond its limit of "
                    f"{workspace.scratch_limit:,} bytes: {', '.join(whole)} decodes no single ones"
                )
                return self.shape[0]
        return heads

    def kept(self, workspace: Workspace, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """As `staged`, of all heads, for who only reads them: a chunk's first pass decodes, and
        later ones find the history as it was left, where the workspace has room to keep it."""
        found = workspace.kept(self.slot, self.shape, dtype, self.k.device)
        if found is None:
            return self.staged(workspace, dtype)
        held, keys, values = found
        if not held.holds(self.segments, self.first):
            held.source = None  # should decoding fail half-way
            decode_visible(self.segments, self.slot, keys, values, self.first)
            held.decoded(self.segments, self.first)
        ops_for(keys.device).copy_pair(keys, values, self.past, self.k, self.v)
        return keys, values

    def staged(self, workspace: Workspace, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [H, tokens, D] in the scratch."""
        keys, values = self.room(workspace, dtype, self.shape[0])
        place = Place.of(self.first, self.shape, workspace.room_at, keys, values, self.k, self.v)
        read = partial(self._read, workspace, keys, values)
        self.replays.read(self.slot, place, self.k.device, read, self._origin)
        return keys, values

    def room(self, workspace: Workspace, dtype: torch.dtype, heads: int) -> tuple[Tensor, Tensor]:
        """The scratch, as keys and values [heads, tokens, D]; what it held before is lost."""
        shape = (heads, *self.shape[1:])
        return workspace.take(shape, dtype, self.k.device, self.reserve)

    def decode_heads(self, keys: Tensor, values: Tensor, heads: slice) -> None:
        """A run of heads into keys and values [heads, tokens, D]."""
        decode_visible(self.segments, self.slot, keys, values, self.first, heads.start)
        ops_for(keys.device).copy_pair(keys, values, self.past, self.k[heads], self.v[heads])

    def _read(self, workspace: Workspace, keys: Tensor, values: Tensor) -> int:
        """Of all heads; as `decode_visible` counts."""
        room, device = workspace.room_at, self.k.device
        history = (self.segments, self.slot, keys, values, self.first)
        launches = decode_visible(*history, None, workspace.room_on(device))
        ops_for(device).copy_pair(keys, values, self.past, self.k, self.v)
        # A room that was made, or made larger, meanwhile is not the one of the first launches.
        return launches + 1 if launches and workspace.room_at == room else 0

    def _origin(self) -> Origin | None:
        """What the visible history is decoded from; None where a format does not say."""
        kinds: list[Any] = []
        tensors: list[Tensor] = []
        for segment in self.segments:
            hidden = segment.hidden_tokens(self.first)
            if hidden >= segment.tokens:
                continue
            for span in (segment.keys[self.slot], segment.values[self.slot]):
                found = segment.fmt.read_from(span) if _moves(type(segment.fmt)) else None
                if found is None:
                    return None
                kinds.append((type(segment.fmt), hidden, segment.tokens, found[0]))
                tensors += found[1]
        return Origin.of(kinds, tensors)

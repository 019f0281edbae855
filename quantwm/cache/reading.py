"""Reading a cache's segments: what a window shows of them, decoded one behind the other."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from quantwm.cache.segments import Segment
from quantwm.cache.spec import CachePolicy


def first_visible(policy: CachePolicy, stop_frame: int) -> int:
    """First frame, the sink aside, that a chunk ending at stop_frame sees."""
    if policy.window_frames is None:
        return 0
    return stop_frame - (policy.window_frames - policy.sink_frames)


def visible_tokens(segments: Sequence[Segment], first: int) -> int:
    """Tokens of the sink and of the frames from `first` on."""
    return sum(s.tokens - s.hidden_tokens(first) for s in segments)


def decode_visible(
    segments: Sequence[Segment], slot: int, keys: Tensor, values: Tensor, first: int
) -> None:
    """One slot's visible tokens into the front of keys and values, both [H, tokens, D]."""
    offset = 0
    for segment in segments:
        start, stop = segment.hidden_tokens(first), segment.tokens
        if start < stop:
            segment.fmt.decode_into(segment.keys[slot], keys, offset, start, stop)
            segment.fmt.decode_into(segment.values[slot], values, offset, start, stop)
            offset += stop - start

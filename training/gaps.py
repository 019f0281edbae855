"""Gaps in the history: chunks that no other chunk may see, so that older ones must be remembered.

In teacher forcing the last frames are always true, and what they show is nearly what comes next:
what lies further back earns hardly any gradient. With a gap, the chunks in it and after it can
come only from what is older, and from the pose.
"""

from __future__ import annotations

import torch


class HiddenChunks:
    """Which clean chunks of each clip are hidden, in memory that stays where it is.

    buffer: bool [B, 2 * chunks] by key chunk of both streams; noisy ones are never hidden. A
    compiled attention reads it, so that a step's gaps cost no new mask and no compilation.
    """

    def __init__(self, batch: int, chunks: int, device: torch.device | str) -> None:
        self.buffer = torch.zeros(batch, 2 * chunks, dtype=torch.bool, device=device)
        self._chunks = chunks

    def set(self, hidden: torch.Tensor) -> None:
        """hidden: bool [B, chunks]."""
        self.buffer[:, : self._chunks].copy_(hidden)


def draw_gaps(
    marks: torch.Tensor, chunks: int, per_chunk: int, share: float, first: int, longest: int,
    generator: torch.Generator,
) -> torch.Tensor:  # fmt: skip
    """bool [B, chunks]: the hidden chunks of each clip, none before chunk `first`.

    marks: int64 [B, 2], the frame of a revisit and of what it revisits, counted from the clip's
    start; where both lie inside, the gap ends with the revisit's chunk or the one after it and
    starts behind the first visit. Elsewhere it is 2 to `longest` chunks anywhere, and for a third
    of the clips a second one of up to 4 chunks comes to it. share: of the clips with gaps at all.
    """
    batch, device = len(marks), marks.device
    if chunks < first + 2:
        return torch.zeros(batch, chunks, dtype=torch.bool, device=device)
    like = {"generator": generator, "device": device}
    u = torch.rand(7, batch, **like)
    longest = min(longest, chunks - first)
    end = first + 2 + (u[0] * (chunks - first - 1)).long()  # one past its last chunk
    length = 2 + (u[1] * (longest - 1)).long()
    chunk_of = marks.div(per_chunk, rounding_mode="floor")
    inside = (marks[:, 1] >= 0) & (marks[:, 0] < chunks * per_chunk) & (marks[:, 0] > marks[:, 1])
    last = (chunk_of[:, 0] + 1 + (u[2] < 0.5)).clamp_max(chunks)
    end = torch.where(inside, last, end)
    earliest = torch.where(inside, chunk_of[:, 1] + 1, 0).clamp_min(first)
    start = torch.maximum(end - length, earliest)
    second = first + (u[3] * (chunks - first)).long()
    second_end = second + 1 + (u[4] * min(4, longest)).long()
    second_end = torch.where(u[5] < 1 / 3, second_end, second)
    index = torch.arange(chunks, device=device)
    here = (index >= start[:, None]) & (index < end[:, None])
    more = (index >= second[:, None]) & (index < second_end[:, None])
    # a second gap must not hide what a revisit is to be remembered from
    more &= ~(inside[:, None] & (index <= chunk_of[:, 1:]))
    return (here | more) & (u[6] < share)[:, None]

"""New segments in the smallest of their forms, with the numbers that it takes read once for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quantwm.cache.formats.base import Counts
from quantwm.cache.segments import Segment


@dataclass(frozen=True)
class Settling:
    """Segments of which some are new.

    Attributes:
        segments: all of them.
        fresh: spans of the new encoded ones, keys then values, by place in `segments`.
        asked: whole numbers on the device that `finish` wants, by place, in tensors of any
            shape.
        ahead: what formats made without them, by place as `asked`.
    """

    segments: Sequence[Segment]
    fresh: Mapping[int, list[Any]]
    asked: Mapping[int, list[Tensor]]
    ahead: Mapping[int, Any]

    @property
    def questions(self) -> tuple[Tensor, ...]:
        return tuple(tensor for asked in self.asked.values() for tensor in asked)

    @classmethod
    def of(cls, segments: Sequence[Segment], held: Sequence[Segment]) -> Settling:
        """held: what the cache had before; segments of it that are still there are not new."""
        before = {id(segment) for segment in held}
        fresh: dict[int, list[Any]] = {}
        asked: dict[int, list[Tensor]] = {}
        ahead: dict[int, Any] = {}
        for place, segment in enumerate(segments):
            if id(segment) in before or not segment.encoded:
                continue
            spans = [*segment.keys, *segment.values]
            if isinstance(segment.fmt, Counts):
                spans = segment.fmt.dense(spans)
                asked[place], ahead[place] = segment.fmt.counts(spans)
            fresh[place] = spans
        return cls(segments, fresh, asked, ahead)

    def finish(self, answers: Sequence[float]) -> list[Segment]:
        """answers: what `questions` hold, flat and in order."""
        segments, left = list(self.segments), [int(answer) for answer in answers]
        for place, spans in self.fresh.items():
            fmt, slots = segments[place].fmt, len(segments[place].keys)
            if place in self.asked:
                count = sum(tensor.numel() for tensor in self.asked[place])
                smallest = fmt.settled(spans, left[:count], self.ahead[place])
                left = left[count:]
            else:
                smallest = fmt.settle(spans)
            keys, values = tuple(smallest[:slots]), tuple(smallest[slots:])
            segments[place] = replace(segments[place], keys=keys, values=values)
        return segments


def settled(segments: Sequence[Segment], held: Sequence[Segment]) -> list[Segment]:
    """The new ones settled at once; one host sync where anything is counted."""
    settling = Settling.of(segments, held)
    return settling.finish(read(settling.questions))


def read(questions: Sequence[Tensor]) -> list[float]:
    """All numbers of all tensors, flat and in order: one host sync, none without questions."""
    if not questions:
        return []
    return torch.cat([question.flatten().double() for question in questions]).tolist()

"""What a cache holds of past frames: segments in frame order, each BF16 or packed in one span."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from quantwm.cache.formats.base import Batched, Format, QueryGuide
from quantwm.cache.formats.rows import ALIGNED_BYTES

Kind = Literal["sink", "recent", "packed"]


@dataclass(frozen=True)
class SpanPlan:
    """One codebook span, for all slots (layers and streams).

    Attributes:
        number: counts spans since the cache was reset.
        tokens: tokens given to it so far, evicted ones included.
        before: tokens given to the spans before it.
        basis, eigenvalues: PSAC's, of all slots; None before any query was seen.
        basis_span: number of the span in which the basis was made.
        refits: codebooks (`codebook_life.Place`) that are fitted again with its first chunk; None
            for all of them.
        lesson: what its chunks share in a format that learns; None otherwise.
    """

    number: int
    tokens: int
    before: int = 0
    basis: Tensor | None = None
    eigenvalues: Tensor | None = None
    basis_span: int = -1
    refits: tuple[int, ...] | None = None
    lesson: Any = None


@dataclass(frozen=True)
class ChunkGuide:
    """How a chunk is to be encoded, fixed before its own queries are known.

    weights: QSAC's, float32 [slots, H, D] ([slots, H, D, D] where the format wants the whole
        moment), or None before any query was seen.
    learned: of a format that learns, with the positions of the chunk's tokens; None otherwise.
    """

    span: SpanPlan
    weights: Tensor | None
    learned: Any = None

    def of_slot(self, slot: int) -> QueryGuide:
        basis, eigenvalues, weights = self.span.basis, self.span.eigenvalues, self.weights
        return QueryGuide(
            None if weights is None else weights[slot],
            None if basis is None else basis[slot],
            None if eigenvalues is None else eigenvalues[slot],
            None if self.learned is None else self.learned.of_slot(slot),
        )

    def of_slots(self, slots: Sequence[int]) -> QueryGuide:
        """Of several, their heads behind each other; without what a format has learned."""

        first, stop = slots[0], slots[0] + len(slots)

        def heads(whole: Tensor | None) -> Tensor | None:
            if whole is None:
                return None
            run = whole[first:stop].flatten(0, 1)
            if list(slots) == list(range(first, stop)) and run.data_ptr() % ALIGNED_BYTES == 0:
                return run
            return torch.cat([whole[slot] for slot in slots])

        return QueryGuide(heads(self.weights), heads(self.span.basis), heads(self.span.eigenvalues))

    def select(self, keep: slice | Tensor) -> ChunkGuide:
        """Of the chunk's tokens in a range, or at ascending int64 positions (a CPU tensor)."""
        return self if self.learned is None else replace(self, learned=self.learned.select(keep))

    def statistics(self) -> tuple[Tensor, ...]:
        """What it holds beside the bases and the places of tokens."""
        held = (self.weights, self.span.eigenvalues)
        learned = () if self.learned is None else self.learned.tensors()
        return (*(t for t in held if t is not None), *learned)

    def places(self) -> tuple[Tensor, ...]:
        return () if self.learned is None else tuple(self.learned.places())

    def bases(self) -> tuple[Tensor, ...]:
        own = () if self.span.basis is None else (self.span.basis,)
        return own if self.span.lesson is None else (*own, *self.span.lesson.tensors())


@dataclass(frozen=True)
class Segment:
    """Consecutive latent frames that are stored in one way.

    Attributes:
        kind: "recent" is BF16 by policy, "packed" is in the cache's format; "sink" is never
            evicted, BF16 by policy or in the cache's format.
        fmt: the format of its spans.
        first_frame, frame_tokens: its frames, and the tokens that are held of each.
        keys, values: one span per slot.
        span: number of the codebook span of a packed segment, -1 for BF16 ones.
        guide: how a recent chunk is to be encoded when its time comes; None otherwise.
    """

    kind: Kind
    fmt: Format[Any]
    first_frame: int
    frame_tokens: tuple[int, ...]
    keys: tuple[Any, ...]
    values: tuple[Any, ...]
    span: int = -1
    guide: ChunkGuide | None = None

    @property
    def stop_frame(self) -> int:
        return self.first_frame + len(self.frame_tokens)

    @property
    def encoded(self) -> bool:
        """Whether it is in the cache's format rather than BF16 by policy."""
        return self.kind == "packed" or self.fmt.compresses

    @property
    def tokens(self) -> int:
        return sum(self.frame_tokens)

    def tokens_before(self, frame: int) -> int:
        """Tokens of its frames before this one."""
        return sum(self.frame_tokens[: max(0, frame - self.first_frame)])

    def hidden_tokens(self, first_visible: int) -> int:
        """Leading tokens that lie before a window's first frame; a sink is always seen."""
        return 0 if self.kind == "sink" else self.tokens_before(first_visible)

    def from_frame(self, frame: int) -> Segment:
        """The segment without its frames before this one, in storage of its own."""
        if frame <= self.first_frame:
            return self
        kept = slice(self.tokens_before(frame), self.tokens)
        return replace(
            self,
            first_frame=frame,
            frame_tokens=self.frame_tokens[frame - self.first_frame :],
            keys=_cut(self.fmt, self.keys, kept),
            values=_cut(self.fmt, self.values, kept),
            guide=None if self.guide is None else self.guide.select(kept),
        )

    def masked(self, keep: Tensor) -> Segment:
        """The segment with the tokens of a mask only. keep: bool [tokens], on the CPU."""
        positions = keep.nonzero().flatten()
        counts = [int(part.sum()) for part in keep.split(self.frame_tokens)]
        return replace(
            self,
            frame_tokens=tuple(counts),
            keys=tuple(self.fmt.select(span, positions) for span in self.keys),
            values=tuple(self.fmt.select(span, positions) for span in self.values),
            guide=None if self.guide is None else self.guide.select(positions),
        )

    def joined(self, later: Segment) -> Segment:
        """This packed segment with a later one of the same span behind it.

        Frames between the two are those that a keep-mask dropped whole.
        """
        gap = (0,) * (later.first_frame - self.stop_frame)
        return replace(
            self,
            frame_tokens=self.frame_tokens + gap + later.frame_tokens,
            keys=_joined(self.fmt, self.keys, later.keys),
            values=_joined(self.fmt, self.values, later.values),
        )

    def split_sink(self, stop_frame: int) -> list[Segment]:
        """Its frames before stop_frame as an encoded sink, and the others as they are."""
        if stop_frame <= self.first_frame:
            return [self]
        count = stop_frame - self.first_frame
        tokens = slice(0, self.tokens_before(stop_frame))
        sink = replace(
            self,
            kind="sink",
            frame_tokens=self.frame_tokens[:count],
            keys=_cut(self.fmt, self.keys, tokens),
            values=_cut(self.fmt, self.values, tokens),
        )
        rest = self.from_frame(stop_frame) if stop_frame < self.stop_frame else None
        return [sink] if rest is None else [sink, rest]

    def parts(self) -> list[tuple[str, Tensor]]:
        """Every tensor it holds, by ledger part."""
        found: list[tuple[str, Tensor]] = []
        for span in (*self.keys, *self.values):
            held: Mapping[str, Sequence[Tensor]] = self.fmt.parts(span)
            for part, tensors in held.items():
                name = part if self.encoded else f"bf16_{self.kind}"
                found.extend((name, tensor) for tensor in tensors)
        return found


def _joined(fmt: Format[Any], firsts: Sequence[Any], seconds: Sequence[Any]) -> tuple[Any, ...]:
    if isinstance(fmt, Batched):
        return tuple(fmt.join_all(firsts, seconds))
    return tuple(map(fmt.join, firsts, seconds))


def _cut(fmt: Format[Any], spans: Sequence[Any], kept: slice) -> tuple[Any, ...]:
    if isinstance(fmt, Batched):
        return tuple(fmt.cut_all(spans, kept.start, kept.stop))
    return tuple(fmt.select(span, kept) for span in spans)


def append_packed(segments: list[Segment], packed: Segment) -> list[Segment]:
    """The segments with a packed chunk at its place: in its span if that is there, else new.

    Recent BF16 chunks lie behind everything packed.
    """
    place = sum(s.kind != "recent" for s in segments)
    before, recent = segments[:place], segments[place:]
    if before and before[-1].kind == "packed" and before[-1].span == packed.span:
        packed = before[-1].joined(packed)
        before = before[:-1]
    return [*before, packed, *recent]


def evict(segments: list[Segment], first_kept: int) -> list[Segment]:
    """Without the frames before `first_kept`, except the sink's."""
    kept = []
    for segment in segments:
        if segment.kind == "sink":
            kept.append(segment)
        elif segment.stop_frame > first_kept:
            kept.append(segment.from_frame(first_kept))
    return [segment for segment in kept if segment.tokens]

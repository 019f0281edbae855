"""The open chunk: what each layer wrote in its clean pass, and how it becomes segments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Generator, Tensor

from quantwm.cache.batch import Batch
from quantwm.cache.beside import Staging, adjacent
from quantwm.cache.codebook import Codebook
from quantwm.cache.codebook_life import outliving
from quantwm.cache.dispatch import kernels_in
from quantwm.cache.formats.base import Format
from quantwm.cache.formats.bf16 import Bf16Format
from quantwm.cache.positions import TokenPositions
from quantwm.cache.segments import ChunkGuide, Segment
from quantwm.cache.unrotation import KeyTurns

BookPair = tuple[Codebook | None, Codebook | None]
"""Codebooks of keys and values; None in formats without."""

BF16 = Bf16Format()

FITTED_TOGETHER = 32 << 20
"""Bytes of keys and values up to which it is done: 12 heads of 4,680 tokens are 29 MB. Larger ones
keep a GPU busy alone, and would take twice what k-means takes beside them."""


@dataclass(frozen=True)
class LayerWrite:
    """One layer's keys and values of a chunk. k, v: [H, N, D]; q: [H, Nq, D] or None.

    lasting: they lie where those of earlier chunks did.
    """

    layer: int
    k: Tensor
    v: Tensor
    q: Tensor | None = None
    stream: str = "self"
    lasting: bool = False


@dataclass(frozen=True)
class Codebooks:
    """The newest span's codebooks, by slot. They outlive its tokens: they warm-start the next."""

    span: int = -1
    pairs: Mapping[int, BookPair] = field(default_factory=dict)


@dataclass(frozen=True)
class PendingWrite:
    """One slot's share of the open chunk.

    Attributes:
        sink: key and value spans of its sink frames (BF16), None without.
        rest: key and value spans of the other frames, in the cache's format or, when recent
            chunks stay BF16, in BF16; None without.
        books: the codebooks that `rest` was encoded against.
        power: of the residuals, see `residual_power`.
        moment, queries: of its queries, for the statistics; None and 0 when they are not wanted.
        learned: what a format's learner made of it; None without a learner.
    """

    sink: tuple[Any, Any] | None
    rest: tuple[Any, Any] | None
    books: BookPair | None
    power: Tensor | None = None
    moment: Tensor | None = None
    queries: int = 0
    learned: Any = None

    def tensors(self, fmt: Format[Any]) -> list[Tensor]:
        """Everything it holds; fmt: the format of `rest`."""
        held = [tensor for tensor in (self.moment, self.power) if tensor is not None]
        held += [] if self.learned is None else self.learned.tensors()
        for pair, pair_format in ((self.sink, BF16), (self.rest, fmt)):
            for span in pair or ():
                held.extend(t for part in pair_format.parts(span).values() for t in part)
        return held


@dataclass
class OpenChunk:
    """The chunk between begin_chunk and finalize_chunk.

    Attributes:
        first_frame, frames, tokens: what it covers.
        sink_tokens: leading tokens of it that belong to the sink and stay BF16.
        kept_tokens: leading tokens of it that belong to the sink, BF16 or encoded.
        generator_state: of k-means before the chunk, for abort_chunk.
        guide: how it is encoded; made from past queries when the first layer is written.
        writes: by slot.
        staging: where layers lie while they are encoded beside the model; None where they are not.
        batch: of slots that are encoded together, those that wait among them; None where each is
            encoded by itself.
        extremes: (names, least, largest) of CUDA writes, on the device, read at the end; a number
            for every name.
    """

    first_frame: int
    frames: int
    tokens: int
    sink_tokens: int
    kept_tokens: int
    generator_state: Tensor
    guide: ChunkGuide | None = None
    writes: dict[int, PendingWrite] = field(default_factory=dict)
    staging: Staging | None = None
    batch: Batch | None = None
    extremes: list[tuple[list[str], Tensor, Tensor]] = field(default_factory=list)

    @property
    def stop_frame(self) -> int:
        return self.first_frame + self.frames

    def join(self) -> None:
        """The model's stream waits for what was encoded beside it."""
        known = self.batch if self.staging is None else self.staging
        if known is not None:
            known.streams.join()
        self.staging = None
        if self.batch is not None and not self.batch.waiting:
            self.batch.release()
            self.batch = None

    def give_up(self) -> None:
        """As `join`; nothing waits any longer."""
        if self.batch is not None:
            self.batch.waiting = {}
        self.join()

    def written(self, slot: int) -> bool:
        """Whether the slot's clean pass was."""
        return slot in self.writes or (self.batch is not None and slot in self.batch.waiting)

    def positions(self, tokens_per_frame: int) -> TokenPositions:
        return TokenPositions(self.first_frame * tokens_per_frame, self.tokens)

    def pending(self, fmt: Format[Any]) -> list[Tensor]:
        """Every tensor that waits for finalize_chunk; fmt: that of what is not sink."""
        held = [tensor for write in self.writes.values() for tensor in write.tensors(fmt)]
        if self.guide is None:
            return held
        return [*held, *self.guide.statistics(), *self.guide.places(), *self.guide.bases()]


def encode_bf16(k: Tensor, v: Tensor) -> tuple[Any, Any]:
    return BF16.hold(k), BF16.hold(v)


def encode_pair(
    fmt: Format[Any],
    generator: Generator,
    slot: int,
    k: Tensor,
    v: Tensor,
    guide: ChunkGuide,
    books: Codebooks,
) -> tuple[tuple[Any, Any], BookPair]:
    """Encode one slot's chunk, against its span's codebooks or, if it opens the span, new ones.

    k, v: bfloat16 [H, N, D]; k as the world gives it. On failure the caller puts the generator
    back.
    """
    queries = guide.of_slot(slot)
    if isinstance(queries.learned, KeyTurns):
        k = queries.learned.undone(k)
    pair = books.pairs.get(slot, (None, None))
    if slot not in books.pairs or books.span != guide.span.number:
        refits = guide.span.refits
        kept = [
            last is not None and refits is not None and 2 * slot + role not in refits
            for role, last in enumerate(pair)
        ]
        both = None if any(kept) else _fitted_together(fmt, k, v, pair)
        if both is not None:
            pair = fmt.fit(both, generator, pair[0].joined(pair[1])).halves()
        else:
            pair = tuple(
                last if keep else fmt.fit(x, generator, last)
                for x, last, keep in zip((k, v), pair, kept, strict=True)
            )
    keys = fmt.encode(k, pair[0], "keys", queries)
    values = fmt.encode(v, pair[1], "values", queries)
    return (keys, values), pair


def _fitted_together(fmt: Format[Any], k: Tensor, v: Tensor, pair: BookPair) -> Tensor | None:
    """Keys and values as tokens of twice the heads, whose codebooks are the same bit for bit, in
    half the launches; None where they are fitted one after the other.

    Only from warm codebooks, for which nothing is drawn; not where one may outlive the other.
    """
    warm = all(isinstance(book, Codebook) for book in pair)
    small = 2 * k.nbytes <= FITTED_TOGETHER and kernels_in("kmeans", k.device) is not None
    if not (warm and small) or outliving(fmt) is not None:
        return None
    both = adjacent(k, v)
    return torch.cat((k, v)) if both is None else both


def residual_power(
    fmt: Format[Any], spans: tuple[Any, Any], pair: tuple[Tensor, Tensor]
) -> Tensor | None:
    """Of the residuals over that of keys and values, float32 [2]; None where nobody asks.

    pair: keys and values [H, N, D] of one chunk, which the spans hold.
    """
    if outliving(fmt) is None:
        return None
    squares = [torch.linalg.vector_norm(x, dtype=torch.float32).square() for x in pair]
    energy = torch.stack(squares) / pair[0].numel()
    return torch.stack([fmt.power(span) for span in spans]) / energy.clamp(min=1e-30)


@dataclass(frozen=True)
class Encoder:
    """Encodes the open chunk, slot by slot. guide: None when all of the chunk is sink."""

    fmt: Format[Any]
    generator: Generator
    guide: ChunkGuide | None
    books: Codebooks

    def written(
        self, slot: int, k: Tensor, v: Tensor, sink: int, stay_recent: bool
    ) -> PendingWrite:
        """One slot's share. k, v: bfloat16 [H, N, D], the first `sink` tokens stay BF16."""
        stored_sink = encode_bf16(k[:, :sink], v[:, :sink]) if sink else None
        rest = books = power = None
        if self.guide is not None:
            pair = k[:, sink:], v[:, sink:]
            if stay_recent:
                rest = encode_bf16(*pair)
            else:
                rest, books = self._pair(slot, *pair)
                power = residual_power(self.fmt, rest, pair)
        return PendingWrite(stored_sink, rest, books, power)

    def spans_for_learning(
        self, slot: int, k: Tensor, v: Tensor, sink: int, written: PendingWrite
    ) -> tuple[Any, Any] | None:
        """What the chunk became, or would have, were it not kept BF16; None if of no use."""
        if self.guide is None or self.guide.span.lesson is None:
            return None
        if written.books is not None:
            return written.rest
        return self._pair(slot, k[:, sink:], v[:, sink:])[0]

    def _pair(self, slot: int, k: Tensor, v: Tensor) -> tuple[tuple[Any, Any], BookPair]:
        return encode_pair(self.fmt, self.generator, slot, k, v, self.guide, self.books)


def chunk_segments(
    chunk: OpenChunk,
    guide: ChunkGuide,
    fmt: Format[Any],
    tokens_per_frame: int,
    stay_recent: bool,
    keep: Tensor | None,
) -> list[Segment]:
    """The open chunk as up to two segments: its sink frames, and the others.

    keep: bool [tokens of the chunk] on the CPU, or None for all.
    """
    writes = [chunk.writes[slot] for slot in sorted(chunk.writes)]
    sink_frames = chunk.sink_tokens // tokens_per_frame
    parts = []
    if sink_frames:
        pairs = [write.sink for write in writes]
        frames = (tokens_per_frame,) * sink_frames
        sink = Segment("sink", BF16, chunk.first_frame, frames, *_columns(pairs))
        parts.append(sink if keep is None else sink.masked(keep[: chunk.sink_tokens]))
    if sink_frames < chunk.frames:
        pairs = [write.rest for write in writes]
        frames = (tokens_per_frame,) * (chunk.frames - sink_frames)
        first = chunk.first_frame + sink_frames
        rest = Segment("packed", fmt, first, frames, *_columns(pairs), span=guide.span.number)
        if stay_recent:
            rest = replace(rest, kind="recent", fmt=BF16, span=-1, guide=guide)
        rest = rest if keep is None else rest.masked(keep[chunk.sink_tokens :])
        parts.extend(
            rest.split_sink(first + (chunk.kept_tokens - chunk.sink_tokens) // tokens_per_frame)
        )
    return [part for part in parts if part.tokens]


def _columns(pairs: list[tuple[Any, Any] | None]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    found = [pair for pair in pairs if pair is not None]
    return tuple(k for k, _ in found), tuple(v for _, v in found)


def encode_recent(
    segment: Segment, fmt: Format[Any], generator: Generator, books: Codebooks
) -> tuple[Segment, Codebooks, dict[int, Tensor]]:
    """A recent BF16 chunk encoded with the guide that it was given when it came.

    Also the power of its residuals by slot, as `PendingWrite` has it.
    """
    guide = segment.guide
    if guide is None:
        raise ValueError("only a recent chunk, which has a guide, can be encoded")
    spans, pairs, powers = [], {}, {}
    for slot, (k, v) in enumerate(zip(segment.keys, segment.values, strict=True)):
        encoded, pairs[slot] = encode_pair(fmt, generator, slot, k.values, v.values, guide, books)
        spans.append(encoded)
        power = residual_power(fmt, encoded, (k.values, v.values))
        if power is not None:
            powers[slot] = power
    keys, values = _columns(spans)
    packed = replace(segment, kind="packed", fmt=fmt, keys=keys, values=values, guide=None)
    books = Codebooks(guide.span.number, pairs)
    return replace(packed, span=guide.span.number), books, powers

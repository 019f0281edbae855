"""What the history becomes when a chunk is committed: its guide, and the segments with it in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Generator, Tensor

from quantwm.cache.chunk import Codebooks, OpenChunk, chunk_segments, encode_recent
from quantwm.cache.codebook_life import BookFit, CodebookLife, outliving, shared_bytes
from quantwm.cache.formats.base import Format, Learner
from quantwm.cache.positions import TokenPositions
from quantwm.cache.segments import ChunkGuide, Segment, SpanPlan, append_packed
from quantwm.cache.spec import CachePolicy, CacheSpec
from quantwm.cache.statistics import QueryStatistics
from quantwm.cache.unrotation import KeyTurns, wants_unrotated


@dataclass(frozen=True)
class Past:
    """What finished chunks left: all that a new one is encoded from and joined to.

    Attributes:
        segments: the history.
        books: the newest codebooks.
        span: the codebook span that is open.
        fit: how well codebooks and basis fit, where they may outlive spans.
        learner: of a format that learns.
    """

    segments: Sequence[Segment]
    books: Codebooks
    span: SpanPlan
    fit: BookFit
    learner: Learner | None


def guide_for(
    chunk: OpenChunk,
    past: Past,
    statistics: QueryStatistics,
    spec: CacheSpec,
    fmt: Format[Any],
    policy: CachePolicy,
) -> ChunkGuide:
    """Span, weights and basis of the open chunk, from past chunks only."""
    span, rest = past.span, chunk.tokens - chunk.sink_tokens
    if not rest:
        return ChunkGuide(span, None)
    lesson = learned = weights = None
    first = chunk.first_frame * spec.tokens_per_frame + chunk.sink_tokens
    positions = TokenPositions(first, rest)
    if wants_unrotated(fmt):
        learned = KeyTurns.of(spec.rope, positions)
    full = span.number < 0 or span.tokens + rest > policy.span_tokens
    if past.learner is not None:
        lesson = past.learner.lesson(span.lesson)
        learned = past.learner.guide(lesson, positions)
        full = full or getattr(lesson, "key", None) != getattr(span.lesson, "key", None)
    life = outliving(fmt)
    anew = ANEW if life is None else _anew(past, life, fmt, spec, rest, full)
    last_basis = span.basis
    if full or anew.books:
        span = _opened(past, anew)
    span = replace(span, lesson=lesson)
    if fmt.uses_queries:
        weights = statistics.sensitivity() if fmt.full_moment else statistics.weights()
    if fmt.rank and span.basis is None:
        basis, eigenvalues = statistics.bases(fmt.rank, last_basis) or (None, None)
        made = {"basis": basis, "eigenvalues": eigenvalues, "basis_span": span.number}
        span = replace(span, **made)
    return ChunkGuide(replace(span, tokens=span.tokens + rest), weights, learned)


@dataclass(frozen=True)
class Anew:
    """What a new span makes anew: these codebooks (None for all), and whether the basis too."""

    books: tuple[int, ...] | None
    basis: bool


ANEW = Anew(None, True)
"""Everything, as published."""


def _anew(
    past: Past, life: CodebookLife, fmt: Format[Any], spec: CacheSpec, rest: int, full: bool
) -> Anew:
    """What no longer fits, as far as the bits go, were a chunk of `rest` tokens to open a span."""
    seen = past.span.before + past.span.tokens
    if not full and past.span.tokens < min(life.refit_after, seen / 2):
        return Anew((), False)
    encoded = [segment for segment in past.segments if segment.encoded]
    spans = [span for segment in encoded for span in (*segment.keys, *segment.values)]
    tokens = sum(segment.tokens for segment in encoded) + rest
    heads = spec.heads * spec.layers * len(spec.streams)
    free = life.allowed_bits(tokens, seen + rest) * heads / 8 - shared_bytes(fmt, spans)
    basis = past.span.basis
    if basis is None:
        free -= heads * spec.head_dim * fmt.rank * 2  # the first one is still to come
    moved = basis is not None and past.fit.basis_moved() and basis.nbytes <= free
    if moved:
        free -= basis.nbytes
    room = int(free // fmt.book_bytes(spec.heads, spec.head_dim))
    return Anew(past.fit.wanted(life.refit_above, room), moved)


def _opened(past: Past, anew: Anew) -> SpanPlan:
    """The next span, with the last one's basis where that is not made anew."""
    place = {"number": past.span.number + 1, "before": past.span.before + past.span.tokens}
    if past.span.basis is None or anew.basis:
        return SpanPlan(**place, tokens=0, refits=anew.books)
    return replace(past.span, **place, tokens=0, refits=anew.books)


def grown(
    past: Past,
    chunk: OpenChunk,
    guide: ChunkGuide,
    fmt: Format[Any],
    policy: CachePolicy,
    tokens_per_frame: int,
    generator: Generator,
    keep: Tensor | None,
) -> tuple[list[Segment], Codebooks, dict[int, Tensor]]:
    """Segments and codebooks with the open chunk in them; the ones given are left untouched.

    Also the power of the residuals that were encoded, by slot (see `PendingWrite`).
    """
    segments, books = list(past.segments), past.books
    stay_recent = policy.recent_chunks > 0
    for added in chunk_segments(chunk, guide, fmt, tokens_per_frame, stay_recent, keep):
        if added.kind == "packed":
            segments = append_packed(segments, added)
        else:
            segments.append(added)
    writes = chunk.writes.items()
    powers = {slot: write.power for slot, write in writes if write.power is not None}
    fitted = {slot: write.books for slot, write in writes if write.books}
    if fitted:
        books = Codebooks(guide.span.number, fitted)
    while sum(s.kind == "recent" for s in segments) > policy.recent_chunks:
        place = next(i for i, s in enumerate(segments) if s.kind == "recent")
        packed, books, powers = encode_recent(segments[place], fmt, generator, books)
        segments = append_packed(segments[:place] + segments[place + 1 :], packed)
    return segments, books, powers

"""What the history becomes when a chunk is committed: its guide, and the segments with it in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Generator, Tensor

from quantwm.cache.chunk import Codebooks, OpenChunk, chunk_segments, encode_recent
from quantwm.cache.formats.base import Format, Learner
from quantwm.cache.positions import TokenPositions
from quantwm.cache.segments import ChunkGuide, Segment, SpanPlan, append_packed
from quantwm.cache.spec import CachePolicy
from quantwm.cache.statistics import QueryStatistics


def guide_for(
    chunk: OpenChunk,
    span: SpanPlan,
    fmt: Format[Any],
    policy: CachePolicy,
    statistics: QueryStatistics,
    learner: Learner | None = None,
    tokens_per_frame: int = 1,
) -> ChunkGuide:
    """Span, weights and basis of the open chunk, from past chunks only."""
    rest, weights, learned = chunk.tokens - chunk.sink_tokens, None, None
    if rest:
        lesson, full = None, span.number < 0 or span.tokens + rest > policy.span_tokens
        if learner is not None:
            first = chunk.first_frame * tokens_per_frame + chunk.sink_tokens
            lesson = learner.lesson(span.lesson)
            learned = learner.guide(lesson, TokenPositions(first, rest))
            full = full or getattr(lesson, "key", None) != getattr(span.lesson, "key", None)
        last_basis = span.basis
        if full:
            span = SpanPlan(number=span.number + 1, tokens=0)
        span = replace(span, lesson=lesson)
        if fmt.uses_queries:
            weights = statistics.sensitivity() if fmt.full_moment else statistics.weights()
        if fmt.rank and span.basis is None:
            basis, eigenvalues = statistics.bases(fmt.rank, last_basis) or (None, None)
            span = replace(span, basis=basis, eigenvalues=eigenvalues)
    return ChunkGuide(replace(span, tokens=span.tokens + rest), weights, learned)


def grown(
    segments: Sequence[Segment],
    books: Codebooks,
    chunk: OpenChunk,
    guide: ChunkGuide,
    fmt: Format[Any],
    policy: CachePolicy,
    tokens_per_frame: int,
    generator: Generator,
    keep: Tensor | None,
) -> tuple[list[Segment], Codebooks]:
    """Segments and codebooks with the open chunk in them; the ones given are left untouched."""
    segments = list(segments)
    stay_recent = policy.recent_chunks > 0
    for added in chunk_segments(chunk, guide, fmt, tokens_per_frame, stay_recent, keep):
        if added.kind == "packed":
            segments = append_packed(segments, added)
        else:
            segments.append(added)
    fitted = {slot: write.books for slot, write in chunk.writes.items() if write.books}
    if fitted:
        books = Codebooks(guide.span.number, fitted)
    while sum(s.kind == "recent" for s in segments) > policy.recent_chunks:
        place = next(i for i, s in enumerate(segments) if s.kind == "recent")
        packed, books = encode_recent(segments[place], fmt, generator, books)
        segments = append_packed(segments[:place] + segments[place + 1 :], packed)
    return segments, books

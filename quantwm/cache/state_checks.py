"""What a saved cache's state must be: frames, segments, codebooks, statistics, generator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor

from quantwm.cache.codebook_life import BookFit
from quantwm.cache.formats.base import Role
from quantwm.cache.formats.qtc_correlations import Correlations
from quantwm.cache.formats.qtc_lesson import LearnedGuide, Lesson
from quantwm.cache.formats.qtc_statistics import Moments, QueryMoment, SlotStatistics
from quantwm.cache.segments import ChunkGuide, Segment, SpanPlan
from quantwm.cache.span_checks import (
    Place,
    Wanted,
    basis_tensors,
    codebook_tensors,
    not_negative,
    position_tensors,
    span_tensors,
    turn_tensors,
)
from quantwm.cache.unrotation import wants_unrotated

MAX_FRAME = 2**40
MAX_GAP = 2**16
"""Frames between two chunks of which every token was dropped. What is joined behind a gap counts
its frames one by one, so a gap of 2**40 frames would be a list of as many."""
LARGEST = 1e15
"""Of statistics: beyond it sums and squares leave float32, and bases are NaN."""
_ROLES: tuple[Role, Role] = ("keys", "values")


def state_tensors(state: Any, cache: Any) -> list[Wanted]:
    """Every tensor of a SavedState with what it must be. ValueError where a plain field is wrong.

    cache: a new one of the right settings.
    """
    wanted = _segments(state.segments, state, cache)
    wanted += _books(state.books.pairs, cache)
    wanted += _span_plan(state.span, cache)
    _fit(state.fit, state.span, cache)
    wanted += _statistics(state.statistics, cache)
    wanted += _learner(state.learner, cache)
    fresh = cache._generator.get_state()
    wanted.append(Wanted("generator", state.generator, fresh.dtype, tuple(fresh.shape)))
    if set(state.companions) != set(cache._companions):
        raise ValueError("companion streams other than the cache's")
    for name, companion in state.companions.items():
        if type(companion) is not type(state):
            raise ValueError(f"companion {name} is no state of a cache")
        wanted += state_tensors(companion, cache._companions[name])
    return wanted


def _slots(cache: Any) -> int:
    return cache.spec.layers * len(cache.spec.streams)


def _segments(segments: Sequence[Segment], state: Any, cache: Any) -> list[Wanted]:
    origin, stop = state.origin, state.next_frame
    if (origin is None) != (stop is None) or (segments and stop is None):
        raise ValueError("frames without a beginning or an end")
    if origin is not None and not 0 <= origin <= stop < MAX_FRAME:
        raise ValueError(f"frames from {origin} to {stop}")
    order = ["sink", "packed", "recent"]
    kinds = [segment.kind for segment in segments]
    if kinds != sorted(kinds, key=order.index):
        raise ValueError("segments that are not sink, packed, recent")
    if kinds.count("recent") > cache.policy.recent_chunks:
        raise ValueError("more recent chunks than the policy keeps")
    ends = [(s.first_frame, s.stop_frame) for s in segments if s.kind != "sink"]
    if any(later[0] - ended > MAX_GAP for (_, ended), later in pairwise([*ends, (stop, stop)])):
        raise ValueError(f"a gap of more than {MAX_GAP:,} frames")
    before = 0 if origin is None else origin
    wanted: list[Wanted] = []
    for segment in segments:
        if segment.first_frame < before or not segment.frame_tokens:
            raise ValueError(f"frames out of order at {segment.first_frame}")
        before = segment.stop_frame
        wanted += _segment(segment, state, cache)
    if segments and before > stop:
        raise ValueError(f"frames up to {before} in a cache that ends at {stop}")
    return wanted


def _segment(segment: Segment, state: Any, cache: Any) -> list[Wanted]:
    per_frame = cache.spec.tokens_per_frame
    if any(not 0 <= count <= per_frame for count in segment.frame_tokens) or not segment.tokens:
        raise ValueError(f"frames of other than 1 to {per_frame} tokens")
    sink_stop = state.origin + cache.policy.sink_frames
    if (segment.kind == "sink") != (segment.first_frame < sink_stop):
        raise ValueError("a sink that is not at the beginning")
    packed = segment.kind == "packed" or (segment.kind == "sink" and cache.policy.compress_sink)
    if packed != (segment.fmt is cache.fmt) or (packed != (0 <= segment.span <= state.span.number)):
        raise ValueError(f"a {segment.kind} segment in another format or span")
    if (segment.kind == "recent") != (segment.guide is not None):
        raise ValueError("a guide that is not of a recent chunk")
    wanted: list[Wanted] = []
    for role, spans in zip(_ROLES, (segment.keys, segment.values), strict=True):
        if len(spans) != _slots(cache):
            raise ValueError(f"{len(spans)} spans of {role} in {_slots(cache)} slots")
        place = Place(segment.fmt, role, segment.tokens, cache.spec, _frames(segment))
        for span in spans:
            wanted += span_tensors(span, place)
    return wanted if segment.guide is None else wanted + _guide(segment.guide, segment, cache)


def _frames(segment: Segment) -> range:
    return range(segment.first_frame, segment.stop_frame)


def _books(pairs: Mapping[Any, Any], cache: Any) -> list[Wanted]:
    wanted: list[Wanted] = []
    for slot, books in pairs.items():
        if not 0 <= slot < _slots(cache):
            raise ValueError(f"a codebook of slot {slot}")
        for role, book in zip(_ROLES, books, strict=True):
            if book is not None:
                if not hasattr(cache.fmt.config, "centroids"):
                    raise ValueError(f"a codebook in {cache.fmt.name}")
                wanted += codebook_tensors(book, Place(cache.fmt, role, 0, cache.spec))
    return wanted


def _span_plan(span: SpanPlan, cache: Any) -> list[Wanted]:
    halved = (span.basis is None) != (span.eigenvalues is None)
    if span.number < -1 or min(span.tokens, span.before) < 0 or halved:
        raise ValueError("a codebook span that cannot be")
    if span.basis_span < -1 or span.basis_span > span.number:
        raise ValueError("a basis of a span to come")
    _places(span.refits or (), cache)
    wanted: list[Wanted] = []
    if span.basis is not None and span.eigenvalues is not None:
        heads, dim, rank = cache.spec.heads, cache.spec.head_dim, cache.fmt.rank
        shape = (_slots(cache), heads, dim, rank)
        wanted.append(Wanted("basis", span.basis, torch.bfloat16, shape))
        wanted.append(
            Wanted(
                "eigenvalues",
                span.eigenvalues,
                torch.float32,
                (_slots(cache), heads, rank),
                not_negative,
            )
        )
    return wanted + _lesson(span.lesson, cache)


def _places(places: Iterable[int], cache: Any) -> None:
    if any(not 0 <= place < 2 * _slots(cache) for place in places):
        raise ValueError("a codebook of a slot that is not there")


def _fit(fit: BookFit, span: SpanPlan, cache: Any) -> None:
    _places((*fit.newest, *fit.fitted), cache)
    numbers = (*fit.newest.values(), *fit.fitted.values(), fit.share, fit.share_then)
    if any(not 0.0 <= number < float("inf") for number in numbers) or fit.basis > span.number:
        raise ValueError("a fit of codebooks that cannot be")


def _guide(guide: ChunkGuide, segment: Segment, cache: Any) -> list[Wanted]:
    wanted = _span_plan(guide.span, cache)
    if guide.weights is not None:
        dim = cache.spec.head_dim
        shape = (_slots(cache), cache.spec.heads, dim)
        shape = (*shape, dim) if cache.fmt.full_moment else shape
        check = None if cache.fmt.full_moment else not_negative
        wanted.append(Wanted("weights", guide.weights, torch.float32, shape, check))
    learned = guide.learned
    place = Place(cache.fmt, "keys", segment.tokens, cache.spec, _frames(segment))
    if wants_unrotated(cache.fmt):
        return wanted + turn_tensors(learned, place, True)
    if (learned is not None) != (cache._learner is not None):
        raise ValueError("a guide with another learner")
    if learned is None:
        return wanted
    if not isinstance(learned, LearnedGuide) or len(learned.queries) != _slots(cache):
        raise ValueError("a guide of other slots")
    horizon = cache._learner.coding.horizon_frames
    if learned.rope not in (None, cache.spec.rope) or learned.horizon_frames != horizon:
        raise ValueError("a guide of other positions")
    wanted += position_tensors(learned.positions, place)
    wanted += [w for queries in learned.queries for w in _queries(queries, cache)]
    return wanted + _lesson(learned.lesson, cache)


def _lesson(lesson: Any, cache: Any) -> list[Wanted]:
    if lesson is None:
        return []
    slots = _slots(cache)
    if not isinstance(lesson, Lesson) or cache._learner is None or lesson.generation < 1:
        raise ValueError("a lesson of another format")
    if {len(lesson.keys), len(lesson.values), len(lesson.promised)} != {slots}:
        raise ValueError("a lesson of other slots")
    heads = cache.spec.heads
    if any(len(costs) != heads or min(costs, default=0.0) < 0 for costs in chain(*lesson.promised)):
        raise ValueError("a lesson that promises costs of other heads")
    place = Place(cache.fmt, "keys", 0, cache.spec)
    return [w for basis in (*lesson.keys, *lesson.values) for w in basis_tensors(basis, place)]


def _statistics(found: Mapping[str, Any], cache: Any) -> list[Wanted]:
    """By the names of a new cache's: counts and settings like its own, tensors by their shape."""
    own = {n: v for n, v in vars(cache._statistics).items() if not n.startswith("_")}
    if set(found) != set(own):
        raise ValueError(f"statistics other than {', '.join(own)}")
    heads, dim = cache.spec.heads, cache.spec.head_dim
    shapes = cache._statistics.shapes()
    wanted: list[Wanted] = []
    for name, value in found.items():
        if isinstance(value, Tensor):
            if name not in shapes:
                raise ValueError(f"a tensor as statistics {name}")
            wanted.append(Wanted(f"statistics {name}", value, *shapes[name], _modest))
        elif name == "count":
            if type(value) is not int or not 0 <= value < 2**53:
                raise ValueError(f"a count of {str(value)[:20]} queries")
        elif value != own[name]:
            raise ValueError(f"statistics {name} of another kind")
    held = [name for name in shapes if isinstance(found.get(name), Tensor)]
    if held not in ([], list(shapes)) or (found["count"] > 0 and not held and heads * dim > 0):
        raise ValueError("statistics that are not whole")
    return wanted


def _learner(found: Sequence[SlotStatistics] | None, cache: Any) -> list[Wanted]:
    if (found is not None) != (cache._learner is not None):
        raise ValueError("another learner than the format's")
    if found is None:
        return []
    if len(found) != _slots(cache):
        raise ValueError("a learner of other slots")
    heads = cache.spec.heads
    wanted: list[Wanted] = []
    for slot in found:
        wanted += _moments(slot.keys, cache) + _moments(slot.values, cache)
        wanted += _queries(slot.queries, cache)
        shape = (2, heads) if slot.residual.numel() else (0,)
        if slot.residual_count < 0 or slot.asked_at < 0:
            raise ValueError("a learner with counts below 0")
        wanted.append(Wanted("residual", slot.residual, torch.float64, shape, not_negative))
    return wanted


def _moments(moments: Moments, cache: Any) -> list[Wanted]:
    heads, dim = cache.spec.heads, cache.spec.head_dim
    known = moments.total.numel() > 0
    if moments.count < 0 or known != (moments.count > 0):
        raise ValueError("moments of another count")
    total, outliers = ((heads, dim), (1,)) if known else ((0,), (0,))
    return [
        Wanted("outliers", moments.outliers, torch.int64, outliers, not_negative),
        Wanted("total", moments.total, torch.float32, total, _modest),
        *_correlations("scatter", moments.scatter, known, cache),
    ]


def _queries(queries: QueryMoment, cache: Any) -> list[Wanted]:
    known = queries.moment.deviations.numel() > 0
    if queries.count < 0 or known != (queries.count > 0):
        raise ValueError("a query moment of another count")
    return _correlations("moment", queries.moment, known, cache)


def _correlations(what: str, found: Correlations, known: bool, cache: Any) -> list[Wanted]:
    heads, dim = cache.spec.heads, cache.spec.head_dim
    shapes = ((heads, dim), (heads, dim * (dim + 1) // 2)) if known else ((0,), (0,))
    return [
        Wanted(f"{what}'s deviations", found.deviations, torch.float32, shapes[0], _small),
        Wanted(f"{what}'s correlations", found.codes, torch.int16, shapes[1]),
    ]


def _modest(tensor: Tensor) -> bool:
    return bool((tensor.float().abs() <= LARGEST).all())


def _small(tensor: Tensor) -> bool:
    return not_negative(tensor) and _modest(tensor)

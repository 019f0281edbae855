"""What finalize_chunk makes of an open chunk: built first, read once, then put in place.

All that the host must know of the device (whether writes were finite, how many PSAC rows are kept,
how well codebooks fit) is asked for while building and read together, for all layers, streams and
companions: one host synchronisation a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Generator, Tensor

from quantwm.cache import checks
from quantwm.cache.chunk import Codebooks, OpenChunk
from quantwm.cache.codebook_life import BookFit, outliving
from quantwm.cache.formats.base import Format
from quantwm.cache.growth import Past, grown
from quantwm.cache.reading import first_visible
from quantwm.cache.segments import ChunkGuide, evict
from quantwm.cache.settling import Settling, read
from quantwm.cache.spec import CachePolicy, CacheSpec
from quantwm.cache.statistics import QueryStatistics


@dataclass(frozen=True)
class Built:
    """A chunk's commit but for what the device has to say.

    Attributes:
        questions: numbers on the device, in tensors of any shape.
        finish: takes them, flat and in order, and gives what is to be.
    """

    questions: tuple[Tensor, ...]
    finish: Callable[[Sequence[float]], Past]


def build(
    chunk: OpenChunk,
    past: Past,
    guide: ChunkGuide,
    statistics: QueryStatistics,
    spec: CacheSpec,
    fmt: Format[Any],
    policy: CachePolicy,
    generator: Generator,
    keep: Tensor | None,
) -> Built:
    """The history with the open chunk in it and without what the next one cannot see."""
    segments, books, powers = grown(
        past, chunk, guide, fmt, policy, spec.tokens_per_frame, generator, keep
    )
    next_stop = chunk.stop_frame + spec.frames_per_chunk
    segments = evict(segments, first_visible(policy, next_stop))
    settling = Settling.of(segments, past.segments)
    learner = past.learner
    if learner is not None:
        learner = learner.with_chunk({slot: w.learned for slot, w in chunk.writes.items()})
        learner.begin(guide.span.lesson)
    flags, share = checks.flags(chunk), None
    if outliving(fmt) is not None and guide.span.basis is not None:
        share = statistics.share(guide.span.basis)
    parts = (flags, settling.questions, tuple(powers.values()), () if share is None else (share,))
    sizes = [sum(question.numel() for question in part) for part in parts]

    def finish(answers: Sequence[float]) -> Past:
        found = iter(answers)
        finite, counts, power, shares = ([next(found) for _ in range(size)] for size in sizes)
        checks.check_flags(chunk, finite)
        places = [2 * slot + role for slot in powers for role in (0, 1)]
        fit = _fit(past, books, dict(zip(places, power, strict=True)))
        if shares:
            fit = fit.with_share(shares[0], guide.span.basis_span)
        return Past(settling.finish(counts), books, guide.span, fit, learner)

    return Built(tuple(question for part in parts for question in part), finish)


def _fit(past: Past, books: Codebooks, powers: dict[int, float]) -> BookFit:
    """powers: by `codebook_life.Place`."""
    before = past.books.pairs
    fitted = [
        place
        for place in powers
        if books.pairs[place // 2][place % 2] is not before.get(place // 2, (None, None))[place % 2]
    ]
    return past.fit.after(powers, fitted) if powers else past.fit


def finish_all(built: Sequence[Built]) -> list[Past]:
    """What each is to be, with one read for all."""
    answers = read([question for one in built for question in one.questions])
    found = []
    for one in built:
        count = sum(question.numel() for question in one.questions)
        found.append(one.finish(answers[:count]))
        answers = answers[count:]
    return found

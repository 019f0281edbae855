"""`Ledger`: every byte that a cache holds, by part, and the two ratios that must not be mixed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from quantwm.cache.chunk import Codebooks
from quantwm.cache.codebook_life import Lasting
from quantwm.cache.formats.base import Learner, Learns, storage_bytes
from quantwm.cache.segments import ChunkGuide, Segment, SpanPlan
from quantwm.cache.spec import CacheSpec
from quantwm.cache.statistics import QueryStatistics

PARTS = (
    "codes",
    "scales",
    "secondary_scales",
    "zeros",
    "ids",
    "codebooks",
    "bases",
    "coefficients",
    "gains",
    "means",
    "positions",
    "bf16",
    "bf16_sink",
    "bf16_recent",
    "statistics",
)
"""bf16 is the history of the bf16 format; bf16_sink and bf16_recent are BF16 by policy. qtc has
gains, means, and positions (of tokens with gaps between them, encoded or still to be)."""


@dataclass(frozen=True)
class Ledger:
    """Bytes by part.

    Attributes:
        parts: part -> bytes held between chunks, parts that hold nothing left out.
        tokens: tokens of history; bf16_bytes: what they would take in BF16, all layers.
        compressed_bf16_bytes: the same for the tokens that are in the cache's format.
        nominal_bytes: of those tokens, packed, as papers count (codebooks and bases in, PSAC rows
            dense, statistics out; what spans share, once).
        pending_bytes: of the open chunk's clean pass, until it is committed.
        making_bytes: of what is made beside the stream and no chunk has asked for yet: what is
            there once it is made, until then the most that it can be. Not part of `total`, and of
            no equality: it alone depends on how fast the worker is.
        scratch_bytes: of the shared scratch of one layer, and on a CPU of the histories that are
            kept from pass to pass of a chunk; transient and not part of `total`.
    """

    parts: Mapping[str, int]
    tokens: int
    bf16_bytes: int
    compressed_bf16_bytes: int
    nominal_bytes: int
    pending_bytes: int
    making_bytes: int = field(compare=False)
    scratch_bytes: int

    @property
    def total(self) -> int:
        """Bytes held between chunks."""
        return sum(self.parts.values())

    @property
    def nominal_ratio(self) -> float | None:
        """BF16 over packed bytes of the compressed tokens; None before anything is encoded."""
        return self.compressed_bf16_bytes / self.nominal_bytes if self.nominal_bytes else None

    @property
    def resident_ratio(self) -> float:
        """BF16 bytes of all tokens over everything held; 1.0 while nothing is held."""
        return self.bf16_bytes / self.total if self.total else 1.0


def beside_spans(
    segments: Sequence[Segment],
    span: SpanPlan,
    books: Codebooks,
    statistics: QueryStatistics,
    learner: Learner | None,
) -> list[tuple[str, Tensor]]:
    """What past chunks taught, by part: held beside the spans, to encode the next ones."""
    found = [("statistics", tensor) for tensor in statistics.tensors()]
    guides = [segment.guide for segment in segments if segment.guide is not None]
    for guide in (ChunkGuide(span, None), *guides):
        found.extend(("statistics", tensor) for tensor in guide.statistics())
        found.extend(("positions", tensor) for tensor in guide.places())
        found.extend(("bases", tensor) for tensor in guide.bases())
    if learner is not None:
        found.extend(("statistics", tensor) for tensor in learner.tensors())
    for pair in books.pairs.values():
        found.extend(("codebooks", t) for book in pair if book is not None for t in book.tensors())
    return found


def take_stock(
    spec: CacheSpec,
    segments: Sequence[Segment],
    extra: Iterable[tuple[str, Tensor]],
    pending: Iterable[Tensor],
    learner: Learner | None,
    scratch: Iterable[Tensor],
) -> Ledger:
    """Count live storages once each, under the first part that holds them."""
    made, to_come = ((), 0) if learner is None else learner.in_work()
    seen: set[int] = set()

    def unseen_bytes(tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0 or storage.data_ptr() in seen:
            return 0
        seen.add(storage.data_ptr())
        return storage.nbytes()

    counted = dict.fromkeys(PARTS, 0)
    nominal = compressed = 0
    shared: dict[int, Tensor] = {}
    lasting: set[tuple[int, torch.Size]] = set()
    for segment in segments:
        for part, tensor in segment.parts():
            counted[part] += unseen_bytes(tensor)
        if segment.encoded:
            compressed += segment.tokens
            spans = (*segment.keys, *segment.values)
            nominal += sum(segment.fmt.nominal_bytes(span) for span in spans)
            if isinstance(segment.fmt, Learns):
                shared.update((id(t), t) for span in spans for t in segment.fmt.shared(span))
            elif isinstance(segment.fmt, Lasting):
                nominal -= _counted_twice(segment.fmt, spans, lasting)
    for part, tensor in extra:
        counted[part] += unseen_bytes(tensor)
    per_token = spec.bf16_bytes_per_token * len(spec.streams)
    tokens = sum(segment.tokens for segment in segments)
    return Ledger(
        parts={part: held for part, held in counted.items() if held},
        tokens=tokens,
        bf16_bytes=tokens * per_token,
        compressed_bf16_bytes=compressed * per_token,
        nominal_bytes=nominal + storage_bytes(list(shared.values())),
        pending_bytes=sum(map(unseen_bytes, pending)),
        making_bytes=sum(map(unseen_bytes, made)) + to_come,
        scratch_bytes=sum(map(unseen_bytes, scratch)),
    )


def _counted_twice(fmt: Lasting, spans: Iterable[Any], seen: set[tuple[int, torch.Size]]) -> int:
    """Bytes of codebooks and bases that spans before these hold too; `seen` learns the others."""
    again = 0
    for span in spans:
        for tensor in fmt.shared(span):
            key = tensor.data_ptr(), tensor.shape
            again += tensor.nbytes if key in seen else 0
            seen.add(key)
    return again


def with_companions(own: Ledger, others: Sequence[Ledger]) -> Ledger:
    """A ledger with companion streams counted in: their bytes, but not as compressed tokens."""
    if not others:
        return own
    parts = dict(own.parts)
    for other in others:
        for part, held in other.parts.items():
            parts[part] = parts.get(part, 0) + held
    return replace(
        own,
        parts={part: parts[part] for part in PARTS if part in parts},
        bf16_bytes=own.bf16_bytes + sum(other.bf16_bytes for other in others),
        pending_bytes=own.pending_bytes + sum(other.pending_bytes for other in others),
    )

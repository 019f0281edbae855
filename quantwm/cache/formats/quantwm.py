"""The `quantwm` format: query-aware centroids, a 4-level affine residual, a low-rank correction.

QuantWM (arXiv 2609.26425). Keys: QSAC picks the centroid (Eq. 6-14), PSAC adds back the error
along the queries' leading directions (Eq. 15-19, App. C, D). Values: nearest centroid and the same
affine residual. Per token and head at D = 128 and rank 8: keys 364 bits, values 284; per span and
head two BF16 codebooks and one BF16 basis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Generator, Tensor

from kernels.format import Side
from quantwm.cache.affine import affine_scales
from quantwm.cache.codebook import codebook_bytes
from quantwm.cache.codebook_life import CodebookLife
from quantwm.cache.dispatch import Decode, note_fallback, ops_for
from quantwm.cache.formats.base import (
    Codebook,
    QueryGuide,
    Role,
    check_clustering,
    check_group,
    storage_bytes,
)
from quantwm.cache.formats.correction import (
    ROW_LIMITS,
    Ahead,
    Correction,
    Room,
    counted,
    dense_all,
    row_bytes,
    settled_corrections,
    stored_rows,
)
from quantwm.cache.formats.quantwm_span import QuantWMSpan, cut_all, join_all
from quantwm.cache.formats.qvg import fit_codebook, require_codebook
from quantwm.cache.pack import packed_bytes as bytes_of_codes
from quantwm.cache.unrotation import KeyTurns
from quantwm.errors import UserError

KEYS = ("given", "unrotated")


@dataclass(frozen=True)
class QuantWMConfig(CodebookLife):
    """Settings; the defaults are the published ones.

    Attributes:
        centroids, group_size, iterations: codebook size, channels a scale, k-means iterations
            (the paper gives none; 2 is what QVG's scripts run).
        qsac, candidates: query-aware assignment of keys, over this many nearest centroids.
        full_moment: those are nearest by the whole query moment, not by its diagonal (Table 10).
        psac, rank: low-rank correction of keys, in this many directions.
        clip: part of a group's range that the four levels span; 1.0 as published.
        keys: "given", or "unrotated": by their positions before anything is fitted to them, turned
            again when they are read. Queries' statistics are then of un-rotated ones.
        coefficients: "int8", or "int4" for half the bytes of PSAC's rows.
        corrected: a session's lane takes off cached scores what errors of keys add to them
            (cache/score_correction.py); nothing that is stored changes.
        compact_statistics: the query moment is kept as a half-precision triangle, a quarter of
            the bytes.
    """

    centroids: int = 256
    group_size: int = 64
    iterations: int = 2
    qsac: bool = True
    candidates: int = 4
    full_moment: bool = False
    psac: bool = True
    rank: int = 8
    clip: float = 1.0
    keys: str = "given"
    coefficients: str = "int8"
    corrected: bool = False
    compact_statistics: bool = False

    def __post_init__(self) -> None:
        check_clustering(self.centroids, self.group_size, self.iterations)
        self.check_life()
        if self.candidates < 1:
            raise UserError(f"candidates must be at least 1, got {self.candidates}")
        if self.rank < 1:
            raise UserError(
                f"rank must be at least 1, got {self.rank}; psac=False turns the correction off"
            )
        if not 0.0 < self.clip <= 1.0:
            raise UserError(f"clip must be above 0 and at most 1, got {self.clip}")
        for name, known in (("keys", KEYS), ("coefficients", tuple(ROW_LIMITS))):
            if getattr(self, name) not in known:
                raise UserError(
                    f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}"
                )


_COMPACT = QuantWMConfig(
    rank=4, clip=0.95, centroid_bits=8, book_bits=42.0, compact_statistics=True
)

PRESETS = {
    "published": QuantWMConfig(),
    "embedded": QuantWMConfig(centroids=64),
    "half-measures": QuantWMConfig(clip=0.7, keys="unrotated", coefficients="int4"),
    "compact": _COMPACT,
    "compact-embedded": replace(_COMPACT, centroids=16, refit_after=768, book_ahead=3072),
    "balanced-embedded": replace(_COMPACT, centroids=16, rank=8, book_bits=90.0, refit_after=384),
}
"""`half-measures`: the published format where docs/beyond.md found it could be better for no more.
`compact`: 6.2x at D = 128 from 28,080 tokens on, whatever the chunks; `balanced`: the published
bytes, spent on codebooks that follow the scene. docs/cache.md has what each costs."""


class QuantWMFormat:
    """x = centroid + (code - zero) * scale, for keys also + basis @ (coefficients * row scale)."""

    name = "quantwm"
    compresses = True
    exact = False

    def __init__(self, config: QuantWMConfig | None = None) -> None:
        self.config = self.life = config or QuantWMConfig()
        self.uses_queries = self.config.qsac or self.config.psac
        self.full_moment = self.config.qsac and self.config.full_moment
        self.rank = self.config.rank if self.config.psac else 0
        self.compact_statistics = self.config.compact_statistics
        self.unrotates = self.config.keys == "unrotated"

    def check(self, head_dim: int) -> None:
        check_group(self.config.group_size, head_dim)
        if self.rank > head_dim:
            raise UserError(f"rank {self.rank} is above head_dim {head_dim}")

    def fit(self, x: Tensor, generator: Generator, warm: Codebook | None) -> Codebook | None:
        return fit_codebook(x, self.config, generator, warm)

    def encode(
        self, x: Tensor, codebook: Codebook | None, role: Role, guide: QueryGuide
    ) -> QuantWMSpan:
        codebook = require_codebook(codebook)
        ops, centroids, config = ops_for(x.device), codebook.dense(), self.config
        basis = guide.basis if role == "keys" and config.psac else None
        if role == "keys" and config.qsac:
            weights = guide.weights
            if weights is None:
                weights = torch.ones(x.shape[0], x.shape[2], device=x.device)
            ids = ops.assign_qsac(x, centroids, weights, config.group_size, config.candidates)
        else:
            ids = ops.assign(x, centroids)
        codes, scales, secondary, zeros, coefficients, row_scales = ops.encode_quantwm(
            x,
            ids,
            centroids,
            config.group_size,
            config.clip,
            basis,
            None if basis is None else guide.eigenvalues,
            ROW_LIMITS[config.coefficients],
        )
        correction = None
        if basis is not None and coefficients is not None and row_scales is not None:
            rows = stored_rows(coefficients, config.coefficients)
            correction = Correction(0, x.shape[1], basis, rows, row_scales, None)
        tokens = (x.shape[1],)
        return QuantWMSpan(
            codes=codes,
            ids=ids,
            scales=scales,
            secondary=secondary.unsqueeze(1),
            # Filled on the device: a copy from the host would wait for all that is queued.
            chunk_stops=torch.full((1,), x.shape[1], dtype=torch.int32, device=x.device),
            chunk_tokens=tokens,
            zeros=zeros,
            codebook=codebook,
            correction=correction,
            turns=self._turns(role, guide, x),
        )

    def _turns(self, role: Role, guide: QueryGuide, x: Tensor) -> KeyTurns | None:
        """Of keys that came without their rotation, as `guide` says."""
        if role != "keys" or not isinstance(guide.learned, KeyTurns):
            return None
        if x.is_cuda:
            note_fallback("quantwm turns un-rotated keys through PyTorch's operations, no kernel")
        return guide.learned

    def join(self, first: QuantWMSpan, second: QuantWMSpan) -> QuantWMSpan:
        return join_all([first], [second])[0]

    def join_all(
        self, firsts: Sequence[QuantWMSpan], seconds: Sequence[QuantWMSpan]
    ) -> list[QuantWMSpan]:
        return join_all(firsts, seconds)

    def cut_all(self, spans: Sequence[QuantWMSpan], start: int, stop: int) -> list[QuantWMSpan]:
        return cut_all(spans, start, stop)

    def for_parting(self, span: QuantWMSpan, count: int) -> QuantWMSpan:
        return replace(span, chunk_stops=span.chunk_stops.repeat(count))

    def parted(
        self, span: QuantWMSpan, books: Sequence[Codebook], guides: Sequence[QueryGuide]
    ) -> list[QuantWMSpan]:
        return span.parted(books, [guide.basis for guide in guides])

    def select(self, span: QuantWMSpan, keep: slice | Tensor) -> QuantWMSpan:
        if isinstance(keep, slice):
            start, stop, _ = keep.indices(span.tokens)
            return cut_all([span], start, stop)[0]
        return span.picked(keep)

    def settle(self, spans: Sequence[QuantWMSpan]) -> list[QuantWMSpan]:
        """PSAC rows dense or sparse, whichever is smaller (App. D.1)."""
        dense = self.dense(spans)
        found, ahead = self.counts(dense)
        return self.settled(dense, torch.cat(found).tolist() if found else [], ahead)

    def dense(self, spans: Sequence[QuantWMSpan]) -> list[QuantWMSpan]:
        """With PSAC rows in their dense form."""
        if all(s.correction is None or s.correction.mask is None for s in spans):
            return list(spans)
        found = iter(dense_all([s.correction for s in spans if s.correction is not None]))
        return [replace(s, correction=next(found)) if s.correction else s for s in spans]

    def counts(self, dense: Sequence[QuantWMSpan]) -> tuple[list[Tensor], Ahead | None]:
        return counted([s.correction for s in dense if s.correction is not None])

    def settled(
        self, dense: Sequence[QuantWMSpan], counts: Sequence[int], ahead: Ahead | None
    ) -> list[QuantWMSpan]:
        found = [s.correction for s in dense if s.correction is not None]
        smallest = settled_corrections(found, counts, ahead)
        return [s if s.correction is None else s.with_correction(next(smallest)) for s in dense]

    def decode_into(
        self, span: QuantWMSpan, out: Tensor, offset: int, start: int, stop: int
    ) -> None:
        span.decode_into(out, offset, start, stop)

    def decode_heads_into(
        self, span: QuantWMSpan, out: Tensor, offset: int, start: int, stop: int, first_head: int
    ) -> None:
        span.decode_into(out, offset, start, stop, first_head)

    def read_from(self, span: QuantWMSpan) -> tuple[Any, Sequence[Tensor]] | None:
        return span.read_from()

    def decode_spread(
        self, span: QuantWMSpan, out: Tensor, offset: int, start: int, stop: int, room: Room
    ) -> bool:
        return span.decode_spread(out, offset, start, stop, room)

    def prepared(self, span: QuantWMSpan) -> Decode | None:
        rows = span.correction
        as_held = (rows is None or rows.is_plain) and span.codebook.scales is None
        return span.decode if as_held and span.turns is None else None

    def side(self, span: QuantWMSpan) -> Side:
        rows = span.correction
        if rows is not None:
            rows = rows.plain()
        packed = (span.codes, span.ids, span.codebook.dense(), span.scales)
        affine = (span.secondary, tuple(accumulate(span.chunk_tokens)), span.zeros)
        if rows is None:
            return Side("affine", None, *packed, *affine)
        correction = (rows.coefficients, rows.row_scales, rows.basis, rows.first)
        return Side("affine", None, *packed, *affine, *correction)

    def tokens(self, span: QuantWMSpan) -> int:
        return span.tokens

    def parts(self, span: QuantWMSpan) -> Mapping[str, Sequence[Tensor]]:
        parts: dict[str, Sequence[Tensor]] = {
            "codes": (span.codes,),
            "scales": (span.scales,),
            "secondary_scales": (span.secondary, span.chunk_stops),
            "zeros": (span.zeros,),
            "ids": (span.ids,),
            "codebooks": span.codebook.tensors(),
        }
        if span.correction is not None:
            parts["coefficients"] = span.correction.row_tensors()
            parts["bases"] = (span.correction.basis,)
        if span.turns is not None and span.turns.places():
            parts["positions"] = span.turns.places()
        return parts

    def power(self, span: QuantWMSpan) -> Tensor:
        return affine_scales(span.scales, span.secondary).square().mean()

    def shared(self, span: QuantWMSpan) -> Sequence[Tensor]:
        rows = span.correction
        return (*span.codebook.tensors(), *(() if rows is None else (rows.basis,)))

    def book_bytes(self, heads: int, head_dim: int) -> int:
        config = self.config
        return heads * codebook_bytes(config.centroids, head_dim, config.centroid_bits)

    def nominal_bytes(self, span: QuantWMSpan) -> int:
        sparse = span.correction
        dense_rows = 0 if sparse is None else sparse.dense_bytes()
        parts = self.parts(span)
        return dense_rows + sum(storage_bytes(parts[p]) for p in parts if p != "coefficients")

    def packed_bytes(
        self, tokens: int, chunks: int, heads: int, head_dim: int, role: Role
    ) -> dict[str, int]:
        groups = head_dim // self.config.group_size
        parts = {
            "codes": tokens * heads * bytes_of_codes(head_dim),
            "scales": tokens * heads * groups,
            "secondary_scales": chunks * (2 * heads + 4),
            "zeros": heads * bytes_of_codes(tokens * groups),
            "ids": tokens * heads,
            "codebooks": self.book_bytes(heads, head_dim),
        }
        if role == "keys" and self.rank:
            row = row_bytes(self.rank, self.config.coefficients) + 2
            parts["coefficients"] = tokens * heads * row
            parts["bases"] = heads * head_dim * self.rank * 2
        return parts

"""The `quantwm` format: query-aware centroids, a 4-level affine residual, a low-rank correction.

QuantWM (arXiv 2609.26425). Keys: QSAC picks the centroid (Eq. 6-14), PSAC adds back the error
along the queries' leading directions (Eq. 15-19, App. C, D). Values: nearest centroid and the same
affine residual. Per token and head at D = 128 and rank 8: keys 364 bits, values 284; per span and
head two BF16 codebooks and one BF16 basis.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Generator, Tensor

from kernels.format import Side
from quantwm.cache.affine import affine_scales
from quantwm.cache.codebook import codebook_bytes
from quantwm.cache.codebook_life import CodebookLife
from quantwm.cache.dispatch import Decode, ops_for
from quantwm.cache.formats.base import (
    Codebook,
    QueryGuide,
    Role,
    check_clustering,
    check_group,
    storage_bytes,
)
from quantwm.cache.formats.correction import (
    Correction,
    cut_corrections,
    join_all_corrections,
    kept_rows,
    settled_corrections,
)
from quantwm.cache.formats.qvg import fit_codebook, require_codebook
from quantwm.cache.formats.rows import cut_rows, join_rows, pick_rows, pick_runs
from quantwm.cache.pack import CODES_PER_BYTE, pack, unpack_range
from quantwm.cache.pack import packed_bytes as bytes_of_codes
from quantwm.errors import UserError


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


_COMPACT = QuantWMConfig(
    rank=4, clip=0.95, centroid_bits=8, book_bits=42.0, compact_statistics=True
)

PRESETS = {
    "published": QuantWMConfig(),
    "embedded": QuantWMConfig(centroids=64),
    "compact": _COMPACT,
    "compact-embedded": replace(_COMPACT, centroids=16, refit_after=768, book_ahead=3072),
    "balanced-embedded": replace(_COMPACT, centroids=16, rank=8, book_bits=90.0, refit_after=384),
}
"""`compact`: 6.2x at D = 128 from 28,080 tokens on, whatever the chunks; `balanced`: the published
bytes, spent on codebooks that follow the scene. docs/cache.md has what each costs."""


@dataclass(frozen=True)
class QuantWMSpan:
    """See docs/architecture.md; chunk_tokens holds the same as chunk_stops, on the host."""

    codes: Tensor
    ids: Tensor
    scales: Tensor
    secondary: Tensor
    chunk_stops: Tensor
    chunk_tokens: tuple[int, ...]
    zeros: Tensor
    codebook: Codebook
    correction: Correction | None

    @cached_property
    def decode(self) -> Decode:
        """Made at the first reading; it holds this span's own tensors and nothing beside them."""
        return self.decoder(self.correction)

    def decoder(self, rows: Correction | None) -> Decode:
        """rows: the span's correction, in its dense form."""
        centroids = self.codebook.dense()
        correction = (None, None, None, 0)
        if rows is not None:
            correction = (rows.coefficients, rows.row_scales, rows.basis, rows.first)
        return ops_for(self.codes.device).prepare_quantwm(
            self.codes,
            self.ids,
            centroids,
            self.scales,
            self.secondary,
            self.chunk_stops,
            self.zeros,
            centroids.shape[2] // self.scales.shape[2],
            *correction,
        )


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
        )
        correction = None
        if basis is not None and coefficients is not None and row_scales is not None:
            correction = Correction(0, x.shape[1], basis, coefficients, row_scales, None)
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
        )

    def join(self, first: QuantWMSpan, second: QuantWMSpan) -> QuantWMSpan:
        return self.join_all([first], [second])[0]

    def join_all(
        self, firsts: Sequence[QuantWMSpan], seconds: Sequence[QuantWMSpan]
    ) -> list[QuantWMSpan]:
        before, after = self.tokens(firsts[0]), self.tokens(seconds[0])
        later_stops = (torch.stack([s.chunk_stops for s in seconds]) + before).split(1)
        stops = join_rows([f.chunk_stops.unsqueeze(0) for f in firsts], later_stops, anywhere=True)
        corrections = join_all_corrections(
            [f.correction for f in firsts], before, [s.correction for s in seconds], after
        )
        parts = (
            join_rows([f.codes for f in firsts], [s.codes for s in seconds]),
            join_rows([f.ids for f in firsts], [s.ids for s in seconds]),
            join_rows([f.scales for f in firsts], [s.scales for s in seconds]),
            join_rows([f.secondary for f in firsts], [s.secondary for s in seconds], anywhere=True),
            [joined.squeeze(0) for joined in stops],
            [f.chunk_tokens + s.chunk_tokens for f, s in zip(firsts, seconds, strict=True)],
            self._join_zeros(firsts, seconds),
            [f.codebook for f in firsts],
            corrections,
        )
        return [QuantWMSpan(*span) for span in zip(*parts, strict=True)]

    def _join_zeros(
        self, firsts: Sequence[QuantWMSpan], seconds: Sequence[QuantWMSpan]
    ) -> list[Tensor]:
        before = firsts[0].scales.shape[1] * firsts[0].scales.shape[2]
        if before % CODES_PER_BYTE == 0:
            return join_rows([f.zeros for f in firsts], [s.zeros for s in seconds])
        after = seconds[0].scales.shape[1] * seconds[0].scales.shape[2]
        codes = (
            (unpack_range(f.zeros, 0, before), unpack_range(s.zeros, 0, after))
            for f, s in zip(firsts, seconds, strict=True)
        )
        return [pack(torch.cat(pair, dim=1)) for pair in codes]

    def cut_all(self, spans: Sequence[QuantWMSpan], start: int, stop: int) -> list[QuantWMSpan]:
        tokens, groups = self.tokens(spans[0]), spans[0].scales.shape[2]
        ends = stop == tokens or stop * groups % CODES_PER_BYTE == 0
        if start >= stop or start * groups % CODES_PER_BYTE or not ends:
            return [self._pick(span, torch.arange(start, stop)) for span in spans]
        # Zeros begin and end with a byte here: ranges of every part, and no host sync.
        stops = list(accumulate(spans[0].chunk_tokens))
        chunks = bisect_right(stops, start), bisect_left(stops, stop) + 1
        kept_stops = [min(s, stop) - start for s in stops[slice(*chunks)]]
        moved = torch.stack([s.chunk_stops for s in spans])[:, slice(*chunks)] - start
        zeros = start * groups // CODES_PER_BYTE, bytes_of_codes(stop * groups)
        parts = (
            cut_rows([s.codes for s in spans], start, stop),
            cut_rows([s.ids for s in spans], start, stop),
            cut_rows([s.scales for s in spans], start, stop),
            cut_rows([s.secondary for s in spans], *chunks, anywhere=True),
            list(moved.clamp_(max=stop - start).unbind(0)),
            [tuple(b - a for a, b in pairwise((0, *kept_stops)))] * len(spans),
            cut_rows([s.zeros for s in spans], *zeros),
            [s.codebook for s in spans],
            cut_corrections([s.correction for s in spans], start, stop),
        )
        return [QuantWMSpan(*span) for span in zip(*parts, strict=True)]

    def select(self, span: QuantWMSpan, keep: slice | Tensor) -> QuantWMSpan:
        if isinstance(keep, slice):
            start, stop, _ = keep.indices(self.tokens(span))
            return self.cut_all([span], start, stop)[0]
        return self._pick(span, keep)

    def _pick(self, span: QuantWMSpan, kept: Tensor) -> QuantWMSpan:
        """Tokens at these positions."""
        tokens, groups = self.tokens(span), span.scales.shape[2]
        chunks, chunk_tokens = pick_runs(span.chunk_tokens, kept)
        stops = torch.tensor(chunk_tokens, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        zeros = unpack_range(span.zeros, 0, tokens * groups).unflatten(1, (tokens, groups))
        correction = span.correction
        return QuantWMSpan(
            codes=pick_rows(span.codes, kept),
            ids=pick_rows(span.ids, kept),
            scales=pick_rows(span.scales, kept),
            secondary=pick_rows(span.secondary, chunks),
            chunk_stops=stops.to(span.codes.device, non_blocking=True),
            chunk_tokens=chunk_tokens,
            zeros=pack(pick_rows(zeros, kept).flatten(1)),
            codebook=span.codebook,
            correction=None if correction is None else correction.select(kept),
        )

    def settle(self, spans: Sequence[QuantWMSpan]) -> list[QuantWMSpan]:
        """PSAC rows dense or sparse, whichever is smaller (App. D.1)."""
        dense = self.dense(spans)
        found = self.counts(dense)
        return self.settled(dense, torch.cat(found).tolist() if found else [])

    def dense(self, spans: Sequence[QuantWMSpan]) -> list[QuantWMSpan]:
        return [
            replace(s, correction=s.correction.dense()) if s.correction is not None else s
            for s in spans
        ]

    def counts(self, dense: Sequence[QuantWMSpan]) -> list[Tensor]:
        return kept_rows([s.correction for s in dense if s.correction is not None])

    def settled(self, dense: Sequence[QuantWMSpan], counts: Sequence[int]) -> list[QuantWMSpan]:
        found = [s.correction for s in dense if s.correction is not None]
        smallest = settled_corrections(found, counts)
        return [
            replace(s, correction=next(smallest)) if s.correction is not None else s for s in dense
        ]

    def decode_into(
        self, span: QuantWMSpan, out: Tensor, offset: int, start: int, stop: int
    ) -> None:
        self.decode_heads_into(span, out, offset, start, stop, 0)

    def decode_heads_into(
        self, span: QuantWMSpan, out: Tensor, offset: int, start: int, stop: int, first_head: int
    ) -> None:
        rows = span.correction
        as_held = (rows is None or rows.mask is None) and span.codebook.scales is None
        # Sparse rows and INT8 centroids are widened for one reading: kept, they would be bytes
        # that nobody counts.
        decode = span.decode if as_held else span.decoder(None if rows is None else rows.dense())
        decode(out, offset, start, stop, first_head)

    def side(self, span: QuantWMSpan) -> Side:
        rows = span.correction
        if rows is not None and rows.mask is not None:
            rows = rows.dense()
        packed = (span.codes, span.ids, span.codebook.dense(), span.scales)
        affine = (span.secondary, tuple(accumulate(span.chunk_tokens)), span.zeros)
        if rows is None:
            return Side("affine", None, *packed, *affine)
        correction = (rows.coefficients, rows.row_scales, rows.basis, rows.first)
        return Side("affine", None, *packed, *affine, *correction)

    def tokens(self, span: QuantWMSpan) -> int:
        return span.ids.shape[1]

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
            parts["coefficients"] = tokens * heads * (self.rank + 2)
            parts["bases"] = heads * head_dim * self.rank * 2
        return parts

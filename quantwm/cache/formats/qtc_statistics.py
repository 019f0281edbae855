"""What past chunks of one layer say about its keys and values; immutable, strictly causal."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantwm.cache.formats.qtc_correlations import Correlations, correlation_bytes
from quantwm.cache.formats.qtc_tokens import Tokens


@dataclass(frozen=True)
class Moments:
    """Of the keys (un-rotated) or the values seen so far.

    Attributes:
        total: float32 [H, D], sum of tokens.
        scatter: mean of (x - m)(x - m)^T, each chunk about its own mean.
        outliers: int64 [1], tokens and heads that did not count in full: far from all others, or
            too large for sums. For `explain` (qtc_doubts.py).
        count: tokens.
    """

    total: Tensor
    scatter: Correlations
    outliers: Tensor
    count: int = 0

    @classmethod
    def empty(cls, device: torch.device) -> Moments:
        nothing = torch.zeros(0, device=device)
        return cls(nothing, Correlations.empty(device), nothing.long())

    def with_chunk(
        self, tokens: Tokens, mass: Tensor | None = None, count: int | None = None
    ) -> Moments:
        """A head whose sums overflow keeps what it knew. mass: float32 [H, N], how much a token's
        scatter counts, mean 1. count: tokens that these stand for; without, themselves."""
        here = tokens.given.shape[1]
        count = here if count is None else count
        mean, weights = tokens.centre()
        outliers = (weights < 1.0).sum(1)
        if mass is not None:
            weights = weights * mass
        scatter = tokens.second_moment(mean, weights)
        total, scatter = count * mean, scatter * (count / here)
        finite = torch.isfinite(total).all(-1) & torch.isfinite(scatter).all(-1).all(-1)
        outliers = torch.where(finite, outliers, here).sum(0, keepdim=True)
        scatter = torch.where(finite[:, None, None], scatter, 0.0)
        return Moments(
            _plus(self.total, torch.where(finite[:, None], total, 0.0)),
            self.scatter.grown(scatter, self.count, count),
            _plus(self.outliers, outliers),
            self.count + count,
        )

    @property
    def mean(self) -> Tensor:
        return self.total / max(self.count, 1)


@dataclass(frozen=True)
class QueryMoment:
    """Mean of q q^T over `count` un-rotated queries."""

    moment: Correlations
    count: int = 0

    def with_chunk(self, queries: Tokens, count: int) -> QueryMoment:
        """count: queries that these stand for."""
        added = queries.second_moment() * (count / queries.given.shape[1])
        finite = torch.isfinite(added).all(-1).all(-1)[:, None, None]
        added = torch.where(finite, added, 0.0)
        return QueryMoment(self.moment.grown(added, self.count, count), self.count + count)


@dataclass(frozen=True)
class SlotStatistics:
    """One layer and stream.

    Attributes:
        keys, values: their moments.
        queries: theirs.
        residual: float64 [2, H], summed cost of the errors of keys and of values over the
            `residual_count` tokens that were encoded since a lesson's `asked_at`.
    """

    keys: Moments
    values: Moments
    queries: QueryMoment
    residual: Tensor
    residual_count: int = 0
    asked_at: int = 0

    @classmethod
    def empty(cls, device: torch.device) -> SlotStatistics:
        """Nothing is allocated before there is something to remember."""
        return cls(
            keys=Moments.empty(device),
            values=Moments.empty(device),
            queries=QueryMoment(Correlations.empty(device)),
            residual=torch.zeros(0, dtype=torch.float64, device=device),
        )

    def with_chunk(
        self,
        k: tuple[Tokens, int],
        v: tuple[Tokens, int],
        q: tuple[Tokens, int] | None,
        mass: Tensor | None = None,
    ) -> SlotStatistics:
        """Tokens, and how many they stand for. mass: of all of the values' tokens."""
        if mass is not None:
            mass = mass[:, :: v[0].step].contiguous()
        values = self.values.with_chunk(v[0], mass, v[1])
        seen = replace(self, keys=self.keys.with_chunk(k[0], None, k[1]), values=values)
        return seen if q is None else replace(seen, queries=self.queries.with_chunk(*q))

    def with_residual(self, cost: Tensor, tokens: int, asked_at: int) -> SlotStatistics:
        """cost: float64 [2, H], summed over `tokens` tokens."""
        if asked_at != self.asked_at:
            return replace(self, residual=cost, residual_count=tokens, asked_at=asked_at)
        return replace(
            self,
            residual=self.residual + cost,
            residual_count=self.residual_count + tokens,
        )

    def tensors(self) -> tuple[Tensor, ...]:
        return (
            self.keys.total,
            *self.keys.scatter.tensors(),
            self.keys.outliers,
            self.values.total,
            *self.values.scatter.tensors(),
            self.values.outliers,
            *self.queries.moment.tensors(),
            self.residual,
        )


def _plus(known: Tensor, added: Tensor) -> Tensor:
    return known + added if known.numel() else added


def statistics_bytes(heads: int, head_dim: int) -> int:
    """What `tensors` of one slot hold once a chunk was encoded in a basis."""
    moments = 3 * correlation_bytes(heads, head_dim)
    return moments + heads * (2 * head_dim * 4 + 2 * 8) + 2 * 8

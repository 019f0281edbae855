"""A correction of cached scores: noise in keys lends cached tokens attention that is not theirs.

A quantized key's score is off by zero on average, but its exponential is not: E[exp(s + e)] =
exp(s + var e / 2) for Gaussian e. Against a chunk whose own keys are exact, cached tokens gain mass
("Quantized Keys Steal Attention"). Here the variance is measured, for any format, and one number a
query and head is taken off; per token it did no better in that paper.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from quantwm.cache.attention import ScoreBias
from quantwm.cache.ledger import Ledger

LIMIT = 2.0
"""Most that is taken off a score: beyond it the expansion overshoots and a head loses its past."""


class ScoreCorrection:
    """A `ScoreBias` for `KVCache.attend`: minus half the variance of a query's cached scores.

    Holds the mean squared error of each channel of cached keys, per layer and stream; the encoder
    has keys exact and decoded once, so nothing is stored with the tokens.
    """

    def __init__(self, limit: float = LIMIT) -> None:
        self._limit = limit
        self._errors: dict[tuple[int, str], tuple[Tensor, int]] = {}

    def learn(self, layer: int, stream: str, exact: Tensor, decoded: Tensor) -> None:
        """Keys of a chunk before and after the cache, [H, N, D]."""
        self.add(layer, stream, squared_errors(exact, decoded), exact.shape[1])

    def add(self, layer: int, stream: str, squares: Tensor, tokens: int) -> None:
        """`squared_errors` of so many tokens."""
        known, count = self._errors.get((layer, stream), (torch.zeros_like(squares), 0))
        self._errors[layer, stream] = known + squares, count + tokens

    def copy(self) -> ScoreCorrection:
        """What it knows, to go on by itself."""
        other = ScoreCorrection(self._limit)
        other._errors = dict(self._errors)
        return other

    @property
    def nbytes(self) -> int:
        """Of what it holds."""
        return sum(squares.nbytes for squares, _ in self._errors.values())

    def __call__(self, layer: int, stream: str, q: Tensor, past: int) -> Tensor:
        """What is added to the scores of `past` cached tokens, [H, Nq, 1]. q: [H, Nq, D]."""
        if (layer, stream) not in self._errors:
            return q.new_zeros(*q.shape[:2], 1)
        squares, count = self._errors[layer, stream]
        variance = (q.float().square() * (squares / count).unsqueeze(1)).mean(-1, keepdim=True)
        return (-variance / 2).clamp(min=-self._limit).to(q.dtype)


def squared_errors(exact: Tensor, decoded: Tensor) -> Tensor:
    """Summed over tokens, float32 [H, D]. exact, decoded: keys [H, N, D]."""
    squares = (decoded.float() - exact.float()).square().sum(1)
    # RoPE turns errors within pairs, and reading turns them on: only a pair's mean stays.
    return squares.unflatten(-1, (-1, 2)).mean(-1).repeat_interleave(2, dim=-1)


class CorrectedCache:
    """A KVCache whose `attend` corrects cached scores by what encoding did to past chunks' keys.

    Everything else passes through. A chunk teaches once it is committed; what of it stays BF16
    teaches nothing. The errors are statistics in the ledger, [H, D] a layer and stream; they are
    not saved with the cache.
    """

    def __init__(self, cache: Any, correction: ScoreCorrection | None = None) -> None:
        self._cache = cache
        self._correction = correction or ScoreCorrection()
        self._pending: dict[tuple[int, str], tuple[Tensor, int]] = {}

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        clean: bool = False,
        stream: str = "self",
        score_bias: ScoreBias | None = None,
    ) -> Tensor:
        """KVCache.attend with corrected scores, unless a bias is given; raises as it does."""
        bias = self._correction if score_bias is None else score_bias
        out = self._cache.attend(layer, q, k, v, clean=clean, stream=stream, score_bias=bias)
        decoded = self._cache.pending_keys(layer, stream) if clean else None
        if decoded is not None:
            exact = k[:, k.shape[1] - decoded.shape[1] :].to(decoded.device)
            self._pending[layer, stream] = squared_errors(exact, decoded), decoded.shape[1]
        return out

    def begin_chunk(self, first_frame: int, frames: int) -> None:
        self._cache.begin_chunk(first_frame, frames)
        self._pending.clear()

    def finalize_chunk(self, keep_mask: Tensor | None = None) -> None:
        self._cache.finalize_chunk(keep_mask)
        for place, measured in self._pending.items():
            self._correction.add(*place, *measured)
        self._pending.clear()

    def abort_chunk(self) -> None:
        self._cache.abort_chunk()
        self._pending.clear()

    def reset(self) -> None:
        self._cache.reset()
        self._correction = ScoreCorrection()
        self._pending.clear()

    def fork(self) -> Self:
        return type(self)(self._cache.fork(), self._correction.copy())

    def ledger(self) -> Ledger:
        held = self._cache.ledger()
        parts = dict(held.parts)
        if self._correction.nbytes:
            parts["statistics"] = parts.get("statistics", 0) + self._correction.nbytes
        pending = sum(squares.nbytes for squares, _ in self._pending.values())
        return replace(held, parts=parts, pending_bytes=held.pending_bytes + pending)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

"""A correction of cached scores: noise in keys lends cached tokens attention that is not theirs.

A quantized key's score is off by zero on average, but its exponential is not: E[exp(s + e)] =
exp(s + var e / 2) for Gaussian e. Against a chunk whose own keys are exact, cached tokens gain mass
("Quantized Keys Steal Attention"). Here the variance is measured, for any format, and one number a
query and head is taken off; per token it did no better in that paper.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
        squares = (decoded.float() - exact.float()).square().sum(1)
        # RoPE turns errors within pairs, and reading turns them on: only a pair's mean stays.
        squares = squares.unflatten(-1, (-1, 2)).mean(-1).repeat_interleave(2, dim=-1)
        known, count = self._errors.get((layer, stream), (torch.zeros_like(squares), 0))
        self._errors[layer, stream] = known + squares, count + exact.shape[1]

    def __call__(self, layer: int, stream: str, q: Tensor, past: int) -> Tensor:
        """What is added to the scores of `past` cached tokens, [H, Nq, 1]. q: [H, Nq, D]."""
        if (layer, stream) not in self._errors:
            return q.new_zeros(*q.shape[:2], 1)
        squares, count = self._errors[layer, stream]
        variance = (q.float().square() * (squares / count).unsqueeze(1)).mean(-1, keepdim=True)
        return (-variance / 2).clamp(min=-self._limit).to(q.dtype)

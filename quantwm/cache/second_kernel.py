"""The noise floor: the same cache, read by a second attention kernel that rounds differently.

A world model amplifies every rounding. What a BF16 lane through this kernel differs by from the
BF16 lane is no cache's doing, and no cache can be told from BF16 below it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quantwm.cache.attention import ScoreBias


class SecondKernelCache:
    """A KVCache whose attention is two matrix products and a softmax, in its dtype; PyTorch's fused
    kernels keep scores and probabilities in FP32. Everything else passes through."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

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
        lasting: bool = False,
    ) -> Tensor:
        """KVCache.attend by the second kernel; raises as it does. lasting: without effect here."""
        keys, values = self._cache.gather(layer, k, v, clean=clean, stream=stream, q=q)
        q = q.to(keys.dtype)
        past = keys.shape[1] - k.shape[1]
        scores = (q * q.shape[2] ** -0.5) @ keys.transpose(1, 2)
        if score_bias is not None and past:
            scores[..., :past] += score_bias(layer, stream, q, past)
        return scores.softmax(dim=-1) @ values

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

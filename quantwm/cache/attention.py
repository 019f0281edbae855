"""Dense attention of one layer over its scratch, with an optional correction of cached scores."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

ScoreBias = Callable[[int, str, Tensor, int], Tensor]
"""(layer, stream, q [H, Nq, D], history tokens n) -> what is added to the scores of the cached
tokens before the softmax, broadcastable to [H, Nq, n]. The current chunk is never corrected."""


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Softmax attention, no mask. q: [H, Nq, D], k and v: [H, Nk, D] -> [H, Nq, D].

    bias: broadcastable to [H, Nq, n], added to the scores of the first n keys.
    """
    mask = None
    if bias is not None:
        mask = torch.zeros(1, q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype, device=q.device)
        mask[0, :, :, : bias.shape[-1]] = bias
    out = functional.scaled_dot_product_attention(
        q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), attn_mask=mask
    )
    return out.squeeze(0)

"""Dense attention of one layer over what its cache shows, staged in the scratch or fused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from quantwm.cache.fused import low_memory_attention
from quantwm.cache.reading import Reading
from quantwm.cache.turns import attend_in_turns
from quantwm.cache.workspace import Workspace

ScoreBias = Callable[[int, str, Tensor, int], Tensor]
"""(layer, stream, q [H, Nq, D], history tokens n) -> what is added to the scores of the cached
tokens before the softmax, broadcastable to [H, Nq, n]. The current chunk is never corrected."""

CUDNN_FLOPS = 5e9
"""Of one head; from here on cuDNN's attention is asked for, the fastest on an H200. It plans anew
for each number of tokens; a chunk has the same number in every layer and pass."""

MASK_ELEMENTS = 1 << 27
"""Scores that a bias is spread over at a time, 256 MB: 40 heads of 4,680 queries over 32,760 keys
together would be 12 GB."""

CPU_SCORES = 1 << 20
"""Scores of a head held at a time on a CPU, whatever the number of heads: 2 MB."""
CPU_SCORES_WORTH = 1 << 15
"""Scores of a head up to which PyTorch's own attention is taken there: too few to be slow, and it
rounds as published models' does, which their golden tensors show in the last bit."""


def attend(reading: Reading, q: Tensor, workspace: Workspace, bias: Tensor | None) -> Tensor:
    """q [H, Nq, D] over all that the reading shows -> [H, Nq, D], in the dtype of q.

    bias: as in `attention`. Staged, heads take turns where all of them would pass the scratch's
    limit; every head's result is the same either way.
    """
    if workspace.mode != "staged":
        out = low_memory_attention(reading, q, workspace, bias)
        if out is not None:
            return out
    group = reading.heads_at_once(workspace, q.dtype)
    heads = q.shape[0]
    if group == heads:
        return attention(q, *reading.kept(workspace, q.dtype), bias)
    return attend_in_turns(
        reading, q, workspace, group,
        lambda some, k, v: attention(q[some], k, v, _of_heads(bias, some, heads)),
    )  # fmt: skip


def _of_heads(bias: Tensor | None, some: slice, heads: int) -> Tensor | None:
    """Of all heads' bias, that of some."""
    own = bias is not None and bias.dim() == 3 and bias.shape[0] == heads
    return bias[some] if own else bias


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Softmax attention, no mask. q: [H, Nq, D], k and v: [H, Nk, D] -> [H, Nq, D].

    bias: broadcastable to [H, Nq, n], added to the scores of the first n keys.
    """
    heads, scores = q.shape[0], q.shape[1] * k.shape[1]
    together = max(MASK_ELEMENTS // max(scores, 1), 1)
    if bias is not None and heads > together:
        out = torch.empty_like(q)
        for first in range(0, heads, together):
            some = slice(first, first + together)
            out[some] = attention(q[some], k[some], v[some], _of_heads(bias, some, heads))
        return out
    worthwhile = q.shape[1] * k.shape[1] >= CPU_SCORES_WORTH
    if worthwhile and q.device.type == "cpu" and q.dtype == torch.bfloat16 and bias is None:
        return _cpu_bf16(q, k, v)
    mask = None
    if bias is not None:
        mask = torch.zeros(1, q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype, device=q.device)
        mask[0, :, :, : bias.shape[-1]] = bias
    with _backend(q, k, mask):
        out = functional.scaled_dot_product_attention(
            q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), attn_mask=mask
        )
    return out.squeeze(0)


def _cpu_bf16(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores, softmax and values as three operations, a block of queries at a time.

    PyTorch's own attention multiplies BF16 in float32 here: on one core with AVX-512 BF16, 3 heads
    of 192 queries and 2,304 keys take 9.1 ms, these products 4.9 ms. Scores round to BF16.
    """
    heads, queries, head_dim = q.shape
    block = max(CPU_SCORES // k.shape[1], 1)
    nothing, turned = q.new_zeros(1), k.transpose(1, 2)
    out = torch.empty((heads, queries, head_dim), dtype=q.dtype)
    for first in range(0, queries, block):
        rows = slice(first, first + block)
        scores = torch.baddbmm(nothing, q[:, rows], turned, beta=0, alpha=head_dim**-0.5)
        out[:, rows] = torch.bmm(scores.softmax(-1), v)
    return out


def _backend(q: Tensor, k: Tensor, mask: Tensor | None) -> AbstractContextManager[None]:
    """cuDNN's attention first where it is the fastest, else what PyTorch prefers.

    A function of the shapes alone, so that equal calls give equal bits whatever ran before.
    """
    if not q.is_cuda or q.dtype != torch.bfloat16 or mask is not None or q.shape[2] > 128:
        return nullcontext()
    flops = 4.0 * q.shape[1] * k.shape[1] * q.shape[2]  # of a head, whatever heads are at once
    if flops < CUDNN_FLOPS or not _has_cudnn_attention(q.device):
        return nullcontext()
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True)


@lru_cache(maxsize=8)
def _has_cudnn_attention(device: torch.device) -> bool:
    """Hopper, where it was measured."""
    return torch.backends.cudnn.is_available() and torch.cuda.get_device_capability(device)[0] == 9

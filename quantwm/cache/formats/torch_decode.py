"""Encoding and decoding through PyTorch's own operations, in blocks: for formats without a kernel.

On a CPU a block is one head's 1,024 tokens, which stay in its L2 cache (quantwm/cache/reference.py
says what was measured). On a GPU launches count and not caches: a block is all heads and as many
tokens as keep its float32 temporaries at 32 MB each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from quantwm.cache.dispatch import note_fallback
from quantwm.cache.pack import unpack
from quantwm.cache.reference import DECODE_BLOCK

GPU_BLOCK_ELEMENTS = 1 << 23

ENCODE_ELEMENTS = 1 << 22
"""Encoded together: temporaries of 16 bytes an element (profiled) are then 64 MB; all 40 heads of
4,680 tokens at once would take 383."""


def in_head_groups(encode: Callable[[Tensor], Sequence[Tensor]], x: Tensor) -> list[Tensor]:
    """encode(x) of some heads at a time, put together. x: [H, N, D]; results begin with heads."""
    together = max(ENCODE_ELEMENTS // max(x[0].numel(), 1), 1)
    parts = [encode(some) for some in x.split(together)]
    return list(parts[0]) if len(parts) == 1 else [torch.cat(p) for p in zip(*parts, strict=True)]


def blocks(out: Tensor, start: int, stop: int) -> Iterator[tuple[slice, slice]]:
    """Heads of `out` and tokens of the span, together all that is asked for. out: [H, any, D]."""
    heads, _, head_dim = out.shape
    if out.is_cuda:
        step = max(GPU_BLOCK_ELEMENTS // (heads * head_dim), 1)
        parts = [slice(0, heads)]
    else:
        step, parts = DECODE_BLOCK, [slice(head, head + 1) for head in range(heads)]
    for part in parts:
        for first in range(start, stop, step):
            yield part, slice(first, min(first + step, stop))


def moved(part: slice, first_head: int) -> slice:
    """Heads of the span that belong to these heads of the buffer."""
    return slice(part.start + first_head, part.stop + first_head)


@lru_cache(maxsize=8)
def _code_table(bits: int, device: torch.device) -> Tensor:
    """[256]: the codes of each byte as float32, two as one complex64 or four as one complex128."""
    codes = unpack(torch.arange(256, dtype=torch.uint8).unsqueeze(-1), 8 // bits, bits).float()
    kind = torch.complex64 if bits == 4 else torch.complex128
    return codes.view(kind).flatten().to(device)


def codes_of(packed: Tensor, bits: int) -> Tensor:
    """uint8 [h, n, bytes] -> the codes, float32 [h, n, D], in storage of their own."""
    heads, tokens, _ = packed.shape
    rows = _code_table(bits, packed.device).index_select(0, packed.int().flatten())
    return rows.view(torch.float32).view(heads, tokens, -1)


def rows_of(table: Tensor, index: Tensor) -> Tensor:
    """table [h, n, ...] at index [h, m] of each head -> [h, m, ...]."""
    heads, count = table.shape[:2]
    first = torch.arange(heads, device=index.device).unsqueeze(-1) * count
    flat = table.reshape(heads * count, *table.shape[2:])
    return flat.index_select(0, (index.long() + first).flatten()).unflatten(0, index.shape)


def say_path(name: str, x: Tensor) -> None:
    """Let `explain` say that a format runs without a kernel of its own on this GPU."""
    if x.is_cuda:
        note_fallback(f"{name} encodes and decodes through PyTorch's operations, no kernel")

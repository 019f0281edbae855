"""The primitives of rtn, kivi and qvg-pro in PyTorch, in blocks: see `group_ops.GroupOps`.

On a CPU a block is one head's 1,024 tokens, which stay in its L2 cache (quantwm/cache/reference.py
says what was measured). On a GPU, where this runs for geometries that no kernel covers, launches
count and not caches: a block is all heads and as many tokens as keep its float32 temporaries at
32 MB each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from quantwm.cache.affine import quantize_real_zero
from quantwm.cache.pack import pack, unpack

DECODE_BLOCK = 1024
"""Tokens decoded together; each of 2 cores then works on 256 KB temporaries, which fit its L2.
Measured on 2 cores of an EPYC (Zen 4), 3 x 2,048 x 128 with PSAC: 256 tokens 2.3 ms, 512 1.7 ms,
1,024 1.3 ms, 2,048 1.4 ms."""

GPU_BLOCK_ELEMENTS = 1 << 23

ENCODE_ELEMENTS = 1 << 22
"""Encoded together: temporaries of 16 bytes an element (profiled) are then 64 MB; all 40 heads of
4,680 tokens at once would take 383."""


def encode_token_groups(x: Tensor, group_size: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    def some_heads(part: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        groups = part.float().unflatten(-1, (-1, group_size))
        codes, scales, zeros = quantize_real_zero(groups, -1, 2**bits)
        return pack(codes.flatten(-2), bits), scales, zeros

    codes, scales, zeros = _in_head_groups(some_heads, x)
    return codes, scales, zeros


def encode_channel_groups(
    x: Tensor, group_size: int, bits: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens = x.shape[1]
    whole = tokens // group_size * group_size

    def some_heads(part: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        groups = [part[:, :whole].unflatten(1, (-1, group_size))] if whole else []
        groups += [part[:, whole:].unsqueeze(1)] if whole < tokens else []
        found = [quantize_real_zero(group.float(), 2, 2**bits) for group in groups]
        codes = torch.cat([codes.flatten(1, 2) for codes, _, _ in found], dim=1)
        scales, zeros = (torch.cat([group[i] for group in found], dim=1) for i in (1, 2))
        return pack(codes, bits), scales, zeros

    codes, scales, zeros = _in_head_groups(some_heads, x)
    stops = torch.arange(1, scales.shape[1] + 1, dtype=torch.int32, device=x.device) * group_size
    return codes, scales, zeros, stops.clamp_(max=tokens)


def _in_head_groups(encode: Callable[[Tensor], Sequence[Tensor]], x: Tensor) -> list[Tensor]:
    """encode(x) of some heads at a time, put together. x: [H, N, D]; results begin with heads."""
    together = max(ENCODE_ELEMENTS // max(x[0].numel(), 1), 1)
    parts = [encode(some) for some in x.split(together)]
    return list(parts[0]) if len(parts) == 1 else [torch.cat(p) for p in zip(*parts, strict=True)]


def residual(x: Tensor, ids: Tensor, centroids: Tensor, into: Tensor | None = None) -> Tensor:
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device) if into is None else into
    together = max(ENCODE_ELEMENTS // x[0].numel(), 1)
    pieces = (t.split(together) for t in (out, x, ids, centroids))
    for left, some, own, means in zip(*pieces, strict=True):
        left.copy_(some.float() - _rows_of(means.float(), own))
    return out


Values = Callable[[slice, slice], Tensor]
"""Of heads and tokens of a span: what they decode to, float32 [heads, tokens, D]."""


def _in_blocks(values: Values) -> Callable[..., None]:
    """A `Decode` that asks for a block at a time."""

    def decode(out: Tensor, offset: int, start: int, stop: int, first_head: int = 0) -> None:
        for part, tokens in blocks(out, start, stop):
            heads = moved(part, first_head)
            place = slice(offset + tokens.start - start, offset + tokens.stop - start)
            out[part, place] = values(heads, tokens)

    return decode


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


def prepare_token_groups(
    codes: Tensor, scales: Tensor, zeros: Tensor, bits: int
) -> Callable[..., None]:
    def values(heads: slice, tokens: slice) -> Tensor:
        found = _codes_of(codes[heads, tokens], bits).unflatten(-1, (scales.shape[2], -1))
        found *= scales[heads, tokens].float().unsqueeze(-1)
        found += zeros[heads, tokens].float().unsqueeze(-1)
        return found.flatten(-2)

    return _in_blocks(values)


def prepare_channel_groups(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor,
    stops: Tensor,
    group_tokens: Sequence[int],
    bits: int,
) -> Callable[..., None]:
    def values(heads: slice, tokens: slice) -> Tensor:
        places = torch.arange(tokens.start, tokens.stop, dtype=torch.int32, device=codes.device)
        group = torch.searchsorted(stops, places, right=True)
        found = _codes_of(codes[heads, tokens], bits)
        found *= scales[heads].index_select(1, group)
        found += zeros[heads].index_select(1, group)
        return found

    return _in_blocks(values)


def prepare_stages(
    codes: Tensor, ids: Tensor, centroids: Tensor, scales: Tensor, group_size: int
) -> Callable[..., None]:
    stages = ids.shape[2]
    count = centroids.shape[1] // stages

    def values(heads: slice, tokens: slice) -> Tensor:
        found = _codes_of(codes[heads, tokens], 2).sub_(1.0).unflatten(-1, (-1, group_size))
        found = found.mul_(scales[heads, tokens].float().unsqueeze(-1)).flatten(-2)
        means = centroids[heads].float()
        for stage in range(stages):
            found += _rows_of(means, ids[heads, tokens, stage].long() + stage * count)
        return found

    return _in_blocks(values)


@lru_cache(maxsize=8)
def _code_table(bits: int, device: torch.device) -> Tensor:
    """[256]: the codes of each byte as float32, two as one complex64 or four as one complex128."""
    codes = unpack(torch.arange(256, dtype=torch.uint8).unsqueeze(-1), 8 // bits, bits).float()
    kind = torch.complex64 if bits == 4 else torch.complex128
    return codes.view(kind).flatten().to(device)


def _codes_of(packed: Tensor, bits: int) -> Tensor:
    """uint8 [h, n, bytes] -> the codes, float32 [h, n, D], in storage of their own."""
    heads, tokens, _ = packed.shape
    rows = _code_table(bits, packed.device).index_select(0, packed.int().flatten())
    return rows.view(torch.float32).view(heads, tokens, -1)


def _rows_of(table: Tensor, index: Tensor) -> Tensor:
    """table [h, n, ...] at index [h, m] of each head -> [h, m, ...]."""
    heads, count = table.shape[:2]
    first = torch.arange(heads, device=index.device).unsqueeze(-1) * count
    flat = table.reshape(heads * count, *table.shape[2:])
    return flat.index_select(0, (index.long() + first).flatten()).unflatten(0, index.shape)

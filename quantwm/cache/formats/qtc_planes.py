"""Code words: codes of 0 to 6 bits in blocks of 16 channels; the only definition of that layout.

Blocks come widest first. A code of w bits is w // 2 digits of two bits, lowest first, and, where w
is odd, its highest bit apart. Digit k of a block is 32 bits (channel j in bits 2j and 2j + 1), the
odd bit of a block is 16 bits (channel j in bit j), little end first. A token's bytes are digit 0 of
all blocks that have one, then digit 1, digit 2, then the odd bits: a budget of B bits is B / 8
bytes for any widths, and a kernel takes 4 steps to a code where bit by bit it would take 6.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

BLOCK = 16
WORD = 32
"""Bits; a token's bits are a multiple of it, so that a kernel can read digits as words."""
Widths = tuple[int, ...]
"""Bits of each block of 16 channels, not increasing; the channels behind them have no code."""


def coded_blocks(widths: Widths) -> int:
    return sum(width > 0 for width in widths)


def pack(codes: Tensor, widths: Widths) -> Tensor:
    """codes: uint8 [N, 16 * len(widths)] -> uint8 [N, 2 * sum(widths)]."""
    parts = []
    for digit in range(max(widths, default=0) // 2):
        channels = BLOCK * sum(width >= 2 * digit + 2 for width in widths)
        parts.append(_packed((codes[:, :channels] >> (2 * digit)) & 3, 4))
    odd = [block for block, width in enumerate(widths) if width % 2]
    if odd:
        shifts = [[widths[block] - 1] for block in odd]
        own = codes.unflatten(1, (-1, BLOCK))[:, odd]
        bits = (own >> torch.tensor(shifts, dtype=torch.uint8, device=codes.device)) & 1
        parts.append(_packed(bits.flatten(1), 8))
    return torch.cat(parts, dim=1) if parts else codes.new_zeros(codes.shape[0], 0)


def _packed(fields: Tensor, per_byte: int) -> Tensor:
    """Fields of 8 / per_byte bits, uint8 [N, n] -> bytes [N, n / per_byte], first field lowest."""
    base = 2 ** (8 // per_byte)
    weights = base ** torch.arange(per_byte, dtype=torch.int32, device=fields.device)
    return (fields.unflatten(1, (-1, per_byte)) * weights).sum(-1).to(torch.uint8)


def unpack(packed: Tensor, widths: Widths, first: int = 0) -> Tensor:
    """packed: uint8 [N, 2 * sum(widths)] -> codes uint8 [N, 16 * blocks that have bits].

    first: 1 adds 2**width to every code, its place in the table of all levels. Eight channels go
    at a time: a byte of odd bits, or two bytes of digits, are spread over the eight bytes of a
    64-bit word. Tokens lie side by side meanwhile, so that sums run over long rows (twice as fast).
    """
    tokens, halves = packed.shape[0], 2 * coded_blocks(widths)
    digits = sum(width // 2 for width in widths)
    if not halves:
        return packed.new_zeros(tokens, 0)
    turned = packed.view(torch.int16).t().contiguous()
    words = _spread_digits(packed.device).index_select(
        0, turned[: 2 * digits].flatten().int() + 2**15
    )
    words, start = words.view(2 * digits, tokens), 0
    codes = torch.zeros(halves, tokens, dtype=torch.int64, device=packed.device)
    if first:
        places = [[0x0101010101010101 << width] for width in widths for _ in range(2) if width]
        codes += torch.tensor(places, dtype=torch.int64, device=packed.device).view(halves, 1)
    for digit in range(max(widths, default=0) // 2):
        count = 2 * sum(width >= 2 * digit + 2 for width in widths)
        codes[:count] += words[start : start + count] << (2 * digit)
        start += count
    odd = [block for block, width in enumerate(widths) if width % 2]
    if odd:
        bits = _spread_bits(packed.device).index_select(
            0, packed[:, 4 * digits :].t().flatten().int()
        )
        for place, block in enumerate(odd):
            own = bits.view(2 * len(odd), tokens)[2 * place : 2 * place + 2]
            codes[2 * block : 2 * block + 2] += own << (widths[block] - 1)
    return codes.t().contiguous().view(torch.uint8).view(tokens, 8 * halves)


@lru_cache(maxsize=8)
def _spread_bits(device: torch.device) -> Tensor:
    """The 8 bits of every byte as 8 bytes, int64 [256]: one look-up in place of 16 operations."""
    values = torch.arange(256, dtype=torch.int32, device=device)
    shifts = torch.arange(8, dtype=torch.int32, device=device)
    return ((values[:, None] >> shifts) & 1).to(torch.uint8).view(torch.int64).flatten()


@lru_cache(maxsize=8)
def _spread_digits(device: torch.device) -> Tensor:
    """The 8 digits of every word of 16 bits as 8 bytes, int64 [2**16], at word as int16 + 2**15."""
    values = torch.arange(2**16, dtype=torch.int32, device=device) - 2**15
    shifts = 2 * torch.arange(8, dtype=torch.int32, device=device)
    return ((values[:, None] >> shifts) & 3).to(torch.uint8).view(torch.int64).flatten()

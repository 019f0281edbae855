"""Bit planes: codes of 0 to 6 bits in blocks of 16 channels; the only definition of that layout.

Blocks come widest first. Plane k holds bit k of every block wider than k: 16 bits a block, two
bytes, little end first (channel 8h + j of a block in bit j of byte h). A token's bytes are plane 0
of all its blocks, then plane 1, and so on: a budget of B bits is B / 8 bytes for any widths.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

BLOCK = 16
Widths = tuple[int, ...]
"""Bits of each block of 16 channels, not increasing; the channels behind them have no code."""


def blocks_in_plane(widths: Widths, plane: int) -> int:
    return sum(width > plane for width in widths)


def pack(codes: Tensor, widths: Widths) -> Tensor:
    """codes: uint8 [N, 16 * len(widths)] -> uint8 [N, 2 * sum(widths)]."""
    weights = 2 ** torch.arange(8, dtype=torch.int32, device=codes.device)
    planes = []
    for plane in range(max(widths, default=0)):
        channels = BLOCK * blocks_in_plane(widths, plane)
        bits = (codes[:, :channels] >> plane) & 1
        planes.append((bits.unflatten(1, (-1, 8)) * weights).sum(-1).to(torch.uint8))
    return torch.cat(planes, dim=1) if planes else codes.new_zeros(codes.shape[0], 0)


def unpack(packed: Tensor, widths: Widths, first: int = 0) -> Tensor:
    """packed: uint8 [N, 2 * sum(widths)] -> codes uint8 [N, 16 * blocks that have bits].

    first: 1 adds 2**width to every code, its place in the table of all levels. Eight channels go
    at a time: a byte of a plane is spread over the eight bytes of a 64-bit word, one bit each.
    Tokens lie side by side meanwhile, so that the sums run over long rows (twice as fast).
    """
    tokens, halves = packed.shape[0], 2 * blocks_in_plane(widths, 0)
    spread = _spread(packed.device).index_select(0, packed.t().flatten().int())
    spread = spread.view(packed.shape[1], tokens)
    codes, start = spread[:halves], halves
    if first:
        ones = 0x0101010101010101
        places = [[ones << width] for width in widths for _ in range(2) if width]
        codes += torch.tensor(places, dtype=torch.int64, device=packed.device).view(halves, 1)
    for plane in range(1, max(widths, default=0)):
        count = 2 * blocks_in_plane(widths, plane)
        codes[:count] += spread[start : start + count] << plane
        start += count
    return codes.t().contiguous().view(torch.uint8).view(tokens, 8 * halves)


@lru_cache(maxsize=8)
def _spread(device: torch.device) -> Tensor:
    """The 8 bits of every byte as 8 bytes, int64 [256]: one look-up in place of 16 operations."""
    values = torch.arange(256, dtype=torch.uint8, device=device)
    shifts = torch.arange(8, dtype=torch.uint8, device=device)
    return ((values[:, None] >> shifts) & 1).view(torch.int64).flatten()

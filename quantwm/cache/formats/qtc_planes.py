"""Bit planes: codes of 0 to 6 bits in blocks of 16 channels; the only definition of that layout.

Blocks come widest first. Plane k holds bit k of every block wider than k: 16 bits a block, two
bytes, little end first (channel 8h + j of a block in bit j of byte h). A token's bytes are plane 0
of all its blocks, then plane 1, and so on: a budget of B bits is B / 8 bytes for any widths.
"""

from __future__ import annotations

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


def unpack(packed: Tensor, widths: Widths) -> Tensor:
    """packed: uint8 [N, 2 * sum(widths)] -> codes uint8 [N, 16 * len(widths)]."""
    bits = _spread(packed.device).index_select(0, packed.flatten().int()).view(torch.uint8)
    bits = bits.view(packed.shape[0], 8 * packed.shape[1])
    codes, start = None, 0
    for plane in range(max(widths, default=0)):
        channels = BLOCK * blocks_in_plane(widths, plane)
        part = bits[:, start : start + channels]
        if codes is None:
            codes = part.contiguous()
        else:
            codes[:, :channels] |= part << plane
        start += channels
    return packed.new_zeros(packed.shape[0], 0) if codes is None else codes


def _spread(device: torch.device) -> Tensor:
    """The 8 bits of every byte as 8 bytes, int64 [256]: one look-up in place of 16 operations."""
    values = torch.arange(256, dtype=torch.uint8, device=device)
    shifts = torch.arange(8, dtype=torch.uint8, device=device)
    return ((values[:, None] >> shifts) & 1).view(torch.int64).flatten()

"""2-bit packing: the only definition of the bit layout.

Four codes a byte, little end first: code 4b + j of a row lies in bits 2j..2j+1 of byte b.
"""

from __future__ import annotations

import torch
from torch import Tensor

CODES_PER_BYTE = 4
LEVELS = 4


def packed_bytes(codes: int) -> int:
    """Bytes that hold this many 2-bit codes."""
    return -(-codes // CODES_PER_BYTE)


def pack(codes: Tensor) -> Tensor:
    """codes: uint8 [..., n] with values 0..3 -> uint8 [..., ceil(n / 4)], unused bits 0."""
    spare = -codes.shape[-1] % CODES_PER_BYTE
    if spare:
        codes = torch.nn.functional.pad(codes, (0, spare))
    quads = codes.reshape(*codes.shape[:-1], -1, CODES_PER_BYTE)
    low = quads[..., 0] | (quads[..., 1] << 2)
    high = quads[..., 2] | (quads[..., 3] << 2)
    return low | (high << 4)


def unpack(packed: Tensor, count: int) -> Tensor:
    """packed: uint8 [..., m] -> the first `count` codes, uint8 [..., count]."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=packed.device)
    codes = (packed.unsqueeze(-1) >> shifts) & (LEVELS - 1)
    return codes.flatten(-2)[..., :count].contiguous()


def unpack_range(packed: Tensor, start: int, stop: int) -> Tensor:
    """Codes start..stop-1 of rows packed by `pack`. uint8 [..., stop - start]."""
    first_byte = start // CODES_PER_BYTE
    skipped = first_byte * CODES_PER_BYTE
    window = unpack(packed[..., first_byte : packed_bytes(stop)], stop - skipped)
    return window[..., start - skipped :]

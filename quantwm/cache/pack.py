"""Packing of 2-bit and 4-bit codes: the only definition of the bit layout.

Little end first: with b bits a code and n = 8 / b codes a byte, code n * i + j of a row lies in
bits b * j .. b * j + b - 1 of byte i.
"""

from __future__ import annotations

import torch
from torch import Tensor

CODES_PER_BYTE = 4
LEVELS = 4
"""Of 2-bit codes, which is what a function packs unless told otherwise."""


def packed_bytes(codes: int, bits: int = 2) -> int:
    """Bytes that hold this many codes."""
    return -(-codes * bits // 8)


def pack(codes: Tensor, bits: int = 2) -> Tensor:
    """codes: uint8 [..., n] with values below 2**bits -> uint8 [..., bytes], unused bits 0."""
    per_byte = 8 // bits
    spare = -codes.shape[-1] % per_byte
    if spare:
        codes = torch.nn.functional.pad(codes, (0, spare))
    places = codes.reshape(*codes.shape[:-1], -1, per_byte)
    packed = places[..., 0]
    for place in range(1, per_byte):
        packed = packed | (places[..., place] << bits * place)
    return packed


def unpack(packed: Tensor, count: int, bits: int = 2) -> Tensor:
    """packed: uint8 [..., m] -> the first `count` codes, uint8 [..., count]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    codes = (packed.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return codes.flatten(-2)[..., :count].contiguous()


def unpack_range(packed: Tensor, start: int, stop: int) -> Tensor:
    """2-bit codes start..stop-1 of rows packed by `pack`. uint8 [..., stop - start]."""
    first_byte = start // CODES_PER_BYTE
    skipped = first_byte * CODES_PER_BYTE
    window = unpack(packed[..., first_byte : packed_bytes(stop)], stop - skipped)
    return window[..., start - skipped :]

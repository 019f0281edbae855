"""Checksums inside FFV1 packets: FFmpeg's decoder hides a damaged slice behind the last picture.

FFV1 version 3 with error correction (RFC 9043, sections 4.4 and 4.9): every slice ends with its
size (3 bytes), an error status (1) and a CRC-32 (polynomial 0x04C11DB7, not reflected, from 0) that
makes the checksum of the whole slice 0. The last slice ends with the packet.
"""

from __future__ import annotations

import zlib

FOOTER = 8
_ONES = 0xFFFFFFFF
_REVERSED = bytes(int(f"{value:08b}"[::-1], 2) for value in range(256))
"""zlib's CRC is the reflected one: with the bits of every byte reversed it is the same register."""


def has_checksums(packet: bytes) -> bool:
    """Whether every slice checks out: the stream has checksums, and this packet is whole."""
    stop = len(packet)
    while stop > 0:
        if stop < FOOTER:
            return False
        size = int.from_bytes(packet[stop - FOOTER : stop - FOOTER + 3], "big")
        start = stop - FOOTER - size
        if start < 0 or _register(packet[start:stop]) != 0:
            return False
        stop = start
    return len(packet) > 0


def _register(data: bytes) -> int:
    """The CRC register after these bytes, from 0; its bits in zlib's order."""
    return zlib.crc32(data.translate(_REVERSED), _ONES) ^ _ONES

"""What decoding programs share: a step's tokens as they lie in the threads of a warp.

A step is a tile [PART / 16, STEP, D / WIDE, WIDE / PART, 16]. Triton hands threads out to the last
dimension, 8 channels or 16 bytes each, then to the first, then to the tokens: PART channels of a
row are an access of a warp, and what a token needs once (id, scales, addresses) serves all the
parts that a thread has of it, where with one part to a row it was half of all instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Without it the and and the or of a code are two instructions, each with a constant of its own.
_CODE_ASM = tl.constexpr("lop3.b32 $0, $1, $2, 0x4B000000, 0xEA;")
# Two BF16 that lie in one register: an instruction each, where a cast takes three for both.
_WIDEN_ASM = tl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;")


@triton.jit
def _first_channel(PART: tl.constexpr):
    """Of every word's channels in the first part, [PART / 16, 1, 1, 1, 16]."""
    word = tl.arange(0, PART // 16)[:, None, None, None, None] * 16
    return word + tl.arange(0, 16)[None, None, None, None, :]


@triton.jit
def _later_parts(D: tl.constexpr, PART: tl.constexpr, WIDE: tl.constexpr):
    """What is added in the other parts, constants of the access, [1, 1, D / WIDE, WIDE / PART, 1].

    WIDE: PART or, if that is more, the channels of a scale.
    """
    wide = tl.arange(0, D // WIDE)[None, None, :, None, None] * WIDE
    return wide + tl.arange(0, WIDE // PART)[None, None, None, :, None] * PART


@triton.jit
def words_of_step(ptr, at, rows, valid, ROW: tl.constexpr, D: tl.constexpr, PART: tl.constexpr,
                  WIDE: tl.constexpr):  # fmt: skip
    """Codes, int32 [PART / 16, STEP, D / WIDE, WIDE / PART]. ROW: channels of a stored row."""
    word = tl.arange(0, PART // 16)[:, None, None, None]
    wide = tl.arange(0, D // WIDE)[None, None, :, None] * (WIDE // 16)
    part = tl.arange(0, WIDE // PART)[None, None, None, :] * (PART // 16)
    place = (at + rows)[None, :, None, None] * (ROW // 16) + word
    return tl.load(ptr + place + (wide + part), mask=valid[None, :, None, None], other=0)


@triton.jit
def group_places(at, rows, ROW: tl.constexpr, D: tl.constexpr, PART: tl.constexpr,
                 WIDE: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """Number of every scale from the first row's on, [PART / 16, STEP, D / WIDE]."""
    word = tl.arange(0, PART // 16)[:, None, None] * 16
    wide = tl.arange(0, D // WIDE)[None, None, :] * WIDE
    return (at + rows)[None, :, None] * (ROW // GROUP) + (word + wide) // GROUP


@triton.jit
def means_of_step(ptr, ids, ROW: tl.constexpr, D: tl.constexpr, PART: tl.constexpr,
                  WIDE: tl.constexpr):  # fmt: skip
    """Centroids, bfloat16. Rows of ROW values: each begins a multiple of 16 bytes."""
    first = ids.to(tl.int32)[None, :, None, None, None] * ROW + _first_channel(PART)
    return tl.load(ptr + first + _later_parts(D, PART, WIDE))


@triton.jit
def _code(words, mask, ASM: tl.constexpr):
    """words & mask behind 2^23."""
    if ASM:
        code = tl.inline_asm_elementwise(
            asm=_CODE_ASM, constraints="=r,r,r", args=[words, mask], dtype=tl.int32, is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        code = (words & mask) | 0x4B000000
    return code.to(tl.float32, bitcast=True)


@triton.jit
def levels_of_step(words, zero, ASM: tl.constexpr):
    """Codes less a zero, an odd channel's four times as large; zero: int32 [PART / 16, STEP, ..].

    A code stays where it lies in the word, behind 2^23 as its zero: neither a conversion nor, for
    every second channel, a shift. All exact.
    """
    channel = tl.arange(0, 16)[None, None, None, None, :]
    shifted = words[:, :, :, :, None] >> (channel // 2 * 4)
    codes = _code(shifted, 3 << (channel % 2 * 2), ASM)
    zeros = (zero[:, :, :, None, None] << (channel % 2 * 2)) | 0x4B000000
    return codes - zeros.to(tl.float32, bitcast=True)


@triton.jit
def scales_of_channels(scale):
    """What levels_of_step are multiplied by; scale: float32 [PART / 16, STEP, D / WIDE]."""
    channel = tl.arange(0, 16)[None, None, None, None, :]
    return scale[:, :, :, None, None] * tl.where(channel % 2 == 1, 0.25, 1.0)


@triton.jit
def widened(means, ASM: tl.constexpr):
    """bfloat16 -> float32."""
    if ASM:
        wide = tl.inline_asm_elementwise(
            asm=_WIDEN_ASM, constraints="=r,=r,r", args=[means], dtype=tl.float32, is_pure=True,
            pack=2,
        )  # fmt: skip
    else:
        wide = means.to(tl.float32)
    return wide


@triton.jit
def byte_value(byte):
    """uint8 -> float32 without a conversion, of which a multiprocessor does 16 at a time."""
    return (byte.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def store_step(ptr, stride_n, at, rows, values, valid, D: tl.constexpr, PART: tl.constexpr,
               WIDE: tl.constexpr):  # fmt: skip
    first = (at + rows)[None, :, None, None, None] * stride_n + _first_channel(PART)
    ptrs = ptr + first + _later_parts(D, PART, WIDE)
    tl.store(ptrs, values.to(ptr.dtype.element_ty), mask=valid[None, :, None, None, None])

"""What decoding programs share: a step's tokens as they lie in the threads of a warp.

A step is a tile of five axes: words of a part, rows, wide parts, parts of a wide one and 16
channels. Triton hands threads out to the channels, 8 of them or 16 bytes each, then to the words,
then to the rows: PART channels of a row are an access of a warp, and what a token needs once (id,
scales, addresses) serves all the parts that a thread has of it, where with one part to a row it
was half of all instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl

BACKWARDS = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) > (3, 6))
"""To which axis threads go after the last: 3.6 takes the first, 3.9 the one before. So the axes are
in the order (words, rows, wide parts, parts) or (wide parts, parts, rows, words)."""

# Without it the and and the or of a code are two instructions, each with a constant of its own.
_CODE_ASM = tl.constexpr("lop3.b32 $0, $1, $2, 0x4B000000, 0xEA;")
# Two BF16 that lie in one register: an instruction each, where a cast takes three for both.
_WIDEN_ASM = tl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;")


@triton.jit
def along_rows(x):
    """[STEP] along the rows of a tile."""
    return x[None, None, :, None, None] if BACKWARDS else x[None, :, None, None, None]


@triton.jit
def along_channels(x):
    """[16] along the channels of a tile."""
    return x[None, None, None, None, :]


@triton.jit
def _of_words(PART: tl.constexpr):
    """First channel of every word of the first part."""
    word = tl.arange(0, PART // 16) * 16
    return word[None, None, None, :, None] if BACKWARDS else word[:, None, None, None, None]


@triton.jit
def _of_wide(D: tl.constexpr, WIDE: tl.constexpr):
    """First channel of every wide part. WIDE: PART or, if more, the channels of a scale."""
    wide = tl.arange(0, D // WIDE) * WIDE
    return wide[:, None, None, None, None] if BACKWARDS else wide[None, None, :, None, None]


@triton.jit
def _of_parts(D: tl.constexpr, PART: tl.constexpr, WIDE: tl.constexpr):
    """First channel of every part: what its accesses are apart, a constant of the instruction."""
    part = tl.arange(0, WIDE // PART) * PART
    tile = part[None, :, None, None, None] if BACKWARDS else part[None, None, None, :, None]
    return _of_wide(D, WIDE) + tile


@triton.jit
def words_of_step(ptr, at, rows, valid, ROW: tl.constexpr, D: tl.constexpr, PART: tl.constexpr,
                  WIDE: tl.constexpr):  # fmt: skip
    """Codes, int32, without the axis of channels. ROW: those of a stored row, of which D are
    decoded."""
    place = along_rows((at + rows) * (ROW // 16)) + _of_words(PART) // 16
    ptrs = ptr + place + _of_parts(D, PART, WIDE) // 16
    mask = tl.broadcast_to(along_rows(valid), ptrs.shape)
    shape: tl.constexpr = (ptrs.shape[0], ptrs.shape[1], ptrs.shape[2], ptrs.shape[3])
    return tl.load(tl.reshape(ptrs, shape), mask=tl.reshape(mask, shape), other=0)


@triton.jit
def group_places(at, rows, ROW: tl.constexpr, D: tl.constexpr, PART: tl.constexpr,
                 WIDE: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """Number of the scale of every word of a wide part, from the first row's on, without the axes
    of parts and channels."""
    group = (_of_words(PART) + _of_wide(D, WIDE)) // GROUP
    return _without_parts(along_rows((at + rows) * (ROW // GROUP)) + group)


@triton.jit
def _without_parts(x):
    """A tile of one part and one channel without these two axes."""
    one: tl.constexpr = 2 if BACKWARDS else 1
    two: tl.constexpr = 3 if BACKWARDS else 2
    return tl.reshape(x, (x.shape[0], x.shape[one], x.shape[two]))


@triton.jit
def of_places(ptr, place, valid):
    """A byte of each of group_places."""
    mask = valid[None, :, None]
    return tl.load(ptr + place, mask=mask, other=0)


@triton.jit
def spread(x):
    """What group_places has along the parts and channels."""
    return x[:, None, :, :, None] if BACKWARDS else x[:, :, :, None, None]


@triton.jit
def means_of_step(ptr, ids, ROW: tl.constexpr, D: tl.constexpr, PART: tl.constexpr,
                  WIDE: tl.constexpr):  # fmt: skip
    """Centroids, bfloat16. Rows of ROW values: each begins a multiple of 16 bytes."""
    first = along_rows(ids.to(tl.int32) * ROW) + _of_words(PART)
    return tl.load(ptr + (first + along_channels(tl.arange(0, 16))) + _of_parts(D, PART, WIDE))


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
    """Codes less a zero, an odd channel's four times as large; zero: int32 of a group's places.

    A code stays where it lies in the word, behind 2^23 as its zero: neither a conversion nor, for
    every second channel, a shift. All exact.
    """
    channel = along_channels(tl.arange(0, 16))
    codes = _code(words[:, :, :, :, None] >> (channel // 2 * 4), 3 << (channel % 2 * 2), ASM)
    zeros = (spread(zero) << (channel % 2 * 2)) | 0x4B000000
    return codes - zeros.to(tl.float32, bitcast=True)


@triton.jit
def scales_of_channels(scale):
    """What levels_of_step are multiplied by; scale: float32 of a group's places."""
    return spread(scale) * tl.where(along_channels(tl.arange(0, 16)) % 2 == 1, 0.25, 1.0)


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
    first = along_rows((at + rows) * stride_n) + _of_words(PART)
    ptrs = ptr + (first + along_channels(tl.arange(0, 16))) + _of_parts(D, PART, WIDE)
    tl.store(ptrs, values.to(ptr.dtype.element_ty), mask=along_rows(valid))

"""What a decoding program does: a run of one head's tokens, step by step, loads a step ahead.

The nearest centroid of a token is known only when its id has come, two trips to memory one behind
the other, so ids are loaded two steps ahead and all else one. Of a step's tokens a thread has 8
channels of every part of a row (decode_tile.py). Instructions a value at head dim 128, triton
3.6.0: ternary 6.9, affine 11.9; with one part to a row 14.0 and 15.3.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.decode_corrected import corrected_rows
from kernels.decode_tile import (
    along_channels,
    byte_value,
    group_places,
    levels_of_step,
    means_of_step,
    of_places,
    scales_of_channels,
    spread,
    store_step,
    widened,
    words_of_step,
)
from kernels.tile import e4m3_value, of_target

PART = tl.constexpr(64)
"""Channels of a row that are one access: 128 bytes of what is written."""

# Two channels at once, whose codes lie 16 bits apart: into the mantissas of 128.0, less 129, times
# the scale, plus the centroid, rounded once. The scale has 4 bits and the centroid 8, so the sum is
# exact in float32 or so near the larger that both round to it: the bits are those of float32.
_TERNARY_ASM = tl.constexpr("""
{
    .reg .b32 a, b;
    mov.b32 b, 0x43014301;
    lop3.b32 a, $1, 0x00030003, 0x43004300, 0xEA;
    sub.rn.bf16x2 a, a, b;
    fma.rn.bf16x2 $0, a, $3, $4;
}
""")


@triton.jit
def _ternary_values(words, scale, means, PACKED: tl.constexpr, ASM: tl.constexpr):
    """mu + (code - 1) * scale: bfloat16 if PACKED, two channels an instruction, else float32."""
    if PACKED:
        channel = along_channels(tl.arange(0, 16))
        half = (words[:, :, :, :, None] >> (channel // 8 * 16)) & 0xFFFF
        # $1 is of the even one of two channels: its code in bits 0, 1, its neighbour's in 16, 17.
        apart = (half | (half << 14)) >> (channel % 8 * 2)
        values = tl.inline_asm_elementwise(
            asm=of_target(_TERNARY_ASM), constraints="=r,r,r,r,r",
            args=[apart, spread(scale.to(tl.bfloat16)), means],
            dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        one = tl.full(scale.shape, 1, tl.int32)
        values = levels_of_step(words, one, ASM) * scales_of_channels(scale)
        values += widened(means, ASM)
    return values


@triton.jit
def ternary_rows(
    out_ptr, out_stride_n, count, codes_ptr, ids_ptr, centroids_ptr, scales_ptr,
    D: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """mu[id] + (code - 1) * scale of `count` tokens. Pointers: of the first token, and the head's
    centroids."""
    wide: tl.constexpr = PART if PART > GROUP else GROUP
    packed: tl.constexpr = PACKED and out_ptr.dtype.element_ty == tl.bfloat16
    rows = tl.arange(0, STEP)
    valid, later = rows < count, rows < count - STEP
    ids = tl.load(ids_ptr + rows, mask=valid, other=0)
    ids_after = tl.load(ids_ptr + STEP + rows, mask=later, other=0)
    words = words_of_step(codes_ptr, 0, rows, valid, D, D, PART, wide)
    place = group_places(0, rows, D, D, PART, wide, GROUP)
    scales = of_places(scales_ptr, place, valid)
    means = means_of_step(centroids_ptr, ids, D, D, PART, wide)
    for at in range(0, count, STEP):
        after = at + STEP
        valid, later = rows < count - at, rows < count - after
        ids = ids_after
        ids_after = tl.load(ids_ptr + after + STEP + rows, mask=rows < count - after - STEP,
                            other=0)  # fmt: skip
        words_after = words_of_step(codes_ptr, after, rows, later, D, D, PART, wide)
        place = group_places(after, rows, D, D, PART, wide, GROUP)
        scales_after = of_places(scales_ptr, place, later)
        means_after = means_of_step(centroids_ptr, ids, D, D, PART, wide)
        values = _ternary_values(words, e4m3_value(scales.to(tl.int32)), means, packed, PACKED)
        store_step(out_ptr, out_stride_n, at, rows, values, valid, D, PART, wide)
        words, scales, means = words_after, scales_after, means_after


@triton.jit
def affine_rows(
    out_ptr, out_stride_n, count, codes_ptr, ids_ptr, centroids_ptr, scales_ptr, step, zeros_ptr,
    shift, D: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """mu[id] + (code - zero) * scale of `count` tokens of one chunk, whose scales are their codes
    times `step`. Pointers as in ternary_rows; zeros begin `shift` zeros into a byte."""
    wide: tl.constexpr = PART if PART > GROUP else GROUP
    rows = tl.arange(0, STEP)
    valid, later = rows < count, rows < count - STEP
    ids = tl.load(ids_ptr + rows, mask=valid, other=0)
    ids_after = tl.load(ids_ptr + STEP + rows, mask=later, other=0)
    words = words_of_step(codes_ptr, 0, rows, valid, D, D, PART, wide)
    place = group_places(0, rows, D, D, PART, wide, GROUP)
    scales = of_places(scales_ptr, place, valid)
    zeros = of_places(zeros_ptr, ((place + shift) >> 2), valid)
    means = means_of_step(centroids_ptr, ids, D, D, PART, wide)
    for at in range(0, count, STEP):
        after = at + STEP
        valid, later = rows < count - at, rows < count - after
        ids = ids_after
        ids_after = tl.load(ids_ptr + after + STEP + rows, mask=rows < count - after - STEP,
                            other=0)  # fmt: skip
        words_after = words_of_step(codes_ptr, after, rows, later, D, D, PART, wide)
        after_place = group_places(after, rows, D, D, PART, wide, GROUP)
        scales_after = of_places(scales_ptr, after_place, later)
        zeros_after = of_places(zeros_ptr, ((after_place + shift) >> 2), later)
        means_after = means_of_step(centroids_ptr, ids, D, D, PART, wide)
        place = group_places(at, rows, D, D, PART, wide, GROUP)
        zero = (zeros.to(tl.int32) >> (((place + shift) & 3) * 2)) & 3
        values = levels_of_step(words, zero, ASM) * scales_of_channels(byte_value(scales) * step)
        values += widened(means, ASM)
        store_step(out_ptr, out_stride_n, at, rows, values, valid, D, PART, wide)
        words, scales, zeros, means = words_after, scales_after, zeros_after, means_after


@triton.jit
def ternary_block(
    out_ptr, out_stride_h, out_stride_n, offset, start, stop, out_head, head,
    codes_ptr, ids_ptr, centroids_ptr, scales_ptr, n_tokens, K,
    D: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """This program's BLOCK_N tokens of start .. stop - 1, of a span's head, to `offset` in out."""
    block = tl.program_id(0).to(tl.int64) * BLOCK_N
    count = tl.minimum(stop - start - block, BLOCK_N).to(tl.int32)
    at = head * n_tokens + start + block
    ternary_rows(
        out_ptr + out_head * out_stride_h + (offset + block) * out_stride_n, out_stride_n, count,
        codes_ptr + at * (D // 16), ids_ptr + at, centroids_ptr + head * K * D,
        scales_ptr + at * (D // GROUP), D, GROUP, STEP, PACKED,
    )  # fmt: skip


@triton.jit
def affine_piece(
    out_ptr, out_stride_h, out_stride_n, offset, start, first, last, out_head, head,
    codes_ptr, ids_ptr, centroids_ptr, scales_ptr, secondary_ptr, chunk_stops_ptr, zeros_ptr,
    coefficients_ptr, row_scales_ptr, basis_ptr, n_tokens, n_chunks, first_corrected, K,
    D: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr,
    STEP: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """Tokens from `first` on of a span's head, to the end of their chunk or to `last`: where it
    ended. A chunk has a scale of its scales. Token `start` goes to `offset` in out.

    With a correction STEP are not tokens of a step but channels of a pass.
    """
    groups: tl.constexpr = D // GROUP
    chunk = 0
    chunks = tl.cast(n_chunks, tl.int32) - 1
    chunk_stop = tl.load(chunk_stops_ptr)
    while (chunk_stop <= first) & (chunk < chunks):
        chunk += 1
        chunk_stop = tl.load(chunk_stops_ptr + chunk)
    ends = tl.where(chunk < chunks, tl.minimum(chunk_stop, last), last)
    secondary = tl.load(secondary_ptr + head * n_chunks + chunk).to(tl.float32)
    step = tl.div_rn(secondary, 255.0)
    out_ptr += out_head * out_stride_h + (offset - start + first.to(tl.int64)) * out_stride_n
    centroids_ptr += head * K * D
    many = tl.cast(n_tokens, tl.int64)
    zeros_ptr += head * ((many * groups + 3) // 4)
    at = head * many + first
    begin = first.to(tl.int64) * groups
    if RANK > 0:
        basis_ptr += head * D * RANK
        row = at - (head + 1) * first_corrected
        for channel in range(0, D, STEP):
            group = begin + channel // GROUP
            corrected_rows(
                out_ptr + channel, out_stride_n, ends - first,
                codes_ptr + (at * (D // 16) + channel // 16), ids_ptr + at,
                centroids_ptr + channel, scales_ptr + (at * groups + channel // GROUP), step,
                zeros_ptr + group // 4, (group % 4).to(tl.int32),
                tl.cast(first_corrected, tl.int32) - first, coefficients_ptr + row * RANK,
                row_scales_ptr + row, basis_ptr + channel * RANK, D, STEP, GROUP, RANK, RANK_PAD,
                DOT_DTYPE,
            )  # fmt: skip
    else:
        affine_rows(
            out_ptr, out_stride_n, ends - first, codes_ptr + at * (D // 16), ids_ptr + at,
            centroids_ptr, scales_ptr + at * groups, step, zeros_ptr + begin // 4,
            (begin % 4).to(tl.int32), D, GROUP, STEP, tl.bfloat16 == DOT_DTYPE,
        )  # fmt: skip
    return ends

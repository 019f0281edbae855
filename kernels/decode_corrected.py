"""Affine rows whose low-rank correction is a product of the tensor cores, thread by thread.

What a tensor core leaves in a thread are two neighbouring columns of each eight, in rows 8 apart.
Here the columns of the product are dealt out so that these are 8 neighbouring channels of two
tokens, which is what the thread decodes and stores. A program is one warp, which waits for no
other, and finds the directions in its shared memory: 10.9 instructions a value at head dim 128 and
rank 8 (triton 3.6.0), where four warps that shared products of 64 tokens took 15.3.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.decode_tile import (
    BACKWARDS,
    along_rows,
    byte_value,
    group_places,
    levels_of_step,
    means_of_step,
    of_places,
    scales_of_channels,
    store_step,
    widened,
    words_of_step,
)

PART = tl.constexpr(32)  # channels of a row that the four threads of a product's row have
STEP = tl.constexpr(16)  # rows of a product


@triton.jit
def _dealt_directions(basis_ptr, WIDTH: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr,
                      DOT_DTYPE: tl.constexpr):  # fmt: skip
    """Directions of WIDTH channels, [RANK_PAD, WIDTH], columns dealt out."""
    n = tl.arange(0, WIDTH)
    channel = n // 32 * 32 + n % 8 // 2 * 8 + n // 8 % 4 * 2 + n % 2
    offs_r = tl.arange(0, RANK_PAD)
    return tl.load(
        basis_ptr + channel[None, :] * RANK + offs_r[:, None], mask=(offs_r < RANK)[:, None],
        other=0.0,
    ).to(tl.float32).to(DOT_DTYPE)  # fmt: skip


@triton.jit
def _product(coefficients, directions, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    """Coefficients int8 [16, RANK_PAD] times the directions, as the tiles of decode_tile.py."""
    total = tl.dot(coefficients.to(tl.float32).to(directions.dtype), directions,
                   input_precision="ieee")  # fmt: skip
    # Columns are (part, pair, word, octet, one of two).
    total = tl.reshape(total, (16, WIDTH // 32, 4, 2, 2, 2))
    if BACKWARDS:
        total = tl.permute(total, (1, 0, 3, 4, 2, 5))
        tile = tl.reshape(total, (WIDTH // WIDE, WIDE // 32, 16, 2, 16))
    else:
        total = tl.permute(total, (3, 0, 1, 4, 2, 5))
        tile = tl.reshape(total, (2, 16, WIDTH // WIDE, WIDE // 32, 16))
    return tile


@triton.jit
def corrected_rows(
    out_ptr, out_stride_n, count, codes_ptr, ids_ptr, centroids_ptr, scales_ptr, step, zeros_ptr,
    shift, uncorrected, coefficients_ptr, row_scales_ptr, basis_ptr,
    D: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr,
    RANK_PAD: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """mu[id] + (code - zero) * scale + coefficients @ directions * row scale of WIDTH channels.

    The rest as in affine_rows; the first `uncorrected` tokens have no coefficients, those of the
    first would be where coefficients_ptr is. The product comes
    first: behind the loads it took 30 registers a thread more.
    """
    wide: tl.constexpr = PART if PART > GROUP else GROUP
    asm: tl.constexpr = tl.bfloat16 == DOT_DTYPE
    rows = tl.arange(0, STEP)
    offs_r = tl.arange(0, RANK_PAD)
    directions = _dealt_directions(basis_ptr, WIDTH, RANK, RANK_PAD, DOT_DTYPE)
    valid, later = rows < count, rows < count - STEP
    ids = tl.load(ids_ptr + rows, mask=valid, other=0)
    ids_after = tl.load(ids_ptr + STEP + rows, mask=later, other=0)
    words = words_of_step(codes_ptr, 0, rows, valid, D, WIDTH, PART, wide)
    place = group_places(0, rows, D, WIDTH, PART, wide, GROUP)
    scales = of_places(scales_ptr, place, valid)
    zeros = of_places(zeros_ptr, ((place + shift) >> 2), valid)
    means = means_of_step(centroids_ptr, ids, D, WIDTH, PART, wide)
    there = valid & (rows >= uncorrected)
    row_scales = tl.load(row_scales_ptr + rows, mask=there, other=0.0)
    coefficients = tl.load(
        coefficients_ptr + rows[:, None] * RANK + offs_r[None, :],
        mask=there[:, None] & (offs_r < RANK)[None, :], other=0,
    )  # fmt: skip
    for at in range(0, count, STEP):
        product = _product(coefficients, directions, WIDTH, wide)
        after = at + STEP
        valid, later = rows < count - at, rows < count - after
        ids = ids_after
        ids_after = tl.load(ids_ptr + after + STEP + rows, mask=rows < count - after - STEP,
                            other=0)  # fmt: skip
        words_after = words_of_step(codes_ptr, after, rows, later, D, WIDTH, PART, wide)
        after_place = group_places(after, rows, D, WIDTH, PART, wide, GROUP)
        scales_after = of_places(scales_ptr, after_place, later)
        zeros_after = of_places(zeros_ptr, ((after_place + shift) >> 2), later)
        means_after = means_of_step(centroids_ptr, ids, D, WIDTH, PART, wide)
        there = later & (rows >= uncorrected - after)
        row_scales_after = tl.load(row_scales_ptr + after + rows, mask=there, other=0.0)
        coefficients_after = tl.load(
            coefficients_ptr + (after + rows)[:, None] * RANK + offs_r[None, :],
            mask=there[:, None] & (offs_r < RANK)[None, :], other=0,
        )  # fmt: skip
        place = group_places(at, rows, D, WIDTH, PART, wide, GROUP)
        zero = (zeros.to(tl.int32) >> (((place + shift) & 3) * 2)) & 3
        scale = scales_of_channels(byte_value(scales) * step)
        values = tl.fma(levels_of_step(words, zero, asm), scale, widened(means, asm))
        values = tl.fma(product, along_rows(row_scales.to(tl.float32)), values)
        store_step(out_ptr, out_stride_n, at, rows, values, valid, WIDTH, PART, wide)
        words, scales, zeros, means = words_after, scales_after, zeros_after, means_after
        coefficients, row_scales = coefficients_after, row_scales_after

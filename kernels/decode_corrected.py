"""Affine rows whose low-rank correction is a product of the tensor cores, thread by thread.

What a tensor core leaves in a thread are two neighbouring columns of each eight, in rows 8 apart.
Here columns and rows of the product are dealt out so that these are 8 neighbouring channels of two
tokens, which is what the thread decodes and stores: the product does not pass through shared
memory, where a plain one cost 25 instructions a value instead of 15, and barriers.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _fetch(
    at, codes_ptr, ids, centroids_ptr, scales_ptr, zeros_ptr, shift, count, PART: tl.constexpr,
    D: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Of ROWS tokens from `at` on and the 32 channels of PART: words, scales, zeros' bytes and
    places [2, ROWS], centroids [2, ROWS, 16]."""
    rows = at + tl.arange(0, ROWS)
    valid = (rows < count)[None, :]
    word = 2 * PART + tl.arange(0, 2)
    words = tl.load(codes_ptr + rows[None, :] * (D // 16) + word[:, None], mask=valid, other=0)
    place = rows[None, :] * (D // GROUP) + (word * 16 // GROUP)[:, None]
    scales = tl.load(scales_ptr + place, mask=valid, other=0)
    place += shift
    zeros = tl.load(zeros_ptr + (place >> 2), mask=valid, other=0)
    channels = word[:, None, None] * 16 + tl.arange(0, 16)[None, None, :]
    means = tl.load(centroids_ptr + ids.to(tl.int32)[None, :, None] * D + channels)
    return words, scales, zeros, place & 3, means


@triton.jit
def _finish(
    out_ptr, out_stride_n, at, count, fetched, step, product, row_scales, PART: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Those tokens' channels decoded, corrected and stored."""
    rows = at + tl.arange(0, ROWS)
    scale = (fetched[1].to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    zero = (fetched[2].to(tl.int32) >> (2 * fetched[3])) & 3
    zero = (zero | 0x4B000000).to(tl.float32, bitcast=True)
    shifts = 2 * tl.arange(0, 16)[None, None, :]
    codes = ((fetched[0][:, :, None] >> shifts) & 3) | 0x4B000000
    values = codes.to(tl.float32, bitcast=True) - zero[:, :, None]
    values = values * (scale * step)[:, :, None] + fetched[4].to(tl.float32)
    values += product * row_scales.to(tl.float32)[None, :, None]
    word = 2 * PART + tl.arange(0, 2)
    channels = word[:, None, None] * 16 + tl.arange(0, 16)[None, None, :]
    ptrs = out_ptr + rows[None, :, None] * out_stride_n + channels
    tl.store(ptrs, values.to(out_ptr.dtype.element_ty), mask=(rows < count)[None, :, None])


@triton.jit
def _dealt_product(coefficients, basis_ptr, PART: tl.constexpr, RANK: tl.constexpr,
                   RANK_PAD: tl.constexpr, DOT_DTYPE: tl.constexpr):  # fmt: skip
    """coefficients [64, RANK_PAD], rows dealt out, times the directions' 32 channels of PART ->
    float32 [2, 32, 16] of the first 32 tokens and of the others."""
    n = tl.arange(0, 32)
    channel = 32 * PART + n % 8 // 2 * 8 + n // 8 * 2 + n % 2
    offs_r = tl.arange(0, RANK_PAD)
    directions = tl.load(
        basis_ptr + channel[None, :] * RANK + offs_r[:, None], mask=(offs_r < RANK)[:, None],
        other=0.0,
    ).to(tl.float32).to(DOT_DTYPE)  # fmt: skip
    product = tl.dot(coefficients, directions, input_precision="ieee")
    # Rows are (warp, half, row), columns (pair, word, octet, one).
    product = tl.reshape(product, (4, 2, 8, 4, 2, 2, 2))
    product = tl.permute(product, (4, 0, 2, 5, 3, 6, 1))
    return tl.split(tl.reshape(product, (2, 32, 16, 2)))


@triton.jit
def corrected_rows(
    out_ptr, out_stride_n, count, codes_ptr, ids_ptr, centroids_ptr, scales_ptr, step, zeros_ptr,
    shift, uncorrected, row, coefficients_ptr, row_scales_ptr, basis_ptr,
    D: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """As affine_rows, 64 tokens a step of four warps. basis_ptr: of the head."""
    coefficients_ptr += row * RANK
    row_scales_ptr += row
    rows = tl.arange(0, 32)
    offs_r = tl.arange(0, RANK_PAD)
    m = tl.arange(0, 64)
    dealt = m // 8 % 2 * 32 + m // 16 * 8 + m % 8
    ids, more = (
        tl.load(ids_ptr + rows, mask=rows < count, other=0),
        tl.load(ids_ptr + 32 + rows, mask=rows < count - 32, other=0),
    )
    for at in range(0, count, 64):
        token = at + dealt
        there = (token < count) & (token >= uncorrected)
        coefficients = tl.load(
            coefficients_ptr + token[:, None] * RANK + offs_r[None, :],
            mask=there[:, None] & (offs_r < RANK)[None, :], other=0,
        ).to(tl.float32).to(DOT_DTYPE)  # fmt: skip
        one = _fetch(at, codes_ptr, ids, centroids_ptr, scales_ptr, zeros_ptr, shift, count, 0,
                     D, GROUP, 32)  # fmt: skip
        two = _fetch(at + 32, codes_ptr, more, centroids_ptr, scales_ptr, zeros_ptr, shift, count,
                     0, D, GROUP, 32)  # fmt: skip
        first, second = at + rows, at + 32 + rows
        corrected_one = (first < count) & (first >= uncorrected)
        corrected_two = (second < count) & (second >= uncorrected)
        scales_one = tl.load(row_scales_ptr + first, mask=corrected_one, other=0.0)
        scales_two = tl.load(row_scales_ptr + second, mask=corrected_two, other=0.0)
        ids_after = tl.load(ids_ptr + first + 64, mask=first + 64 < count, other=0)
        more_after = tl.load(ids_ptr + second + 64, mask=second + 64 < count, other=0)
        for part in tl.static_range(D // 32):
            one_after = _fetch(at, codes_ptr, ids, centroids_ptr, scales_ptr, zeros_ptr, shift,
                               count, (part + 1) % (D // 32), D, GROUP, 32)  # fmt: skip
            two_after = _fetch(at + 32, codes_ptr, more, centroids_ptr, scales_ptr, zeros_ptr,
                               shift, count, (part + 1) % (D // 32), D, GROUP, 32)  # fmt: skip
            product_one, product_two = _dealt_product(
                coefficients, basis_ptr, part, RANK, RANK_PAD, DOT_DTYPE
            )
            _finish(out_ptr, out_stride_n, at, count, one, step, product_one, scales_one, part, 32)
            _finish(out_ptr, out_stride_n, at + 32, count, two, step, product_two, scales_two,
                    part, 32)  # fmt: skip
            one, two = one_after, two_after
        ids, more = ids_after, more_after

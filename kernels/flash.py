"""Attention that decodes packed keys and values in registers: fused, without a scratch.

Floor (operations): 4 Nq Nk D per head on the tensor cores (989 TFLOP/s by an H200's datasheet),
packed or not. Reached, 40 heads of 4,680 queries and 32,760 keys (H200, 2026-11-30): BF16 499
TFLOP/s, 50%; packed 240 (qvg) and 216 (quantwm, rank 8), 24% and 22%, where kernels.flash_hopper
takes the packed ones. A packed tile costs about 2.5 instructions an element on top, which the
queries of a program share.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.tile import (
    affine_scales,
    as_operand,
    channels_of,
    code_words,
    e4m3_value,
    of_target,
    of_words,
    scale_bytes,
    word_levels,
)

# Kinds of a side, as constants of the kernel: 0 plain, 1 ternary, 2 affine, 3 INT8 keys.

# Two channels at once: their codes, 16 bits apart, into the mantissas of 128.0, less 128 + zero,
# times the scale, plus the centroid. All exact up to the last fused multiply-add, which rounds once
# to BF16. $1 is of the first of the two, so they must be neighbours: they are while centroids are
# loaded 16 bytes at a time, which the launcher sees to.
_LEVELS_ASM = tl.constexpr("""
{
    .reg .b32 a, b;
    lop3.b32 a, $1, 0x00030003, 0x43004300, 0xEA;
    mov.b32 b, $3;
    sub.rn.bf16x2 a, a, b;
    fma.rn.bf16x2 $0, a, $4, $5;
}
""")


@triton.jit
def _apart(words):
    """Words of 16 codes -> int32 [BLOCK_N, D / 16, 16], an even channel's code in bits 0 and 1 and
    its neighbour's in bits 16 and 17; what odd channels have is not used."""
    channel = tl.arange(0, 16)[None, None, :]
    half = (words[:, :, None] >> (channel // 8 * 16)) & 0xFFFF
    return (half | (half << 14)) >> (channel % 8 * 2)


@triton.jit
def _plain_tile(ptr, first, stride_n, rows, valid, D: tl.constexpr):
    offs = rows[:, None] * stride_n + tl.arange(0, D)[None, :]
    ptr += tl.cast(first, tl.int64) * stride_n
    return tl.load(ptr + offs, mask=valid[:, None], other=0.0)


@triton.jit
def _ids(ids_ptr, first, rows, stop):
    return tl.load(ids_ptr + tl.cast(first, tl.int64) + rows, mask=rows < stop - first, other=0)


@triton.jit
def _tile_loads(
    codes_ptr, centroids_ptr, ids, scales_ptr, zeros_ptr, first, rows, valid,
    D: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Code words, centroids, scale and zero bytes of a tile, from token `first` of the head on."""
    means = tl.load(centroids_ptr + ids.to(tl.int32)[:, None, None] * D + channels_of(D))
    words = code_words(codes_ptr + tl.cast(first, tl.int64) * (D // 16), rows, valid, D)
    scales, zeros = scale_bytes(scales_ptr, zeros_ptr, first, rows, valid, D, GROUP, KIND == 2)
    return words, means, scales, zeros


@triton.jit
def _packed_tile(
    words, means, scales, zeros, step, first, rows,
    D: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
    BLOCK_N: tl.constexpr, DOT_DTYPE: tl.constexpr, PACKED_MATH: tl.constexpr,
):  # fmt: skip
    """A decoded tile [BLOCK_N, D] of what _tile_loads gave.

    PACKED_MATH: two channels an instruction in BF16, which rounds an affine scale to BF16 (2^-9
    of a residual of a few scales); without it float32, as the interpreter needs.
    """
    if KIND == 1:
        scale = e4m3_value(scales.to(tl.int32))
        zero = tl.full(scale.shape, 1.0, tl.float32)
    else:
        scale, zero = affine_scales(scales, zeros, first, step, rows, D, GROUP)
    scale, zero = of_words(scale, D, GROUP), of_words(zero, D, GROUP)
    if PACKED_MATH:
        values = tl.inline_asm_elementwise(
            asm=of_target(_LEVELS_ASM),
            constraints="=r,r,r,r,r,r",
            args=[
                _apart(words),
                (zero + 128.0).to(tl.bfloat16)[:, :, None], scale.to(tl.bfloat16)[:, :, None],
                means,
            ],
            dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        levels = word_levels(words, zero)
        values = (levels * scale[:, :, None] + means.to(tl.float32)).to(DOT_DTYPE)
    return tl.reshape(values, (BLOCK_N, D))


@triton.jit
def _turned(q, basis_ptr, FIRST: tl.constexpr, D: tl.constexpr, RANK: tl.constexpr,
            DOT_DTYPE: tl.constexpr):  # fmt: skip
    """Queries in 16 of the directions that keys are corrected in, from FIRST on; 0 beyond RANK.

    basis_ptr: of the head. 16 at a time, for 32 numbers of BF16 are rows of 64 bytes in shared
    memory, and ptxas 12.8 (Triton 3.6 and 3.7) loses a register of such a tile's descriptor: two
    runs differed, and some read where no shared memory is (tests/sass.py finds it).
    """
    direction = FIRST + tl.arange(0, 16)
    basis = tl.load(
        basis_ptr + tl.arange(0, D)[:, None] * RANK + direction[None, :],
        mask=(direction < RANK)[None, :], other=0.0,
    )  # fmt: skip
    turned = tl.dot(q, as_operand(basis, DOT_DTYPE), input_precision="ieee")
    return turned.to(DOT_DTYPE)


@triton.jit
def _coefficients(ptr, row, rows, there, FIRST: tl.constexpr, RANK: tl.constexpr):
    """Coefficients of a tile's keys in the same 16 directions, int8 [BLOCK_N, 16].

    row: number of the tile's first token among those that have some, maybe negative.
    """
    direction = FIRST + tl.arange(0, 16)
    return tl.load(
        ptr + row * RANK + rows[:, None] * RANK + direction[None, :],
        mask=there[:, None] & (direction < RANK)[None, :], other=0,
    )  # fmt: skip


@triton.jit
def _corrected(scores, turned, coefficients, row_scales, DOT_DTYPE: tl.constexpr):
    """Scores with what 16 directions add to them."""
    turning = coefficients.to(tl.float32) * row_scales.to(tl.float32)[:, None]
    turning = tl.trans(turning.to(DOT_DTYPE))
    return scores + tl.dot(turned, turning, input_precision="ieee")


@triton.jit
def _attend_range(
    q, q_scale, turned, turned_2, sums, largest, total, first, last, stop, k_step, v_step,
    first_corrected, scale,
    k_ptr, k_stride_n, k_codes_ptr, k_ids_ptr, k_centroids_ptr, k_scales_ptr, k_zeros_ptr,
    coefficients_ptr, row_scales_ptr,
    v_ptr, v_stride_n, v_codes_ptr, v_ids_ptr, v_centroids_ptr, v_scales_ptr, v_zeros_ptr,
    D: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr, K_GROUP: tl.constexpr,
    V_GROUP: tl.constexpr, RANK: tl.constexpr, BLOCK_N: tl.constexpr, DOT_DTYPE: tl.constexpr,
    PACKED_MATH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The running softmax after tokens first .. last - 1. MASKED: some of them lie beyond stop.

    largest is in the scores' own unit, so that scaling and shifting are one multiply-add.
    """
    rows = tl.arange(0, BLOCK_N)
    # Of packed tiles only ids are loaded a tile ahead: the rest then goes out together, and nothing
    # is under way where a decoded tile is handed to the tensor cores, which waits for all of it.
    k_ids, v_ids = 0, 0
    if K_KIND == 1 or K_KIND == 2:
        k_ids = _ids(k_ids_ptr, first, rows, stop)
    if V_KIND > 0:
        v_ids = _ids(v_ids_ptr, first, rows, stop)
    for begin in range(first, last, BLOCK_N):
        valid = (rows < stop - begin) if MASKED else tl.full((BLOCK_N,), True, tl.int1)
        if K_KIND == 1 or K_KIND == 2:
            k_words, k_means, k_scales, k_zeros = _tile_loads(
                k_codes_ptr, k_centroids_ptr, k_ids, k_scales_ptr, k_zeros_ptr, begin, rows, valid,
                D, K_GROUP, K_KIND,
            )  # fmt: skip
        if V_KIND > 0:
            v_words, v_means, v_scales, v_zeros = _tile_loads(
                v_codes_ptr, v_centroids_ptr, v_ids, v_scales_ptr, v_zeros_ptr, begin, rows, valid,
                D, V_GROUP, V_KIND,
            )  # fmt: skip
        if RANK > 0:
            there = valid & (rows >= first_corrected - begin)
            row = tl.cast(begin, tl.int64) - first_corrected
            row_scales = tl.load(row_scales_ptr + row + rows, mask=there, other=0.0)
            coefficients = _coefficients(coefficients_ptr, row, rows, there, 0, RANK)
            if RANK > 16:
                coefficients_2 = _coefficients(coefficients_ptr, row, rows, there, 16, RANK)
        if K_KIND == 3:
            k = _plain_tile(k_ptr, begin, k_stride_n, rows, valid, D)
            steps = tl.load(k_scales_ptr + begin + rows, mask=valid, other=0.0)
            scores = tl.dot(q, tl.trans(k)).to(tl.float32) * q_scale[:, None]
            scores *= steps[None, :]
        else:
            if K_KIND == 0:
                k = as_operand(_plain_tile(k_ptr, begin, k_stride_n, rows, valid, D), DOT_DTYPE)
            else:
                k = _packed_tile(
                    k_words, k_means, k_scales, k_zeros, k_step, begin, rows, D, K_GROUP, K_KIND,
                    BLOCK_N, DOT_DTYPE, PACKED_MATH,
                )  # fmt: skip
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            if RANK > 0:
                scores = _corrected(scores, turned, coefficients, row_scales, DOT_DTYPE)
                if RANK > 16:
                    scores = _corrected(scores, turned_2, coefficients_2, row_scales, DOT_DTYPE)
        if V_KIND == 0:
            v = as_operand(_plain_tile(v_ptr, begin, v_stride_n, rows, valid, D), DOT_DTYPE)
        else:
            v = _packed_tile(
                v_words, v_means, v_scales, v_zeros, v_step, begin, rows, D, V_GROUP, V_KIND,
                BLOCK_N, DOT_DTYPE, PACKED_MATH,
            )  # fmt: skip
        if MASKED:
            scores = tl.where(valid[None, :], scores, float("-inf"))
        above = tl.maximum(largest, tl.max(scores, axis=1))
        shift = above * scale
        weights = tl.exp2(scores * scale - shift[:, None])
        kept = tl.exp2(largest * scale - shift)
        total = total * kept + tl.sum(weights, axis=1)
        sums = sums * kept[:, None]
        largest = above
        if K_KIND == 1 or K_KIND == 2:
            k_ids = _ids(k_ids_ptr, begin + BLOCK_N, rows, stop)
        if V_KIND > 0:
            v_ids = _ids(v_ids_ptr, begin + BLOCK_N, rows, stop)
        sums = tl.dot(weights.to(DOT_DTYPE), v, sums, input_precision="ieee")
    return sums, largest, total


@triton.jit(
    do_not_specialize=[
        "n_queries", "start", "stop", "n_tokens", "chunk", "n_chunks", "first_corrected",
        "is_first", "is_last", "k_secondary_ptr", "v_secondary_ptr",
    ]
)  # fmt: skip
def flash_kernel(
    q_ptr, q_stride_h, q_stride_n, q_scales_ptr, out_ptr, sums_ptr, largest_ptr, total_ptr,
    k_ptr, k_stride_h, k_stride_n, k_codes_ptr, k_ids_ptr, k_centroids_ptr, k_scales_ptr,
    k_secondary_ptr, k_zeros_ptr, coefficients_ptr, row_scales_ptr, basis_ptr,
    v_ptr, v_stride_h, v_stride_n, v_codes_ptr, v_ids_ptr, v_centroids_ptr, v_scales_ptr,
    v_secondary_ptr, v_zeros_ptr,
    k_count, v_count,  # centroids; runtime: only in addresses
    n_queries, start, stop, n_tokens, first_corrected,  # runtime: bounds and addresses
    chunk, n_chunks,  # runtime: tokens start .. stop - 1 are of one chunk and share its scale
    is_first, is_last,  # runtime: whether there is a state to go on from, and one to leave
    scale,  # runtime: of the scores, log2(e) in it
    D: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr, K_GROUP: tl.constexpr,
    V_GROUP: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DOT_DTYPE: tl.constexpr, PACKED_MATH: tl.constexpr,
):  # fmt: skip
    """One segment's keys and values for a block of queries. Grid (query blocks, heads).

    The state between segments is the running softmax: float32 sums [H, Nq, D] of the weighted
    values, the largest score and the total weight [H, Nq]. out: contiguous [H, Nq, D].
    """
    head = tl.program_id(1).to(tl.int64)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, D)
    valid_m = offs_m < n_queries
    q_ptrs = q_ptr + head * q_stride_h + offs_m[:, None] * q_stride_n + offs_d[None, :]
    q = tl.load(q_ptrs, mask=valid_m[:, None], other=0)
    if K_KIND == 3:
        q_scale = tl.load(q_scales_ptr + head * n_queries + offs_m, mask=valid_m, other=0.0)
    else:
        q = as_operand(q, DOT_DTYPE)
        q_scale = 0.0
    turned, turned_2 = q, q
    if RANK > 0:
        turned = _turned(q, basis_ptr + head * D * RANK, 0, D, RANK, DOT_DTYPE)
    if RANK > 16:
        turned_2 = _turned(q, basis_ptr + head * D * RANK, 16, D, RANK, DOT_DTYPE)

    # Pointers of this head.
    k_step, v_step = 1.0, 1.0
    at = head * n_tokens
    if K_KIND == 0 or K_KIND == 3:
        k_ptr += head * k_stride_h
    else:
        k_codes_ptr += at * (D // 16)
        k_ids_ptr += at
        k_centroids_ptr += head * k_count * D
        k_scales_ptr += at * (D // K_GROUP)
    if K_KIND == 2:
        k_step = tl.load(k_secondary_ptr + head * n_chunks + chunk).to(tl.float32) / 255.0
        k_zeros_ptr += head * ((n_tokens.to(tl.int64) * (D // K_GROUP) + 3) // 4)
    if K_KIND == 3:
        k_scales_ptr += at
    if V_KIND == 0:
        v_ptr += head * v_stride_h
    else:
        v_codes_ptr += at * (D // 16)
        v_ids_ptr += at
        v_centroids_ptr += head * v_count * D
        v_scales_ptr += at * (D // V_GROUP)
    if V_KIND == 2:
        v_step = tl.load(v_secondary_ptr + head * n_chunks + chunk).to(tl.float32) / 255.0
        v_zeros_ptr += head * ((n_tokens.to(tl.int64) * (D // V_GROUP) + 3) // 4)
    if RANK > 0:
        coefficients_ptr += head * (n_tokens - first_corrected) * RANK
        row_scales_ptr += head * (n_tokens - first_corrected)

    place = head * n_queries + offs_m
    going_on = offs_m < n_queries * (1 - is_first)
    largest = tl.load(largest_ptr + place, mask=going_on, other=float("-inf")).to(tl.float32)
    total = tl.load(total_ptr + place, mask=going_on, other=0.0).to(tl.float32)
    sums_at = place[:, None] * D + offs_d[None, :]
    sums = tl.load(sums_ptr + sums_at, mask=going_on[:, None], other=0.0).to(tl.float32)
    whole = start + (stop - start) // BLOCK_N * BLOCK_N
    for part in tl.static_range(2):
        sums, largest, total = _attend_range(
            q, q_scale, turned, turned_2, sums, largest, total, start if part == 0 else whole,
            whole if part == 0 else stop, stop, k_step, v_step, first_corrected, scale,
            k_ptr, k_stride_n, k_codes_ptr, k_ids_ptr, k_centroids_ptr, k_scales_ptr,
            k_zeros_ptr, coefficients_ptr, row_scales_ptr,
            v_ptr, v_stride_n, v_codes_ptr, v_ids_ptr, v_centroids_ptr, v_scales_ptr,
            v_zeros_ptr, D, K_KIND, V_KIND, K_GROUP, V_GROUP,
            RANK, BLOCK_N, DOT_DTYPE, PACKED_MATH, part == 1,
        )  # fmt: skip
    if is_last:
        out = sums / total[:, None]
        tl.store(out_ptr + sums_at, out.to(out_ptr.dtype.element_ty), mask=valid_m[:, None])
    else:
        tl.store(sums_ptr + sums_at, sums, mask=valid_m[:, None])
        tl.store(largest_ptr + place, largest, mask=valid_m)
        tl.store(total_ptr + place, total, mask=valid_m)


@triton.jit(do_not_specialize=["n_tokens"])
def quantize_rows_kernel(
    x_ptr, x_stride_h, x_stride_n, means_ptr, codes_ptr, scales_ptr,
    n_tokens,  # runtime: only in masks and addresses
    D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """x - mean of every token as INT8 with a float32 scale of its own. Grid (blocks, heads)."""
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, D)
    valid = rows < n_tokens
    x_ptrs = x_ptr + head * x_stride_h + rows[:, None] * x_stride_n + offs_d[None, :]
    x = tl.load(x_ptrs, mask=valid[:, None], other=0.0).to(tl.float32)
    if means_ptr is not None:
        x -= tl.load(means_ptr + head * D + offs_d)[None, :]
    scale = tl.max(tl.abs(x), axis=1) / 127.0
    codes = tl.floor(x / tl.where(scale > 0, scale, 1.0)[:, None] + 0.5)
    place = head * n_tokens + rows
    tl.store(codes_ptr + place[:, None] * D + offs_d[None, :], codes.to(tl.int8),
             mask=valid[:, None])  # fmt: skip
    tl.store(scales_ptr + place, scale, mask=valid)

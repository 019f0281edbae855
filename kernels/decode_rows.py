"""What a decoding program does: a run of one head's tokens, step by step, loads a step ahead.

A step is 16 rows of a head in 128 threads: 8 channels of a row, 16 bytes, are a thread's. The
nearest centroid of a token is known only when its id has come, two trips to memory one behind the
other, so ids are loaded two steps ahead and all else one: what a multiprocessor has in flight, and
not its arithmetic, is what held decoding at 2 TB/s when a program had 8 tokens and no next ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.decode_corrected import corrected_rows
from kernels.tile import e4m3_value


@triton.jit
def _step_bytes(ptr, at, rows, valid, D: tl.constexpr, GROUP: tl.constexpr):
    """A byte a group, for every word of 16 channels: uint8 [D / 16, STEP]."""
    of_word = tl.arange(0, D // 16) * 16 // GROUP
    place = (at + rows)[None, :] * (D // GROUP) + of_word[:, None]
    return tl.load(ptr + place, mask=valid[None, :], other=0)


@triton.jit
def _zero_place(at, rows, shift, D: tl.constexpr, GROUP: tl.constexpr):
    """Of every word's zero: its number in the bits that begin `shift` zeros into a byte."""
    of_word = tl.arange(0, D // 16) * 16 // GROUP
    return (at + rows)[None, :] * (D // GROUP) + of_word[:, None] + shift


@triton.jit
def _channels(D: tl.constexpr):
    """Channel numbers, [D / 16, 1, 16]: a warp's threads lie along a row, 256 bytes of a store.

    Triton hands threads out to the last dimension, then to the first: with rows before words a
    warp stored 32 bytes of each of 16 rows.
    """
    return tl.arange(0, D // 16)[:, None, None] * 16 + tl.arange(0, 16)[None, None, :]


@triton.jit
def _centroids(centroids_ptr, ids, D: tl.constexpr):
    """bfloat16 [D / 16, STEP, 16]. Rows of D values: each begins a multiple of 16 bytes."""
    return tl.load(centroids_ptr + ids.to(tl.int32)[None, :, None] * D + _channels(D))


@triton.jit
def _words(codes_ptr, at, rows, valid, D: tl.constexpr):
    """Codes, int32 [D / 16, STEP]."""
    place = (at + rows)[None, :] * (D // 16) + tl.arange(0, D // 16)[:, None]
    return tl.load(codes_ptr + place, mask=valid[None, :], other=0)


@triton.jit
def _levels(words, zero):
    """Codes less a zero, both behind 2^23: no conversion. zero: float32 [D / 16, STEP]."""
    shifts = 2 * tl.arange(0, 16)[None, None, :]
    codes = ((words[:, :, None] >> shifts) & 3) | 0x4B000000
    return codes.to(tl.float32, bitcast=True) - zero[:, :, None]


@triton.jit
def _store(out_ptr, stride_n, at, rows, values, valid, D: tl.constexpr):
    ptrs = out_ptr + (at + rows)[None, :, None] * stride_n + _channels(D)
    tl.store(ptrs, values.to(out_ptr.dtype.element_ty), mask=valid[None, :, None])


@triton.jit
def ternary_rows(
    out_ptr, out_stride_n, count, codes_ptr, ids_ptr, centroids_ptr, scales_ptr,
    D: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """mu[id] + (code - 1) * scale of `count` tokens. Pointers: of the first token, and the head's
    centroids."""
    rows = tl.arange(0, STEP)
    one = tl.full((D // 16, STEP), 8388609.0, tl.float32)  # 2^23 + 1
    valid, later = rows < count, rows < count - STEP
    ids = tl.load(ids_ptr + rows, mask=valid, other=0)
    ids_after = tl.load(ids_ptr + STEP + rows, mask=later, other=0)
    words = _words(codes_ptr, 0, rows, valid, D)
    scales = _step_bytes(scales_ptr, 0, rows, valid, D, GROUP)
    means = _centroids(centroids_ptr, ids, D)
    for at in range(0, count, STEP):
        after = at + STEP
        valid, later = rows < count - at, rows < count - after
        ids = ids_after
        ids_after = tl.load(ids_ptr + after + STEP + rows, mask=rows < count - after - STEP,
                            other=0)  # fmt: skip
        words_after = _words(codes_ptr, after, rows, later, D)
        scales_after = _step_bytes(scales_ptr, after, rows, later, D, GROUP)
        means_after = _centroids(centroids_ptr, ids, D)
        scale = e4m3_value(scales.to(tl.int32))
        values = _levels(words, one) * scale[:, :, None] + means.to(tl.float32)
        _store(out_ptr, out_stride_n, at, rows, values, valid, D)
        words, scales, means = words_after, scales_after, means_after


@triton.jit
def _by_product(
    coefficients_ptr, directions, at, rows, there, D: tl.constexpr, RANK: tl.constexpr,
    RANK_PAD: tl.constexpr, STEP: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """Coefficients times directions, float32 [D / 16, STEP, 16]. directions: [RANK_PAD, D]."""
    offs_r = tl.arange(0, RANK_PAD)
    coefficients = tl.load(
        coefficients_ptr + (at + rows)[:, None] * RANK + offs_r[None, :],
        mask=there[:, None] & (offs_r < RANK)[None, :], other=0,
    ).to(tl.float32).to(DOT_DTYPE)  # fmt: skip
    total = tl.dot(coefficients, directions, input_precision="ieee")
    return tl.permute(tl.reshape(total, (STEP, D // 16, 16)), (1, 0, 2))


@triton.jit
def affine_rows(
    out_ptr, out_stride_n, count, codes_ptr, ids_ptr, centroids_ptr, scales_ptr, step, zeros_ptr,
    shift, uncorrected, row, coefficients_ptr, row_scales_ptr, directions,
    D: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr,
    STEP: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """mu[id] + (code - zero) * scale (+ coefficients @ directions * row scale) of `count` tokens
    of one chunk, whose scales are their codes times `step`.

    Pointers as in ternary_rows; zeros begin `shift` zeros into a byte; the first `uncorrected`
    tokens have no coefficients, those of the first would be in row `row`.
    """
    if RANK > 0:
        coefficients_ptr += row * RANK
        row_scales_ptr += row
    rows = tl.arange(0, STEP)
    valid, later = rows < count, rows < count - STEP
    ids = tl.load(ids_ptr + rows, mask=valid, other=0)
    ids_after = tl.load(ids_ptr + STEP + rows, mask=later, other=0)
    words = _words(codes_ptr, 0, rows, valid, D)
    scales = _step_bytes(scales_ptr, 0, rows, valid, D, GROUP)
    place = _zero_place(0, rows, shift, D, GROUP)
    zeros = tl.load(zeros_ptr + (place >> 2), mask=valid[None, :], other=0)
    means = _centroids(centroids_ptr, ids, D)
    for at in range(0, count, STEP):
        after = at + STEP
        valid, later = rows < count - at, rows < count - after
        ids = ids_after
        ids_after = tl.load(ids_ptr + after + STEP + rows, mask=rows < count - after - STEP,
                            other=0)  # fmt: skip
        words_after = _words(codes_ptr, after, rows, later, D)
        scales_after = _step_bytes(scales_ptr, after, rows, later, D, GROUP)
        place_after = _zero_place(after, rows, shift, D, GROUP)
        zeros_after = tl.load(zeros_ptr + (place_after >> 2), mask=later[None, :], other=0)
        means_after = _centroids(centroids_ptr, ids, D)

        scale = (scales.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
        scale *= step
        zero = (zeros.to(tl.int32) >> ((_zero_place(at, rows, shift, D, GROUP) & 3) * 2)) & 3
        zero = (zero | 0x4B000000).to(tl.float32, bitcast=True)
        values = _levels(words, zero) * scale[:, :, None] + means.to(tl.float32)
        if RANK > 0:
            there = valid & (rows >= uncorrected - at)
            row_scales = tl.load(row_scales_ptr + at + rows, mask=there, other=0.0)
            correction = _by_product(
                coefficients_ptr, directions, at, rows, there, D, RANK, RANK_PAD, STEP, DOT_DTYPE
            )
            values += correction * row_scales.to(tl.float32)[None, :, None]
        _store(out_ptr, out_stride_n, at, rows, values, valid, D)
        words, scales, zeros, means = words_after, scales_after, zeros_after, means_after


@triton.jit
def ternary_block(
    out_ptr, out_stride_h, out_stride_n, offset, start, stop, out_head, head,
    codes_ptr, ids_ptr, centroids_ptr, scales_ptr, n_tokens, K,
    D: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """This program's BLOCK_N tokens of start .. stop - 1, of a span's head, to `offset` in out."""
    block = tl.program_id(0).to(tl.int64) * BLOCK_N
    count = tl.minimum(stop - start - block, BLOCK_N).to(tl.int32)
    at = head * n_tokens + start + block
    ternary_rows(
        out_ptr + out_head * out_stride_h + (offset + block) * out_stride_n, out_stride_n, count,
        codes_ptr + at * (D // 16), ids_ptr + at, centroids_ptr + head * K * D,
        scales_ptr + at * (D // GROUP), D, GROUP, STEP,
    )  # fmt: skip


@triton.jit
def affine_block(
    out_ptr, out_stride_h, out_stride_n, offset, start, stop, out_head, head,
    codes_ptr, ids_ptr, centroids_ptr, scales_ptr, secondary_ptr, chunk_stops_ptr, zeros_ptr,
    coefficients_ptr, row_scales_ptr, basis_ptr, n_tokens, n_chunks, first_corrected, K,
    D: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr, STEP: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """The same of an affine span, chunk by chunk: a chunk has a scale of its scales.

    Steps of 64 deal a correction's product out to the threads that decode (decode_corrected.py).
    """
    groups: tl.constexpr = D // GROUP
    block = tl.program_id(0).to(tl.int64) * BLOCK_N
    first = start + block
    last = tl.minimum(stop, first + BLOCK_N).to(tl.int64)
    directions = 0.0
    if RANK > 0:
        basis_ptr += head * D * RANK
        coefficients_ptr -= (head + 1) * first_corrected * RANK
        row_scales_ptr -= (head + 1) * first_corrected
    if RANK > 0 and STEP < 64:
        offs_r = tl.arange(0, RANK_PAD)
        directions = tl.load(
            basis_ptr + tl.arange(0, D)[None, :] * RANK + offs_r[:, None],
            mask=(offs_r < RANK)[:, None], other=0.0,
        ).to(tl.float32).to(DOT_DTYPE)  # fmt: skip
    out_ptr += out_head * out_stride_h + (offset - start) * out_stride_n
    centroids_ptr += head * K * D
    zeros_ptr += head * ((n_tokens.to(tl.int64) * groups + 3) // 4)
    chunk = 0
    chunk_stop = tl.load(chunk_stops_ptr).to(tl.int64)
    while first < last:
        while (chunk_stop <= first) & (chunk < n_chunks - 1):
            chunk += 1
            chunk_stop = tl.load(chunk_stops_ptr + chunk).to(tl.int64)
        ends = tl.where(chunk < n_chunks - 1, tl.minimum(chunk_stop, last), last)
        secondary = tl.load(secondary_ptr + head * n_chunks + chunk).to(tl.float32)
        step = tl.div_rn(secondary, 255.0)
        at, begin = head * n_tokens + first, first * groups
        if RANK > 0 and STEP == 64:
            corrected_rows(
                out_ptr + first * out_stride_n, out_stride_n, (ends - first).to(tl.int32),
                codes_ptr + at * (D // 16), ids_ptr + at, centroids_ptr, scales_ptr + at * groups,
                step, zeros_ptr + begin // 4, (begin % 4).to(tl.int32),
                (first_corrected - first).to(tl.int32), at, coefficients_ptr, row_scales_ptr,
                basis_ptr, D, GROUP, RANK, RANK_PAD, DOT_DTYPE,
            )  # fmt: skip
        else:
            affine_rows(
                out_ptr + first * out_stride_n, out_stride_n, (ends - first).to(tl.int32),
                codes_ptr + at * (D // 16), ids_ptr + at, centroids_ptr, scales_ptr + at * groups,
                step, zeros_ptr + begin // 4, (begin % 4).to(tl.int32),
                (first_corrected - first).to(tl.int32), at, coefficients_ptr, row_scales_ptr,
                directions, D, GROUP, RANK, RANK_PAD, STEP, DOT_DTYPE,
            )  # fmt: skip
        first = ends

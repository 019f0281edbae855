"""Sums over a chunk without its rotation: its centre, weights of tokens, second moments.

Floor of a mean, 40 heads x 4,680 x 128 on an H200 that copies 4,219 GB/s: 48 MB read by each of two
passes, 23 us; of a second moment 48 MB read by each of three parts, 34 us, 6 GFLOP being less.
Reached (H200, 2026-11-29): mean of keys, four launches, 0.137 ms, 17%. The second moment is timed
only with what observing a chunk takes beside it, 0.631 ms.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import checks, qtc_tuning, tuning
from kernels.launch import launch
from kernels.qtc_tile import Turning, token_tile
from kernels.tile import round_half_up, round_to_bf16, split_operand

MERGED = 64
"""Group means, at most, that compete for the centre (qtc_tokens.py makes 63 of them at most)."""


@triton.jit(do_not_specialize=["n_tokens", "first_place", "step"])
def group_sums_kernel(
    x_ptr, x_stride_h, x_stride_n, phases_ptr, places_ptr, sums_ptr, squares_ptr,
    n_tokens,  # runtime: only in masks and addresses
    first_place,  # runtime: where the chunk's first token stands
    step,  # runtime: places between two tokens
    D: tl.constexpr, TURN: tl.constexpr, TIME: tl.constexpr,
    ROW: tl.constexpr, GRID_ROWS: tl.constexpr, GRID_COLUMNS: tl.constexpr, LISTED: tl.constexpr,
    BLOCK_N: tl.constexpr, FAST: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Sum of every GROUP tokens and of their squared lengths. Grid (token blocks, heads)."""
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = rows < n_tokens
    even, odd = token_tile(
        x_ptr, x_stride_h, x_stride_n, phases_ptr, places_ptr, first_place, step, head, rows,
        valid, D, TURN, TIME, ROW, GRID_ROWS, GRID_COLUMNS, LISTED, FAST,
    )  # fmt: skip
    groups: tl.constexpr = BLOCK_N // GROUP
    total = (n_tokens.to(tl.int64) + GROUP - 1) // GROUP
    group = tl.program_id(0).to(tl.int64) * groups + tl.arange(0, groups)
    held = group < total
    squares = tl.sum(even * even + odd * odd, axis=1)
    squares = tl.sum(tl.reshape(squares, (groups, GROUP)), axis=1)
    tl.store(squares_ptr + head * total + group, squares, mask=held)
    even = tl.sum(tl.reshape(even, (groups, GROUP, D // 2)), axis=1)
    odd = tl.sum(tl.reshape(odd, (groups, GROUP, D // 2)), axis=1)
    at = sums_ptr + (head * total + group)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(at, tl.interleave(even, odd), mask=held[:, None])


@triton.jit
def _ordered(x):
    """float32 -> int32 of the same order; its own inverse on int32."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _median(keys, rank):
    """The number of this rank among int32 keys [n, ...], along the first axis; bit by bit."""
    found = tl.where(tl.sum((keys < 0).to(tl.int32), axis=0) <= rank, 0, -2147483648)
    for place in range(0, 31):
        higher = found + (1 << (30 - place))
        below = tl.sum((keys < higher).to(tl.int32), axis=0)
        found = tl.where(below <= rank, higher, found)
    bits = tl.where(found >= 0, found, found ^ 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["n_tokens", "groups", "several", "merged"])
def middle_kernel(
    sums_ptr, squares_ptr, middle_ptr, limit_ptr,
    n_tokens,  # runtime: only in masks and counts
    groups,  # runtime: only in addresses
    several,  # runtime: groups that are put together
    merged,  # runtime: how many come of it
    D: tl.constexpr, GROUP: tl.constexpr, MERGED: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Median of group means, and LIMIT times the median of squared distances from it in a group.

    Grid (1, heads).
    """
    head = tl.program_id(1).to(tl.int64)
    row = tl.arange(0, MERGED)
    channel = tl.arange(0, D)
    there = row < merged
    sums = tl.zeros((MERGED, D), tl.float32)
    squares = tl.zeros((MERGED,), tl.float32)
    for part in range(0, several):
        at = head * groups + row * several + part
        rows = sums_ptr + at[:, None] * D + channel[None, :]
        sums += tl.load(rows, mask=there[:, None], other=0.0)
        squares += tl.load(squares_ptr + at, mask=there, other=0.0)
    first = row * several * GROUP
    stop = tl.minimum(first + several * GROUP, n_tokens)
    count = tl.maximum(stop - first, 1).to(tl.float32)
    means = tl.div_rn(sums, tl.broadcast_to(count[:, None], (MERGED, D)))
    last = 0x7FFFFFFF
    rank = (merged - 1) // 2
    middle = _median(tl.where(there[:, None], _ordered(means), last), rank)
    tl.store(middle_ptr + head * D + channel, middle)
    apart = squares - 2.0 * tl.sum(sums * middle[None, :], axis=1)
    apart = tl.maximum(apart / count + tl.sum(middle * middle, axis=0), 0.0)
    keys = tl.where(there, _ordered(apart), last)
    tl.store(limit_ptr + head, LIMIT * _median(keys, rank))


@triton.jit(do_not_specialize=["n_tokens", "first_place", "step"])
def weighted_sums_kernel(
    x_ptr, x_stride_h, x_stride_n, phases_ptr, places_ptr, middle_ptr, limit_ptr, weights_ptr,
    sums_ptr, shares_ptr,
    n_tokens,  # runtime: only in masks and addresses
    first_place,  # runtime: where the chunk's first token stands
    step,  # runtime: places between two tokens
    D: tl.constexpr, TURN: tl.constexpr, TIME: tl.constexpr, ROW: tl.constexpr,
    GRID_ROWS: tl.constexpr, GRID_COLUMNS: tl.constexpr, LISTED: tl.constexpr,
    BLOCK_N: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Weight of every token by its distance from the middle; a block's weighted sum and weight.

    Grid (token blocks, heads).
    """
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = rows < n_tokens
    even, odd = token_tile(
        x_ptr, x_stride_h, x_stride_n, phases_ptr, places_ptr, first_place, step, head, rows,
        valid, D, TURN, TIME, ROW, GRID_ROWS, GRID_COLUMNS, LISTED, FAST,
    )  # fmt: skip
    middle = middle_ptr + head * D + 2 * tl.arange(0, D // 2)
    from_even = even - tl.load(middle)[None, :]
    from_odd = odd - tl.load(middle + 1)[None, :]
    squares = tl.sum(from_even * from_even + from_odd * from_odd, axis=1)
    limit = tl.load(limit_ptr + head)
    most = tl.where(limit > 0, limit, float("inf"))
    weight = tl.where(squares <= most, 1.0, limit / tl.maximum(squares, 1e-30))
    weight = tl.where(valid, weight, 0.0)
    tl.store(weights_ptr + head * n_tokens + rows, weight, mask=valid)
    block = head * tl.num_programs(0) + tl.program_id(0)
    even = tl.sum(even * weight[:, None], axis=0)
    odd = tl.sum(odd * weight[:, None], axis=0)
    tl.store(sums_ptr + block * D + tl.arange(0, D), tl.interleave(even, odd))
    tl.store(shares_ptr + block, tl.sum(weight, axis=0))


@triton.jit(do_not_specialize=["blocks"])
def mean_kernel(
    sums_ptr, shares_ptr, about_ptr, mean_ptr, codes_ptr, scales_ptr, stored_ptr,
    blocks,  # runtime: loop bound
    D: tl.constexpr, CODED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Mean of a head's tokens; CODED: as INT8 steps from another one too (qtc_gain.mean_codes).

    Grid (1, heads).
    """
    head = tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, D)
    total = tl.zeros((BLOCK_N, D), tl.float32)
    share = tl.zeros((BLOCK_N,), tl.float32)
    for first in range(0, blocks, BLOCK_N):
        block = first + tl.arange(0, BLOCK_N)
        there = block < blocks
        at = head * blocks + block
        rows = sums_ptr + at[:, None] * D + channel[None, :]
        total += tl.load(rows, mask=there[:, None], other=0.0)
        share += tl.load(shares_ptr + at, mask=there, other=0.0)
    mean = tl.sum(total, axis=0) / tl.sum(share, axis=0)
    tl.store(mean_ptr + head * D + channel, mean)
    if CODED:
        about = tl.load(about_ptr + head * D + channel)
        apart = mean - about
        scale = round_to_bf16(tl.div_rn(tl.max(tl.abs(apart), axis=0), 127.0))
        # The least normal number stands for 0, as in PyTorch's code.
        divisor = tl.broadcast_to(tl.maximum(scale, 1.1754943508222875e-38), (D,))
        codes = round_half_up(tl.div_rn(apart, divisor))
        codes = tl.minimum(tl.maximum(codes, -127.0), 127.0)
        tl.store(codes_ptr + head * D + channel, codes.to(tl.int8))
        tl.store(scales_ptr + head, scale.to(tl.bfloat16))
        tl.store(stored_ptr + head * D + channel, about + codes * scale)


@triton.jit(do_not_specialize=["n_tokens", "first_place", "step", "blocks"])
def second_moment_kernel(
    x_ptr, x_stride_h, x_stride_n, phases_ptr, places_ptr, centre_ptr, weights_ptr, out_ptr,
    n_tokens,  # runtime: only in masks and addresses
    first_place,  # runtime: where the chunk's first token stands
    step,  # runtime: places between two tokens
    blocks,  # runtime: token blocks of a program
    D: tl.constexpr, WEIGHTED: tl.constexpr, TURN: tl.constexpr, TIME: tl.constexpr,
    ROW: tl.constexpr, GRID_ROWS: tl.constexpr, GRID_COLUMNS: tl.constexpr, LISTED: tl.constexpr,
    BLOCK_N: tl.constexpr, FAST: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """A part of the sum of w (x - c)(x - c)^T over a run of token blocks, float32 [D / 2, D / 2].

    Parts are even by even, even by odd, odd by odd channels, one a program: together they spill.
    WEIGHTED False: c = 0 and w = 1. Grid (3 runs, heads).
    """
    head = tl.program_id(1).to(tl.int64)
    part = tl.program_id(0) % 3
    half: tl.constexpr = D // 2
    pair = tl.arange(0, half)
    moment = tl.zeros((half, half), tl.float32)
    for block in range(0, blocks):
        at = ((tl.program_id(0) // 3).to(tl.int64) * blocks + block) * BLOCK_N
        rows = at + tl.arange(0, BLOCK_N)
        valid = rows < n_tokens
        even, odd = token_tile(
            x_ptr, x_stride_h, x_stride_n, phases_ptr, places_ptr, first_place, step, head, rows,
            valid, D, TURN, TIME, ROW, GRID_ROWS, GRID_COLUMNS, LISTED, FAST,
        )  # fmt: skip
        if WEIGHTED:
            centre = centre_ptr + head * D + 2 * pair
            weight = tl.load(weights_ptr + head * n_tokens + rows, mask=valid, other=0.0)
            root = tl.sqrt(weight)[:, None]
            even = (even - tl.load(centre)[None, :]) * root
            odd = (odd - tl.load(centre + 1)[None, :]) * root
        left = tl.where(part == 2, odd, even)
        right = tl.where(part == 0, even, odd)
        left_high, rest = split_operand(left, DOT_DTYPE)
        left_low = tl.trans(rest.to(DOT_DTYPE))
        right_high, rest = split_operand(right, DOT_DTYPE)
        moment = tl.dot(left_low, right_high, moment, input_precision="ieee")
        left_high = tl.trans(left_high)
        moment = tl.dot(left_high, rest.to(DOT_DTYPE), moment, input_precision="ieee")
        moment = tl.dot(left_high, right_high, moment, input_precision="ieee")
    program = head * tl.num_programs(0) + tl.program_id(0)
    tl.store(out_ptr + program * half * half + pair[:, None] * half + pair[None, :], moment)


def _options(x: Tensor, turning: Turning, row: tuning.Launch) -> dict[str, object]:
    return turning.constants() | {
        "D": x.shape[2], "BLOCK_N": row.block_n, "FAST": tuning.dot_mode(x)[1] == tl.bfloat16,
        "num_warps": row.num_warps, "num_stages": row.num_stages,
    }  # fmt: skip


def _check(x: Tensor, turning: Turning, *others: Tensor | None) -> None:
    checks.rows("x", x)
    turning.check(x.shape[2])
    checks.together(x, *turning.tensors(), *others)


def centre(
    x: Tensor, turning: Turning, group: int, limit_times: float, about: Tensor | None = None
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor] | None]:
    """Mean float32 [H, D] of un-rotated x [H, N, D], and the weights float32 [H, N] it is made by.

    group: tokens of a group, a power of two to 16; limit_times: see qtc_tokens.py. about: float32
    [H, D], from which the mean is coded: int8 [H, 1, D], bfloat16 [H, 1], and float32 [H, D] as it
    is read again; None without. ValueError on anything else.
    """
    _check(x, turning, about)
    if group not in (1, 2, 4, 8, 16):
        raise ValueError(f"groups of {group} tokens are not of 1, 2, 4, 8 or 16")
    heads, tokens, dim = x.shape
    if about is not None:
        checks.packed("about", about, torch.float32, (heads, dim))
    middle, limit = _middle(x, turning, group, limit_times)
    row = qtc_tuning.SUMS[dim]
    blocks = triton.cdiv(tokens, row.block_n)
    weights = limit.new_empty((heads, tokens))
    sums, shares = limit.new_empty((heads, blocks, dim)), limit.new_empty((heads, blocks))
    args = (
        x, x.stride(0), x.stride(1), *turning.tensors(), middle, limit, weights, sums, shares,
        tokens, turning.first_place, turning.step,
    )  # fmt: skip
    launch(weighted_sums_kernel, (blocks, heads), args, _options(x, turning, row))
    mean, coded = limit.new_empty((heads, dim)), None
    if about is not None:
        coded = (
            torch.empty((heads, 1, dim), dtype=torch.int8, device=x.device),
            torch.empty((heads, 1), dtype=torch.bfloat16, device=x.device),
            torch.empty_like(mean),
        )  # fmt: skip
    args = (sums, shares, about, mean, *(coded or (None, None, None)), blocks)
    options = {"D": dim, "CODED": about is not None, "BLOCK_N": 16, "num_warps": 4}
    launch(mean_kernel, (1, heads), args, options | {"num_stages": 1})
    return mean, weights, coded


def _middle(x: Tensor, turning: Turning, group: int, limit_times: float) -> tuple[Tensor, Tensor]:
    """Median of group means float32 [H, D] and the limit of squared distances float32 [H]."""
    heads, tokens, dim = x.shape
    row, groups = qtc_tuning.SUMS[dim], triton.cdiv(tokens, group)
    several = max(groups // 32, 1)
    sums = torch.empty((heads, groups, dim), dtype=torch.float32, device=x.device)
    squares, limit = sums.new_empty((heads, groups)), sums.new_empty(heads)
    args = (
        x, x.stride(0), x.stride(1), *turning.tensors(), sums, squares, tokens,
        turning.first_place, turning.step,
    )  # fmt: skip
    options = _options(x, turning, row) | {"GROUP": group}
    launch(group_sums_kernel, (triton.cdiv(tokens, row.block_n), heads), args, options)
    middle = sums.new_empty((heads, dim))
    args = (sums, squares, middle, limit, tokens, groups, several, groups // several)
    options = {"D": dim, "GROUP": group, "MERGED": MERGED, "LIMIT": limit_times}
    launch(middle_kernel, (1, heads), args, options | {"num_warps": 8, "num_stages": 1})
    return middle, limit


def second_moment(
    x: Tensor, turning: Turning, centre: Tensor | None, weights: Tensor | None
) -> Tensor:
    """Sum of w (x - c)(x - c)^T over un-rotated x: [H, N, D] -> float32 [H, D, D].

    centre: float32 [H, D]; weights: float32 [H, N]; both or neither.
    """
    _check(x, turning, centre, weights)
    heads, tokens, dim = x.shape
    if (centre is None) != (weights is None):
        raise ValueError("centre and weights come together or not at all")
    if centre is not None and weights is not None:
        checks.packed("centre", centre, torch.float32, (heads, dim))
        checks.packed("weights", weights, torch.float32, (heads, tokens))
    row = qtc_tuning.MOMENT[dim]
    count = triton.cdiv(tokens, row.block_n)
    runs = min(count, max(1, triton.cdiv(qtc_tuning.MOMENT_PROGRAMS, heads)))
    blocks = triton.cdiv(count, runs)
    half = dim // 2
    parts = torch.empty((heads, runs, 3, half, half), dtype=torch.float32, device=x.device)
    args = (
        x, x.stride(0), x.stride(1), *turning.tensors(), centre, weights, parts, tokens,
        turning.first_place, turning.step, blocks,
    )  # fmt: skip
    options = _options(x, turning, row)
    options |= {"WEIGHTED": weights is not None, "DOT_DTYPE": tuning.dot_mode(x)[1]}
    launch(second_moment_kernel, (3 * runs, heads), args, options)
    even, cross, odd = parts.sum(1).unbind(1)
    out = x.new_empty((heads, half, 2, half, 2), dtype=torch.float32)
    out[:, :, 0, :, 0], out[:, :, 1, :, 1] = even, odd
    out[:, :, 0, :, 1], out[:, :, 1, :, 0] = cross, cross.transpose(1, 2)
    return out.view(heads, dim, dim)

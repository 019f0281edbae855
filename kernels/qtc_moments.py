"""Sums over a chunk without its rotation: group sums, distances, second moments; one read each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import checks, qtc_tuning, tuning
from kernels.launch import launch
from kernels.qtc_tile import Turning, token_tile
from kernels.tile import split_operand


@triton.jit(do_not_specialize=["n_tokens", "first_place"])
def group_sums_kernel(
    x_ptr, x_stride_h, x_stride_n, phases_ptr, places_ptr, weights_ptr, sums_ptr,
    n_tokens,  # runtime: only in masks and addresses
    first_place,  # runtime: where the chunk's first token stands
    D: tl.constexpr, WEIGHTED: tl.constexpr, TURN: tl.constexpr, TIME: tl.constexpr,
    ROW: tl.constexpr, GRID_ROWS: tl.constexpr, GRID_COLUMNS: tl.constexpr, LISTED: tl.constexpr,
    BLOCK_N: tl.constexpr, FAST: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Sum of every GROUP tokens, even channels then odd ones. Grid (token blocks, heads)."""
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = rows < n_tokens
    even, odd = token_tile(
        x_ptr, x_stride_h, x_stride_n, phases_ptr, places_ptr, first_place, head, rows, valid, D,
        TURN, TIME, ROW, GRID_ROWS, GRID_COLUMNS, LISTED, FAST,
    )  # fmt: skip
    if WEIGHTED:
        weight = tl.load(weights_ptr + head * n_tokens + rows, mask=valid, other=0.0)[:, None]
        even, odd = even * weight, odd * weight
    groups: tl.constexpr = BLOCK_N // GROUP
    total = (n_tokens.to(tl.int64) + GROUP - 1) // GROUP
    group = tl.program_id(0).to(tl.int64) * groups + tl.arange(0, groups)
    at = sums_ptr + (head * total + group)[:, None] * D + tl.arange(0, D // 2)[None, :]
    held = (group < total)[:, None]
    tl.store(at, tl.sum(tl.reshape(even, (groups, GROUP, D // 2)), axis=1), mask=held)
    tl.store(at + D // 2, tl.sum(tl.reshape(odd, (groups, GROUP, D // 2)), axis=1), mask=held)


@triton.jit(do_not_specialize=["n_tokens", "first_place"])
def distances_kernel(
    x_ptr, x_stride_h, x_stride_n, phases_ptr, places_ptr, centre_ptr, squares_ptr,
    n_tokens,  # runtime: only in masks and addresses
    first_place,  # runtime: where the chunk's first token stands
    D: tl.constexpr, TURN: tl.constexpr, TIME: tl.constexpr, ROW: tl.constexpr,
    GRID_ROWS: tl.constexpr, GRID_COLUMNS: tl.constexpr, LISTED: tl.constexpr,
    BLOCK_N: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Squared distance of every token from a centre. Grid (token blocks, heads)."""
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = rows < n_tokens
    even, odd = token_tile(
        x_ptr, x_stride_h, x_stride_n, phases_ptr, places_ptr, first_place, head, rows, valid, D,
        TURN, TIME, ROW, GRID_ROWS, GRID_COLUMNS, LISTED, FAST,
    )  # fmt: skip
    centre = centre_ptr + head * D + 2 * tl.arange(0, D // 2)
    even -= tl.load(centre)[None, :]
    odd -= tl.load(centre + 1)[None, :]
    squares = tl.sum(even * even + odd * odd, axis=1)
    tl.store(squares_ptr + head * n_tokens + rows, squares, mask=valid)


@triton.jit(do_not_specialize=["n_tokens", "first_place", "blocks"])
def second_moment_kernel(
    x_ptr, x_stride_h, x_stride_n, phases_ptr, places_ptr, centre_ptr, weights_ptr, out_ptr,
    n_tokens,  # runtime: only in masks and addresses
    first_place,  # runtime: where the chunk's first token stands
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
            x_ptr, x_stride_h, x_stride_n, phases_ptr, places_ptr, first_place, head, rows, valid,
            D, TURN, TIME, ROW, GRID_ROWS, GRID_COLUMNS, LISTED, FAST,
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


def _joined(halves: Tensor) -> Tensor:
    """Even channels then odd ones [..., D] -> channels in their order."""
    return halves.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def group_sums(x: Tensor, turning: Turning, weights: Tensor | None, group: int) -> Tensor:
    """Sums of every `group` tokens of un-rotated x: [H, N, D] -> float32 [H, ceil(N / group), D].

    weights: float32 [H, N], None for ones; group: a power of two to 16. ValueError on anything
    else.
    """
    _check(x, turning, weights)
    if group not in (1, 2, 4, 8, 16):
        raise ValueError(f"groups of {group} tokens are not of 1, 2, 4, 8 or 16")
    heads, tokens, dim = x.shape
    if weights is not None:
        checks.packed("weights", weights, torch.float32, (heads, tokens))
    out = torch.empty((heads, -(-tokens // group), dim), dtype=torch.float32, device=x.device)
    row = qtc_tuning.SUMS[dim]
    args = (
        x, x.stride(0), x.stride(1), *turning.tensors(), weights, out, tokens, turning.first_place,
    )  # fmt: skip
    options = _options(x, turning, row) | {"WEIGHTED": weights is not None, "GROUP": group}
    launch(group_sums_kernel, (triton.cdiv(tokens, row.block_n), heads), args, options)
    return _joined(out)


def distances(x: Tensor, turning: Turning, centre: Tensor) -> Tensor:
    """|x - centre|^2 of un-rotated x: [H, N, D], centre float32 [H, D] -> float32 [H, N]."""
    _check(x, turning, centre)
    heads, tokens, dim = x.shape
    checks.packed("centre", centre, torch.float32, (heads, dim))
    out = torch.empty((heads, tokens), dtype=torch.float32, device=x.device)
    row = qtc_tuning.SUMS[dim]
    args = (
        x, x.stride(0), x.stride(1), *turning.tensors(), centre, out, tokens, turning.first_place,
    )  # fmt: skip
    grid = (triton.cdiv(tokens, row.block_n), heads)
    launch(distances_kernel, grid, args, _options(x, turning, row))
    return out


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
        turning.first_place, blocks,
    )  # fmt: skip
    options = _options(x, turning, row)
    options |= {"WEIGHTED": weights is not None, "DOT_DTYPE": tuning.dot_mode(x)[1]}
    launch(second_moment_kernel, (3 * runs, heads), args, options)
    even, cross, odd = parts.sum(1).unbind(1)
    out = x.new_empty((heads, half, 2, half, 2), dtype=torch.float32)
    out[:, :, 0, :, 0], out[:, :, 1, :, 1] = even, odd
    out[:, :, 0, :, 1], out[:, :, 1, :, 0] = cross, cross.transpose(1, 2)
    return out.view(heads, dim, dim)

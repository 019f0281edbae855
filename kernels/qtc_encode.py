"""Encode a chunk in a qtc basis: un-rotate, project, choose gain and codes, pack; one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import checks, qtc_tuning, tuning
from kernels.launch import launch
from kernels.qtc_tile import Turning, block_words, token_tile
from kernels.tile import split_operand

CELLS = 64  # of the positive half line, 1/16 wide: at most one border of a 6-bit grid in each


@triton.jit
def _projected(
    z, x, high_ptr, low_ptr, U: tl.constexpr, U_PAD: tl.constexpr, D: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """z + x @ analysis of every second channel; products of two BF16 parts, 16 bits of mantissa."""
    channel = 2 * tl.arange(0, D // 2)[:, None]
    column = tl.arange(0, U_PAD)[None, :]
    high = tl.load(high_ptr + channel * U + column, mask=column < U, other=0.0)
    x_high, x_rest = split_operand(x, DOT_DTYPE)
    z = tl.dot(x_rest.to(DOT_DTYPE), high, z, input_precision="ieee")
    low = tl.load(low_ptr + channel * U + column, mask=column < U, other=0.0)
    z = tl.dot(x_high, low, z, input_precision="ieee")
    return tl.dot(x_high, high, z, input_precision="ieee")


@triton.jit
def _codes(scaled, width, counts_ptr, borders_ptr):
    """Code of the nearest level, the lower one on a tie; int32 like scaled.

    counts, borders: [7, CELLS] by width and cell of the magnitude: borders below the cell, and the
    one in it (infinity without).
    """
    size = tl.abs(scaled)
    cell = (tl.minimum(size, 3.9375) * 16.0).to(tl.int32) + 64 * width[None, :]
    border = tl.load(borders_ptr + cell)
    above = tl.load(counts_ptr + cell).to(tl.int32)
    half = ((1 << width) >> 1)[None, :]
    positive = half + above + (size > border).to(tl.int32)
    negative = half - 1 - above - (size >= border).to(tl.int32)
    return tl.maximum(tl.where(scaled > 0, positive, negative), 0)


@triton.jit
def _pack(
    codes, codes_ptr, widths_ptr, token, valid, NB: tl.constexpr, NB_PAD: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """codes: int32 [BLOCK_N, NB_PAD, 16], to words as in quantwm/cache/formats/qtc_planes.py."""
    width, second, third, odd, with_second, with_third = block_words(widths_ptr, 0, NB_PAD, NB)
    words_ptr = codes_ptr.to(tl.pointer_type(tl.int32)) + token[:, None] * (WORDS // 2)
    channel = tl.arange(0, 16)[None, None, :]
    rows = valid[:, None]
    digit = tl.sum((codes & 3) << (2 * channel), axis=2)
    tl.store(words_ptr + tl.arange(0, NB_PAD)[None, :], digit, mask=rows & (width >= 2)[None, :])
    if with_second > 0:
        digit = tl.sum(((codes >> 2) & 3) << (2 * channel), axis=2)
        tl.store(words_ptr + second[None, :], digit, mask=rows & (width >= 4)[None, :])
    if with_third > 0:
        digit = tl.sum(((codes >> 4) & 3) << (2 * channel), axis=2)
        tl.store(words_ptr + third[None, :], digit, mask=rows & (width >= 6)[None, :])
    highest = tl.maximum(width - 1, 0)[None, :, None]
    bits = tl.sum(((codes >> highest) & 1) << channel, axis=2).to(tl.int16)
    at = codes_ptr + token[:, None] * WORDS + odd[None, :]
    tl.store(at, bits, mask=rows & (width % 2 == 1)[None, :])


@triton.jit(do_not_specialize=["n_tokens", "first_place", "widths_ptr"])
def encode_qtc_kernel(
    x_ptr, x_stride_h, x_stride_n, about_ptr, high_ptr, low_ptr, costs_ptr, widths_ptr, levels_ptr,
    gain_table_ptr, counts_ptr, borders_ptr, phases_ptr, places_ptr, codes_ptr, gains_ptr,
    n_tokens,  # runtime: only in masks and addresses
    first_place,  # runtime: where the chunk's first token stands
    D: tl.constexpr, NB: tl.constexpr, NB_PAD: tl.constexpr, WORDS: tl.constexpr,
    TURN: tl.constexpr, TIME: tl.constexpr, ROW: tl.constexpr, GRID_ROWS: tl.constexpr,
    GRID_COLUMNS: tl.constexpr, LISTED: tl.constexpr, BLOCK_N: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """Codes and gain of every token of a block. Grid (token blocks, heads).

    The gain is the root mean square of the coded coordinates, or one step beside it where that
    costs less (quantwm/cache/formats/qtc_coder.py).
    """
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = rows < n_tokens
    token = head * n_tokens + rows
    widths_ptr += head * NB
    even, odd = token_tile(
        x_ptr, x_stride_h, x_stride_n, phases_ptr, places_ptr, first_place, head, rows, valid, D,
        TURN, TIME, ROW, GRID_ROWS, GRID_COLUMNS, LISTED, tl.bfloat16 == DOT_DTYPE,
    )  # fmt: skip
    pair = about_ptr + head * D + 2 * tl.arange(0, D // 2)
    even = tl.where(valid[:, None], even - tl.load(pair)[None, :], 0.0)
    odd = tl.where(valid[:, None], odd - tl.load(pair + 1)[None, :], 0.0)
    U: tl.constexpr = 16 * NB
    U_PAD: tl.constexpr = 16 * NB_PAD
    high_ptr += head * D * U
    low_ptr += head * D * U
    z = tl.zeros((BLOCK_N, U_PAD), tl.float32)
    z = _projected(z, even, high_ptr, low_ptr, U, U_PAD, D, DOT_DTYPE)
    z = _projected(z, odd, high_ptr + U, low_ptr + U, U, U_PAD, D, DOT_DTYPE)

    channel = tl.arange(0, U_PAD)
    width = tl.load(widths_ptr + channel // 16, mask=channel < U, other=0).to(tl.int32)
    cost = tl.load(costs_ptr + head * U + channel, mask=channel < U, other=0.0)
    cost = tl.where(width > 0, cost, 0.0)
    z = tl.where((width > 0)[None, :], z, 0.0)
    coded = tl.sum((width > 0).to(tl.float32), axis=0)
    deviation = tl.sqrt(tl.sum(z * z, axis=1) / coded)
    centre = tl.floor(tl.log2(tl.maximum(deviation, 1e-38)) * 4.0 + 0.5) + 128.0
    centre = tl.minimum(tl.maximum(centre, 1.0), 255.0).to(tl.int32)
    centre = tl.where(deviation > 0, centre, 0)

    best = tl.full((BLOCK_N,), float("inf"), tl.float32)
    best_gain = tl.zeros((BLOCK_N,), tl.int32)
    codes = tl.zeros((BLOCK_N, U_PAD), tl.int32)
    for attempt in range(0, 3):
        # 0, -1, 1: the middle one wins where they cost the same.
        step = (attempt + 1) // 2 * (2 * (attempt // 2) - 1)
        tried = tl.minimum(tl.maximum(centre + step, 1), 255)
        tried = tl.where(centre > 0, tried, 0)
        gain = tl.load(gain_table_ptr + tried)
        # Gains are powers of two: that of 256 - code is the reciprocal, 1 for the gain of 0.
        inverse = tl.load(gain_table_ptr + tl.where(tried > 0, 256 - tried, 128))
        found = _codes(z * inverse[:, None], width, counts_ptr, borders_ptr)
        found = tl.where((width > 0)[None, :], found, 0)
        value = tl.load(levels_ptr + (1 << width)[None, :] + found) * gain[:, None]
        left = tl.sum((value - z) * (value - z) * cost[None, :], axis=1)
        better = left < best
        best = tl.where(better, left, best)
        best_gain = tl.where(better, tried, best_gain)
        codes = tl.where(better[:, None], found, codes)
    tl.store(gains_ptr + token, best_gain.to(tl.uint8), mask=valid)
    tiles = tl.reshape(codes, (BLOCK_N, NB_PAD, 16))
    _pack(tiles, codes_ptr, widths_ptr, token, valid, NB, NB_PAD, WORDS)


def encode_qtc(
    x: Tensor, turning: Turning, about: Tensor, analysis: Tensor, costs: Tensor, widths: Tensor,
    words: int, tables: tuple[Tensor, Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Codes uint8 [H, N, 2 * words] and gains uint8 [H, N].

    x: float32 or bfloat16 [H, N, D]. about: float32 [H, D], the chunk's mean as stored. analysis:
    float32 [H, D, u]; costs: float32 [H, u], of a unit error in each channel; widths: uint8
    [H, u / 16], not increasing. tables: levels float32 [128], gains float32 [256], counts uint8 and
    borders float32 [7, CELLS] (see `_codes`). ValueError on anything else.
    """
    checks.rows("x", x)
    heads, tokens, dim = x.shape
    kept, device = analysis.shape[2], x.device
    checks.packed("about", about, torch.float32, (heads, dim))
    checks.packed("analysis", analysis, torch.float32, (heads, dim, kept))
    checks.packed("costs", costs, torch.float32, (heads, kept))
    checks.packed("widths", widths, torch.uint8, (heads, kept // 16))
    checks.packed("counts", tables[2], torch.uint8, (7, CELLS))
    checks.packed("borders", tables[3], torch.float32, (7, CELLS))
    turning.check(dim)
    checks.together(x, about, analysis, costs, widths, *tables, *turning.tensors())
    if kept % 16 or words % 2:
        raise ValueError(f"{kept} rows or {words} words are not whole blocks and words of 32 bits")
    dot_type = tuning.dot_mode(x)[0]
    high = analysis.to(dot_type)
    low = (analysis - high.float()).to(dot_type)
    codes = torch.empty((heads, tokens, words), dtype=torch.int16, device=device)
    gains = torch.empty((heads, tokens), dtype=torch.uint8, device=device)
    row = qtc_tuning.ENCODE[dim]
    args = (
        x, x.stride(0), x.stride(1), about, high, low, costs, widths, *tables,
        *turning.tensors(), codes, gains, tokens, turning.first_place,
    )  # fmt: skip
    constants = turning.constants() | {
        "D": dim, "NB": kept // 16, "NB_PAD": triton.next_power_of_2(kept // 16), "WORDS": words,
        "BLOCK_N": row.block_n,
        "DOT_DTYPE": tuning.dot_mode(x)[1], "num_warps": row.num_warps,
        "num_stages": row.num_stages, "enable_fp_fusion": False,
    }  # fmt: skip
    launch(encode_qtc_kernel, (triton.cdiv(tokens, row.block_n), heads), args, constants)
    return codes.view(torch.uint8), gains

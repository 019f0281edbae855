"""Encode a chunk in a qtc basis: un-rotate, project, choose gain and codes, pack; one kernel.

Floor, keys or values of 40 heads x 4,680 x 128 on an H200 that copies 4,219 GB/s: 48 MB read and 6
written, 13 us; 12 GFLOP of projections are as much. Reached (H200, 2026-11-29, the build before):
codes of keys 0.481 ms, 3%: several gains are tried for every token, each with a code of every
channel.
"""

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
def _added(
    z, x, rest, high_ptr, low_ptr, FIRST: tl.constexpr, BLOCKS: tl.constexpr, U: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """z + (x + rest) @ some columns of every second row of analysis, in products of BF16 parts."""
    row = 2 * tl.arange(0, D // 2)[:, None]
    column = 16 * FIRST + tl.arange(0, 16 * BLOCKS)[None, :]
    at, there = row * U + column, column < U
    high = tl.load(high_ptr + at, mask=there, other=0.0)
    z = tl.dot(rest, high, z, input_precision="ieee")
    z = tl.dot(x, high, z, input_precision="ieee")
    low = tl.load(low_ptr + at, mask=there, other=0.0)
    return tl.dot(x, low, z, input_precision="ieee")


@triton.jit
def _projected(
    z, z_2, x, high_ptr, low_ptr, FIRST: tl.constexpr, REST: tl.constexpr, U: tl.constexpr,
    D: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """Both parts of the coordinates plus what half the channels add: 16 bits of mantissa.

    One half behind the other: the operands of both at once take 64 registers of a thread.
    """
    x, rest = split_operand(x, DOT_DTYPE)
    rest = rest.to(DOT_DTYPE)
    z = _added(z, x, rest, high_ptr, low_ptr, 0, FIRST, U, D)
    if REST:
        z_2 = _added(z_2, x, rest, high_ptr, low_ptr, FIRST, REST, U, D)
    return z, z_2


@triton.jit
def _widths(widths_ptr, FIRST: tl.constexpr, BLOCKS: tl.constexpr, NB: tl.constexpr):
    """Of every channel of some blocks, int32 [16 * BLOCKS]; 0 behind the last block."""
    block = FIRST + tl.arange(0, 16 * BLOCKS) // 16
    return tl.load(widths_ptr + block, mask=block < NB, other=0).to(tl.int32)


@triton.jit
def _looked_up(table_ptr, at, FAST: tl.constexpr):
    """Numbers of 32 bits at places of a table, int32.

    FAST: by an instruction of its own. What Triton makes of a load wants another layout than a
    product has, and takes addresses of 64 bits there through shared memory, and numbers back.
    """
    if FAST:
        address = (table_ptr + at).to(tl.int64)
        found = tl.inline_asm_elementwise(
            "ld.global.nc.b32 $0, [$1];", "=r,l", [address], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        found = tl.load(table_ptr + at).to(tl.int32, bitcast=True)
    return found


@triton.jit
def _levels(size, inverse, width, cells_ptr, FAST: tl.constexpr):
    """Nearest level of every magnitude, counted from the least; int32 like size.

    size: float32 [BLOCK_N, channels]; inverse: of the gain, [BLOCK_N]; cells: int32 [7, CELLS] by
    width and cell: the border in it, a float whose five lowest bits are the borders below.
    """
    scaled = size * inverse[:, None]
    cell = (tl.minimum(scaled, 3.9375) * 16.0).to(tl.int32) + 64 * width[None, :]
    word = _looked_up(cells_ptr, cell, FAST)
    return (word & 31) + (scaled > word.to(tl.float32, bitcast=True)).to(tl.int32)


@triton.jit
def _cost(size, gain, inverse, width, cost, cells_ptr, levels_ptr, FAST: tl.constexpr):
    """What the errors of each token's channels cost with this gain, [BLOCK_N]."""
    level = _levels(size, inverse, width, cells_ptr, FAST)
    # Three halves of 2**width: where the upper half of that width's levels begins.
    found = _looked_up(levels_ptr, ((3 << width) >> 1)[None, :] + level, FAST)
    error = found.to(tl.float32, bitcast=True) * gain[:, None] - size
    return tl.sum(error * error * cost[None, :], axis=1)


@triton.jit
def _inverse(gain_table_ptr, code):
    """1 / gain: gains are powers of two, so that of 256 - code; 1 for the gain of 0."""
    return tl.load(gain_table_ptr + tl.where(code > 0, 256 - code, 128))


@triton.jit
def _pack(
    z, inverse, channel_width, cells_ptr, codes_ptr, widths_ptr, token, valid, FIRST: tl.constexpr,
    BLOCKS: tl.constexpr, NB: tl.constexpr, WORDS: tl.constexpr, BLOCK_N: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Codes of some blocks to words as in quantwm/cache/formats/qtc_planes.py."""
    level = _levels(tl.abs(z), inverse, channel_width, cells_ptr, FAST)
    half = ((1 << channel_width) >> 1)[None, :]
    codes = tl.maximum(tl.where(z > 0, half + level, half - 1 - level), 0)
    codes = tl.reshape(codes, (BLOCK_N, BLOCKS, 16))
    width, second, third, odd, with_second, with_third = block_words(widths_ptr, FIRST, BLOCKS, NB)
    words_ptr = codes_ptr.to(tl.pointer_type(tl.int32)) + token[:, None] * (WORDS // 2)
    channel = tl.arange(0, 16)[None, None, :]
    rows = valid[:, None]
    digit = tl.sum((codes & 3) << (2 * channel), axis=2)
    block = FIRST + tl.arange(0, BLOCKS)
    tl.store(words_ptr + block[None, :], digit, mask=rows & (width >= 2)[None, :])
    if with_second > FIRST:
        digit = tl.sum(((codes >> 2) & 3) << (2 * channel), axis=2)
        tl.store(words_ptr + second[None, :], digit, mask=rows & (width >= 4)[None, :])
    if with_third > FIRST:
        digit = tl.sum(((codes >> 4) & 3) << (2 * channel), axis=2)
        tl.store(words_ptr + third[None, :], digit, mask=rows & (width >= 6)[None, :])
    highest = tl.maximum(width - 1, 0)[None, :, None]
    bits = tl.sum(((codes >> highest) & 1) << channel, axis=2).to(tl.int16)
    at = codes_ptr + token[:, None] * WORDS + odd[None, :]
    tl.store(at, bits, mask=rows & (width % 2 == 1)[None, :])


@triton.jit(do_not_specialize=["n_tokens", "first_place", "widths_ptr"])
def encode_qtc_kernel(
    x_ptr, x_stride_h, x_stride_n, about_ptr, high_ptr, low_ptr, costs_ptr, widths_ptr, levels_ptr,
    gain_table_ptr, cells_ptr, phases_ptr, places_ptr, codes_ptr, gains_ptr,
    n_tokens,  # runtime: only in masks and addresses
    first_place,  # runtime: where the chunk's first token stands
    D: tl.constexpr, NB: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    WORDS: tl.constexpr, TURN: tl.constexpr, TIME: tl.constexpr, ROW: tl.constexpr,
    GRID_ROWS: tl.constexpr, GRID_COLUMNS: tl.constexpr, LISTED: tl.constexpr,
    BLOCK_N: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """Codes and gain of every token of a block. Grid (token blocks, heads).

    The gain is the root mean square of the coded coordinates, or one step beside it where that
    costs less (quantwm/cache/formats/qtc_coder.py). Channels are held in two parts of FIRST and
    REST blocks, powers of two: 4 and 2 for 6 where one part would be 8.
    """
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = rows < n_tokens
    token = head * n_tokens + rows
    widths_ptr += head * NB
    U: tl.constexpr = 16 * NB
    FAST: tl.constexpr = tl.bfloat16 == DOT_DTYPE
    high_ptr += head * D * U
    low_ptr += head * D * U
    costs_ptr += head * U
    even, odd = token_tile(
        x_ptr, x_stride_h, x_stride_n, phases_ptr, places_ptr, first_place, 1, head, rows, valid,
        D, TURN, TIME, ROW, GRID_ROWS, GRID_COLUMNS, LISTED, FAST,
    )  # fmt: skip
    pair = about_ptr + head * D + 2 * tl.arange(0, D // 2)
    even = tl.where(valid[:, None], even - tl.load(pair)[None, :], 0.0)
    odd = tl.where(valid[:, None], odd - tl.load(pair + 1)[None, :], 0.0)
    z = tl.zeros((BLOCK_N, 16 * FIRST), tl.float32)
    z_2 = tl.zeros((BLOCK_N, 16 * REST if REST else 16), tl.float32)
    z, z_2 = _projected(z, z_2, even, high_ptr, low_ptr, FIRST, REST, U, D, DOT_DTYPE)
    z, z_2 = _projected(z, z_2, odd, high_ptr + U, low_ptr + U, FIRST, REST, U, D, DOT_DTYPE)

    width = _widths(widths_ptr, 0, FIRST, NB)
    cost = tl.where(width > 0, tl.load(costs_ptr + tl.arange(0, 16 * FIRST)), 0.0)
    z = tl.where((width > 0)[None, :], z, 0.0)
    power = tl.sum(z * z, axis=1)
    coded = tl.sum((width > 0).to(tl.float32), axis=0)
    if REST:
        width_2 = _widths(widths_ptr, FIRST, REST, NB)
        channel = 16 * FIRST + tl.arange(0, 16 * REST)
        cost_2 = tl.load(costs_ptr + channel, mask=width_2 > 0, other=0.0)
        z_2 = tl.where((width_2 > 0)[None, :], z_2, 0.0)
        power += tl.sum(z_2 * z_2, axis=1)
        coded += tl.sum((width_2 > 0).to(tl.float32), axis=0)
    deviation = tl.sqrt(power / coded)
    centre = tl.floor(tl.log2(tl.maximum(deviation, 1e-38)) * 4.0 + 0.5) + 128.0
    centre = tl.minimum(tl.maximum(centre, 1.0), 255.0).to(tl.int32)
    centre = tl.where(deviation > 0, centre, 0)

    best = tl.full((BLOCK_N,), float("inf"), tl.float32)
    best_gain = tl.zeros((BLOCK_N,), tl.int32)
    for attempt in range(0, 3):
        # 0, -1, 1: the middle one wins where they cost the same.
        move = (attempt + 1) // 2 * (2 * (attempt // 2) - 1)
        tried = tl.minimum(tl.maximum(centre + move, 1), 255)
        tried = tl.where(centre > 0, tried, 0)
        gain, inverse = tl.load(gain_table_ptr + tried), _inverse(gain_table_ptr, tried)
        left = _cost(tl.abs(z), gain, inverse, width, cost, cells_ptr, levels_ptr, FAST)
        if REST:
            left += _cost(
                tl.abs(z_2), gain, inverse, width_2, cost_2, cells_ptr, levels_ptr, FAST
            )  # fmt: skip
        better = left < best
        best = tl.where(better, left, best)
        best_gain = tl.where(better, tried, best_gain)
    tl.store(gains_ptr + token, best_gain.to(tl.uint8), mask=valid)
    # Levels are looked up once more: to keep the best ones takes a third of the registers.
    inverse = _inverse(gain_table_ptr, best_gain)
    _pack(
        z, inverse, width, cells_ptr, codes_ptr, widths_ptr, token, valid, 0, FIRST, NB, WORDS,
        BLOCK_N, FAST,
    )  # fmt: skip
    if REST:
        _pack(
            z_2, inverse, width_2, cells_ptr, codes_ptr, widths_ptr, token, valid, FIRST, REST, NB,
            WORDS, BLOCK_N, FAST,
        )  # fmt: skip


def split(analysis: Tensor) -> tuple[Tensor, Tensor]:
    """float32 of any shape as the two parts of a dot's operand."""
    dot_type = tuning.dot_mode(analysis)[0]
    high = analysis.to(dot_type)
    return high, (analysis - high).to(dot_type)


def encode_qtc(
    x: Tensor, turning: Turning, about: Tensor, analysis: tuple[Tensor, Tensor], costs: Tensor,
    widths: Tensor, words: int, tables: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Codes uint8 [H, N, 2 * words] and gains uint8 [H, N].

    x: float32 or bfloat16 [H, N, D]. about: float32 [H, D], the chunk's mean as stored. analysis:
    what `split` made of it, [H, D, u] each; costs: float32 [H, u], of a unit error in each channel;
    widths: uint8 [H, u / 16], not increasing. tables: levels float32 [128], gains float32 [256],
    cells int32 [7, CELLS] (see `_levels`). ValueError on anything else.
    """
    checks.rows("x", x)
    heads, tokens, dim = x.shape
    kept, device = costs.shape[1], x.device
    dot_type = tuning.dot_mode(x)[0]
    checks.packed("about", about, torch.float32, (heads, dim))
    for part in analysis:
        checks.packed("analysis", part, dot_type, (heads, dim, kept))
    checks.packed("costs", costs, torch.float32, (heads, kept))
    checks.packed("widths", widths, torch.uint8, (heads, kept // 16))
    checks.packed("cells", tables[2], torch.int32, (7, CELLS))
    turning.check(dim)
    checks.together(x, about, *analysis, costs, widths, *tables, *turning.tensors())
    if kept % 16 or words % 2:
        raise ValueError(f"{kept} rows or {words} words are not whole blocks and words of 32 bits")
    codes = torch.empty((heads, tokens, words), dtype=torch.int16, device=device)
    gains = torch.empty((heads, tokens), dtype=torch.uint8, device=device)
    row, blocks = qtc_tuning.ENCODE[dim], kept // 16
    first = 1 << (blocks.bit_length() - 1)
    rest = blocks - first
    args = (
        x, x.stride(0), x.stride(1), about, *analysis, costs, widths, *tables,
        *turning.tensors(), codes, gains, tokens, turning.first_place,
    )  # fmt: skip
    constants = turning.constants() | {
        "D": dim, "NB": blocks, "FIRST": first, "WORDS": words, "BLOCK_N": row.block_n,
        "REST": triton.next_power_of_2(rest) if rest else 0,
        "DOT_DTYPE": tuning.dot_mode(x)[1], **row.options,
    }  # fmt: skip
    if row.registers:
        constants["maxnreg"] = row.registers
    launch(encode_qtc_kernel, (triton.cdiv(tokens, row.block_n), heads), args, constants)
    return codes.view(torch.uint8), gains

"""Decode a range of a qtc span into the attention's buffer: one kernel from code words to RoPE."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import checks, qtc_tuning, tuning
from kernels.decode import Decoder
from kernels.launch import PreparedLaunch
from kernels.qtc_tile import Turning, block_words, turn_tiles

TILES = 4


@triton.jit
def _digit(codes_ptr, place, word, held):
    """32 bits of 16 channels, int32 [BLOCK_N, BLOCKS, 1]; words are 2-byte aligned: two loads."""
    at = codes_ptr + place + word[None, :]
    low = tl.load(at, mask=held, other=0).to(tl.int32) & 0xFFFF
    high = tl.load(at + 1, mask=held, other=0).to(tl.int32)
    return (low | (high << 16))[:, :, None]


@triton.jit
def _levels(
    codes_ptr, widths_ptr, pairs_ptr, token, valid, FIRST: tl.constexpr, BLOCKS: tl.constexpr,
    NB: tl.constexpr, WORDS: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """Levels of some blocks of a token block, [BLOCK_N, 16 * BLOCKS], two channels a look-up.

    pairs: int32 [5461], the two BF16 levels of a pair of codes, lower channel in the lower half;
    codes of w bits begin at (4**w - 1) / 3. Both codes' digit 0 is 4 bits, then digit 1, digit 2,
    the odd bits: the order in which they lie in the words.
    """
    width, first, second, third, odd = block_words(widths_ptr, FIRST, BLOCKS, NB)
    place = token[:, None] * WORDS
    shift = (4 * tl.arange(0, 8))[None, None, :]
    digit0 = _digit(codes_ptr, place, first, valid[:, None] & (width >= 2)[None, :])
    digit1 = _digit(codes_ptr, place, second, valid[:, None] & (width >= 4)[None, :])
    digit2 = _digit(codes_ptr, place, third, valid[:, None] & (width >= 6)[None, :])
    is_odd = valid[:, None] & (width % 2 == 1)[None, :]
    # Moved up to where they stand in the pair's code; a block of 16 has at most 26 bits then.
    bits = tl.load(codes_ptr + place + odd[None, :], mask=is_odd, other=0).to(tl.int32)[:, :, None]
    code = (digit0 >> shift) & 15
    code |= ((digit1 >> shift) & 15) << 4
    code |= ((digit2 >> shift) & 15) << 8
    code |= ((bits >> (shift >> 1)) & 3) << (width // 2 * 4)[None, :, None]
    start = (((1 << (2 * width)) - 1) // 3)[None, :, None]
    both = tl.load(pairs_ptr + start + code)
    if tl.bfloat16 == DOT_DTYPE:
        low = both.to(tl.int16).to(tl.bfloat16, bitcast=True)
        high = (both >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        low = (both << 16).to(tl.float32, bitcast=True)
        high = (both & -65536).to(tl.float32, bitcast=True)
    return tl.reshape(tl.join(low, high), (token.shape[0], 16 * BLOCKS))


@triton.jit
def _rows(
    rows_ptr, scales_ptr, FIRST: tl.constexpr, BLOCKS: tl.constexpr, D: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """Synthesis rows of some blocks as two operands: even channels, odd channels, [u, D / 2]."""
    row = 16 * FIRST + tl.arange(0, 16 * BLOCKS)
    pair = tl.arange(0, D // 2)
    both = tl.load(rows_ptr + row[:, None] * (D // 2) + pair[None, :]).to(tl.int32)
    scale = tl.load(scales_ptr + row).to(tl.float32)[:, None]
    even = ((both << 24) >> 24).to(tl.float32) * scale
    odd = (both >> 8).to(tl.float32) * scale
    return even.to(DOT_DTYPE), odd.to(DOT_DTYPE)


@triton.jit
def _with_means(
    even, odd, mean_ptr, mean_codes_ptr, mean_scales_ptr, chunk_stops_ptr, head, rows, last,
    n_chunks, D: tl.constexpr,
):  # fmt: skip
    """even, odd plus the mean of every token's chunk. last: the newest token of the block.

    A loop over the chunks that the block touches, mostly one, so that a mean is made a number once
    and not for every token.
    """
    first_chunk = 0
    last_chunk = 0
    for c in range(0, n_chunks - 1):
        stop = tl.load(chunk_stops_ptr + c)
        first_chunk += (last - rows.shape[0] + 1 >= stop).to(tl.int32)
        last_chunk += (last >= stop).to(tl.int32)
    pair = tl.arange(0, D // 2)
    about = mean_ptr + 2 * pair
    about_even = tl.load(about).to(tl.float32)
    about_odd = tl.load(about + 1).to(tl.float32)
    for c in range(first_chunk, last_chunk + 1):
        both = tl.load(mean_codes_ptr + (head * n_chunks + c) * (D // 2) + pair).to(tl.int32)
        scale = tl.load(mean_scales_ptr + head * n_chunks + c).to(tl.float32)
        mean_even = about_even + ((both << 24) >> 24).to(tl.float32) * scale
        mean_odd = about_odd + (both >> 8).to(tl.float32) * scale
        within = (rows < tl.load(chunk_stops_ptr + c)) | (c == n_chunks - 1)
        if c > first_chunk:
            within = within & (rows >= tl.load(chunk_stops_ptr + c - 1))
        even += tl.where(within[:, None], mean_even[None, :], 0.0)
        odd += tl.where(within[:, None], mean_odd[None, :], 0.0)
    return even, odd


@triton.jit
def _finished(
    even, odd, out_ptr, out_stride_n, offset, start, codes, mean_ptr, mean_codes_ptr,
    mean_scales_ptr, chunk_stops_ptr, gain_table_ptr, phases_ptr, places_ptr, first_place,
    n_chunks, head, rows, last, valid, D: tl.constexpr, TURN: tl.constexpr, TIME: tl.constexpr,
    ROW: tl.constexpr, GRID_ROWS: tl.constexpr, GRID_COLUMNS: tl.constexpr, LISTED: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Gain, mean and RoPE put to the product, and the tokens stored. codes: of the gains."""
    gain = tl.load(gain_table_ptr + codes)[:, None]
    even, odd = _with_means(
        even * gain, odd * gain, mean_ptr, mean_codes_ptr, mean_scales_ptr, chunk_stops_ptr, head,
        rows, last, n_chunks, D,
    )  # fmt: skip
    if TURN:
        sine, cosine = turn_tiles(
            phases_ptr, places_ptr, first_place, rows, valid, D // 2, TIME, ROW, GRID_ROWS,
            GRID_COLUMNS, LISTED, FAST,
        )  # fmt: skip
        turned = even * cosine - odd * sine
        odd = odd * cosine + even * sine
        even = turned
    ptrs = out_ptr + (rows - start + offset)[:, None] * out_stride_n + tl.arange(0, D)[None, :]
    tl.store(ptrs, tl.interleave(even, odd).to(out_ptr.dtype.element_ty), mask=valid[:, None])


@triton.jit(
    do_not_specialize=[
        "n_tokens", "offset", "start", "stop", "first_head", "n_chunks", "first_place",
        # Views that begin anywhere, and a few bytes that gain nothing from alignment.
        "mean_scales_ptr", "chunk_stops_ptr", "codes_ptr", "mean_codes_ptr", "widths_ptr",
    ]
)  # fmt: skip
def decode_qtc_kernel(
    out_ptr, out_stride_h, out_stride_n,
    offset, start, stop, first_head,  # runtime: only in masks and addresses
    codes_ptr, gains_ptr, widths_ptr, rows_ptr, row_scales_ptr, mean_ptr, mean_codes_ptr,
    mean_scales_ptr, chunk_stops_ptr, pairs_ptr, gain_table_ptr, phases_ptr, places_ptr,
    n_tokens,  # runtime: only in masks and addresses
    n_chunks,  # runtime: loop bound
    first_place,  # runtime: where the span's first token stands
    D: tl.constexpr, NB: tl.constexpr, WORDS: tl.constexpr, TURN: tl.constexpr,
    TIME: tl.constexpr, ROW: tl.constexpr, GRID_ROWS: tl.constexpr, GRID_COLUMNS: tl.constexpr,
    LISTED: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr, SHARED: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """R_p (mean + gain * levels @ rows), rounded once. Grid (runs of TILES token blocks, heads).

    Even and odd channels are two products, so that a pair of RoPE lies in one thread. Blocks are
    taken four, two and one at a time: their number is that of the basis, nothing is padded. The
    rows are made operands once for all blocks of tokens.
    """
    to_head = tl.program_id(1).to(tl.int64)
    head = first_head + to_head
    out_ptr += to_head * out_stride_h
    owner = head * 0 if SHARED else head
    widths_ptr += owner * NB
    rows_ptr += owner * NB * 16 * (D // 2)
    row_scales_ptr += owner * NB * 16
    mean_ptr += owner * D
    FAST: tl.constexpr = tl.bfloat16 == DOT_DTYPE
    FOUR: tl.constexpr = NB // 4
    TWO: tl.constexpr = NB % 4 // 2
    ONE: tl.constexpr = NB % 2
    if FOUR >= 1:
        even_a, odd_a = _rows(rows_ptr, row_scales_ptr, 0, 4, D, DOT_DTYPE)
    if FOUR >= 2:
        even_b, odd_b = _rows(rows_ptr, row_scales_ptr, 4, 4, D, DOT_DTYPE)
    if TWO:
        even_c, odd_c = _rows(rows_ptr, row_scales_ptr, 4 * FOUR, 2, D, DOT_DTYPE)
    if ONE:
        even_d, odd_d = _rows(rows_ptr, row_scales_ptr, NB - 1, 1, D, DOT_DTYPE)
    for tile in range(0, TILES):
        block = tl.program_id(0).to(tl.int64) * TILES + tile
        rows = start + block * BLOCK_N + tl.arange(0, BLOCK_N)
        valid = rows < stop
        token = head * n_tokens + rows
        even = tl.zeros((BLOCK_N, D // 2), tl.float32)
        odd = tl.zeros((BLOCK_N, D // 2), tl.float32)
        if FOUR >= 1:
            levels = _levels(
                codes_ptr, widths_ptr, pairs_ptr, token, valid, 0, 4, NB, WORDS, DOT_DTYPE
            )
            even = tl.dot(levels, even_a, even, input_precision="ieee")
            odd = tl.dot(levels, odd_a, odd, input_precision="ieee")
        if FOUR >= 2:
            levels = _levels(
                codes_ptr, widths_ptr, pairs_ptr, token, valid, 4, 4, NB, WORDS, DOT_DTYPE
            )
            even = tl.dot(levels, even_b, even, input_precision="ieee")
            odd = tl.dot(levels, odd_b, odd, input_precision="ieee")
        for four in tl.static_range(2, FOUR):
            levels = _levels(
                codes_ptr, widths_ptr, pairs_ptr, token, valid, 4 * four, 4, NB, WORDS, DOT_DTYPE
            )
            to_even, to_odd = _rows(rows_ptr, row_scales_ptr, 4 * four, 4, D, DOT_DTYPE)
            even = tl.dot(levels, to_even, even, input_precision="ieee")
            odd = tl.dot(levels, to_odd, odd, input_precision="ieee")
        if TWO:
            levels = _levels(
                codes_ptr, widths_ptr, pairs_ptr, token, valid, 4 * FOUR, 2, NB, WORDS, DOT_DTYPE
            )
            even = tl.dot(levels, even_c, even, input_precision="ieee")
            odd = tl.dot(levels, odd_c, odd, input_precision="ieee")
        if ONE:
            levels = _levels(
                codes_ptr, widths_ptr, pairs_ptr, token, valid, NB - 1, 1, NB, WORDS, DOT_DTYPE
            )
            even = tl.dot(levels, even_d, even, input_precision="ieee")
            odd = tl.dot(levels, odd_d, odd, input_precision="ieee")
        gain_codes = tl.load(gains_ptr + token, mask=valid, other=0).to(tl.int32)
        _finished(
            even, odd, out_ptr, out_stride_n, offset, start, gain_codes, mean_ptr, mean_codes_ptr,
            mean_scales_ptr, chunk_stops_ptr, gain_table_ptr, phases_ptr, places_ptr, first_place,
            n_chunks, head, rows, start + (block + 1) * BLOCK_N - 1, valid, D, TURN, TIME, ROW,
            GRID_ROWS, GRID_COLUMNS, LISTED, FAST,
        )  # fmt: skip


def prepare_qtc(
    codes: Tensor, gains: Tensor, basis: tuple[Tensor, Tensor, Tensor, Tensor],
    means: tuple[Tensor, Tensor, Tensor], tables: tuple[Tensor, Tensor],
    turning: Turning,
) -> Decoder:  # fmt: skip
    """A qtc span's decoder; it keeps these tensors, which are contiguous and on one device.

    codes uint8 [H, N, B / 8], gains uint8 [H, N]. basis: rows int8 [H, u, D], their scales bfloat16
    [H, u], mean bfloat16 [H, D], widths uint8 [H, u / 16], or all [1, ...] for one basis of all
    heads. means: mean_codes int8 [H, C, D],
    mean_scales bfloat16 [H, C], chunk_stops int32 [C]. tables: pairs of levels int32 [5461] (see
    `_levels`) and gains float32 [256].
    ValueError on anything else.
    """
    (heads, tokens), dim = gains.shape, basis[0].shape[2]
    rows, row_scales, mean, widths = basis
    mean_codes, mean_scales, chunk_stops = means
    kept, chunks, size = rows.shape[1], mean_codes.shape[1], codes.shape[2]
    checks.packed("codes", codes, torch.uint8, (heads, tokens, size))
    checks.packed("gains", gains, torch.uint8, (heads, tokens))
    owners = 1 if rows.shape[0] == 1 else heads
    checks.packed("rows", rows, torch.int8, (owners, kept, dim))
    checks.packed("row_scales", row_scales, torch.bfloat16, (owners, kept))
    checks.packed("mean", mean, torch.bfloat16, (owners, dim))
    checks.packed("widths", widths, torch.uint8, (owners, kept // 16))
    checks.packed("mean_codes", mean_codes, torch.int8, (heads, chunks, dim))
    checks.packed("mean_scales", mean_scales, torch.bfloat16, (heads, chunks))
    checks.packed("chunk_stops", chunk_stops, torch.int32, (chunks,))
    checks.together(codes, gains, *basis, *means, *tables, *turning.tensors())
    if kept % 16 or size % 2:
        raise ValueError(f"{kept} rows or {size} bytes of codes are not whole blocks of 16")
    checks.packed("pairs", tables[0], torch.int32, (5461,))
    turning.check(dim)
    row = qtc_tuning.DECODE[dim]
    # A program for one block of tokens until there are enough of them to fill the device.
    tiles = TILES if heads * tokens >= TILES * 8192 else 1
    fixed = (
        codes.view(torch.int16), gains, widths, rows.view(torch.int16), row_scales, mean,
        mean_codes.view(torch.int16), mean_scales, chunk_stops, *tables,
        *turning.tensors(), tokens, chunks, turning.first_place,
    )  # fmt: skip
    constants = turning.constants() | {
        "D": dim, "NB": kept // 16, "WORDS": size // 2, "BLOCK_N": row.block_n, "TILES": tiles,
        "SHARED": owners == 1,
        "DOT_DTYPE": tuning.dot_mode(codes)[1], "num_warps": row.num_warps,
        "num_stages": row.num_stages,
    }  # fmt: skip
    prepared = PreparedLaunch(decode_qtc_kernel, fixed, constants)
    return Decoder(prepared, (heads, tokens, dim), codes.device, row.block_n * tiles)

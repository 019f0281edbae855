"""Decode a range of a qtc span into the attention's buffer: one kernel from code words to RoPE.

Floor, keys or values of 40 heads x 18,720 x 128 on an H200 that fills 3,357 GB/s and copies 4,219:
192 MB written and 25 read, 63 us; the product with the basis, 18 GFLOP, is less. Reached there
(2026-11-30, triton 3.6.0): keys of `medium` 0.115 ms, 55%, of `small` 0.112, 55%, of `large` 0.124,
53%; values of `small` 0.086, 71%, of `large` 0.097, 66%.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import checks, qtc_tuning, tuning
from kernels.decode import Decoder
from kernels.decode_tile import BACKWARDS
from kernels.launch import PreparedLaunch
from kernels.qtc_tile import Turning, cells, sine_cosine
from kernels.qtc_words import levels_of_step, part_words, words_of_step


@triton.jit(
    do_not_specialize=["n_chunks", "mean_scales_ptr", "mean_codes_ptr"]
)  # fmt: skip
def rows_qtc_kernel(
    out_ptr, out_stride_h, out_stride_part, means_ptr, rows_ptr, scales_ptr, mean_ptr,
    mean_codes_ptr, mean_scales_ptr,
    n_chunks,  # runtime: only in addresses
    NB: tl.constexpr, PADDED: tl.constexpr, D: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Synthesis rows as the operand that `decode_qtc_kernel` reads, and chunks' means, float32,
    even channels first.

    Grid (blocks of 16 rows, PADDED of them of which NB have codes, and then chunks; heads). Made
    once for all blocks of tokens: in each of them it took a third of the instructions.
    Rows and channels are dealt out so that the two levels of a pair, in one thread, are multiplied
    by their own rows, and a thread is left with 8 neighbouring channels.
    """
    head = tl.program_id(1).to(tl.int64)
    owner = head * 0 if SHARED else head
    n = tl.arange(0, D)
    if tl.program_id(0) < PADDED:
        if owner == head:
            block = tl.program_id(0)
            row = tl.arange(0, 16)
            channel = n // 32 * 32 + n % 8 // 2 * 8 + n // 8 % 4 * 2 + n % 2
            at = owner * NB * 16 + block * 16 + row
            there = block * 16 + row < NB * 16
            code = tl.load(
                rows_ptr + at[:, None] * D + channel[None, :], mask=there[:, None], other=0
            )  # fmt: skip
            scale = tl.load(scales_ptr + at, mask=there, other=0.0)
            value = code.to(tl.float32) * scale.to(tl.float32)[:, None]
            first = block // 4 * 4
            share = tl.where(PADDED - first > 2, 1, 2)
            pair = row // 2
            thread = (block - first) * share + pair // (8 // share)
            place = 16 * first + pair % (8 // share) * 8 + thread * 2 + row % 2
            to = out_ptr + owner * out_stride_h + place * out_stride_part
            tl.store(to[:, None] + n[None, :], value.to(out_ptr.dtype.element_ty))
    else:
        chunk = head * n_chunks + tl.program_id(0) - PADDED
        channel = n % (D // 2) * 2 + n // (D // 2)
        code = tl.load(mean_codes_ptr + chunk * D + channel).to(tl.float32)
        mean = tl.load(mean_ptr + owner * D + channel).to(tl.float32)
        scale = tl.load(mean_scales_ptr + chunk).to(tl.float32)
        tl.store(means_ptr + chunk * D + n, mean + code * scale)


@triton.jit
def _operand(rows_ptr, K: tl.constexpr, D: tl.constexpr):
    """Rows of a part: their first 64 channels and their last, [K, 64] each."""
    ptrs = rows_ptr + tl.arange(0, K)[:, None] * D + tl.arange(0, 64)[None, :]
    first = tl.load(ptrs)
    last = tl.load(ptrs + (D - 64)) if D > 64 else first
    return first, last


@triton.jit
def _channel_pairs(product):
    """Product [STEP, 64] as even and odd channels: tiles of tokens in order, twice 16 pairs.

    What is a thread's are 8 neighbouring channels of tokens STEP / 2 apart.
    """
    STEP: tl.constexpr = product.shape[0]
    PARTS: tl.constexpr = product.shape[1] // 32
    total = tl.reshape(product, (STEP // 16, 2, 8, PARTS, 4, 4, 2))
    if BACKWARDS:
        tile = tl.reshape(tl.permute(total, (3, 1, 0, 2, 5, 4, 6)), (PARTS, STEP, 16, 2))
    else:
        tile = tl.reshape(tl.permute(total, (1, 0, 2, 3, 5, 4, 6)), (STEP, PARTS, 16, 2))
    return tl.split(tile)


@triton.jit
def _along_rows(x):
    return x[None, :, None] if BACKWARDS else x[:, None, None]


@triton.jit
def _along_channels(x):
    return x[:, None, :] if BACKWARDS else x[None, :, :]


@triton.jit
def _numbers(FIRST: tl.constexpr, SIZE: tl.constexpr):
    """Of the 64 channels from FIRST on, or their pairs: SIZE of them in each of two parts."""
    return FIRST * SIZE // 32 + tl.arange(0, 2)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]


@triton.jit
def _stored(
    product, out_ptr, stride_n, gain, mean_ptr, frame, row, column, phases_ptr, valid,
    FIRST: tl.constexpr, D: tl.constexpr, TURN: tl.constexpr, TIME: tl.constexpr,
    ROW: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Gain, mean and RoPE put to the product, tokens' channels from FIRST on, which are stored."""
    even, odd = _channel_pairs(product)
    gain = _along_rows(gain)
    pair = _numbers(FIRST, 16)
    even = even * gain + _along_channels(tl.load(mean_ptr + pair))
    odd = odd * gain + _along_channels(tl.load(mean_ptr + D // 2 + pair))
    if TURN:
        start = _along_channels(tl.load(phases_ptr + pair))
        step = _along_channels(tl.load(phases_ptr + D // 2 + pair))
        pair = _along_channels(pair)
        steps = tl.where(pair < TIME + ROW, _along_rows(row), _along_rows(column))
        steps = tl.where(pair < TIME, _along_rows(frame), steps)
        sine, cosine = sine_cosine(start + steps * step, FAST)
        turned = even * cosine - odd * sine
        odd = odd * cosine + even * sine
        even = turned
    tile = tl.reshape(tl.join(even, odd), (even.shape[0], even.shape[1], 32))
    token = _along_rows(tl.arange(0, product.shape[0]) * stride_n)
    ptrs = out_ptr + token + _along_channels(_numbers(FIRST, 32))
    tl.store(ptrs, tile.to(out_ptr.dtype.element_ty), mask=_along_rows(valid))


@triton.jit
def _fetch(ptr, first, stop, TOKENS: tl.constexpr, SIZE: tl.constexpr):
    """TOKENS of SIZE bytes from `first` on, as far as they are before `stop`, into the L2 cache."""
    line = tl.arange(0, triton.next_power_of_2((TOKENS * SIZE + 127) // 128))
    at = tl.minimum(first.to(tl.int64) * SIZE + line * 128, stop.to(tl.int64) * SIZE - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptr.to(tl.int64) + at], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _chunk_from(chunk_stops_ptr, chunk, chunk_stop, token, n_chunks):
    """The chunk of a token from `chunk` on, which stops at `chunk_stop`, and where it stops."""
    while (chunk_stop <= token) & (chunk < n_chunks - 1):
        chunk += 1
        chunk_stop = tl.load(chunk_stops_ptr + chunk)
    return chunk, chunk_stop


@triton.jit(
    do_not_specialize=[
        "n_tokens", "offset", "start", "stop", "first_head", "n_chunks", "first_place",
        # Views that begin anywhere, and a few bytes that gain nothing from alignment.
        "chunk_stops_ptr", "widths_ptr",
    ]
)  # fmt: skip
def decode_qtc_kernel(
    out_ptr, out_stride_h, out_stride_n,
    offset, start, stop, first_head,  # runtime: only in masks and addresses
    codes_ptr, gains_ptr, widths_ptr, rows_ptr, means_ptr, chunk_stops_ptr, pairs_ptr,
    gain_table_ptr, phases_ptr, places_ptr,
    n_tokens,  # runtime: only in masks and addresses
    n_chunks,  # runtime: loop bound
    first_place,  # runtime: where the span's first token stands
    D: tl.constexpr, NB: tl.constexpr, WORDS: tl.constexpr, TURN: tl.constexpr,
    TIME: tl.constexpr, ROW: tl.constexpr, GRID_ROWS: tl.constexpr, GRID_COLUMNS: tl.constexpr,
    LISTED: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr, SHARED: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """R_p (mean + gain * levels @ rows), rounded once. Grid (token blocks, heads).

    rows_ptr, means_ptr: what `rows_qtc_kernel` made. A program goes through its BLOCK_N tokens in
    steps that end where a chunk ends, and through a step's channels in halves. The next step's
    words are loaded behind the first half: beside the look-ups, whose scoreboard they then shared,
    every product waited for them too (keys of `medium` 0.135 ms, now 0.115).
    """
    to_head = tl.program_id(1).to(tl.int64)
    head = first_head + to_head
    out_ptr += to_head * out_stride_h
    owner = head * 0 if SHARED else head
    FAST: tl.constexpr = tl.bfloat16 == DOT_DTYPE
    BLOCKS: tl.constexpr = 4 if NB > 2 else 2  # of the first part
    LATER: tl.constexpr = 0 if NB <= 4 else (2 if NB <= 6 else 4)  # of the second
    SHARE: tl.constexpr = 4 // BLOCKS
    LATER_SHARE: tl.constexpr = 4 // LATER if LATER else 1
    K: tl.constexpr = 16 * BLOCKS
    # Widths do not increase: so many bits a later block can have, seldom digits 1 and 2.
    MOST: tl.constexpr = min(WORDS, 6)
    LATER_MOST: tl.constexpr = min(WORDS // (BLOCKS + 1), 6)
    rows_ptr += owner * (K + 16 * LATER) * D
    means_ptr += head * n_chunks * D
    codes_ptr += head * n_tokens * WORDS
    gains_ptr += head * n_tokens
    at = start + tl.program_id(0) * BLOCK_N
    if FAST:  # no inline assembly in the interpreter
        _fetch(codes_ptr, at, stop, BLOCK_N, 2 * WORDS)
        _fetch(gains_ptr, at, stop, BLOCK_N, 1)
    last = tl.minimum(stop, at + BLOCK_N)
    rows = tl.arange(0, STEP)
    chunk = tl.cast(0, tl.int32)
    chunk_stop = tl.load(chunk_stops_ptr)
    part, widest = part_words(widths_ptr + owner * NB, pairs_ptr, 0, SHARE, NB)
    # Before it is known where the chunk ends: what is behind is not stored.
    there = rows < last - at
    from_ptr = codes_ptr + at.to(tl.int64) * WORDS
    words = words_of_step(from_ptr, rows, there, part, WORDS, MOST)
    if LATER:
        part_b, widest_b = part_words(
            widths_ptr + owner * NB, pairs_ptr, BLOCKS, LATER_SHARE, NB
        )  # fmt: skip
        words_b = words_of_step(from_ptr, rows, there, part_b, WORDS, LATER_MOST)
    operand = _operand(rows_ptr, K, D)
    if LATER:
        operand_b = _operand(rows_ptr + K * D, 16 * LATER, D)
    chunk, chunk_stop = _chunk_from(chunk_stops_ptr, chunk, chunk_stop, at, n_chunks)
    end = tl.minimum(tl.minimum(at + STEP, chunk_stop), last)
    while at < last:
        valid = rows < end - at
        code = tl.load(gains_ptr + at + rows, mask=valid, other=0)
        mean_ptr = means_ptr + chunk * D
        chunk, chunk_stop = _chunk_from(chunk_stops_ptr, chunk, chunk_stop, end, n_chunks)
        after = tl.minimum(tl.minimum(end + STEP, chunk_stop), last)
        there = rows < after - end
        levels = levels_of_step(words, part, widest, SHARE, MOST, DOT_DTYPE)
        if LATER:
            levels_b = tl.zeros((STEP, 16 * LATER), DOT_DTYPE)
            if widest_b > 0:
                levels_b = levels_of_step(
                    words_b, part_b, widest_b, LATER_SHARE, LATER_MOST, DOT_DTYPE
                )  # fmt: skip
        frame, row, column = at, at, at
        if TURN:
            frame, row, column = cells(
                places_ptr, first_place, 1, at + rows, valid, GRID_ROWS, GRID_COLUMNS, LISTED
            )  # fmt: skip
        to = out_ptr + (at - start + offset).to(tl.int64) * out_stride_n
        for HALF in tl.static_range(D // 64):
            product = tl.dot(levels, operand[HALF], input_precision="ieee")
            if LATER:
                product = tl.dot(levels_b, operand_b[HALF], product, input_precision="ieee")
            if HALF == 0:
                gain = tl.load(gain_table_ptr + code.to(tl.int32))
            _stored(
                product, to, out_stride_n, gain, mean_ptr, frame, row, column, phases_ptr, valid,
                64 * HALF, D, TURN, TIME, ROW, FAST,
            )  # fmt: skip
            if HALF == 0:
                from_ptr = codes_ptr + end.to(tl.int64) * WORDS
                words = words_of_step(from_ptr, rows, there, part, WORDS, MOST)
                if LATER:
                    words_b = words_of_step(from_ptr, rows, there, part_b, WORDS, LATER_MOST)
        at = end
        end = after


def prepare_qtc(
    codes: Tensor, gains: Tensor, basis: tuple[Tensor, Tensor, Tensor, Tensor],
    means: tuple[Tensor, Tensor, Tensor], tables: tuple[Tensor, Tensor],
    turning: Turning,
) -> QtcDecoder:  # fmt: skip
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
    if kept % 16 or size % 4 or kept > dim:
        raise ValueError(
            f"{kept} rows or {size} bytes of codes are not whole blocks, of {dim} rows at most, "
            "and words"
        )
    checks.packed("pairs", tables[0], torch.int32, (5461,))
    turning.check(dim)
    row = qtc_tuning.DECODE[dim]
    device, dot_type = codes.device, tuning.dot_mode(codes)[0]
    blocks = kept // 16
    padded = blocks + 1 if blocks % 4 in (1, 3) else blocks
    operands = _scratch("rows", owners * padded * 16 * dim, dot_type, device)
    operands = operands[: owners * padded * 16 * dim].view(owners, padded * 16, dim)
    chunk_means = _scratch("means", heads * chunks * dim, torch.float32, device)
    fixed = (
        codes.view(torch.int16), gains, widths, operands, chunk_means, chunk_stops, *tables,
        *turning.tensors(), tokens, chunks, turning.first_place,
    )  # fmt: skip
    constants = turning.constants() | {
        "D": dim, "NB": blocks, "WORDS": size // 2, "BLOCK_N": row.block_n,
        "STEP": 16 * row.num_warps, "SHARED": owners == 1, "DOT_DTYPE": tuning.dot_mode(codes)[1],
        "num_warps": row.num_warps, "num_stages": row.num_stages,
    }  # fmt: skip
    if row.registers and blocks <= BOUNDED_BLOCKS:
        constants["maxnreg"] = row.registers
    made = {
        "NB": blocks, "PADDED": padded, "D": dim, "SHARED": owners == 1, "num_warps": 4,
        "num_stages": 1,
    }  # fmt: skip
    sources = (chunk_means, rows, row_scales, mean, mean_codes, mean_scales, chunks)
    return QtcDecoder(
        PreparedLaunch(decode_qtc_kernel, fixed, constants),
        PreparedLaunch(rows_qtc_kernel, sources, made),
        operands, (padded + chunks, heads), (heads, tokens, dim), row.block_n,
    )  # fmt: skip


BOUNDED_BLOCKS = 6
"""Of a head: with more, a thread's operand does not fit beside its product in bounded registers."""
FLOAT_REGISTERS = 240
"""Of a thread that writes float32, as tests do: bounded by a row's, 8 bytes of it are spilled."""


class QtcDecoder(Decoder):
    """A decoder that first makes the rows operands and the means numbers, in a scratch that all
    spans share."""

    def __init__(
        self, launch: PreparedLaunch, make: PreparedLaunch, operands: Tensor,
        grid: tuple[int, int], shape: tuple[int, int, int], rows: int,
    ) -> None:  # fmt: skip
        """grid: of `make`."""
        super().__init__(launch, shape, operands.device, rows)
        self._make, self._operands, self._grid = make, operands, grid

    def launch_into(self, out: Tensor) -> PreparedLaunch:
        return self._launch.bounded(FLOAT_REGISTERS) if out.dtype == torch.float32 else self._launch

    def __call__(
        self, out: Tensor, offset: int, start: int, stop: int, first_head: int = 0
    ) -> None:
        """As `Decoder`. The scratch is the stream's: spans are decoded one behind the other."""
        if stop > start:
            strides = self._operands.stride(0), self._operands.stride(1)
            self._make(self._grid, self._operands, strides, ())
        super().__call__(out, offset, start, stop, first_head)


_SCRATCH: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}


def _scratch(name: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Of one span, 1 MB of rows for 40 heads of 96 x 128: the largest asked for is kept."""
    held = _SCRATCH.get((name, dtype, device))
    if held is None or held.numel() < size:
        held = _SCRATCH[name, dtype, device] = torch.empty(size, dtype=dtype, device=device)
    return held

"""Decode a range of a qtc span into the attention's buffer: one kernel from code words to RoPE.

Floor, keys or values of 40 heads x 18,720 x 128 on an H200 that fills 3,357 GB/s and copies 4,219:
192 MB written and 26 read, 63 us; the product with the basis, 25 GFLOP, is less. Reached (H200,
2026-11-29, the build before): keys 0.223 ms, 28%; values 0.197 ms, 32%. Instructions bound it, 28
an element: looking levels up and turning keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import checks, qtc_tuning, tuning
from kernels.decode import Decoder
from kernels.launch import PreparedLaunch
from kernels.qtc_tile import Turning, block_words, turn_tiles


@triton.jit
def _pair(pairs_ptr, two, top, PLACE: tl.constexpr):
    """The two levels of pair PLACE of every block, int32 like two.

    two: nibbles 0 and 1 of every other pair, a byte each; top: nibble 2 of every pair.
    """
    code = (two >> (PLACE // 2 * 8)) & 255
    if PLACE < 2:
        code |= (top << (8 - 4 * PLACE)) & 3840
    else:
        code |= (top >> (4 * PLACE - 8)) & 3840
    return tl.load(pairs_ptr + code)


@triton.jit
def _words(
    codes_ptr, widths_ptr, token, valid, FIRST: tl.constexpr, BLOCKS: tl.constexpr,
    NB: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Of some blocks what `_pair` wants: its words for even pairs and for odd ones and the third
    nibbles, int32 [BLOCK_N, BLOCKS] each; and where each block's pairs of levels begin, [BLOCKS].

    A pair's code is the nibbles digit 0, digit 1, digit 2; the odd bits, spread to two of each
    nibble, are the nibble behind the digits that there are.
    """
    width, second, third, odd, with_second, with_third = block_words(widths_ptr, FIRST, BLOCKS, NB)
    words_ptr = codes_ptr.to(tl.pointer_type(tl.int32)) + token[:, None] * (WORDS // 2)
    # Widths end at 6: `nothing` is 0, but hides that these words follow each other. Known to, they
    # are loaded in another layout than the look-ups, and all eight pairs then pass through shared
    # memory, with 32 barriers.
    nothing = width >> 3
    block = FIRST + tl.arange(0, BLOCKS) + nothing
    rows = valid[:, None]
    first = tl.load(words_ptr + block[None, :], mask=rows & (width >= 2)[None, :], other=0)
    held = rows & (width % 2 == 1)[None, :]
    bits = tl.load(codes_ptr + token[:, None] * WORDS + odd[None, :], mask=held, other=0)
    bits = bits.to(tl.int32) & 0xFFFF
    bits = (bits | (bits << 8)) & 0x00FF00FF
    bits = (bits | (bits << 4)) & 0x0F0F0F0F
    bits = (bits | (bits << 2)) & 0x33333333
    first |= tl.where((width == 1)[None, :], bits, 0)
    middle = tl.where((width == 3)[None, :], bits, 0)
    top = tl.where((width == 5)[None, :], bits, 0)
    if with_second > FIRST:
        held = rows & (width >= 4)[None, :]
        middle |= tl.load(words_ptr + (second + nothing)[None, :], mask=held, other=0)
    if with_third > FIRST:
        held = rows & (width >= 6)[None, :]
        top |= tl.load(words_ptr + (third + nothing)[None, :], mask=held, other=0)
    even = (first & 0x0F0F0F0F) | ((middle & 0x0F0F0F0F) << 4)
    odd_pairs = ((first >> 4) & 0x0F0F0F0F) | (middle & -0x0F0F0F10)
    return even, odd_pairs, top, ((1 << (2 * width)) - 1) // 3


@triton.jit
def _levels(even, odd, top, begin, pairs_ptr, DOT_DTYPE: tl.constexpr):
    """Levels of some blocks' first and second channels of every pair, [BLOCK_N, 8 * BLOCKS] each.

    even, odd, top, begin: of `_words`. pairs: int32 [5461], the two BF16 levels of a pair of codes,
    lower channel in the lower half. The eight pairs of a block are taken one by one, so that a word
    is loaded once and not by eight threads; the joins put pair 4 x + 2 y + z where it belongs. Two
    halves and not one matrix: put together again they cost three times the moves.
    """
    pairs = pairs_ptr + begin[None, :]
    p0 = tl.join(_pair(pairs, even, top, 0), _pair(pairs, even, top, 4))
    p1 = tl.join(_pair(pairs, odd, top, 1), _pair(pairs, odd, top, 5))
    p2 = tl.join(_pair(pairs, even, top, 2), _pair(pairs, even, top, 6))
    p3 = tl.join(_pair(pairs, odd, top, 3), _pair(pairs, odd, top, 7))
    both = tl.join(tl.join(p0, p2), tl.join(p1, p3))
    both = tl.reshape(both, (even.shape[0], 8 * even.shape[1]))
    if tl.bfloat16 == DOT_DTYPE:
        low = both.to(tl.int16).to(tl.bfloat16, bitcast=True)
        high = (both >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        low = (both << 16).to(tl.float32, bitcast=True)
        high = (both & -65536).to(tl.float32, bitcast=True)
    return low, high


@triton.jit(
    do_not_specialize=["n_chunks", "mean_scales_ptr", "mean_codes_ptr"]
)  # fmt: skip
def rows_qtc_kernel(
    out_ptr, out_stride_h, out_stride_part, means_ptr, rows_ptr, scales_ptr, mean_ptr,
    mean_codes_ptr, mean_scales_ptr,
    n_chunks,  # runtime: only in addresses
    NB: tl.constexpr, D: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Synthesis rows as the operands that `decode_qtc_kernel` reads: even rows, then odd rows; of
    each its even channels, then its odd ones. Means of chunks, float32, in the same order.

    Grid (blocks of 16 rows and then chunks, heads). Made once for all blocks of tokens: in each of
    them it took a third of the instructions.
    """
    head = tl.program_id(1).to(tl.int64)
    owner = head * 0 if SHARED else head
    pair = tl.arange(0, D // 2)
    if tl.program_id(0) < NB:
        if owner == head:
            row = 16 * tl.program_id(0) + tl.arange(0, 16)
            at = owner * NB * 16 + row
            both = tl.load(rows_ptr + at[:, None] * (D // 2) + pair[None, :]).to(tl.int32)
            scale = tl.load(scales_ptr + at).to(tl.float32)[:, None]
            even = ((both << 24) >> 24).to(tl.float32) * scale
            odd = (both >> 8).to(tl.float32) * scale
            to = out_ptr + owner * out_stride_h + (row % 2) * out_stride_part + row // 2 * D
            tl.store(to[:, None] + pair[None, :], even.to(out_ptr.dtype.element_ty))
            tl.store(to[:, None] + D // 2 + pair[None, :], odd.to(out_ptr.dtype.element_ty))
    else:
        chunk = head * n_chunks + tl.program_id(0) - NB
        both = tl.load(mean_codes_ptr + chunk * (D // 2) + pair).to(tl.int32)
        scale = tl.load(mean_scales_ptr + chunk).to(tl.float32)
        even = tl.load(mean_ptr + owner * D + 2 * pair).to(tl.float32)
        odd = tl.load(mean_ptr + owner * D + 2 * pair + 1).to(tl.float32)
        to = means_ptr + chunk * D + pair
        tl.store(to, even + ((both << 24) >> 24).to(tl.float32) * scale)
        tl.store(to + D // 2, odd + (both >> 8).to(tl.float32) * scale)


@triton.jit
def _operands(
    rows_ptr, FIRST: tl.constexpr, BLOCKS: tl.constexpr, NB: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """Half the rows of some blocks: even channels and odd channels, [8 * BLOCKS, D / 2] each."""
    row = 8 * FIRST + tl.arange(0, 8 * BLOCKS)
    at = rows_ptr + row[:, None] * D + tl.arange(0, D // 2)[None, :]
    if FIRST + BLOCKS <= NB:
        return tl.load(at), tl.load(at + D // 2)
    there = (row < 8 * NB)[:, None]
    return tl.load(at, mask=there, other=0.0), tl.load(at + D // 2, mask=there, other=0.0)


@triton.jit
def _added(
    even, odd, words, pairs_ptr, rows_ptr, FIRST: tl.constexpr, BLOCKS: tl.constexpr,
    NB: tl.constexpr, D: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """even and odd plus what some blocks add to them. words: of `_words`."""
    low_even, low_odd = _operands(rows_ptr, FIRST, BLOCKS, NB, D)
    high_even, high_odd = _operands(rows_ptr + 8 * NB * D, FIRST, BLOCKS, NB, D)
    low, high = _levels(words[0], words[1], words[2], words[3], pairs_ptr, DOT_DTYPE)
    even = tl.dot(low, low_even, even, input_precision="ieee")
    odd = tl.dot(low, low_odd, odd, input_precision="ieee")
    even = tl.dot(high, high_even, even, input_precision="ieee")
    odd = tl.dot(high, high_odd, odd, input_precision="ieee")
    return even, odd


@triton.jit
def _chunks_of(chunk_stops_ptr, first_token, last_token, n_chunks):
    """Chunks of a block's first and last token."""
    first_chunk = 0
    last_chunk = 0
    for c in range(0, n_chunks - 1):
        stop = tl.load(chunk_stops_ptr + c)
        first_chunk += (first_token >= stop).to(tl.int32)
        last_chunk += (last_token >= stop).to(tl.int32)
    return first_chunk, last_chunk


@triton.jit
def _with_means(
    even, odd, gain, means_ptr, chunk_stops_ptr, rows, first_chunk, last_chunk, D: tl.constexpr
):  # fmt: skip
    """Gain times even and odd, plus the mean of every token's chunk. means_ptr: of the head.

    A block of tokens mostly lies in one chunk, whose mean is then all that is read.
    """
    mean_ptr = means_ptr + first_chunk * D + tl.arange(0, D // 2)
    rows = rows.to(tl.int32)  # chunk stops are no longer
    even = even * gain + tl.load(mean_ptr)[None, :]
    odd = odd * gain + tl.load(mean_ptr + D // 2)[None, :]
    # Both means are read again here: carried along, they would be the most registers at once.
    for c in range(first_chunk + 1, last_chunk + 1):
        later = (rows >= tl.load(chunk_stops_ptr + c - 1))[:, None]
        step = tl.load(mean_ptr + D) - tl.load(mean_ptr)
        even += tl.where(later, step[None, :], 0.0)
        step = tl.load(mean_ptr + D + D // 2) - tl.load(mean_ptr + D // 2)
        odd += tl.where(later, step[None, :], 0.0)
        mean_ptr += D
    return even, odd


@triton.jit
def _finished(
    even, odd, out_ptr, out_stride_n, offset, start, gain, means_ptr, chunk_stops_ptr,
    phases_ptr, places_ptr, first_place, first_chunk, last_chunk, rows, valid, D: tl.constexpr,
    TURN: tl.constexpr, TIME: tl.constexpr, ROW: tl.constexpr, GRID_ROWS: tl.constexpr,
    GRID_COLUMNS: tl.constexpr, LISTED: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Gain, mean and RoPE put to the product, and the tokens stored."""
    even, odd = _with_means(
        even, odd, gain[:, None], means_ptr, chunk_stops_ptr, rows, first_chunk, last_chunk, D
    )
    if TURN:
        sine, cosine = turn_tiles(
            phases_ptr, places_ptr, first_place, 1, rows, valid, D // 2, TIME, ROW, GRID_ROWS,
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
    LISTED: tl.constexpr, BLOCK_N: tl.constexpr, SHARED: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """R_p (mean + gain * levels @ rows), rounded once. Grid (token blocks, heads).

    rows_ptr, means_ptr: what `rows_qtc_kernel` made.

    Even and odd channels are two products, so that a pair of RoPE lies in one thread. Blocks of
    channels are taken four at a time and then two, the least that a tensor core takes.
    """
    to_head = tl.program_id(1).to(tl.int64)
    head = first_head + to_head
    out_ptr += to_head * out_stride_h
    owner = head * 0 if SHARED else head
    widths_ptr += owner * NB
    rows_ptr += owner * NB * 16 * D
    means_ptr += head * n_chunks * D
    FAST: tl.constexpr = tl.bfloat16 == DOT_DTYPE
    FOUR: tl.constexpr = NB // 4
    REST: tl.constexpr = 0 if NB % 4 == 0 else (4 if NB % 4 == 3 else 2)
    PARTS: tl.constexpr = FOUR + (1 if REST else 0)
    first = start + tl.program_id(0).to(tl.int64) * BLOCK_N
    rows = first + tl.arange(0, BLOCK_N)
    valid = rows < stop
    token = head * n_tokens + rows
    even = tl.zeros((BLOCK_N, D // 2), tl.float32)
    odd = tl.zeros((BLOCK_N, D // 2), tl.float32)
    # What comes from far is asked for before it is wanted: a block waits for memory, and few
    # blocks fit beside each other.
    words = _words(
        codes_ptr, widths_ptr, token, valid, 0, 4 if FOUR else REST, NB, WORDS
    )  # fmt: skip
    gain = tl.load(gain_table_ptr + tl.load(gains_ptr + token, mask=valid, other=0).to(tl.int32))
    first_chunk, last_chunk = _chunks_of(
        chunk_stops_ptr, first.to(tl.int32), first.to(tl.int32) + BLOCK_N - 1, n_chunks
    )
    for part in tl.static_range(0, PARTS):
        now = words
        if part + 1 < PARTS:
            words = _words(
                codes_ptr, widths_ptr, token, valid, 4 * part + 4, 4 if part + 1 < FOUR else REST,
                NB, WORDS,
            )  # fmt: skip
        even, odd = _added(
            even, odd, now, pairs_ptr, rows_ptr, 4 * part, 4 if part < FOUR else REST, NB, D,
            DOT_DTYPE,
        )  # fmt: skip
    _finished(
        even, odd, out_ptr, out_stride_n, offset, start, gain, means_ptr, chunk_stops_ptr,
        phases_ptr, places_ptr, first_place, first_chunk, last_chunk, rows, valid, D, TURN, TIME,
        ROW, GRID_ROWS, GRID_COLUMNS, LISTED, FAST,
    )  # fmt: skip


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
    if kept % 16 or size % 4:
        raise ValueError(f"{kept} rows or {size} bytes of codes are not whole blocks and words")
    checks.packed("pairs", tables[0], torch.int32, (5461,))
    turning.check(dim)
    row = qtc_tuning.DECODE[dim]
    device, dot_type = codes.device, tuning.dot_mode(codes)[0]
    operands = _scratch("rows", owners * kept * dim, dot_type, device)
    operands = operands[: owners * kept * dim].view(owners, 2, kept // 2, dim)
    chunk_means = _scratch("means", heads * chunks * dim, torch.float32, device)
    fixed = (
        codes.view(torch.int16), gains, widths, operands, chunk_means, chunk_stops, *tables,
        *turning.tensors(), tokens, chunks, turning.first_place,
    )  # fmt: skip
    constants = turning.constants() | {
        "D": dim, "NB": kept // 16, "WORDS": size // 2, "BLOCK_N": row.block_n,
        "SHARED": owners == 1, "DOT_DTYPE": tuning.dot_mode(codes)[1],
        "num_warps": row.num_warps, "num_stages": row.num_stages,
    }  # fmt: skip
    if row.registers:
        constants["maxnreg"] = row.registers
    made = {"NB": kept // 16, "D": dim, "SHARED": owners == 1, "num_warps": 4, "num_stages": 1}
    sources = (
        chunk_means, rows.view(torch.int16), row_scales, mean, mean_codes.view(torch.int16),
        mean_scales, chunks,
    )  # fmt: skip
    return QtcDecoder(
        PreparedLaunch(decode_qtc_kernel, fixed, constants),
        PreparedLaunch(rows_qtc_kernel, sources, made),
        operands, (kept // 16 + chunks, heads), (heads, tokens, dim), row.block_n,
    )  # fmt: skip


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

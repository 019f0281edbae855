"""Group quantizers with real zeros: per token (rtn, kivi's values), per channel (kivi's keys).

x = zero + code * scale with 2 or 4 bits a code and FP16 numbers, bit for bit the reference's
(quantwm/cache/reference_groups.py). Floors, keys or values of 40 x 4,680 x 128 on an H200 that
copies 4,219 GB/s and fills 3,357: an encode reads 48 MB and writes 9 (kivi int2), 13 us; a decode
the other way, 16 us. Reached for keys and values together (H200, 2026-11-29): encode rtn 0.056 ms,
47%, kivi 0.095 ms, 28%; decode 0.046 ms each, 70%.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import checks, tuning
from kernels.decode import Decoder
from kernels.launch import PreparedLaunch, launch
from kernels.tile import (
    channels_of,
    code_levels,
    round_half_up,
    safe_divide,
    store_codes,
    store_values,
)

_FLOAT16_MAX = tl.constexpr(65504.0)
BITS = (2, 4)


@triton.jit
def _zero_and_scale(low, high, LEVELS: tl.constexpr):
    """The least value and the step of groups, as FP16 holds them, in float32.

    A 0 at either end is +0: which of two zeros a minimum returns is anyone's choice.
    """
    low = tl.minimum(tl.maximum(low, -_FLOAT16_MAX), _FLOAT16_MAX)
    high = tl.minimum(tl.maximum(high, -_FLOAT16_MAX), _FLOAT16_MAX)
    high = tl.where(high == 0, 0.0, high)
    zero = tl.where(low == 0, 0.0, low).to(tl.float16).to(tl.float32)
    scale = tl.maximum(tl.div_rn(high - zero, LEVELS - 1.0), 0.0)
    return zero, tl.minimum(scale, _FLOAT16_MAX).to(tl.float16).to(tl.float32)


@triton.jit
def _codes_of(x, zero, scale, AXIS: tl.constexpr, LEVELS: tl.constexpr):
    """round((x - zero) / scale), halves up, in 0 .. LEVELS - 1; 0 where the scale is.

    No division: one took half of an encode's instructions. An FP16 scale times a number of halves
    is exact, so comparing with it decides as the quotient would (quantize_real_zero has the proof).
    zero, scale: of groups, without AXIS.
    """
    d = x - tl.expand_dims(zero, AXIS)
    step = tl.where(scale > 0, scale, float("inf"))
    if LEVELS == 4:
        codes = (d >= tl.expand_dims(0.5 * step, AXIS)).to(tl.int32)
        codes += (d >= tl.expand_dims(1.5 * step, AXIS)).to(tl.int32)
        return codes + (d >= tl.expand_dims(2.5 * step, AXIS)).to(tl.int32)
    guess = round_half_up(d * tl.expand_dims(safe_divide(tl.full(scale.shape, 1.0, tl.float32),
                                                         scale), AXIS))  # fmt: skip
    guess = tl.minimum(tl.maximum(guess, 0.0), LEVELS - 1.0)  # off by one at most
    step = tl.expand_dims(step, AXIS)
    up = (d >= (guess + 0.5) * step) & (guess < LEVELS - 1)
    down = (d < (guess - 0.5) * step) & (guess > 0)
    return guess.to(tl.int32) + up.to(tl.int32) - down.to(tl.int32)


@triton.jit(do_not_specialize=["n_tokens"])
def encode_token_groups_kernel(
    x_ptr, x_stride_h, x_stride_n, codes_ptr, scales_ptr, zeros_ptr,
    n_tokens,  # runtime: only in masks and addresses
    D: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Groups of GROUP channels of one token. Grid (token blocks, heads)."""
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = rows < n_tokens
    groups: tl.constexpr = D // GROUP
    channels = tl.arange(0, groups)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x_ptrs = (x_ptr + head * x_stride_h + rows * x_stride_n)[:, None, None] + channels[None, :, :]
    x = tl.load(x_ptrs, mask=valid[:, None, None], other=0.0).to(tl.float32)
    zero, scale = _zero_and_scale(tl.min(x, axis=2), tl.max(x, axis=2), 1 << BITS)
    codes = _codes_of(x, zero, scale, 2, 1 << BITS)
    store_codes(codes_ptr, codes, head * n_tokens + rows, valid, BLOCK_N, D, D, BITS)
    place = (head * n_tokens + rows)[:, None] * groups + tl.arange(0, groups)[None, :]
    tl.store(scales_ptr + place, scale.to(tl.float16), mask=valid[:, None])
    tl.store(zeros_ptr + place, zero.to(tl.float16), mask=valid[:, None])


@triton.jit(do_not_specialize=["n_tokens", "n_groups"])
def encode_channel_groups_kernel(
    x_ptr, x_stride_h, x_stride_n, codes_ptr, scales_ptr, zeros_ptr, stops_ptr,
    n_tokens, n_groups,  # runtime: only in masks and addresses
    D: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Groups of GROUP tokens of one channel, the last one shorter; where each ends.

    Grid (groups * D / BLOCK_D, heads): a program has some channels of one group.
    """
    head = tl.program_id(1).to(tl.int64)
    parts: tl.constexpr = D // BLOCK_D
    group, first = tl.program_id(0) // parts, tl.program_id(0) % parts * BLOCK_D
    rows = group.to(tl.int64) * GROUP + tl.arange(0, GROUP)
    channels = first + tl.arange(0, BLOCK_D)
    valid = rows < n_tokens
    x_ptrs = x_ptr + head * x_stride_h + rows[:, None] * x_stride_n + channels[None, :]
    x = tl.load(x_ptrs, mask=valid[:, None], other=0.0).to(tl.float32)
    low = tl.min(tl.where(valid[:, None], x, float("inf")), axis=0)
    high = tl.max(tl.where(valid[:, None], x, -float("inf")), axis=0)
    zero, scale = _zero_and_scale(low, high, 1 << BITS)
    codes = _codes_of(x, zero, scale, 0, 1 << BITS)
    words = codes_ptr + first * BITS // 32
    store_codes(words, codes, head * n_tokens + rows, valid, GROUP, BLOCK_D, D, BITS)
    place = (head * n_groups + group) * D + channels
    tl.store(scales_ptr + place, scale.to(tl.float16))
    tl.store(zeros_ptr + place, zero.to(tl.float16))
    stop = tl.minimum((group + 1) * GROUP, n_tokens)
    tl.store(stops_ptr + group, stop, mask=(head == 0) & (first == 0))


@triton.jit(do_not_specialize=["n_tokens", "offset", "start", "stop", "first_head"])
def decode_token_groups_kernel(
    out_ptr, out_stride_h, out_stride_n,
    offset, start, stop, first_head,  # runtime: only in masks and addresses
    codes_ptr, scales_ptr, zeros_ptr,
    n_tokens,  # runtime: only in masks and addresses
    D: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """code * scale + zero in float32, rounded once. Grid (token blocks, heads of out)."""
    out_head = tl.program_id(1).to(tl.int64)
    head = out_head + first_head
    block = tl.program_id(0).to(tl.int64) * BLOCK_N
    rows = tl.arange(0, BLOCK_N)
    valid = rows < stop - start - block
    at = head * n_tokens + start + block
    words: tl.constexpr = D * BITS // 32
    groups: tl.constexpr = D // GROUP
    of_word = tl.arange(0, words) * (32 // BITS) // GROUP
    place = at * groups + rows[:, None] * groups + of_word[None, :]
    scale = tl.load(scales_ptr + place, mask=valid[:, None], other=0.0).to(tl.float32)
    zero = tl.load(zeros_ptr + place, mask=valid[:, None], other=0.0).to(tl.float32)
    none = tl.zeros((1, words), tl.float32)
    values = code_levels(codes_ptr + at * words, none, rows, valid, D, BITS) * scale[:, :, None]
    out_ptr += out_head * out_stride_h + (offset + block) * out_stride_n
    store_values(out_ptr, out_stride_n, values + zero[:, :, None], rows, valid, D, BITS)


@triton.jit(
    do_not_specialize=[
        "n_tokens", "n_groups", "offset", "start", "stop", "first_head", "first_group",
        "stops_ptr",  # views into all layers' storage begin anywhere
    ]
)  # fmt: skip
def decode_channel_groups_kernel(
    out_ptr, out_stride_h, out_stride_n,
    offset, start, stop, first_head, first_group,  # runtime: only in masks and addresses
    codes_ptr, scales_ptr, zeros_ptr, stops_ptr,
    n_tokens, n_groups,  # runtime: only in addresses
    D: tl.constexpr, BITS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """As decode_token_groups_kernel. Grid (groups that the range touches, heads of out).

    A program has the tokens of one group that are asked for, so that its scales and zeros are read
    once and no token looks its group up.
    """
    out_head = tl.program_id(1).to(tl.int64)
    head = out_head + first_head
    group = first_group + tl.program_id(0)
    begin = tl.load(stops_ptr + group - 1, mask=group > 0, other=0)
    begin = tl.maximum(begin, start)
    end = tl.minimum(tl.load(stops_ptr + group), stop)
    channels = channels_of(D, BITS)
    numbers = (head * n_groups + group) * D
    scale = tl.load(scales_ptr + numbers + channels).to(tl.float32)
    zero = tl.load(zeros_ptr + numbers + channels).to(tl.float32)
    words: tl.constexpr = D * BITS // 32
    none = tl.zeros((1, words), tl.float32)
    rows = tl.arange(0, BLOCK_N)
    for first in range(begin, end, BLOCK_N):
        valid = rows < end - first
        at = (head * n_tokens + first) * words
        values = code_levels(codes_ptr + at, none, rows, valid, D, BITS) * scale + zero
        place = out_head * out_stride_h + tl.cast(offset + first - start, tl.int64) * out_stride_n
        store_values(out_ptr + place, out_stride_n, values, rows, valid, D, BITS)


class GroupDecoder(Decoder):
    """A Decoder whose programs have a group of tokens each."""

    def __init__(
        self, launch: PreparedLaunch, shape: tuple[int, int, int], device: torch.device,
        group_tokens: Sequence[int],
    ) -> None:  # fmt: skip
        """group_tokens: the tokens of each group, in order."""
        super().__init__(launch, shape, device, 1)
        self._stops = list(accumulate(group_tokens))

    def _start(self, out: Tensor, offset: int, start: int, stop: int, first_head: int) -> None:
        stride_h, stride_n, _ = out.stride()
        first = bisect_right(self._stops, start)
        touched = bisect_left(self._stops, stop) + 1 - first
        lengths = (offset, start, stop, first_head, first)
        self._launch((touched, out.shape[0]), out, (stride_h, stride_n), lengths)


def _check(x: Tensor, group_size: int, bits: int) -> tuple[int, int, int]:
    checks.rows("x", x)
    heads, tokens, dim = x.shape
    checks.geometry(dim, group_size)
    if bits not in BITS:
        raise ValueError(f"no kernel: codes of {bits} bits, there are {BITS}")
    return heads, tokens, dim


def _constants(row: tuning.Launch, **sizes: int) -> dict[str, object]:
    return {**sizes, **row.options}


def encode_token_groups(x: Tensor, group_size: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Groups of channels of x: [H, N, D] float32 or bfloat16, channels adjacent.

    Returns codes uint8 [H, N, D * bits / 8], scales and zeros float16 [H, N, D / group_size].
    ValueError on anything else.
    """
    heads, tokens, dim = _check(x, group_size, bits)
    row = tuning.ENCODE_TOKENS[dim]
    words = torch.empty((heads, tokens, dim * bits // 32), dtype=torch.int32, device=x.device)
    scales = torch.empty((heads, tokens, dim // group_size), dtype=torch.float16, device=x.device)
    zeros = torch.empty_like(scales)
    args = (x, x.stride(0), x.stride(1), words, scales, zeros, tokens)
    constants = _constants(row, D=dim, GROUP=group_size, BITS=bits, BLOCK_N=row.block_n)
    grid = (triton.cdiv(tokens, row.block_n), heads)
    launch(encode_token_groups_kernel, grid, args, constants)
    return words.view(torch.uint8), scales, zeros


def encode_channel_groups(
    x: Tensor, group_size: int, bits: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Groups of tokens of each channel; x as in `encode_token_groups`.

    Returns codes uint8 [H, N, D * bits / 8], scales and zeros float16 [H, C, D], stops int32 [C]
    (where each of the C groups ends).
    """
    heads, tokens, dim = _check(x, group_size, bits)
    row = tuning.ENCODE_CHANNELS[dim]
    wide = min(dim, row.block_n // group_size)
    groups = triton.cdiv(tokens, group_size)
    words = torch.empty((heads, tokens, dim * bits // 32), dtype=torch.int32, device=x.device)
    scales = torch.empty((heads, groups, dim), dtype=torch.float16, device=x.device)
    zeros = torch.empty_like(scales)
    stops = torch.empty((groups,), dtype=torch.int32, device=x.device)
    args = (x, x.stride(0), x.stride(1), words, scales, zeros, stops, tokens, groups)
    constants = _constants(row, D=dim, GROUP=group_size, BITS=bits, BLOCK_D=wide)
    launch(encode_channel_groups_kernel, (groups * (dim // wide), heads), args, constants)
    return words.view(torch.uint8), scales, zeros, stops


def _check_codes(codes: Tensor, dim: int, bits: int) -> tuple[int, int]:
    heads, tokens = codes.shape[:2]
    checks.packed("codes", codes, torch.uint8, (heads, tokens, dim * bits // 8))
    return heads, tokens


def prepare_token_groups(codes: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Decoder:
    """The decoder of a span of `encode_token_groups`, all contiguous. ValueError otherwise."""
    heads, tokens, groups = scales.shape
    dim = codes.shape[2] * 8 // bits
    checks.geometry(dim, dim // groups)
    _check_codes(codes, dim, bits)
    checks.packed("scales", scales, torch.float16, (heads, tokens, groups))
    checks.packed("zeros", zeros, torch.float16, (heads, tokens, groups))
    checks.together(codes, scales, zeros)
    row = tuning.DECODE_TOKENS[dim]
    constants = _constants(row, D=dim, GROUP=dim // groups, BITS=bits, BLOCK_N=row.block_n)
    fixed = (codes.view(torch.int32), scales, zeros, tokens)
    prepared = PreparedLaunch(decode_token_groups_kernel, fixed, constants)
    return Decoder(prepared, (heads, tokens, dim), codes.device, row.block_n)


def prepare_channel_groups(
    codes: Tensor, scales: Tensor, zeros: Tensor, stops: Tensor, group_tokens: Sequence[int],
    bits: int,
) -> Decoder:  # fmt: skip
    """The decoder of a span of `encode_channel_groups`, or of several joined or cut.

    stops: int32 [C], the token of the span at which each group ends; group_tokens: the tokens of
    each group, on the host. ValueError on anything else.
    """
    heads, groups, dim = scales.shape
    checks.geometry(dim)
    _, tokens = _check_codes(codes, dim, bits)
    checks.packed("codes", codes, torch.uint8, (heads, tokens, dim * bits // 8))
    checks.packed("zeros", zeros, torch.float16, (heads, groups, dim))
    checks.packed("stops", stops, torch.int32, (groups,))
    checks.together(codes, scales, zeros, stops)
    if len(group_tokens) != groups or sum(group_tokens) != tokens:
        raise ValueError(f"{len(group_tokens)} groups do not hold {tokens} tokens")
    row = tuning.DECODE_CHANNELS[dim]
    constants = _constants(row, D=dim, BITS=bits, BLOCK_N=row.block_n)
    fixed = (codes.view(torch.int32), scales, zeros, stops, tokens, groups)
    prepared = PreparedLaunch(decode_channel_groups_kernel, fixed, constants)
    return GroupDecoder(prepared, (heads, tokens, dim), codes.device, group_tokens)

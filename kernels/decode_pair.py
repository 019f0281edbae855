"""Keys and values of one span decoded by one launch, where two would each end with idle processors.

A launch loses 3 to 4 us while its first programs begin and its last ones end. Of keys with PSAC
there is more: 12 of their programs share a multiprocessor and wait for memory more than for each
other, while those of values are held up by what they write; side by side each fills the other's
gaps. Heads take turns, keys before values, so that the shorter programs come last.

Floor, both sides: decode.py's twice. Reached (H200, 2026-11-30), 4,680 and 18,720 tokens: ternary
37 and 125 us, 86 and 100%; keys with PSAC and affine values 46 and 149 to 151, 70 and 85%.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernels import tuning
from kernels.decode import FLOAT_REGISTERS, Decoder
from kernels.decode_rows import affine_piece, ternary_block
from kernels.launch import compile_only, launch

Constants = dict[str, Any]


@triton.jit(
    do_not_specialize=["offset", "start", "stop", "first_head", "k_tokens", "v_tokens", "k_book",
                       "v_book"]
)  # fmt: skip
def ternary_pair_kernel(
    k_out_ptr, v_out_ptr, out_stride_h, out_stride_n,
    offset, start, stop, first_head,  # runtime: only in masks and addresses
    k_codes_ptr, k_ids_ptr, k_centroids_ptr, k_scales_ptr, k_tokens, k_book,
    v_codes_ptr, v_ids_ptr, v_centroids_ptr, v_scales_ptr, v_tokens, v_book,
    D: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """As decode_ternary_kernel. Grid (token blocks, twice the heads of out)."""
    out_head = (tl.program_id(1) // 2).to(tl.int64)
    if tl.program_id(1) % 2 == 0:
        ternary_block(
            k_out_ptr, out_stride_h, out_stride_n, offset, start, stop, out_head,
            out_head + first_head, k_codes_ptr, k_ids_ptr, k_centroids_ptr, k_scales_ptr,
            k_tokens, k_book, D, GROUP, BLOCK_N, STEP, PACKED,
        )  # fmt: skip
    else:
        ternary_block(
            v_out_ptr, out_stride_h, out_stride_n, offset, start, stop, out_head,
            out_head + first_head, v_codes_ptr, v_ids_ptr, v_centroids_ptr, v_scales_ptr,
            v_tokens, v_book, D, GROUP, BLOCK_N, STEP, PACKED,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "offset", "start", "stop", "first_head", "k_tokens", "v_tokens", "k_chunks", "v_chunks",
        "first_corrected", "k_book", "v_book",
        "k_secondary_ptr", "k_stops_ptr", "v_secondary_ptr", "v_stops_ptr",  # see decode.py
    ]
)  # fmt: skip
def affine_pair_kernel(
    k_out_ptr, v_out_ptr, out_stride_h, out_stride_n,
    offset, start, stop, first_head,  # runtime: only in masks and addresses
    k_codes_ptr, k_ids_ptr, k_centroids_ptr, k_scales_ptr, k_secondary_ptr, k_stops_ptr,
    k_zeros_ptr, coefficients_ptr, row_scales_ptr, basis_ptr, k_tokens, k_chunks,
    first_corrected, k_book,
    v_codes_ptr, v_ids_ptr, v_centroids_ptr, v_scales_ptr, v_secondary_ptr, v_stops_ptr,
    v_zeros_ptr, v_tokens, v_chunks, v_book,
    D: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """As decode_affine_kernel, of keys with a correction of this RANK and values with none. Grid
    (token blocks, twice the heads of out). WIDTH: channels of a pass where there is one."""
    out_head = (tl.program_id(1) // 2).to(tl.int64)
    first = start + tl.program_id(0) * BLOCK_N
    last = tl.minimum(stop, first + BLOCK_N)
    if tl.program_id(1) % 2 == 0:
        while first < last:
            first = affine_piece(
                k_out_ptr, out_stride_h, out_stride_n, offset, start, first, last, out_head,
                out_head + first_head, k_codes_ptr, k_ids_ptr, k_centroids_ptr, k_scales_ptr,
                k_secondary_ptr, k_stops_ptr, k_zeros_ptr, coefficients_ptr, row_scales_ptr,
                basis_ptr, k_tokens, k_chunks, first_corrected, k_book, D, GROUP, RANK,
                RANK_PAD, WIDTH if RANK > 0 else STEP, DOT_DTYPE,
            )  # fmt: skip
    else:
        while first < last:
            first = affine_piece(
                v_out_ptr, out_stride_h, out_stride_n, offset, start, first, last, out_head,
                out_head + first_head, v_codes_ptr, v_ids_ptr, v_centroids_ptr, v_scales_ptr,
                v_secondary_ptr, v_stops_ptr, v_zeros_ptr, None, None, None, v_tokens, v_chunks,
                0, v_book, D, GROUP, 0, RANK_PAD, STEP, DOT_DTYPE,
            )  # fmt: skip


UNCORRECTED = (0, 1, 2, 3, 4, 5, 6, 10, 11, 13)
"""Places of an affine decoder's arguments without those of a correction."""


def is_affine(decode: Decoder) -> bool:
    return "RANK" in decode.prepared.constants


def launch_constants(decode: Decoder, out: Tensor, long: bool) -> Constants:
    """Of one launch of many such spans into such an output; decode: with the most directions.

    Left alone, ptxas takes 168 registers of a thread and lays up to 32 bytes of it on the stack
    where groups are small, directions many or values float32.
    """
    own = decode.prepared.constants
    if not is_affine(decode):
        return dict(own)
    dim, group, rank = own["D"], own["GROUP"], own["RANK"]
    table = tuning.DECODE_PAIR_LONG if long else tuning.DECODE_PAIR
    row = table[dim] if rank else tuning.DECODE_AFFINE[dim]
    constants = {
        "D": dim, "GROUP": group, "RANK": rank, "RANK_PAD": own["RANK_PAD"],
        "BLOCK_N": row.block_n, "WIDTH": max(tuning.DECODE_PSAC[dim].block_k, group),
        "STEP": row.block_k, "DOT_DTYPE": own["DOT_DTYPE"], **row.options,
    }  # fmt: skip
    registers = row.registers
    if rank and (out.element_size() == 4 or rank > 16 or group < 64):
        registers = FLOAT_REGISTERS
    return {**constants, "maxnreg": registers} if registers else constants


def launch_many(
    kernel: Any, decode: Decoder, out: Tensor, lengths: Sequence[int], heads: int,
    args: Sequence[Any], more: Mapping[str, int] | None = None,
) -> None:  # fmt: skip
    """Parts of these lengths in a grid of `heads` times as many heads as out has.

    more: constants beyond launch_constants'. With the first launch of a kind the row of other
    lengths is compiled too, so that no history compiles anything because it has grown.
    """
    long, more = sum(lengths) >= tuning.LONG_TOKENS, more or {}
    constants = {**launch_constants(decode, out, long), **more}
    grid = (-(-max(lengths) // constants["BLOCK_N"]), heads * out.shape[0])
    if launch(kernel, grid, args, constants):
        other = {**launch_constants(decode, out, not long), **more}
        if other != constants:
            compile_only(kernel, grid, args, other)


def decode_pair(
    keys: Decoder, values: Decoder, outs: tuple[Tensor, Tensor], offset: int, start: int,
    stop: int, first_head: int,
) -> None:  # fmt: skip
    """What keys(outs[0], offset, ...) and values(outs[1], ...) write. They are of one kind as
    decode_spans.py has it and so are the outputs; values have no correction."""
    for decode, out in zip((keys, values), outs, strict=True):
        decode.check(out, offset, start, stop, first_head)
    if start >= stop:
        return
    kernel, k_fixed, v_fixed = ternary_pair_kernel, keys.prepared.fixed, values.prepared.fixed
    if is_affine(keys):
        kernel = affine_pair_kernel
        v_fixed = tuple(v_fixed[place] for place in UNCORRECTED)
    stride_h, stride_n, _ = outs[0].stride()
    place = (stride_h, stride_n, offset, start, stop, first_head)
    launch_many(kernel, keys, outs[0], [stop - start] * 2, 2, (*outs, *place, *k_fixed, *v_fixed))

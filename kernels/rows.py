"""PSAC rows out of their sparse form: a bit a token says whether it has one.

Floor: the rows read and the dense ones written, 0.6 MB of 12 heads x 2,640 tokens at rank 8, less
than a launch takes. PyTorch's operations were 15 launches for every layer in every denoising pass.
The fraction reached has not been measured: nothing but the launch would be seen.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import checks
from kernels.launch import launch

BLOCK_N, BLOCK_M = 512, 2048  # tokens of a program; bytes of the mask counted at a time


@triton.jit
def _bits_set(byte):
    """How many bits of an int32 0..255 are set."""
    byte = byte - ((byte >> 1) & 0x55)
    byte = (byte & 0x33) + ((byte >> 2) & 0x33)
    return (byte + (byte >> 4)) & 0x0F


# Where rows of several layers share a storage, theirs begin anywhere.
@triton.jit(
    do_not_specialize=["mask_ptr", "rows_ptr", "scales_ptr", "n_tokens", "mask_bytes"],
)
def spread_rows_kernel(
    mask_ptr, rows_ptr, scales_ptr, out_ptr, out_scales_ptr,
    n_tokens,  # runtime: only in masks and addresses
    mask_bytes,  # runtime: of a head
    STORED: tl.constexpr, STORED_PAD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Rows and their scales at their tokens, zeros elsewhere. Grid (token blocks, heads).

    A program counts the bits that lie before its own: at most 109 KB of them, from the L2 cache,
    in 40 heads x 21,840 tokens.
    """
    head = tl.program_id(1)
    before = head * mask_bytes + tl.program_id(0) * (BLOCK_N // 8)
    counts = tl.zeros((BLOCK_M,), tl.int32)
    for start in range(0, before, BLOCK_M):
        at = start + tl.arange(0, BLOCK_M)
        counts += _bits_set(tl.load(mask_ptr + at, mask=at < before, other=0).to(tl.int32))
    token = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = token < n_tokens
    byte = tl.load(mask_ptr + head * mask_bytes + token // 8, mask=there, other=0).to(tl.int32)
    bit = (byte >> (token % 8)) & 1
    row = (tl.sum(counts, axis=0) + tl.cumsum(bit, axis=0) - bit).to(tl.int64)
    held = there & (bit == 1)
    place = head.to(tl.int64) * n_tokens + token
    columns = tl.arange(0, STORED_PAD)[None, :]
    wide = columns < STORED
    rows_ptrs = rows_ptr + row[:, None] * STORED + columns
    rows = tl.load(rows_ptrs, mask=held[:, None] & wide, other=0)
    tl.store(out_ptr + place[:, None] * STORED + columns, rows, mask=there[:, None] & wide)
    scales = tl.load(scales_ptr + row, mask=held, other=0.0)
    tl.store(out_scales_ptr + place, scales, mask=there)


def spread_rows(
    mask: Tensor, rows: Tensor, scales: Tensor, tokens: int,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rows of the tokens whose bit is set, in order, all heads behind each other -> of all tokens.

    mask: uint8 [H, ceil(tokens / 8)], token 8b + j in bit j of byte b, others 0; rows: int8 or
    uint8 [R, any]; scales: float16 [R]. Returns [H, tokens, any] and [H, tokens], in storage of
    their own or in the two of `into`. ValueError on anything else.
    """
    heads, stored = mask.shape[0], rows.shape[-1]
    checks.packed("mask", mask, torch.uint8, (heads, -(-tokens // 8)))
    checks.packed("rows", rows, (torch.int8, torch.uint8), (rows.shape[0], stored))
    checks.packed("scales", scales, torch.float16, (rows.shape[0],))
    checks.together(mask, rows, scales)
    if into is None:
        out = torch.empty((heads, tokens, stored), dtype=rows.dtype, device=rows.device)
        out_scales = torch.empty((heads, tokens), dtype=torch.float16, device=rows.device)
    else:
        out, out_scales = into
        checks.packed("into", out, rows.dtype, (heads, tokens, stored))
        checks.packed("into", out_scales, torch.float16, (heads, tokens))
        checks.together(mask, out, out_scales)
    args = (mask, rows, scales, out, out_scales, tokens, mask.shape[1])
    constants = {
        "STORED": stored, "STORED_PAD": 1 << (stored - 1).bit_length(), "BLOCK_N": BLOCK_N,
        "BLOCK_M": BLOCK_M, "num_warps": 4, "num_stages": 1,
    }  # fmt: skip
    launch(spread_rows_kernel, (-(-tokens // BLOCK_N), heads), args, constants)
    return out, out_scales

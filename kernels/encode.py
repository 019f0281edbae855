"""Encode and pack: QVG's ternary residual, QuantWM's affine residual with its PSAC rows.

Floors, 40 x 4,680 x 128 on an H200 that copies 4,263 GB/s: ternary reads 48 MB and writes 7, 13 us;
affine reads the tokens twice, for the largest scale first, 25 us. Reached: 0.033 ms, 39%, and with
PSAC 0.143 ms, 17%.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import checks, tuning
from kernels.format import CODES_PER_BYTE
from kernels.launch import launch
from kernels.tile import (
    e4m3_byte,
    e4m3_value,
    pack_bits,
    residual_tile,
    round_half_up,
    round_to_bf16,
    safe_divide,
    split_operand,
    store_codes,
)


@triton.jit(do_not_specialize=["n_tokens"])
def encode_ternary_kernel(
    x_ptr, x_stride_h, x_stride_n, ids_ptr, centroids_ptr, codes_ptr, scales_ptr,
    n_tokens,  # runtime: only in masks and addresses
    K,  # runtime: only in addresses
    D: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Residual in BF16, scale E4M3(max of its magnitude), code round(r / scale) + 1 in 0..2.

    Grid (token blocks, heads). r / scale >= 1/2 is compared as r >= scale / 2, which is the same
    for a BF16 residual and an E4M3 scale: their quotient is never within a rounding of 1/2.
    """
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = residual_tile(
        x_ptr, x_stride_h, x_stride_n, ids_ptr, centroids_ptr, head, rows, n_tokens, K, D, GROUP
    )
    r = round_to_bf16(r)
    scale_bytes = e4m3_byte(tl.max(tl.abs(r), axis=2))
    scale = e4m3_value(scale_bytes)[:, :, None]
    up = (r >= 0.5 * scale) & (scale > 0)
    down = (r <= -0.5 * scale) & (scale > 0)
    codes = 1 + up.to(tl.int32) - down.to(tl.int32)
    store_codes(codes_ptr, codes, head * n_tokens + rows, rows < n_tokens, BLOCK_N, D, D)
    groups: tl.constexpr = D // GROUP
    place = (head * n_tokens + rows)[:, None] * groups + tl.arange(0, groups)[None, :]
    tl.store(scales_ptr + place, scale_bytes.to(tl.uint8), mask=(rows < n_tokens)[:, None])


@triton.jit
def _affine_range(r, clip):
    """Range of every group, extended to hold 0 and shrunk by clip, and its exact scale."""
    low = tl.minimum(tl.min(r, axis=2), 0.0) * clip
    high = tl.maximum(tl.max(r, axis=2), 0.0) * clip
    return low, tl.div_rn(high - low, 3.0)


@triton.jit(do_not_specialize=["n_tokens", "clip"])
def largest_scale_kernel(
    x_ptr, x_stride_h, x_stride_n, ids_ptr, centroids_ptr, largest_ptr,
    n_tokens,  # runtime: only in masks and addresses
    K,  # runtime: only in addresses
    clip,  # runtime
    D: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Largest group scale of a head, as the bits of a float32 (ordered like it, being >= 0).

    Grid (token blocks, heads). The one atomic of this package: a maximum is exact in any order.
    """
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = residual_tile(
        x_ptr, x_stride_h, x_stride_n, ids_ptr, centroids_ptr, head, rows, n_tokens, K, D, GROUP
    )
    _, exact = _affine_range(r, clip)
    largest = tl.max(tl.max(exact, axis=1), axis=0)
    tl.atomic_max(largest_ptr + head, largest.to(tl.int32, bitcast=True))


@triton.jit
def _encode_rows(
    error, basis_ptr, eigenvalues_ptr, coefficients_ptr, row_scales_ptr, head, rows, n_tokens,
    D: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """PSAC rows of error [BLOCK_N, D]: INT8 with an FP16 scale, zero where the gate refuses.

    The gate (QuantWM App. D.1) in the eigenbasis: sum_j lambda_j (c_j^2 - (c_j - stored_j)^2) > 0.
    """
    offs_d = tl.arange(0, D)
    offs_r = tl.arange(0, RANK_PAD)
    valid_r = offs_r < RANK
    valid = (rows < n_tokens)[:, None]
    basis = tl.load(
        basis_ptr + head * D * RANK + offs_d[:, None] * RANK + offs_r[None, :],
        mask=valid_r[None, :], other=0.0,
    ).to(tl.float32).to(DOT_DTYPE)  # fmt: skip
    # Three BF16 parts give a float32-grade product, so that codes equal the reference's but for
    # ties; with two, 1 row scale in 70 would round to another FP16.
    high, rest = split_operand(error, DOT_DTYPE)
    middle, rest = split_operand(rest, DOT_DTYPE)
    low, _ = split_operand(rest, DOT_DTYPE)
    projected = tl.dot(low, basis, input_precision="ieee")
    projected = tl.dot(middle, basis, projected, input_precision="ieee")
    projected = tl.dot(high, basis, projected, input_precision="ieee")
    stored = tl.div_rn(tl.max(tl.abs(projected), axis=1), 127.0).to(tl.float16)
    scale = stored.to(tl.float32)
    codes = round_half_up(safe_divide(projected, scale[:, None] + tl.zeros_like(projected)))
    codes = tl.minimum(tl.maximum(codes, -127.0), 127.0)
    left = projected - codes * scale[:, None]
    eigenvalues = tl.load(eigenvalues_ptr + head * RANK + offs_r, mask=valid_r, other=0.0)
    gain = (projected * projected - left * left) * eigenvalues[None, :]
    kept = tl.sum(gain, axis=1) > 0
    codes = tl.where(kept[:, None], codes, 0.0).to(tl.int8)
    row = head * n_tokens + rows
    tl.store(
        coefficients_ptr + row[:, None] * RANK + offs_r[None, :], codes,
        mask=valid & valid_r[None, :],
    )  # fmt: skip
    tl.store(row_scales_ptr + row, tl.where(kept, scale, 0.0).to(tl.float16), mask=rows < n_tokens)


@triton.jit(do_not_specialize=["n_tokens", "clip"])
def encode_affine_kernel(
    x_ptr, x_stride_h, x_stride_n, ids_ptr, centroids_ptr, largest_ptr, basis_ptr, eigenvalues_ptr,
    codes_ptr, scales_ptr, secondary_ptr, zeros_ptr, coefficients_ptr, row_scales_ptr,
    n_tokens,  # runtime: only in masks and addresses
    K,  # runtime: only in addresses
    clip,  # runtime
    D: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """4-level affine residual with 2-bit integer zeros and 8-bit scale codes (QuantWM Eq. 1-4).

    Grid (token blocks, heads). RANK 0 leaves the PSAC rows out. The scale code is rounded up and
    the residual is quantized against the stored scale code * (secondary / 255).
    """
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = rows < n_tokens
    r = residual_tile(
        x_ptr, x_stride_h, x_stride_n, ids_ptr, centroids_ptr, head, rows, n_tokens, K, D, GROUP
    )
    low, exact = _affine_range(r, clip)
    largest = tl.load(largest_ptr + head).to(tl.float32, bitcast=True)
    secondary = tl.minimum(largest, 65504.0).to(tl.float16)
    tl.store(secondary_ptr + head, secondary, mask=tl.program_id(0) == 0)
    secondary = secondary.to(tl.float32)
    scale_codes = tl.ceil(safe_divide(exact * 255.0, secondary + tl.zeros_like(exact)))
    scale_codes = tl.minimum(scale_codes, 255.0)
    scale = scale_codes * tl.div_rn(secondary, 255.0)
    zeros = tl.minimum(round_half_up(safe_divide(-low, scale)), 3.0)
    wide_scale = scale[:, :, None] + tl.zeros_like(r)
    codes = round_half_up(safe_divide(r, wide_scale)) + zeros[:, :, None]
    codes = tl.minimum(tl.maximum(codes, 0.0), 3.0)
    store_codes(
        codes_ptr, codes.to(tl.int32), head * n_tokens + rows, valid, BLOCK_N, D, D
    )  # fmt: skip

    groups: tl.constexpr = D // GROUP
    place = (head * n_tokens + rows)[:, None] * groups + tl.arange(0, groups)[None, :]
    tl.store(scales_ptr + place, scale_codes.to(tl.int32).to(tl.uint8), mask=valid[:, None])
    # Zeros are one flat run of 2-bit codes per head; a block of tokens fills whole bytes of it.
    zero_bytes: tl.constexpr = BLOCK_N * groups // 4
    zeros_kept = tl.where(valid[:, None], zeros, 0.0).to(tl.int32)
    total = (n_tokens.to(tl.int64) * groups + 3) // 4
    byte = tl.program_id(0).to(tl.int64) * zero_bytes + tl.arange(0, zero_bytes)
    packed = pack_bits(zeros_kept, zero_bytes, 4).to(tl.uint8)
    tl.store(zeros_ptr + head * total + byte, packed, mask=byte < total)

    if RANK > 0:
        error = tl.reshape(r - (codes - zeros[:, :, None]) * scale[:, :, None], (BLOCK_N, D))
        _encode_rows(
            error, basis_ptr, eigenvalues_ptr, coefficients_ptr, row_scales_ptr, head, rows,
            n_tokens, D, RANK, RANK_PAD, DOT_DTYPE,
        )  # fmt: skip


def check_rows(
    x: Tensor, ids: Tensor, centroids: Tensor, group_size: int, rank: int = 0
) -> tuple[int, int, int]:
    """Heads, tokens and channels of what is encoded against centroids."""
    checks.rows("x", x)
    heads, tokens, dim = x.shape
    count = centroids.shape[1]
    checks.geometry(dim, group_size, count, rank)
    checks.packed("ids", ids, torch.uint8, (heads, tokens))
    checks.packed("centroids", centroids, torch.bfloat16, (heads, count, dim))
    checks.together(x, ids, centroids)
    return heads, tokens, dim


def encode_qvg(x: Tensor, ids: Tensor, centroids: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Ternary residual of x: [H, N, D] float32 or bfloat16 against BF16 centroids [H, K, D].

    ids: uint8 [H, N]. Returns codes uint8 [H, N, D/4], scales float8_e4m3fn [H, N, D/G].
    ValueError on anything else.
    """
    heads, tokens, dim = check_rows(x, ids, centroids, group_size)
    row = tuning.ENCODE[dim]
    words = torch.empty((heads, tokens, dim // 16), dtype=torch.int32, device=x.device)
    scales = torch.empty((heads, tokens, dim // group_size), dtype=torch.uint8, device=x.device)
    args = (
        x, x.stride(0), x.stride(1), ids, centroids, words, scales, tokens, centroids.shape[1],
    )  # fmt: skip
    constants = {"D": dim, "GROUP": group_size, "BLOCK_N": row.block_n, **row.options}
    launch(encode_ternary_kernel, (-(-tokens // row.block_n), heads), args, constants)
    return words.view(torch.uint8), scales.view(torch.float8_e4m3fn)


def encode_quantwm(
    x: Tensor, ids: Tensor, centroids: Tensor, group_size: int, clip: float,
    basis: Tensor | None, eigenvalues: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Affine residual of x (as in `encode_qvg`), and its PSAC rows when a basis is given.

    basis: bfloat16 [H, D, r], eigenvalues: float32 [H, r], both or neither. Returns codes uint8
    [H, N, D/4], scales uint8 [H, N, D/G], secondary float16 [H], zeros uint8
    [H, ceil(N * D/G / 4)], coefficients int8 [H, N, r] | None, coefficient_scales float16
    [H, N] | None.
    """
    rank = 0 if basis is None else basis.shape[2]
    heads, tokens, dim = check_rows(x, ids, centroids, group_size, rank)
    if (basis is None) != (eigenvalues is None):
        raise ValueError("basis and eigenvalues come together or not at all")
    groups, device = dim // group_size, x.device
    coefficients = row_scales = None
    if basis is not None and eigenvalues is not None:
        checks.packed("basis", basis, torch.bfloat16, (heads, dim, rank))
        checks.packed("eigenvalues", eigenvalues, torch.float32, (heads, rank))
        checks.together(x, basis, eigenvalues)
        coefficients = torch.empty((heads, tokens, rank), dtype=torch.int8, device=device)
        row_scales = torch.empty((heads, tokens), dtype=torch.float16, device=device)
    words = torch.empty((heads, tokens, dim // 16), dtype=torch.int32, device=device)
    scales = torch.empty((heads, tokens, groups), dtype=torch.uint8, device=device)
    secondary = torch.empty((heads,), dtype=torch.float16, device=device)
    zero_bytes = -(-tokens * groups // CODES_PER_BYTE)
    zeros = torch.empty((heads, zero_bytes), dtype=torch.uint8, device=device)
    largest = torch.zeros((heads,), dtype=torch.int32, device=device)
    row = tuning.ENCODE_PSAC[dim] if rank else tuning.ENCODE[dim]
    grid = (-(-tokens // row.block_n), heads)
    shared = (x, x.stride(0), x.stride(1), ids, centroids, largest)
    sizes = (tokens, centroids.shape[1], float(clip))
    options = {"D": dim, "GROUP": group_size, "BLOCK_N": row.block_n, **row.options}
    launch(largest_scale_kernel, grid, (*shared, *sizes), options)
    args = (
        *shared, basis, eigenvalues, words, scales, secondary, zeros, coefficients, row_scales,
        *sizes,
    )  # fmt: skip
    options |= {
        "RANK": rank, "RANK_PAD": max(16, 1 << max(rank - 1, 0).bit_length()),
        "DOT_DTYPE": tuning.dot_mode(x)[1],
    }  # fmt: skip
    launch(encode_affine_kernel, grid, args, options)
    return words.view(torch.uint8), scales, secondary, zeros, coefficients, row_scales

"""Attention that decodes packed keys and values in registers: fused, without a scratch.

Floor (operations): 4 Nq Nk D per head on the tensor cores, the same for BF16 keys and values. A
packed tile costs on top, per key or value element and program, about 3 instructions of packed BF16
arithmetic and a sixteenth of a 32-byte centroid load; a program's queries share them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import checks, tuning
from kernels.format import FUSED_HEAD_DIMS, Side
from kernels.launch import launch
from kernels.tile import (
    affine_scales,
    as_operand,
    centroid_rows,
    channels_of,
    code_levels,
    ternary_scales,
)

LOG2_E = 1.4426950408889634
PLAIN, TERNARY, AFFINE, INT8 = 0, 1, 2, 3
KINDS = {"plain": PLAIN, "ternary": TERNARY, "affine": AFFINE}

# Two channels at once: their codes into the mantissas of 128.0, less 128 + zero, times the scale,
# plus the centroid. All exact up to the last fused multiply-add, which rounds once to BF16.
_LEVELS_ASM = tl.constexpr("""
{
    .reg .b32 a, b;
    shr.u32 a, $1, $3;
    shr.u32 b, $2, $4;
    prmt.b32 a, a, b, 0x5410;
    lop3.b32 a, a, 0x00030003, 0x43004300, 0xEA;
    sub.rn.bf16x2 a, a, $5;
    fma.rn.bf16x2 $0, a, $6, $7;
}
""")


@triton.jit
def _plain_tile(ptr, stride_n, rows, valid, D: tl.constexpr):
    offs = rows[:, None] * stride_n + tl.arange(0, D)[None, :]
    return tl.load(ptr + offs, mask=valid[:, None], other=0.0)


@triton.jit
def _packed_tile(
    codes_ptr, ids_ptr, centroids_ptr, scales_ptr, secondary_ptr, chunk_stops_ptr, zeros_ptr,
    rows, valid, n_tokens, n_chunks, D: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
    BLOCK_N: tl.constexpr, DOT_DTYPE: tl.constexpr, PACKED_MATH: tl.constexpr,
):  # fmt: skip
    """A decoded tile [BLOCK_N, D]. Pointers are those of the head, so that offsets are 32 bits.

    PACKED_MATH: two channels an instruction in BF16, which rounds an affine scale to BF16 (2^-9
    of a residual of a few scales); without it float32, as the interpreter needs.
    """
    if KIND == 1:
        scale = ternary_scales(scales_ptr, 0, rows, valid, n_tokens, D, GROUP)
        zero = tl.full(scale.shape, 1.0, tl.float32)
    else:
        scale, zero = affine_scales(
            scales_ptr, zeros_ptr, secondary_ptr, chunk_stops_ptr, 0, rows, valid, n_tokens,
            n_chunks, D, GROUP,
        )  # fmt: skip
    if PACKED_MATH:
        words: tl.constexpr = D // 16
        place = rows[:, None] * words + tl.arange(0, words)[None, :]
        packed = tl.load(codes_ptr + place, mask=valid[:, None], other=0)
        ids = tl.load(ids_ptr + rows, mask=valid, other=0).to(tl.int32)
        means = tl.load(centroids_ptr + ids[:, None, None] * D + channels_of(D))
        values = tl.inline_asm_elementwise(
            asm=_LEVELS_ASM,
            constraints="=r,r,r,r,r,r,r,r",
            args=[
                packed[:, :, None], 2 * tl.arange(0, 16)[None, None, :],
                (zero + 128.0).to(tl.bfloat16)[:, :, None], scale.to(tl.bfloat16)[:, :, None],
                means,
            ],
            dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        levels = code_levels(codes_ptr, 0, rows, valid, n_tokens, D) - zero[:, :, None]
        means = centroid_rows(ids_ptr, centroids_ptr, 0, rows, valid, n_tokens, 0, D)
        values = (levels * scale[:, :, None] + means).to(DOT_DTYPE)
    return tl.reshape(values, (BLOCK_N, D))


@triton.jit(
    do_not_specialize=[
        "n_queries", "start", "stop", "n_tokens", "n_chunks", "first_corrected", "is_first",
        "is_last", "k_secondary_ptr", "v_secondary_ptr", "chunk_stops_ptr",
    ]
)  # fmt: skip
def flash_kernel(
    q_ptr, q_stride_h, q_stride_n, q_scales_ptr, out_ptr, sums_ptr, largest_ptr, total_ptr,
    k_ptr, k_stride_h, k_stride_n, k_codes_ptr, k_ids_ptr, k_centroids_ptr, k_scales_ptr,
    k_secondary_ptr, k_zeros_ptr, coefficients_ptr, row_scales_ptr, basis_ptr,
    v_ptr, v_stride_h, v_stride_n, v_codes_ptr, v_ids_ptr, v_centroids_ptr, v_scales_ptr,
    v_secondary_ptr, v_zeros_ptr, chunk_stops_ptr,
    k_count, v_count,  # centroids; runtime: only in addresses
    n_queries, start, stop, n_tokens, n_chunks, first_corrected,  # runtime: bounds and addresses
    is_first, is_last,  # runtime: whether there is a state to go on from, and one to leave
    scale,  # runtime: of the scores, log2(e) in it
    D: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr, K_GROUP: tl.constexpr,
    V_GROUP: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, DOT_DTYPE: tl.constexpr, PACKED_MATH: tl.constexpr,
):  # fmt: skip
    """One segment's keys and values for a block of queries. Grid (query blocks, heads).

    The state between segments is the running softmax: float32 sums [H, Nq, D] of the weighted
    values, the largest score and the total weight [H, Nq]. out: contiguous [H, Nq, D].
    """
    head = tl.program_id(1).to(tl.int64)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, D)
    valid_m = offs_m < n_queries
    q_ptrs = q_ptr + head * q_stride_h + offs_m[:, None] * q_stride_n + offs_d[None, :]
    q = tl.load(q_ptrs, mask=valid_m[:, None], other=0)
    if K_KIND == 3:
        q_scale = tl.load(q_scales_ptr + head * n_queries + offs_m, mask=valid_m, other=0.0)
        q_scale = q_scale * scale
    else:
        q = as_operand(q, DOT_DTYPE)
    if RANK > 0:
        offs_r = tl.arange(0, RANK_PAD)
        basis = tl.load(
            basis_ptr + head * D * RANK + offs_d[:, None] * RANK + offs_r[None, :],
            mask=(offs_r < RANK)[None, :], other=0.0,
        )  # fmt: skip
        turned = tl.dot(q, as_operand(basis, DOT_DTYPE), input_precision="ieee").to(DOT_DTYPE)

    # Pointers of this head: offsets inside it fit 32 bits.
    at = head * n_tokens
    if K_KIND == 0 or K_KIND == 3:
        k_ptr += head * k_stride_h
    else:
        k_codes_ptr += at * (D // 16)
        k_ids_ptr += at
        k_centroids_ptr += head * k_count * D
        k_scales_ptr += at * (D // K_GROUP)
    if K_KIND == 2:
        k_secondary_ptr += head * n_chunks
        k_zeros_ptr += head * ((n_tokens.to(tl.int64) * (D // K_GROUP) + 3) // 4)
    if K_KIND == 3:
        k_scales_ptr += at
    if V_KIND == 0:
        v_ptr += head * v_stride_h
    else:
        v_codes_ptr += at * (D // 16)
        v_ids_ptr += at
        v_centroids_ptr += head * v_count * D
        v_scales_ptr += at * (D // V_GROUP)
    if V_KIND == 2:
        v_secondary_ptr += head * n_chunks
        v_zeros_ptr += head * ((n_tokens.to(tl.int64) * (D // V_GROUP) + 3) // 4)
    if RANK > 0:
        coefficients_ptr += head * (n_tokens - first_corrected) * RANK
        row_scales_ptr += head * (n_tokens - first_corrected)

    place = head * n_queries + offs_m
    going_on = offs_m < n_queries * (1 - is_first)
    largest = tl.load(largest_ptr + place, mask=going_on, other=float("-inf"))
    total = tl.load(total_ptr + place, mask=going_on, other=0.0)
    sums_at = place[:, None] * D + offs_d[None, :]
    sums = tl.load(sums_ptr + sums_at, mask=going_on[:, None], other=0.0)
    for first in range(start, stop, BLOCK_N):
        rows = first + tl.arange(0, BLOCK_N)
        valid = rows < stop
        if K_KIND == 3:
            k = _plain_tile(k_ptr, k_stride_n, rows, valid, D)
            steps = tl.load(k_scales_ptr + rows, mask=valid, other=0.0)
            scores = tl.dot(q, tl.trans(k)).to(tl.float32) * (q_scale[:, None] * steps[None, :])
        else:
            if K_KIND == 0:
                k = as_operand(_plain_tile(k_ptr, k_stride_n, rows, valid, D), DOT_DTYPE)
            else:
                k = _packed_tile(
                    k_codes_ptr, k_ids_ptr, k_centroids_ptr, k_scales_ptr, k_secondary_ptr,
                    chunk_stops_ptr, k_zeros_ptr, rows, valid, n_tokens, n_chunks, D, K_GROUP,
                    K_KIND, BLOCK_N, DOT_DTYPE, PACKED_MATH,
                )  # fmt: skip
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            if RANK > 0:
                corrected = valid & (rows >= first_corrected)
                row = rows - first_corrected
                coefficients = tl.load(
                    coefficients_ptr + row[:, None] * RANK + offs_r[None, :],
                    mask=corrected[:, None] & (offs_r < RANK)[None, :], other=0,
                ).to(tl.float32)  # fmt: skip
                step = tl.load(row_scales_ptr + row, mask=corrected, other=0.0).to(tl.float32)
                coefficients = (coefficients * step[:, None]).to(DOT_DTYPE)
                scores = tl.dot(turned, tl.trans(coefficients), scores, input_precision="ieee")
            scores *= scale
        scores = tl.where(valid[None, :], scores, float("-inf"))
        above = tl.maximum(largest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - above[:, None])
        kept = tl.exp2(largest - above)
        total = total * kept + tl.sum(weights, axis=1)
        sums = sums * kept[:, None]
        largest = above
        if V_KIND == 0:
            v = as_operand(_plain_tile(v_ptr, v_stride_n, rows, valid, D), DOT_DTYPE)
        else:
            v = _packed_tile(
                v_codes_ptr, v_ids_ptr, v_centroids_ptr, v_scales_ptr, v_secondary_ptr,
                chunk_stops_ptr, v_zeros_ptr, rows, valid, n_tokens, n_chunks, D, V_GROUP,
                V_KIND, BLOCK_N, DOT_DTYPE, PACKED_MATH,
            )  # fmt: skip
        sums = tl.dot(weights.to(DOT_DTYPE), v, sums, input_precision="ieee")
    if is_last:
        out = sums / total[:, None]
        tl.store(out_ptr + sums_at, out.to(out_ptr.dtype.element_ty), mask=valid_m[:, None])
    else:
        tl.store(sums_ptr + sums_at, sums, mask=valid_m[:, None])
        tl.store(largest_ptr + place, largest, mask=valid_m)
        tl.store(total_ptr + place, total, mask=valid_m)


@triton.jit(do_not_specialize=["n_tokens"])
def quantize_rows_kernel(
    x_ptr, x_stride_h, x_stride_n, means_ptr, codes_ptr, scales_ptr,
    n_tokens,  # runtime: only in masks and addresses
    D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """x - mean of every token as INT8 with a float32 scale of its own. Grid (blocks, heads)."""
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, D)
    valid = rows < n_tokens
    x_ptrs = x_ptr + head * x_stride_h + rows[:, None] * x_stride_n + offs_d[None, :]
    x = tl.load(x_ptrs, mask=valid[:, None], other=0.0).to(tl.float32)
    if means_ptr is not None:
        x -= tl.load(means_ptr + head * D + offs_d)[None, :]
    scale = tl.max(tl.abs(x), axis=1) / 127.0
    codes = tl.floor(x / tl.where(scale > 0, scale, 1.0)[:, None] + 0.5)
    place = head * n_tokens + rows
    tl.store(codes_ptr + place[:, None] * D + offs_d[None, :], codes.to(tl.int8),
             mask=valid[:, None])  # fmt: skip
    tl.store(scales_ptr + place, scale, mask=valid)


def unsupported_queries(q: Tensor) -> str | None:
    """Why the fused kernel does not take these queries, in a few words; None when it does."""
    if q.is_cuda and q.dtype != torch.bfloat16:
        return f"queries are {q.dtype}, the kernel takes bfloat16"
    if q.shape[2] not in FUSED_HEAD_DIMS:
        return f"head dim {q.shape[2]} is not one of {FUSED_HEAD_DIMS}"
    return None


def fused(q: Tensor, segments: Sequence[tuple[Side, Side, int, int]], scale: float) -> Tensor:
    """Softmax attention of q [H, Nq, D] over segments of keys and values -> [H, Nq, D].

    segments: (keys, values, start, stop): tokens [start, stop) of both are attended. scale: of
    the scores. One launch a segment; between them the running softmax lies in float32 [H, Nq, D]
    and two [H, Nq], the only memory beyond the output. ValueError on anything else.
    """
    reason = unsupported_queries(q)
    if reason or q.stride(2) != 1:
        raise ValueError(f"no kernel: {reason or 'channels of q must be adjacent'}")
    heads, queries, dim = q.shape
    shown = [segment for segment in segments if segment[2] < segment[3]]
    if not shown:
        raise ValueError("attention needs at least one token")
    out = torch.empty((heads, queries, dim), dtype=q.dtype, device=q.device)
    state: tuple[Tensor | None, ...] = (None, None, None)
    if len(shown) > 1:
        rows = torch.empty((2, heads, queries), dtype=torch.float32, device=q.device)
        sums = torch.empty((heads, queries, dim), dtype=torch.float32, device=q.device)
        state = (sums, rows[0], rows[1])
    else:
        state = (out, out, out)  # neither read nor written
    for number, (keys, values, start, stop) in enumerate(shown):
        _check(keys, q, stop), _check(values, q, stop)
        flags = (int(number == 0), int(number == len(shown) - 1))
        _launch(q, None, out, state, keys, values, (start, stop), flags, scale)
    return out


def attend_int8(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention whose scores are INT8 products: BF16 q [H, Nq, D], k and v [H, N, D].

    A query and a key have a scale each. The keys' mean over tokens is taken off first: it adds
    the same to all scores of a query, which the softmax does not see.
    """
    means = k.mean(dim=1, dtype=torch.float32)
    (q_codes, q_scales), (k_codes, k_scales) = quantize_rows(q, None), quantize_rows(k, means)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    keys = Side("plain", values=k_codes, scales=k_scales)
    bounds = (0, k.shape[1])
    _launch(q_codes, q_scales, out, (out, out, out), keys, Side("plain", values=v), bounds,
            (1, 1), scale)  # fmt: skip
    return out


def quantize_rows(x: Tensor, means: Tensor | None) -> tuple[Tensor, Tensor]:
    """INT8 codes [H, N, D] and float32 scales [H, N] of x - means; means: float32 [H, D]."""
    checks.rows("x", x)
    heads, tokens, dim = x.shape
    codes = torch.empty((heads, tokens, dim), dtype=torch.int8, device=x.device)
    scales = torch.empty((heads, tokens), dtype=torch.float32, device=x.device)
    row = tuning.COPY[dim]
    constants = {
        "D": dim, "BLOCK_N": row.block_n, "num_warps": row.num_warps,
        "num_stages": row.num_stages,
    }  # fmt: skip
    args = (x, x.stride(0), x.stride(1), means, codes, scales, tokens)
    launch(quantize_rows_kernel, (triton.cdiv(tokens, row.block_n), heads), args, constants)
    return codes, scales


def _check(side: Side, q: Tensor, stop: int) -> None:
    heads, _, dim = q.shape
    if side.kind == "plain":
        held = side.values
        fits = held is not None and held.shape[0] == heads and held.shape[2] == dim
        if not fits or held.stride(2) != 1 or held.shape[1] < stop or held.dtype != q.dtype:
            raise ValueError(f"a plain side must be {q.dtype} [{heads}, {stop} or more, {dim}]")
        return
    if side.codes is None or side.ids is None or side.centroids is None or side.scales is None:
        raise ValueError(f"a {side.kind} side needs codes, ids, centroids and scales")
    rank = 0 if side.basis is None else side.basis.shape[2]
    groups = side.scales.shape[2]
    checks.geometry(dim, dim // groups, side.centroids.shape[1], rank)
    tokens = side.ids.shape[1]
    checks.packed("ids", side.ids, torch.uint8, (heads, tokens))
    checks.packed("codes", side.codes, torch.uint8, (heads, tokens, dim // 4))
    if stop > tokens or tokens * dim >= 2**31:
        raise ValueError(f"tokens up to {stop} of {tokens} are not to be had")


def _addresses(side: Side) -> tuple[Tensor | int | None, ...]:
    """What flash_kernel takes of keys or of values, up to the zeros."""
    if side.kind == "plain" and side.values is not None:
        values = side.values
        return values, values.stride(0), values.stride(1), None, None, None, side.scales, None, None
    scales = side.scales.view(torch.uint8)
    codes = side.codes.view(torch.int32)
    packed = (codes, side.ids, side.centroids, scales, side.secondary, side.zeros)
    return None, 0, 0, *packed


def _tokens(side: Side) -> int:
    held = side.ids if side.values is None else side.values
    return 0 if held is None else held.shape[1]


def _launch(
    q: Tensor, q_scales: Tensor | None, out: Tensor, state: tuple[Tensor | None, ...],
    keys: Side, values: Side, bounds: tuple[int, int], flags: tuple[int, int], scale: float,
) -> None:  # fmt: skip
    heads, queries, dim = q.shape
    k_kind = INT8 if q_scales is not None else KINDS[keys.kind]
    v_kind = KINDS[values.kind]
    rank = 0 if keys.basis is None else keys.basis.shape[2]
    if k_kind == INT8:
        table = tuning.FLASH_INT8
    else:
        table = tuning.FLASH if k_kind == v_kind == PLAIN else tuning.FLASH_PACKED
    row, packed = table[dim], values if keys.secondary is None else keys
    chunks = 1 if packed.secondary is None else packed.secondary.shape[1]
    stops = packed.chunk_stops
    counts = [1 if s.centroids is None else s.centroids.shape[1] for s in (keys, values)]
    groups = [dim if s.kind == "plain" else dim // s.scales.shape[2] for s in (keys, values)]
    args = (
        q, q.stride(0), q.stride(1), q_scales, out, *state,
        *_addresses(keys), keys.coefficients, keys.row_scales, keys.basis,
        *_addresses(values), stops, *counts,
        queries, *bounds, _tokens(keys), chunks, keys.first_corrected if rank else 0, *flags,
        float(scale) * LOG2_E,
    )  # fmt: skip
    constants = {
        "D": dim, "K_KIND": k_kind, "V_KIND": v_kind, "K_GROUP": groups[0], "V_GROUP": groups[1],
        "RANK": rank, "RANK_PAD": max(16, triton.next_power_of_2(rank)),
        "BLOCK_M": row.block_k, "BLOCK_N": row.block_n, "DOT_DTYPE": tuning.dot_mode(out)[1],
        "PACKED_MATH": tuning.dot_mode(out)[0] == torch.bfloat16, "num_warps": row.num_warps,
        "num_stages": row.num_stages,
    }  # fmt: skip
    launch(flash_kernel, (triton.cdiv(queries, row.block_k), heads), args, constants)

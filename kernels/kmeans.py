"""Centroid assignment (nearest, or QSAC's range score) and the deterministic centroid update.

Floors, 40 x 4,680 x 128 with 256 centroids on an H200 (989 TFLOP/s BF16 by its datasheet): a dot
of all tokens with all centroids is 12.3 GFLOP, 12 us; assignment to float32 means takes two, for
their two BF16 parts. Reached: assign 0.076 ms, 33%; update 0.063 ms with the means, 20%.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import checks, tuning
from kernels.format import MAX_CANDIDATES
from kernels.launch import launch
from kernels.tile import as_operand, split_operand

# Centroids beyond K and unused candidate slots carry this distance; real ones stay far below.
_FAR = tl.constexpr(3.0e38)


@triton.jit
def prepare_kernel(
    centroids_ptr, weights_ptr, operands_ptr, norms_ptr,
    K,  # runtime: only in masks and addresses
    D: tl.constexpr, K_PAD: tl.constexpr, BLOCK_K: tl.constexpr, WEIGHTED: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """w * mu as PARTS operands that sum to it, and sum_c w mu^2, for every centroid.

    Grid (K_PAD / BLOCK_K, heads). Centroids beyond K get zero operands and the norm _FAR.
    """
    head = tl.program_id(1).to(tl.int64)
    offs_k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    offs_d = tl.arange(0, D)
    valid = offs_k < K
    place = offs_k[:, None] * D + offs_d[None, :]
    c = tl.load(centroids_ptr + head * K * D + place, mask=valid[:, None], other=0.0)
    c = c.to(tl.float32)
    scaled = c
    if WEIGHTED:
        scaled = c * tl.load(weights_ptr + head * D + offs_d)[None, :]
    norms = tl.where(valid, tl.sum(scaled * c, axis=1), _FAR)
    tl.store(norms_ptr + head * K_PAD + offs_k, norms)
    operand_ptrs = operands_ptr + head * PARTS * K_PAD * D + place
    rest = scaled
    for part in tl.static_range(PARTS):
        operand, rest = split_operand(rest, operands_ptr.dtype.element_ty)
        tl.store(operand_ptrs + part * K_PAD * D, operand)


@triton.jit
def _slot(distance, index, above_d, above_i, d, i):
    """A slot of a sorted list after an insertion: what is inserted, or what stood above, or itself.

    Strictly smaller only, so that of equal distances the one seen first (lower index) stays ahead.
    """
    here = distance < d
    pushed = distance < above_d
    d = tl.where(pushed, above_d, tl.where(here, distance, d))
    return d, tl.where(pushed, above_i, tl.where(here, index, i))


@triton.jit
def _range_score(x, centroid_ptrs, index, distance, group_weights, D: tl.constexpr):
    """S = sum_g W_g range_g(x - mu)^2 of one candidate per token (QuantWM Eq. 12)."""
    r = x - tl.load(centroid_ptrs + index[:, None, None] * D).to(tl.float32)
    spread = tl.max(r, axis=2) - tl.min(r, axis=2)
    score = tl.sum(group_weights * (spread * spread), axis=1)
    return tl.where(distance < _FAR, score, float("inf"))


@triton.jit(do_not_specialize=["n_tokens"])
def assign_kernel(
    x_ptr, x_stride_h, x_stride_n, centroids_ptr, operands_ptr, norms_ptr, weights_ptr,
    ids_ptr,
    n_tokens,  # runtime: only in masks and addresses
    K,  # runtime: only in addresses
    D: tl.constexpr, GROUP: tl.constexpr, K_PAD: tl.constexpr, PARTS: tl.constexpr,
    CANDIDATES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """The nearest centroid, or the best range score among the CANDIDATES nearest.

    Grid (token blocks, heads). The distance leaves out the token's own norm, constant per row:
    sum_c w mu^2 - 2 x . (w mu). No N x K matrix is ever written.
    """
    head = tl.program_id(1).to(tl.int64)
    offs_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, D)
    valid_n = offs_n < n_tokens
    row_ptrs = x_ptr + head * x_stride_h + offs_n * x_stride_n
    x = tl.load(row_ptrs[:, None] + offs_d[None, :], mask=valid_n[:, None], other=0.0)
    x = as_operand(x, DOT_DTYPE)
    operands_base = operands_ptr + head * PARTS * K_PAD * D + offs_d[:, None]

    d0 = tl.full((BLOCK_N,), _FAR, tl.float32)
    i0 = tl.zeros((BLOCK_N,), tl.int32)
    d1, d2, d3 = d0, d0, d0
    i1, i2, i3 = i0, i0, i0
    for start in range(0, K_PAD, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        dots = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        for part in tl.static_range(PARTS):
            c = tl.load(operands_base + part * K_PAD * D + offs_k[None, :] * D)
            dots = tl.dot(x, c, dots, input_precision="ieee")
        norms = tl.load(norms_ptr + head * K_PAD + offs_k)
        distances = norms[None, :] - 2.0 * dots
        for _ in tl.static_range(CANDIDATES):
            d, i = tl.min(
                distances, axis=1, return_indices=True, return_indices_tie_break_left=True
            )
            i += start
            if CANDIDATES > 1:
                distances = tl.where(offs_k[None, :] == i[:, None], float("inf"), distances)
            if CANDIDATES > 3:
                d3, i3 = _slot(d, i, d2, i2, d3, i3)
            if CANDIDATES > 2:
                d2, i2 = _slot(d, i, d1, i1, d2, i2)
            if CANDIDATES > 1:
                d1, i1 = _slot(d, i, d0, i0, d1, i1)
            i0 = tl.where(d < d0, i, i0)
            d0 = tl.minimum(d, d0)

    if CANDIDATES > 1:
        groups: tl.constexpr = D // GROUP
        offs_c = tl.arange(0, groups)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        xg = tl.load(
            row_ptrs[:, None, None] + offs_c[None, :, :], mask=valid_n[:, None, None], other=0.0
        ).to(tl.float32)
        c_ptrs = centroids_ptr + head * K * D + offs_c[None, :, :]
        gw = tl.sum(tl.load(weights_ptr + head * D + offs_c), axis=1)[None, :]
        best = _range_score(xg, c_ptrs, i0, d0, gw, D)
        score = _range_score(xg, c_ptrs, i1, d1, gw, D)
        i0 = tl.where(score < best, i1, i0)
        if CANDIDATES > 2:
            best = tl.minimum(best, score)
            score = _range_score(xg, c_ptrs, i2, d2, gw, D)
            i0 = tl.where(score < best, i2, i0)
        if CANDIDATES > 3:
            best = tl.minimum(best, score)
            score = _range_score(xg, c_ptrs, i3, d3, gw, D)
            i0 = tl.where(score < best, i3, i0)
    tl.store(ids_ptr + head * n_tokens + offs_n, i0.to(tl.uint8), mask=valid_n)


@triton.jit
def _ids(ids_base, rows, end):
    """Ids of tokens as int32, -1 from the end on.

    Asked for twice: of fewer loads than threads every thread makes all that its rows need.
    """
    twice = rows[None, :] + tl.zeros((2, 1), tl.int32)
    ids = tl.load(ids_base + twice, mask=twice < end, other=0).to(tl.int32)
    return tl.max(tl.where(twice < end, ids, -1), axis=0)


@triton.jit
def _one_hot(ids, offs_k, DOT_DTYPE: tl.constexpr):
    """2^-7 where a row's id is the column's, else 0.

    So BF16 reads the 1.0 of a comparison of float16, two an instruction; selects were five each.
    """
    if tl.bfloat16 == DOT_DTYPE:
        ids, offs_k = ids.to(tl.float16), offs_k.to(tl.float16)
        member = tl.inline_asm_elementwise(
            asm="set.eq.f16x2.f16x2 $0, $1, $2;", constraints="=r,r,r",
            args=[ids[:, None], offs_k[None, :]], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        member = tl.where(ids[:, None] == offs_k[None, :], 0.0078125, 0.0)
    return member


@triton.jit
def _store_means(out_ptr, centroids_ptr, place, valid_k, sums, counts):
    """Means of the clusters; an empty one keeps its centroid."""
    old = tl.load(centroids_ptr + place, mask=valid_k[:, None], other=0.0).to(tl.float32)
    mean = tl.div_rn(sums, tl.maximum(counts, 1.0)[:, None])
    new = tl.where(counts[:, None] > 0, mean, old)
    tl.store(out_ptr + place, new, mask=valid_k[:, None])


@triton.jit(do_not_specialize=["n_tokens"])
def update_kernel(
    x_ptr, x_stride_h, x_stride_n, ids_ptr, centroids_ptr, out_ptr, sums_ptr, counts_ptr,
    n_tokens,  # runtime: loop bound and masks
    K,  # runtime: only in masks and addresses
    D: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """Sums of each cluster's tokens, or with one split their means.

    Grid (SPLITS * ceil(K / BLOCK_K), heads): each program walks its part of a head's tokens in
    order and adds x^T @ one_hot(ids) on the tensor cores, both from shared memory: with one-hot
    rows in registers every wgmma waited for the one before. One owner per centroid and split, no
    sort: the same bits every time. One-hot is exact in BF16, only sums round.
    """
    head = tl.program_id(1).to(tl.int64)
    tile, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    offs_k = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    offs_d, offs_n = tl.arange(0, D), tl.arange(0, BLOCK_N)
    x_ptr += head * x_stride_h
    offs_x = offs_n.to(tl.int64)[:, None] * x_stride_n + offs_d[None, :]
    ids_base = ids_ptr + head * n_tokens
    part = tl.cdiv(n_tokens, SPLITS * BLOCK_N) * BLOCK_N
    begin, end = split * part, tl.minimum(n_tokens, (split + 1) * part)
    members = tl.zeros((BLOCK_K,), tl.int32)
    for start in range(begin, end, 1024):
        ids = _ids(ids_base, start + tl.arange(0, 1024), end) - tile * BLOCK_K
        members += tl.histogram(ids, BLOCK_K, mask=(ids >= 0) & (ids < BLOCK_K))
    sums = tl.zeros((D, BLOCK_K), tl.float32)
    ahead = _ids(ids_base, begin + offs_n, end)
    for start in range(begin, end, BLOCK_N):
        ids = ahead
        ahead = _ids(ids_base, start + BLOCK_N + offs_n, end)
        x_ptrs = x_ptr + tl.cast(start, tl.int64) * x_stride_n + offs_x
        x = tl.load(x_ptrs, mask=offs_n[:, None] < n_tokens - start, other=0.0)
        x = as_operand(x, DOT_DTYPE)
        member = _one_hot(ids, offs_k, DOT_DTYPE)
        sums = tl.dot(tl.trans(x), member, sums, input_precision="ieee")
    sums, counts = tl.trans(sums) * 128.0, members.to(tl.float32)
    valid_k = offs_k < K
    place = offs_k[:, None] * D + offs_d[None, :]
    if SPLITS == 1:
        at = head * K * D
        _store_means(out_ptr + at, centroids_ptr + at, place, valid_k, sums, counts)
    else:
        at = head * SPLITS + split
        tl.store(sums_ptr + at * K * D + place, sums, mask=valid_k[:, None])
        tl.store(counts_ptr + at * K + offs_k, counts, mask=valid_k)


@triton.jit
def means_kernel(
    sums_ptr, counts_ptr, centroids_ptr, out_ptr,
    K,  # runtime: only in masks and addresses
    D: tl.constexpr, SPLITS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Means from the splits' sums, in their order. Grid (ceil(K / BLOCK_K), heads)."""
    head = tl.program_id(1).to(tl.int64)
    offs_k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    valid_k = offs_k < K
    place = offs_k[:, None] * D + tl.arange(0, D)[None, :]
    sums = tl.zeros((BLOCK_K, D), tl.float32)
    counts = tl.zeros((BLOCK_K,), tl.float32)
    for split in tl.static_range(SPLITS):
        at = head * SPLITS + split
        sums += tl.load(sums_ptr + at * K * D + place, mask=valid_k[:, None], other=0.0)
        counts += tl.load(counts_ptr + at * K + offs_k, mask=valid_k, other=0.0)
    at = head * K * D
    _store_means(out_ptr + at, centroids_ptr + at, place, valid_k, sums, counts)


def _prepare(
    x: Tensor, centroids: Tensor, weights: Tensor | None, row: tuning.Launch
) -> tuple[Tensor, Tensor]:
    """Operands [H, PARTS, K_PAD, D] and norms [H, K_PAD] of the distance, for assign_kernel."""
    heads, count, dim = centroids.shape
    dtype, _ = tuning.dot_mode(x)
    # A BF16 centroid is its own operand; products with weights or float32 means need 16 bits.
    exact = dtype == torch.float32 or (centroids.dtype == dtype and weights is None)
    parts = 1 if exact else 2
    small = tuning.PREPARE[dim]
    tile = max(row.block_k, small.block_k)  # both are powers of two
    padded = -(-count // tile) * tile
    operands = torch.empty((heads, parts, padded, dim), dtype=dtype, device=x.device)
    norms = torch.empty((heads, padded), dtype=torch.float32, device=x.device)
    args = (centroids, weights, operands, norms, count)
    constants = {
        "D": dim, "K_PAD": padded, "BLOCK_K": small.block_k, "WEIGHTED": weights is not None,
        "PARTS": parts, **small.options,
    }  # fmt: skip
    launch(prepare_kernel, (padded // small.block_k, heads), args, constants)
    return operands, norms


def _check(x: Tensor, centroids: Tensor) -> None:
    checks.rows("x", x)
    (heads, _, dim), count = x.shape, centroids.shape[1]
    checks.geometry(dim, centroids=count)
    checks.packed("centroids", centroids, (torch.float32, torch.bfloat16), (heads, count, dim))
    if x.is_cuda and x.dtype != torch.bfloat16:
        raise ValueError(f"no kernel: x must be bfloat16 on a GPU, got {x.dtype}")


def _assign(
    x: Tensor, centroids: Tensor, weights: Tensor | None, group_size: int, candidates: int
) -> Tensor:
    heads, tokens, dim = x.shape
    row = (tuning.ASSIGN if candidates == 1 else tuning.ASSIGN_RANGE)[dim]
    operands, norms = _prepare(x, centroids, weights, row)
    ids = torch.empty((heads, tokens), dtype=torch.uint8, device=x.device)
    args = (
        x, x.stride(0), x.stride(1), centroids, operands, norms, weights, ids, tokens,
        centroids.shape[1],
    )  # fmt: skip
    constants = {
        "D": dim, "GROUP": group_size, "K_PAD": operands.shape[2], "PARTS": operands.shape[1],
        "CANDIDATES": candidates, "BLOCK_N": row.block_n, "BLOCK_K": row.block_k,
        "DOT_DTYPE": tuning.dot_mode(x)[1], **row.options,
    }  # fmt: skip
    launch(assign_kernel, (-(-tokens // row.block_n), heads), args, constants)
    return ids


def assign(x: Tensor, centroids: Tensor) -> Tensor:
    """Nearest centroid, ties to the smaller index.

    x: [H, N, D] bfloat16 (float32 too in the interpreter), channels adjacent; centroids:
    [H, K, D] float32 or bfloat16. Returns ids uint8 [H, N]. ValueError on anything else.
    """
    _check(x, centroids)
    checks.together(x, centroids)
    return _assign(x, centroids, None, x.shape[2], 1)


def assign_qsac(
    x: Tensor, centroids: Tensor, weights: Tensor, group_size: int, candidates: int
) -> Tensor:
    """QSAC (QuantWM Eq. 6-14): of the nearest by weighted distance, the least range score.

    weights: float32 [H, D]; candidates 1 to 4; the rest as in `assign`.
    """
    _check(x, centroids)
    heads, _, dim = x.shape
    checks.geometry(dim, group_size)
    checks.packed("weights", weights, torch.float32, (heads, dim))
    checks.together(x, centroids, weights)
    if not 1 <= candidates <= MAX_CANDIDATES:
        raise ValueError(f"candidates must be 1 to {MAX_CANDIDATES}, got {candidates}")
    return _assign(x, centroids, weights, group_size, candidates)


def update(x: Tensor, ids: Tensor, centroids: Tensor) -> Tensor:
    """Mean of each cluster's tokens, an empty cluster keeps its centroid. float32 [H, K, D]."""
    _check(x, centroids)
    heads, tokens, dim = x.shape
    checks.packed("ids", ids, torch.uint8, (heads, tokens))
    checks.together(x, ids, centroids)
    count = centroids.shape[1]
    row = tuning.UPDATE[dim]
    splits = tuning.UPDATE_SPLITS if tokens >= tuning.UPDATE_SPLIT_TOKENS else 1
    out = torch.empty((heads, count, dim), dtype=torch.float32, device=x.device)
    sums = counts = None
    if splits > 1:
        sums = torch.empty((heads, splits, count, dim), dtype=torch.float32, device=x.device)
        counts = torch.empty((heads, splits, count), dtype=torch.float32, device=x.device)
    args = (x, x.stride(0), x.stride(1), ids, centroids, out, sums, counts, tokens, count)
    constants = {
        "D": dim, "SPLITS": splits, "BLOCK_N": row.block_n, "BLOCK_K": row.block_k,
        "DOT_DTYPE": tuning.dot_mode(x)[1], **row.options,
    }  # fmt: skip
    grid = (splits * -(-count // row.block_k), heads)
    launch(update_kernel, grid, args, constants)
    if splits > 1:
        row = tuning.MEANS[dim]
        constants = {"D": dim, "SPLITS": splits, "BLOCK_K": row.block_k, **row.options}
        args = (sums, counts, centroids, out, count)
        launch(means_kernel, (-(-count // row.block_k), heads), args, constants)
    return out

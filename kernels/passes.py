"""Row-wise work between a Wan transformer's matrix products, each in one reading and one writing.

Matrix-Game-2 has some 10,000 small operations a chunk on tensors of 8 MB; on an H200 each takes
3 to 5 us whatever it computes. Every rounding to BF16 that PyTorch's operations make one after the
other is made here too, so the results differ by the order of float32 sums only. Floor: one tensor
read and one written (two and one by the gate): 16 MB of Matrix-Game-2's chunk, 3.8 us at the 4,219
GB/s that a copy moves; 128 MB of LingBot's, 30 us. Reached in such a chunk (`benchmarks wan
--kernels 60`, 2026-11-30, one tensor lying in L2 in part): rotation 5.1 us, 74%, modulation 8.4,
45%, gate 6.1 of 5.8, 94%; the mouse's attention takes 20.8.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import launch

MAX_WIDTH = 8192
"""Channels of a row that one program holds: 64 a thread of 4 warps."""
CELLS = 16  # latent cells of one program of the attention over time
WARPS = 4


@triton.jit
def _rounded(x):
    """To BF16 and back, as every BF16 operation of PyTorch ends."""
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _turned(x, cos, sin, ROWS: tl.constexpr, D: tl.constexpr):
    """x [ROWS, D] with its interleaved pairs rotated; cos, sin: [D / 2]."""
    even, odd = tl.split(tl.reshape(x, (ROWS, D // 2, 2)))
    turned = tl.join(even * cos - odd * sin, even * sin + odd * cos)
    return tl.reshape(turned, (ROWS, D))


@triton.jit(do_not_specialize=["n_tokens"])
def turn_kernel(
    x_ptr, x_stride_h, x_stride_n, weight_ptr, cos_ptr, sin_ptr, out_ptr,
    n_tokens,  # runtime: only in addresses
    eps,
    H: tl.constexpr, H_PAD: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """RMS norm over all heads of a token, weight, rotation; those that are given. Grid (tokens, 1).

    out: contiguous [H, n_tokens, D].
    """
    row = tl.program_id(0).to(tl.int64)
    heads, offs_d = tl.arange(0, H_PAD), tl.arange(0, D)
    there = (heads < H)[:, None]
    x_ptrs = x_ptr + row * x_stride_n + heads.to(tl.int64)[:, None] * x_stride_h + offs_d[None, :]
    x = tl.load(x_ptrs, mask=there, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        mean = tl.sum(tl.sum(x * x, axis=1), axis=0) / (H * D)
        weights = weight_ptr + heads[:, None] * D + offs_d[None, :]
        weight = tl.load(weights, mask=there, other=0.0).to(tl.float32)
        x = _rounded(_rounded(x * tl.rsqrt(mean + eps)) * weight)
    if cos_ptr is not None:
        half = tl.arange(0, D // 2)
        cos = tl.load(cos_ptr + row * (D // 2) + half)[None, :]
        sin = tl.load(sin_ptr + row * (D // 2) + half)[None, :]
        x = _turned(x, cos, sin, H_PAD, D)
    out = out_ptr + heads.to(tl.int64)[:, None] * n_tokens * D + row * D + offs_d[None, :]
    tl.store(out, x.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["n_tokens", "per_frame"])
def action_turn_kernel(
    x_ptr, x_stride_h, x_stride_n, cos_ptr, sin_ptr, out_ptr,
    n_tokens, per_frame,  # runtime: only in addresses
    eps,
    H: tl.constexpr, H_PAD: tl.constexpr, D: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """RMS norm of every head in BF16, its leading TURNED channels rotated. Grid (tokens, 1).

    cos, sin: float32 [frames, TURNED / 2]; a frame has per_frame tokens. out: as turn_kernel's.
    """
    row = tl.program_id(0).to(tl.int64)
    heads, offs_d = tl.arange(0, H_PAD), tl.arange(0, D)
    there = (heads < H)[:, None]
    x_ptrs = x_ptr + row * x_stride_n + heads.to(tl.int64)[:, None] * x_stride_h + offs_d[None, :]
    x = tl.load(x_ptrs, mask=there, other=0.0).to(tl.float32)
    mean = _rounded(tl.sum(_rounded(x * x), axis=1) / D)
    x = _rounded(x * _rounded(tl.rsqrt(_rounded(mean + eps)))[:, None])
    half = tl.arange(0, D // 2)
    at = row // per_frame * (TURNED // 2) + half
    cos = tl.load(cos_ptr + at, mask=half < TURNED // 2, other=1.0)[None, :]
    sin = tl.load(sin_ptr + at, mask=half < TURNED // 2, other=0.0)[None, :]
    x = _turned(x, cos, sin, H_PAD, D)
    out = out_ptr + heads.to(tl.int64)[:, None] * n_tokens * D + row * D + offs_d[None, :]
    tl.store(out, x.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["cells", "frames", "seen"])
def cell_attention_kernel(
    q_ptr, q_stride_h, q_stride_n, k_ptr, k_stride_h, k_stride_n, v_ptr, v_stride_h, v_stride_n,
    out_ptr, out_stride_h, out_stride_n,
    cells, frames, seen,  # runtime: bounds and addresses
    scale,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every latent cell over its own past frames. Grid (cell blocks * frames, heads)."""
    head = tl.program_id(1).to(tl.int64)
    frame = tl.program_id(0) % frames
    cell = tl.program_id(0) // frames * BLOCK + tl.arange(0, BLOCK)
    there, offs_d = (cell < cells)[:, None], tl.arange(0, D)[None, :]
    row = (frame * cells + cell).to(tl.int64)[:, None]
    q = tl.load(q_ptr + head * q_stride_h + row * q_stride_n + offs_d, mask=there, other=0.0)
    q = q.to(tl.float32)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total, sums = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK, D), tl.float32)
    for past in range(0, seen):
        at = (past * cells + cell).to(tl.int64)[:, None]
        k = tl.load(k_ptr + head * k_stride_h + at * k_stride_n + offs_d, mask=there, other=0.0)
        v = tl.load(v_ptr + head * v_stride_h + at * v_stride_n + offs_d, mask=there, other=0.0)
        score = tl.sum(q * k.to(tl.float32), axis=1) * scale
        above = tl.maximum(largest, score)
        kept, weight = tl.exp(largest - above), tl.exp(score - above)
        total = total * kept + weight
        sums = sums * kept[:, None] + v.to(tl.float32) * weight[:, None]
        largest = above
    out = sums / total[:, None]
    out_ptrs = out_ptr + head * out_stride_h + row * out_stride_n + offs_d
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["per_frame", "vector_stride"])
def modulate_kernel(
    x_ptr, x_stride_n, shift_ptr, scale_ptr, out_ptr,
    vector_stride, per_frame,  # runtime: only in addresses
    eps,
    W: tl.constexpr, W_PAD: tl.constexpr,
):  # fmt: skip
    """Layer norm, times 1 + scale, plus shift, each rounded. Grid (tokens, 1)."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, W_PAD)
    there = offs < W
    x = tl.load(x_ptr + row * x_stride_n + offs, mask=there, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / W
    apart = tl.where(there, x - mean, 0.0)
    normed = _rounded(apart * tl.rsqrt(tl.sum(apart * apart, axis=0) / W + eps))
    at = row // per_frame * vector_stride + offs
    scale = tl.load(scale_ptr + at, mask=there, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + at, mask=there, other=0.0).to(tl.float32)
    out = _rounded(normed * _rounded(1.0 + scale)) + shift
    tl.store(out_ptr + row * W + offs, out.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["per_frame", "gate_stride"])
def gated_kernel(
    x_ptr, x_stride_n, update_ptr, update_stride_n, gate_ptr, out_ptr,
    gate_stride, per_frame,  # runtime: only in addresses
    W: tl.constexpr, W_PAD: tl.constexpr,
):  # fmt: skip
    """x + update * gate, each rounded. Grid (tokens, 1)."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, W_PAD)
    there = offs < W
    x = tl.load(x_ptr + row * x_stride_n + offs, mask=there, other=0.0).to(tl.float32)
    update = tl.load(update_ptr + row * update_stride_n + offs, mask=there, other=0.0)
    gates = gate_ptr + row // per_frame * gate_stride + offs
    gate = tl.load(gates, mask=there, other=0.0).to(tl.float32)
    out = x + _rounded(update.to(tl.float32) * gate)
    tl.store(out_ptr + row * W + offs, out.to(out_ptr.dtype.element_ty), mask=there)


def covers(width: int, head_dim: int) -> bool:
    """Whether rows of this width, in heads of this size, are for these kernels."""
    return width <= MAX_WIDTH and head_dim in (16, 32, 64, 128, 256) and width % head_dim == 0


def turn(
    x: Tensor,
    weight: Tensor | None,
    turns: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    """x [H, N, D], strides of heads and tokens free -> contiguous [H, N, D], normed and turned.

    weight: [H * D] of the RMS norm over the whole width of a token, None for no norm.
    turns: cosines and sines, float32 contiguous [N, D / 2], None for no rotation.
    """
    heads, tokens, dim = _rows("x", x)
    out = torch.empty((heads, tokens, dim), dtype=x.dtype, device=x.device)
    cos, sin = (None, None) if turns is None else _tables(turns, (tokens, dim // 2))
    strides = x.stride(0), x.stride(1)
    launch(
        turn_kernel,
        (tokens, 1),
        (x, *strides, weight, cos, sin, out, tokens, eps),
        {"H": heads, "H_PAD": triton.next_power_of_2(heads), "D": dim, "num_warps": WARPS},
    )
    return out


def action_turn(x: Tensor, turns: tuple[Tensor, Tensor], frames: int, eps: float) -> Tensor:
    """x [H, N, D] of `frames` latent frames -> contiguous [H, N, D], each head normed, then turned.

    turns: float32 contiguous [frames, turned channels / 2].
    """
    heads, tokens, dim = _rows("x", x)
    cos, sin = _tables(turns, (frames, turns[0].shape[1]))
    out = torch.empty((heads, tokens, dim), dtype=x.dtype, device=x.device)
    launch(
        action_turn_kernel,
        (tokens, 1),
        (x, x.stride(0), x.stride(1), cos, sin, out, tokens, tokens // frames, eps),
        {
            "H": heads, "H_PAD": triton.next_power_of_2(heads), "D": dim,
            "TURNED": 2 * cos.shape[1], "num_warps": WARPS,
        },
    )  # fmt: skip
    return out


def cell_attention(q: Tensor, k: Tensor, v: Tensor, frames: int) -> Tensor:
    """q [H, frames * cells, D] over k and v [H, seen * cells, D] of the same cells -> [H, N, D].

    The result lies as [N, H, D], so that joining its heads moves nothing.
    """
    heads, tokens, dim = _rows("q", q)
    cells = tokens // frames
    for name, x in (("k", k), ("v", v)):
        _rows(name, x)
        if x.shape[1] % cells:
            raise ValueError(f"{name} has {x.shape[1]} tokens, no multiple of {cells} cells")
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device).transpose(0, 1)
    strides = [(x, x.stride(0), x.stride(1)) for x in (q, k, v, out)]
    launch(
        cell_attention_kernel,
        (triton.cdiv(cells, CELLS) * frames, heads),
        (*(a for s in strides for a in s), cells, frames, k.shape[1] // cells, dim**-0.5),
        {"D": dim, "BLOCK": CELLS, "num_warps": 2},
    )
    return out


def modulate(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Layer norm of x [N, W], times 1 + scale, plus shift, both [F, 1, W] -> [N, W]."""
    tokens, width = x.shape
    frames = _vectors((shift, scale), width)
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    launch(
        modulate_kernel,
        (tokens, 1),
        (x, x.stride(0), shift, scale, out, shift.stride(0), tokens // frames, eps),
        {"W": width, "W_PAD": triton.next_power_of_2(width), "num_warps": WARPS},
    )
    return out


def gated(x: Tensor, update: Tensor, gate: Tensor) -> Tensor:
    """x + update * gate: x and update [N, W], gate [F, 1, W] -> [N, W]."""
    tokens, width = x.shape
    frames = _vectors((gate,), width)
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    launch(
        gated_kernel,
        (tokens, 1),
        (x, x.stride(0), update, update.stride(0), gate, out, gate.stride(0), tokens // frames),
        {"W": width, "W_PAD": triton.next_power_of_2(width), "num_warps": WARPS},
    )
    return out


def _rows(name: str, x: Tensor) -> tuple[int, int, int]:
    if x.ndim != 3 or x.stride(2) != 1:
        raise ValueError(f"{name} must be [H, N, D] with adjacent channels, got {tuple(x.shape)}")
    return x.shape


def _tables(turns: tuple[Tensor, Tensor], shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    for table in turns:
        if table.dtype != torch.float32 or table.shape != shape or not table.is_contiguous():
            raise ValueError(
                f"cosines and sines must be contiguous float32 {shape}, got {table.dtype} "
                f"{tuple(table.shape)}"
            )
    return turns


def _vectors(vectors: tuple[Tensor, ...], width: int) -> int:
    """Frames that vectors [F, 1, W] are of; all must lie alike."""
    first = vectors[0]
    for vector in vectors:
        if vector.shape != (first.shape[0], 1, width) or vector.stride() != first.stride():
            raise ValueError(f"vectors must be [frames, 1, {width}] alike, got {vector.shape}")
    return first.shape[0]

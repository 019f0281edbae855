"""Decode a range of a span straight into the attention's buffer (the staged path), or copy it.

Floor, keys or values of 40 heads of 128 on an H200 that fills 3,357 GB/s and copies 4,219: 4,680
tokens are 48 MB written and 7 read, 16 us; 18,720 are 63 us. Reached there, 2026-11-30: ternary
21.6 and 65.8 us, 73 and 96%; affine 22.4 and 68.5, 71 and 92%; with PSAC, which reads 10 bytes a
token more, 27.5 and 88.2, 58 and 74%.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import checks, tuning
from kernels.decode_rows import affine_piece, ternary_block
from kernels.format import CODES_PER_BYTE
from kernels.launch import PreparedLaunch, launch

FLOATS = (torch.float32, torch.bfloat16)
WIDE_RANK_REGISTERS = 200
"""Of a thread where more than 16 directions are added; left alone, ptxas takes 168 and spills."""
FLOAT_REGISTERS = 240
"""Of a thread that adds directions and writes float32, as tests and caches of float32 ask for: with
168 or 200 up to 48 bytes of it lie on the stack, with 224 16 by Triton 3.7."""


@triton.jit(do_not_specialize=["n_tokens", "offset", "start", "stop", "first_head"])
def decode_ternary_kernel(
    out_ptr, out_stride_h, out_stride_n,
    offset, start, stop, first_head,  # runtime: only in masks and addresses
    codes_ptr, ids_ptr, centroids_ptr, scales_ptr,
    n_tokens,  # runtime: only in masks and addresses
    K,  # runtime: only in addresses
    D: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """mu[id] + (code - 1) * scale in float32, rounded once. Grid (token blocks, heads of out)."""
    out_head = tl.program_id(1).to(tl.int64)
    ternary_block(
        out_ptr, out_stride_h, out_stride_n, offset, start, stop, out_head, out_head + first_head,
        codes_ptr, ids_ptr, centroids_ptr, scales_ptr, n_tokens, K, D, GROUP, BLOCK_N, STEP,
        PACKED,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "n_tokens", "offset", "start", "stop", "first_head", "n_chunks", "first_corrected",
        # Views into all layers' storage begin anywhere; a few bytes gain nothing from alignment.
        "secondary_ptr", "chunk_stops_ptr",
    ]
)  # fmt: skip
def decode_affine_kernel(
    out_ptr, out_stride_h, out_stride_n,
    offset, start, stop, first_head,  # runtime: only in masks and addresses
    codes_ptr, ids_ptr, centroids_ptr, scales_ptr, secondary_ptr, chunk_stops_ptr, zeros_ptr,
    coefficients_ptr, row_scales_ptr, basis_ptr,
    n_tokens,  # runtime: only in masks and addresses
    n_chunks,  # runtime: loop bound
    first_corrected,  # runtime: only in masks and addresses
    K,  # runtime: only in addresses
    D: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr, STEP: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """mu[id] + (code - zero) * scale (+ coefficients @ basis^T * row scale), rounded once.

    Grid (token blocks, heads of out). RANK 0 leaves the correction out.
    """
    out_head = tl.program_id(1).to(tl.int64)
    first = start + tl.program_id(0) * BLOCK_N
    last = tl.minimum(stop, first + BLOCK_N)
    while first < last:
        first = affine_piece(
            out_ptr, out_stride_h, out_stride_n, offset, start, first, last, out_head,
            out_head + first_head, codes_ptr, ids_ptr, centroids_ptr, scales_ptr, secondary_ptr,
            chunk_stops_ptr, zeros_ptr, coefficients_ptr, row_scales_ptr, basis_ptr, n_tokens,
            n_chunks, first_corrected, K, D, GROUP, RANK, RANK_PAD, STEP, DOT_DTYPE,
        )  # fmt: skip


@triton.jit
def _copy_rows(
    out_ptr, out_stride_h, out_stride_n, out_head, to, x_ptr, x_stride_h, x_stride_n, head, rows,
    valid, D: tl.constexpr,
):  # fmt: skip
    offs_d = tl.arange(0, D)[None, :]
    x_ptrs = x_ptr + head * x_stride_h + rows[:, None] * x_stride_n + offs_d
    x = tl.load(x_ptrs, mask=valid[:, None], other=0.0)
    out_ptrs = out_ptr + out_head * out_stride_h + to[:, None] * out_stride_n + offs_d
    same: tl.constexpr = x.dtype == out_ptr.dtype.element_ty
    tl.store(
        out_ptrs, x if same else x.to(tl.float32).to(out_ptr.dtype.element_ty),
        mask=valid[:, None],
    )  # fmt: skip


@triton.jit(do_not_specialize=["offset", "start", "stop", "first_head"])
def copy_kernel(
    out_ptr, out_stride_h, out_stride_n,
    offset, start, stop, first_head,  # runtime: only in masks and addresses
    x_ptr, x_stride_h, x_stride_n, D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Tokens start .. stop - 1 of x, in out's type. Grid (token blocks, heads of out)."""
    out_head = tl.program_id(1).to(tl.int64)
    rows = start + tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    _copy_rows(
        out_ptr, out_stride_h, out_stride_n, out_head, rows - start + offset,
        x_ptr, x_stride_h, x_stride_n, out_head + first_head, rows, rows < stop, D,
    )  # fmt: skip


@triton.jit(do_not_specialize=["offset", "n_tokens", "heads"])
def copy_pair_kernel(
    k_out_ptr, v_out_ptr, out_stride_h, out_stride_n, k_ptr, k_stride_h, k_stride_n,
    v_ptr, v_stride_h, v_stride_n,
    offset, n_tokens,  # runtime: only in masks and addresses
    heads,  # runtime
    D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """All tokens of k and of v to their outputs. Grid (token blocks, 2 * heads)."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.program_id(1).to(tl.int64)
    if head < heads:
        _copy_rows(
            k_out_ptr, out_stride_h, out_stride_n, head, rows + offset,
            k_ptr, k_stride_h, k_stride_n, head, rows, rows < n_tokens, D,
        )  # fmt: skip
    else:
        _copy_rows(
            v_out_ptr, out_stride_h, out_stride_n, head - heads, rows + offset,
            v_ptr, v_stride_h, v_stride_n, head - heads, rows, rows < n_tokens, D,
        )  # fmt: skip


class Decoder:
    """Decodes ranges of one packed span, whose tensors were checked when it was made."""

    def __init__(
        self, launch: PreparedLaunch, shape: tuple[int, int, int], device: torch.device, rows: int
    ) -> None:
        """shape: heads, tokens and channels of the span; rows: tokens of a program."""
        self._launch, self._shape, self._device, self._rows = launch, shape, device, rows
        self.kind: tuple[Any, ...] | None = ()
        """What decode_spans.py found that it shares a launch with; empty until it looked."""

    def __call__(
        self, out: Tensor, offset: int, start: int, stop: int, first_head: int = 0
    ) -> None:
        """Write tokens [start, stop) of heads from first_head on to out[:, offset : ...].

        out: [heads wanted, capacity, D] float32 or bfloat16, channels adjacent. ValueError on
        anything else, and on a range that does not fit.
        """
        self.check(out, offset, start, stop, first_head)
        if start < stop:
            self._start(out, offset, start, stop, first_head)

    @property
    def prepared(self) -> PreparedLaunch:
        return self._launch

    def launch_into(self, out: Tensor) -> PreparedLaunch:
        """What is launched for an output of this type."""
        return self._launch

    def check(self, out: Tensor, offset: int, start: int, stop: int, first_head: int) -> None:
        heads, tokens, dim = self._shape
        out_heads, capacity, out_dim = out.shape
        stride_d = out.stride(2)
        within = 0 <= first_head <= heads - out_heads
        wanted = within and out_dim == dim and stride_d == 1
        if not wanted or out.dtype not in FLOATS or out.device != self._device:
            raise ValueError(
                f"out must be float32 or bfloat16 [up to {heads - first_head} heads from "
                f"{first_head}, capacity, {dim}] with adjacent "
                f"channels on {self._device}, got {out.dtype} {tuple(out.shape)}, strides "
                f"{out.stride()}, on {out.device}"
            )
        count = stop - start
        if not (0 <= start <= stop <= tokens and offset >= 0 and offset + count <= capacity):
            raise ValueError(
                f"tokens {start}..{stop} of {tokens} do not fit at offset {offset} of {capacity}"
            )

    def _start(self, out: Tensor, offset: int, start: int, stop: int, first_head: int) -> None:
        stride_h, stride_n, _ = out.stride()
        blocks = -(-(stop - start) // self._rows)
        lengths = (offset, start, stop, first_head)
        self.launch_into(out)((blocks, out.shape[0]), out, (stride_h, stride_n), lengths)


class AffineDecoder(Decoder):
    """Of a QuantWM span, whose widened parts may be others in every reading."""

    PLACES: ClassVar = {"centroids": 2, "coefficients": 7, "coefficient_scales": 8}

    def rebound(self, parts: Mapping[str, Tensor | None]) -> AffineDecoder:
        """The same with other tensors, of the shapes and types that were checked; None lets go of
        one, to be given before the next call."""
        other = copy(self)
        other._launch = self._launch.rebound({self.PLACES[n]: t for n, t in parts.items()})
        return other

    def launch_into(self, out: Tensor) -> PreparedLaunch:
        wide = out.dtype == torch.float32 and self._launch.constants["RANK"] > 0
        return self._launch.bounded(FLOAT_REGISTERS) if wide else self._launch


def _check(
    codes: Tensor, ids: Tensor, centroids: Tensor, group_size: int, rank: int = 0
) -> tuple[int, int, int]:
    """Heads, tokens and channels of a span."""
    (heads, tokens), (count, dim) = ids.shape, centroids.shape[1:]
    checks.geometry(dim, group_size, count, rank)
    checks.packed("codes", codes, torch.uint8, (heads, tokens, dim // CODES_PER_BYTE))
    checks.packed("ids", ids, torch.uint8, (heads, tokens))
    checks.packed("centroids", centroids, torch.bfloat16, (heads, count, dim))
    checks.together(codes, ids, centroids)
    return heads, tokens, dim


def prepare_copy(x: Tensor) -> Decoder:
    """The decoder of a span that is not compressed: x float32 or bfloat16 [H, N, D]."""
    checks.rows("x", x)
    heads, tokens, dim = x.shape
    checks.geometry(dim)
    row = tuning.COPY[dim]
    constants = {
        "D": dim, "BLOCK_N": row.block_n, "num_warps": row.num_warps,
        "num_stages": row.num_stages,
    }  # fmt: skip
    prepared = PreparedLaunch(copy_kernel, (x, x.stride(0), x.stride(1)), constants)
    return Decoder(prepared, (heads, tokens, dim), x.device, row.block_n)


def copy_pair(k_out: Tensor, v_out: Tensor, offset: int, k: Tensor, v: Tensor) -> None:
    """k and v to k_out[:, offset : offset + N] and v_out[...] in one launch.

    k, v: float32 or bfloat16 [H, N, D] with adjacent channels; k_out, v_out: as in `Decoder`, with
    the same strides. ValueError on anything else.
    """
    (heads, tokens, dim), (out_heads, capacity, out_dim) = k.shape, k_out.shape
    stride_h, stride_n, stride_d = strides = k_out.stride()
    k_strides, v_strides = k.stride(), v.stride()
    fits = 0 <= offset <= capacity - tokens and out_heads == heads and out_dim == dim
    alike = v.shape == k.shape and v_out.shape == k_out.shape and v_out.stride() == strides
    plain = stride_d == k_strides[2] == v_strides[2] == 1 and dim in tuning.COPY
    types = {k.dtype, v.dtype, k_out.dtype, v_out.dtype}.issubset(FLOATS)
    here = k.device == v.device == k_out.device == v_out.device
    if not (fits and alike and plain and types and here):
        raise ValueError(
            f"k {k.dtype} {tuple(k.shape)} and v {v.dtype} {tuple(v.shape)} do not go to "
            f"{k_out.dtype} {tuple(k_out.shape)} and {tuple(v_out.shape)} at {offset}"
        )
    row = tuning.COPY[dim]
    args = (
        k_out, v_out, stride_h, stride_n, k, k_strides[0], k_strides[1], v, v_strides[0],
        v_strides[1], offset, tokens, heads,
    )  # fmt: skip
    constants = {
        "D": dim, "BLOCK_N": row.block_n, "num_warps": row.num_warps,
        "num_stages": row.num_stages,
    }  # fmt: skip
    launch(copy_pair_kernel, (-(-tokens // row.block_n), 2 * heads), args, constants)


def prepare_qvg(
    codes: Tensor, ids: Tensor, centroids: Tensor, scales: Tensor, group_size: int
) -> Decoder:
    """A QVG span's decoder.

    codes uint8 [H, N, D/4], ids uint8 [H, N], centroids bfloat16 [H, K, D], scales float8_e4m3fn
    [H, N, D/G], all contiguous. ValueError on anything else.
    """
    heads, tokens, dim = _check(codes, ids, centroids, group_size)
    checks.packed("scales", scales, torch.float8_e4m3fn, (heads, tokens, dim // group_size))
    checks.together(codes, scales)
    row = tuning.DECODE[dim]
    fixed = (
        codes.view(torch.int32), ids, centroids, scales.view(torch.uint8), tokens,
        centroids.shape[1],
    )  # fmt: skip
    constants = {
        "D": dim, "GROUP": group_size, "BLOCK_N": row.block_n, "STEP": row.block_k,
        "PACKED": tuning.dot_mode(codes)[0] == torch.bfloat16, **row.options,
    }  # fmt: skip
    prepared = PreparedLaunch(decode_ternary_kernel, fixed, constants)
    return Decoder(prepared, (heads, tokens, dim), codes.device, row.block_n)


def prepare_quantwm(
    codes: Tensor, ids: Tensor, centroids: Tensor, scales: Tensor, secondary: Tensor,
    chunk_stops: Tensor, zeros: Tensor, group_size: int, coefficients: Tensor | None,
    coefficient_scales: Tensor | None, basis: Tensor | None, first_corrected: int,
) -> AffineDecoder:  # fmt: skip
    """As `prepare_qvg` for QuantWM spans.

    scales uint8 [H, N, D/G], secondary float16 [H, C], chunk_stops int32 [C] (where each chunk of
    the span ends), zeros uint8 [H, ceil(N * D/G / 4)], coefficients int8
    [H, N - first_corrected, r], coefficient_scales float16 [H, N - first_corrected], basis
    bfloat16 [H, D, r]; the last three all or none.
    """
    correction = (coefficients, coefficient_scales, basis)
    rank = 0 if basis is None or any(t is None for t in correction) else basis.shape[2]
    heads, tokens, dim = _check(codes, ids, centroids, group_size, rank)
    groups, chunks = dim // group_size, secondary.shape[-1]
    checks.packed("scales", scales, torch.uint8, (heads, tokens, groups))
    checks.packed("secondary", secondary, torch.float16, (heads, chunks))
    checks.packed("chunk_stops", chunk_stops, torch.int32, (chunks,))
    checks.packed("zeros", zeros, torch.uint8, (heads, -(-tokens * groups // CODES_PER_BYTE)))
    checks.together(codes, scales, secondary, chunk_stops, zeros, *correction)
    if rank:
        corrected = tokens - first_corrected
        checks.packed("coefficients", coefficients, torch.int8, (heads, corrected, rank))
        checks.packed("coefficient_scales", coefficient_scales, torch.float16, (heads, corrected))
        checks.packed("basis", basis, torch.bfloat16, (heads, dim, rank))
    row = tuning.DECODE_PSAC[dim] if rank else tuning.DECODE_AFFINE[dim]
    step = max(row.block_k, group_size) if rank else row.block_k  # a pass has whole groups
    fixed = (
        codes.view(torch.int32), ids, centroids, scales, secondary, chunk_stops, zeros,
        *(correction if rank else (None, None, None)),
        tokens, chunks, first_corrected if rank else 0, centroids.shape[1],
    )  # fmt: skip
    constants = {
        "D": dim, "GROUP": group_size, "RANK": rank,
        "RANK_PAD": max(16, triton.next_power_of_2(rank)), "BLOCK_N": row.block_n,
        "STEP": step, "DOT_DTYPE": tuning.dot_mode(codes)[1], **row.options,
    }  # fmt: skip
    registers = row.registers or (WIDE_RANK_REGISTERS if rank > 16 else 0)
    if registers:
        constants["maxnreg"] = registers
    prepared = PreparedLaunch(decode_affine_kernel, fixed, constants)
    return AffineDecoder(prepared, (heads, tokens, dim), codes.device, row.block_n)

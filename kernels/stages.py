"""Several stages of centroids (qvg-pro): what a stage leaves, and a span with all stages decoded.

Assignment, means and the ternary residual of the last stage are qvg's kernels. Floors, keys or
values of 40 x 4,680 x 128 on an H200 that copies 4,263 GB/s: a residual reads and writes 48 MB,
22 us; a decode writes 48 MB and reads 9, 16 us, with four stages 192 MB more from the L2 cache.
Reached for keys and values together (H200, 2026-11-29): decode 0.081 ms, 40%. A residual has been
timed only inside an encode of 0.752 ms with codebooks given; the floor of its six residuals is
0.134 ms.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import checks, tuning
from kernels.decode import Decoder
from kernels.encode import check_rows
from kernels.format import CODES_PER_BYTE
from kernels.launch import PreparedLaunch, launch
from kernels.tile import (
    centroid_rows,
    code_levels,
    e4m3_value,
    of_words,
    residual_tile,
    round_to_bf16,
    scale_bytes,
    store_values,
)


@triton.jit(do_not_specialize=["n_tokens"])
def residual_kernel(
    x_ptr, x_stride_h, x_stride_n, ids_ptr, centroids_ptr, out_ptr,
    n_tokens,  # runtime: only in masks and addresses
    K,  # runtime: only in addresses
    D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """x - mu[id] in BF16. Grid (token blocks, heads)."""
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = residual_tile(
        x_ptr, x_stride_h, x_stride_n, ids_ptr, centroids_ptr, head, rows, n_tokens, K, D, 16
    )
    at = (head * n_tokens + rows) * D
    # Rounded by hand first: the interpreter's cast cuts.
    store_values(out_ptr, 1, round_to_bf16(r), at, rows < n_tokens, D)


@triton.jit(do_not_specialize=["n_tokens", "offset", "start", "stop", "first_head"])
def decode_stages_kernel(
    out_ptr, out_stride_h, out_stride_n,
    offset, start, stop, first_head,  # runtime: only in masks and addresses
    codes_ptr, ids_ptr, centroids_ptr, scales_ptr,
    n_tokens,  # runtime: only in masks and addresses
    K,  # runtime: only in addresses
    D: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(code - 1) * scale, then a centroid of every stage added in float32, rounded once.

    K: centroids of one stage. Grid (token blocks, heads of out).
    """
    out_head = tl.program_id(1).to(tl.int64)
    head = out_head + first_head
    block = tl.program_id(0).to(tl.int64) * BLOCK_N
    rows = tl.arange(0, BLOCK_N)
    valid = rows < stop - start - block
    at = head * n_tokens + start + block
    heads_scales = scales_ptr + head * n_tokens * (D // GROUP)
    scale, _ = scale_bytes(heads_scales, heads_scales, start + block, rows, valid, D, GROUP, False)
    scale = of_words(e4m3_value(scale.to(tl.int32)), D, GROUP)
    one = tl.full(scale.shape, 1.0, tl.float32)
    values = code_levels(codes_ptr + at * (D // 16), one, rows, valid, D) * scale[:, :, None]
    for stage in tl.static_range(STAGES):
        ids = ids_ptr + at * STAGES + stage
        book = centroids_ptr + (head * STAGES + stage) * K * D
        values += centroid_rows(ids, book, rows, valid, D, STAGES).to(tl.float32)
    out_ptr += out_head * out_stride_h + (offset + block) * out_stride_n
    store_values(out_ptr, out_stride_n, values, rows, valid, D)


def residual(x: Tensor, ids: Tensor, centroids: Tensor, into: Tensor | None = None) -> Tensor:
    """What BF16 centroids [H, K, D] leave of x [H, N, D] (float32 or bfloat16), in BF16.

    ids: uint8 [H, N]; into: contiguous, where it is written, x itself if need be. ValueError on
    anything else.
    """
    heads, tokens, dim = check_rows(x, ids, centroids, 16)
    row = tuning.ENCODE[dim]
    out = into
    if out is None:
        out = torch.empty((heads, tokens, dim), dtype=torch.bfloat16, device=x.device)
    checks.packed("into", out, torch.bfloat16, (heads, tokens, dim))
    checks.together(x, out)
    args = (x, x.stride(0), x.stride(1), ids, centroids, out, tokens, centroids.shape[1])
    constants = {"D": dim, "BLOCK_N": row.block_n, **row.options}
    launch(residual_kernel, (triton.cdiv(tokens, row.block_n), heads), args, constants)
    return out


def prepare_stages(
    codes: Tensor, ids: Tensor, centroids: Tensor, scales: Tensor, group_size: int
) -> Decoder:
    """The decoder of a span with S stages: as `decode.prepare_qvg`, but ids [H, N, S] and
    centroids bfloat16 [H, S * K, D], those of stage s from s * K on."""
    heads, tokens, stages = ids.shape
    total, dim = centroids.shape[1:]
    if not stages or total % stages:
        raise ValueError(f"{total} centroids are not {stages} stages of as many each")
    checks.geometry(dim, group_size, total // stages)
    checks.packed("codes", codes, torch.uint8, (heads, tokens, dim // CODES_PER_BYTE))
    checks.packed("ids", ids, torch.uint8, (heads, tokens, stages))
    checks.packed("centroids", centroids, torch.bfloat16, (heads, total, dim))
    checks.packed("scales", scales, torch.float8_e4m3fn, (heads, tokens, dim // group_size))
    checks.together(codes, ids, centroids, scales)
    row = tuning.DECODE_STAGES[dim]
    fixed = (
        codes.view(torch.int32), ids, centroids, scales.view(torch.uint8), tokens, total // stages,
    )  # fmt: skip
    constants = {
        "D": dim, "GROUP": group_size, "STAGES": stages, "BLOCK_N": row.block_n,
        **row.options,
    }  # fmt: skip
    prepared = PreparedLaunch(decode_stages_kernel, fixed, constants)
    return Decoder(prepared, (heads, tokens, dim), codes.device, row.block_n)

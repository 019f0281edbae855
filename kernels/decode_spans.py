"""Many spans of a history decoded by one launch, so that each does not end with idle processors.

A launch of 40 heads x 4,680 tokens x 128 writes 48 MB, 14 us at what a fill reaches, and loses 3 to
4 us while its first programs begin and its last ones end: 12 launches for 28,080 tokens, and 256
for 150,000 in four groups of heads. What a span's decoder is launched with goes into a table here,
a row of 64-bit numbers for each span, addresses among them. Floor and fraction are decode.py's:
18,720 tokens there are what one launch of four spans writes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.decode import Decoder, decode_affine_kernel, decode_ternary_kernel
from kernels.decode_rows import affine_piece, ternary_block
from kernels.launch import launch

WORTHWHILE = 1 << 24
"""Elements from which on a table is made and copied, 40 us of the host: below, a launch for each
span costs less, and a small world is bound by the host."""

Part = tuple[Callable[..., None], int, int, int]
"""A span's decoder, where its tokens go, and which of them: first and behind the last."""


@triton.jit(do_not_specialize=["n_heads", "first_head"])
def ternary_spans_kernel(
    out_ptr, out_stride_h, out_stride_n, table_ptr,
    n_heads, first_head,  # runtime: only in addresses
    D: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """A row: offset, start and stop, then as in decode_ternary_kernel. Grid (token blocks of the
    longest span, spans times heads of out)."""
    row = table_ptr + tl.program_id(1) // n_heads * 9
    out_head = (tl.program_id(1) % n_heads).to(tl.int64)
    start, stop = tl.load(row + 1), tl.load(row + 2)
    if start + tl.program_id(0) * BLOCK_N < stop:
        ternary_block(
            out_ptr, out_stride_h, out_stride_n, tl.load(row), start, stop, out_head,
            out_head + first_head,
            tl.load(row + 3).to(tl.pointer_type(tl.int32)),
            tl.load(row + 4).to(tl.pointer_type(tl.uint8)),
            tl.multiple_of(tl.load(row + 5).to(tl.pointer_type(tl.bfloat16)), 16),
            tl.load(row + 6).to(tl.pointer_type(tl.uint8)),
            tl.load(row + 7), tl.load(row + 8), D, GROUP, BLOCK_N, STEP, PACKED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["n_heads", "first_head"])
def affine_spans_kernel(
    out_ptr, out_stride_h, out_stride_n, table_ptr,
    n_heads, first_head,  # runtime: only in addresses
    D: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr, STEP: tl.constexpr, DOT_DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """A row: offset, start and stop, then as in decode_affine_kernel. ALIGNED: of PSAC's rows and
    directions, whose address in the table is a multiple of this, so that loads are wide."""
    row = table_ptr + tl.program_id(1) // n_heads * 17
    out_head = (tl.program_id(1) % n_heads).to(tl.int64)
    first = tl.load(row + 1).to(tl.int32) + tl.program_id(0) * BLOCK_N
    last = tl.minimum(tl.load(row + 2).to(tl.int32), first + BLOCK_N)
    while first < last:
        # Read again for every piece, so that of a row only its address is held beside the tile.
        first = affine_piece(
            out_ptr, out_stride_h, out_stride_n, tl.load(row), tl.load(row + 1), first, last,
            out_head, out_head + first_head,
            tl.load(row + 3).to(tl.pointer_type(tl.int32)),
            tl.load(row + 4).to(tl.pointer_type(tl.uint8)),
            tl.multiple_of(tl.load(row + 5).to(tl.pointer_type(tl.bfloat16)), 16),
            tl.load(row + 6).to(tl.pointer_type(tl.uint8)),
            tl.load(row + 7).to(tl.pointer_type(tl.float16)),
            tl.load(row + 8).to(tl.pointer_type(tl.int32)),
            tl.load(row + 9).to(tl.pointer_type(tl.uint8)),
            tl.multiple_of(tl.load(row + 10).to(tl.pointer_type(tl.int8)), ALIGNED),
            tl.load(row + 11).to(tl.pointer_type(tl.float16)),
            tl.multiple_of(tl.load(row + 12).to(tl.pointer_type(tl.bfloat16)), ALIGNED),
            tl.load(row + 13), tl.load(row + 14), tl.load(row + 15), tl.load(row + 16),
            D, GROUP, RANK, RANK_PAD, STEP, DOT_DTYPE,
        )  # fmt: skip


CENTROIDS = 2
"""Their place among a decoder's numbers: they are loaded 16 bytes at a time."""
CORRECTION = (7, 9)
"""The places of PSAC's rows and directions."""


def decode_spans(parts: Sequence[Part], out: Tensor, first_head: int = 0) -> None:
    """Every part as its decoder called alone does; bits and errors are the same.

    out: [heads wanted, capacity, D], of the spans' heads from first_head on.
    """
    alike: dict[Any, list[Part]] = defaultdict(list)
    for part in parts:
        alike[_kind(part[0])].append(part)
    for kind, group in alike.items():
        size = sum(stop - start for _, _, start, stop in group) * out.shape[0] * out.shape[2]
        if kind is None or len(group) < 2 or size < WORTHWHILE or _capturing(out):
            for decode, offset, start, stop in group:
                decode(out, offset, start, stop, first_head)
        else:
            _decode_alike(group, out, first_head)


def _kind(decode: Callable[..., None]) -> Any:
    """What must be the same for one launch; None for a decoder that is launched alone.

    Asked once of every decoder (5 us, for every span of every reading); other tensors of the same
    kinds that it is rebound to change nothing here.
    """
    if not isinstance(decode, Decoder):
        return None
    if decode.kind == ():
        decode.kind = _found_kind(decode)
    return decode.kind


def _found_kind(decode: Decoder) -> tuple[Any, ...] | None:
    if id(decode.prepared.kernel) not in _kernels() or decode.prepared.numbers[CENTROIDS] % 16:
        return None
    return (id(decode.prepared.kernel), *decode.prepared.constants.items(), *_aligned(decode))


def _aligned(decode: Decoder) -> tuple[tuple[str, int], ...]:
    """The constant that the kernel of many affine spans has beyond that of one."""
    if decode.prepared.kernel is not decode_affine_kernel:
        return ()
    numbers = decode.prepared.numbers
    return (("ALIGNED", 1 if any(numbers[place] % 16 for place in CORRECTION) else 16),)


def _kernels() -> dict[int, Any]:
    """The kernel of many spans by that of one."""
    return {
        id(decode_ternary_kernel): ternary_spans_kernel,
        id(decode_affine_kernel): affine_spans_kernel,
    }


def _capturing(out: Tensor) -> bool:
    """In a CUDA graph the table's copy would read, at every replay, memory that is long reused."""
    return out.is_cuda and torch.cuda.is_current_stream_capturing()


def _decode_alike(parts: Sequence[Part], out: Tensor, first_head: int) -> None:
    rows, longest, held = [], 0, []
    for decode, offset, start, stop in parts:
        decode.check(out, offset, start, stop, first_head)
        rows.append((offset, start, stop, *decode.prepared.numbers))
        longest = max(longest, stop - start)
        held.append(decode)  # what the addresses are of lives until the launch is queued
    # Pinned: a copy from pageable memory would wait for all that is queued.
    table = torch.tensor(rows, dtype=torch.int64, pin_memory=out.is_cuda)
    table = table.to(out.device, non_blocking=True)
    prepared = held[0].launch_into(out)
    constants = {**prepared.constants, **dict(_aligned(held[0]))}
    grid = (triton.cdiv(longest, constants["BLOCK_N"]), len(rows) * out.shape[0])
    stride_h, stride_n, _ = out.stride()
    args = (out, stride_h, stride_n, table, out.shape[0], first_head)
    launch(_kernels()[id(prepared.kernel)], grid, args, constants)

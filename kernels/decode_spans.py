"""Many spans of a history decoded by one launch, so that each does not end with idle processors.

A launch of 40 heads x 4,680 tokens x 128 writes 48 MB, 14 us at what a fill reaches, and loses 3 to
4 us while its first programs begin and its last ones end: 12 launches for 28,080 tokens, and 256
for 150,000 in four groups of heads. What a span's decoder is launched with goes into a table here,
a row of 64-bit numbers for each span of keys and of values, addresses among them. Keys and values
of one span need no table (decode_pair.py). Floor and fraction are decode.py's: 18,720 tokens there
are what one launch of four spans writes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import decode as single
from kernels.decode import Decoder
from kernels.decode_pair import decode_pair, is_affine, launch_many
from kernels.decode_rows import affine_piece, ternary_block

WORTHWHILE = 1 << 24
"""Elements from which on a table is made and copied, 40 us of the host: below, a launch for each
span costs less, and a small world is bound by the host."""

Part = tuple[Callable[..., None], int, int, int]
"""A span's decoder, where its tokens go, and which of them: first and behind the last."""


@triton.jit(do_not_specialize=["n_rows", "first_head"])
def ternary_spans_kernel(
    k_out_ptr, v_out_ptr, out_stride_h, out_stride_n, table_ptr,
    n_rows, first_head,  # runtime: only in addresses
    D: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """A row: 1 for values, offset, start and stop, then as in decode_ternary_kernel. Grid (token
    blocks of the longest span, rows times heads of out)."""
    row = table_ptr + tl.program_id(1) % n_rows * 10
    out_head = (tl.program_id(1) // n_rows).to(tl.int64)
    start, stop = tl.load(row + 2), tl.load(row + 3)
    if start + tl.program_id(0) * BLOCK_N < stop:
        ternary_block(
            tl.multiple_of(tl.where(tl.load(row) == 1, v_out_ptr, k_out_ptr), 16),
            out_stride_h, out_stride_n, tl.load(row + 1), start, stop, out_head,
            out_head + first_head,
            tl.load(row + 4).to(tl.pointer_type(tl.int32)),
            tl.load(row + 5).to(tl.pointer_type(tl.uint8)),
            tl.multiple_of(tl.load(row + 6).to(tl.pointer_type(tl.bfloat16)), 16),
            tl.load(row + 7).to(tl.pointer_type(tl.uint8)),
            tl.load(row + 8), tl.load(row + 9), D, GROUP, BLOCK_N, STEP, PACKED,
        )  # fmt: skip


@triton.jit
def _affine_row(
    out_ptr, out_stride_h, out_stride_n, row, first, last, out_head, head,
    D: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr,
    STEP: tl.constexpr, DOT_DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Read again for every piece, so that of a row only its address is held beside the tile."""
    return affine_piece(
        out_ptr, out_stride_h, out_stride_n, tl.load(row + 1), tl.load(row + 2), first, last,
        out_head, head,
        tl.load(row + 4).to(tl.pointer_type(tl.int32)),
        tl.load(row + 5).to(tl.pointer_type(tl.uint8)),
        tl.multiple_of(tl.load(row + 6).to(tl.pointer_type(tl.bfloat16)), 16),
        tl.load(row + 7).to(tl.pointer_type(tl.uint8)),
        tl.load(row + 8).to(tl.pointer_type(tl.float16)),
        tl.load(row + 9).to(tl.pointer_type(tl.int32)),
        tl.load(row + 10).to(tl.pointer_type(tl.uint8)),
        tl.multiple_of(tl.load(row + 11).to(tl.pointer_type(tl.int8)), ALIGNED),
        tl.load(row + 12).to(tl.pointer_type(tl.float16)),
        tl.multiple_of(tl.load(row + 13).to(tl.pointer_type(tl.bfloat16)), ALIGNED),
        tl.load(row + 14), tl.load(row + 15), tl.load(row + 16), tl.load(row + 17),
        D, GROUP, RANK, RANK_PAD, STEP, DOT_DTYPE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n_rows", "first_head"])
def affine_spans_kernel(
    k_out_ptr, v_out_ptr, out_stride_h, out_stride_n, table_ptr,
    n_rows, first_head,  # runtime: only in addresses
    D: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, DOT_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """A row: 1 for values and 2 for keys with a correction, of this RANK, else 0; offset, start and
    stop; then as in decode_affine_kernel. WIDTH: channels of a pass where there is a correction.
    ALIGNED: of PSAC's rows and directions, whose address in the table is a multiple of this, so
    that loads are wide."""
    row = table_ptr + tl.program_id(1) % n_rows * 18
    out_head = (tl.program_id(1) // n_rows).to(tl.int64)
    first = tl.load(row + 2).to(tl.int32) + tl.program_id(0) * BLOCK_N
    last = tl.minimum(tl.load(row + 3).to(tl.int32), first + BLOCK_N)
    kind = tl.load(row)
    if RANK > 0:  # noqa: SIM102  (a constant: without a correction this is no code at all)
        if kind == 2:
            while first < last:
                first = _affine_row(
                    k_out_ptr, out_stride_h, out_stride_n, row, first, last, out_head,
                    out_head + first_head, D, GROUP, RANK, RANK_PAD, WIDTH, DOT_DTYPE, ALIGNED,
                )  # fmt: skip
    if kind != 2:
        out_ptr = tl.multiple_of(tl.where(kind == 1, v_out_ptr, k_out_ptr), 16)
        while first < last:
            first = _affine_row(
                out_ptr, out_stride_h, out_stride_n, row, first, last, out_head,
                out_head + first_head, D, GROUP, 0, RANK_PAD, STEP, DOT_DTYPE, ALIGNED,
            )  # fmt: skip


CENTROIDS = 2
"""Their place among a decoder's numbers: they are loaded 16 bytes at a time."""
CORRECTION = (7, 9)
"""The places of PSAC's rows and directions."""


class Placed(NamedTuple):
    """A part, and its place among (keys, values)."""

    side: int
    decode: Any
    offset: int
    start: int
    stop: int


def decode_spans(
    sides: tuple[Sequence[Part], Sequence[Part]], outs: tuple[Tensor, Tensor], first_head: int = 0
) -> int:
    """Every part of keys and of values as its decoder called alone does; bits and errors are the
    same. Returns the launches made, 0 where one of them is of what does not last.

    outs: each [heads wanted, capacity, D], of the spans' heads from first_head on.
    """
    k_out, v_out = outs
    alike = (
        k_out.dtype == v_out.dtype and k_out.stride() == v_out.stride()
        and k_out.shape == v_out.shape and not (k_out.data_ptr() | v_out.data_ptr()) % 16
    )  # fmt: skip
    groups: dict[Any, list[Placed]] = defaultdict(list)
    for side, parts in enumerate(sides):
        for part in parts:
            kind = _kind(part[0]) if alike else None
            groups[kind].append(Placed(side, *part))
    made, lasting = 0, True
    for kind, group in groups.items():
        size = sum(part.stop - part.start for part in group) * k_out.shape[0] * k_out.shape[2]
        if kind is None or not _together(group):
            made += _each(group, outs, first_head)
        elif _few(group) or size < WORTHWHILE or _capturing(k_out):
            made += _by_pairs(group, outs, first_head)
        else:
            _by_table(group, outs, first_head)
            lasting = False
    return made if lasting else 0


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
    kernel, constants = decode.prepared.kernel, decode.prepared.constants
    known = kernel is single.decode_ternary_kernel or kernel is single.decode_affine_kernel
    if not known or decode.prepared.numbers[CENTROIDS] % 16:
        return None
    if is_affine(decode):
        return "affine", constants["D"], constants["GROUP"], constants["DOT_DTYPE"]
    return ("ternary", *constants.items())


def _rank(part: Placed) -> int:
    return part.decode.prepared.constants.get("RANK", 0)


def _together(group: Sequence[Placed]) -> bool:
    """Whether there is one rank of corrections, and keys alone have any."""
    corrected = {(part.side, _rank(part)) for part in group if _rank(part)}
    return not corrected or (len(corrected) == 1 and min(corrected)[0] == 0)


def _few(group: Sequence[Placed]) -> bool:
    """One part, or the two sides of one span."""
    return len(group) == 1 or (len(group) == 2 and group[0].side != group[1].side)


def _capturing(out: Tensor) -> bool:
    """In a CUDA graph the table's copy would read, at every replay, memory that is long reused."""
    return out.is_cuda and torch.cuda.is_current_stream_capturing()


def _each(group: Sequence[Placed], outs: tuple[Tensor, Tensor], first_head: int) -> int:
    for side, decode, offset, start, stop in group:
        decode(outs[side], offset, start, stop, first_head)
    return len(group)


def _by_pairs(group: Sequence[Placed], outs: tuple[Tensor, Tensor], first_head: int) -> int:
    """Keys and values of the same tokens by one launch; the launches made."""
    values = {part[2:]: part for part in group if part.side == 1}
    alone = []
    made = 0
    for part in group:
        other = values.pop(part[2:], None) if part.side == 0 else None
        if other is not None:
            decode_pair(part.decode, other.decode, outs, *part[2:], first_head)
            made += 1
        elif part.side == 0:
            alone.append(part)
    return made + _each([*alone, *values.values()], outs, first_head)


def _by_table(group: Sequence[Placed], outs: tuple[Tensor, Tensor], first_head: int) -> None:
    rows, lengths, k_out = [], [], outs[0]
    # Keys and values by turns: the ones wait for memory while the others write.
    for part in sorted(group, key=lambda part: part.offset):
        side, decode, offset, start, stop = part
        decode.check(outs[side], offset, start, stop, first_head)
        mark = 2 if _rank(part) else side
        rows.append((mark, offset, start, stop, *decode.prepared.numbers))
        lengths.append(stop - start)
    # Pinned: a copy from pageable memory would wait for all that is queued.
    table = torch.tensor(rows, dtype=torch.int64, pin_memory=k_out.is_cuda)
    table = table.to(k_out.device, non_blocking=True)
    most = max(group, key=_rank).decode
    kernel, more = ternary_spans_kernel, {}
    if is_affine(most):
        kernel = affine_spans_kernel
        more["ALIGNED"] = 1 if any(_unaligned(part.decode) for part in group) else 16
    stride_h, stride_n, _ = k_out.stride()
    args = (*outs, stride_h, stride_n, table, len(rows), first_head)
    launch_many(kernel, most, k_out, lengths, len(rows), args, more)


def _unaligned(decode: Decoder) -> bool:
    numbers = decode.prepared.numbers
    return any(numbers[place] % 16 for place in CORRECTION)

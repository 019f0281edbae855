"""Helpers that qtc's kernels share: where a block's code words lie, and what widths say."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import checks, qtc_tuning


@dataclass(frozen=True)
class Turning:
    """How RoPE turned a run of tokens; the default is not at all.

    Attributes:
        phases: int32 [2, D / 2] in turns / 2**32: angle of every pair at place 0, and what a step
            along its axis adds. None for tokens that are not turned.
        split: pairs of time and of the row; the others are of the column.
        grid: rows and columns of a frame.
        first_place: of the first token, counted from the frame that phases begin with.
        places: int32 [N], the same token by token, where they do not follow each other.
        step: places from one token to the next, where they do.
    """

    phases: Tensor | None = None
    split: tuple[int, int] = (0, 0)
    grid: tuple[int, int] = (1, 1)
    first_place: int = 0
    places: Tensor | None = None
    step: int = 1

    def check(self, dim: int) -> None:
        """ValueError when it does not suit this head size."""
        if dim not in qtc_tuning.DECODE:
            raise ValueError(f"no kernel: head dim {dim} is not one of {tuple(qtc_tuning.DECODE)}")
        if self.phases is not None:
            checks.packed("phases", self.phases, torch.int32, (2, dim // 2))

    def tensors(self) -> tuple[Tensor | None, Tensor | None]:
        return self.phases, self.places

    def constants(self) -> dict[str, object]:
        return {
            "TURN": self.phases is not None, "TIME": self.split[0], "ROW": self.split[1],
            "GRID_ROWS": self.grid[0], "GRID_COLUMNS": self.grid[1],
            "LISTED": self.places is not None,
        }  # fmt: skip


@triton.jit
def block_words(widths_ptr, FIRST: tl.constexpr, BLOCKS: tl.constexpr, NB: tl.constexpr):
    """Of blocks FIRST .. FIRST + BLOCKS - 1 of one head: where their code words lie in a token.

    widths_ptr: of the head. Returns widths; digit 1 and 2 in words of 32 bits (digit 0 is the
    block's own number) and the odd bit in words of 16, int32 [BLOCKS] each; and the blocks of the
    head that have digit 1 and digit 2 (quantwm/cache/formats/qtc_planes.py: all digits 0, digits 1,
    digits 2, odd bits).
    """
    every = tl.arange(0, triton.next_power_of_2(NB))
    all_widths = tl.load(widths_ptr + every, mask=every < NB, other=0).to(tl.int32)
    block = FIRST + tl.arange(0, BLOCKS)
    width = tl.load(widths_ptr + block, mask=block < NB, other=0).to(tl.int32)
    # Widths do not increase, so the blocks that have digit k are the first ones.
    with_first = tl.sum((all_widths >= 2).to(tl.int32), axis=0)
    with_second = tl.sum((all_widths >= 4).to(tl.int32), axis=0)
    with_third = tl.sum((all_widths >= 6).to(tl.int32), axis=0)
    digits = with_first + with_second + with_third
    before = (every[None, :] < block[:, None]) & (all_widths % 2 == 1)[None, :]
    odd = 2 * digits + tl.sum(before.to(tl.int32), axis=1)
    second = with_first + block
    return width, second, with_first + with_second + block, odd, with_second, with_third


@triton.jit
def cells(
    places_ptr, first_place, step, rows, valid, GRID_ROWS: tl.constexpr,
    GRID_COLUMNS: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Frame, row and column of tokens, int32; as in `turn_tiles`."""
    if LISTED:
        place = tl.load(places_ptr + rows, mask=valid, other=0)
    else:
        place = (first_place + step * rows).to(tl.int32)
    cell = place % (GRID_ROWS * GRID_COLUMNS)
    return place // (GRID_ROWS * GRID_COLUMNS), cell // GRID_COLUMNS, cell % GRID_COLUMNS


@triton.jit
def sine_cosine(phase, FAST: tl.constexpr):
    """Of an angle in turns / 2**32, int32 as it wraps; float32.

    FAST: the hardware's, within 2**-20 on the half turn either way that the wrap leaves; without,
    the library's, which the interpreter has.
    """
    angle = phase.to(tl.float32) * 1.4629180792671596e-09  # 2 pi / 2**32
    if FAST:
        sine = tl.inline_asm_elementwise(
            "sin.approx.f32 $0, $1;", "=f,f", [angle], dtype=tl.float32, is_pure=True, pack=1
        )
        cosine = tl.inline_asm_elementwise(
            "cos.approx.f32 $0, $1;", "=f,f", [angle], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        sine = tl.sin(angle)
        cosine = tl.cos(angle)
    return sine, cosine


@triton.jit
def turn_tiles(
    phases_ptr, places_ptr, first_place, step, rows, valid, PAIRS: tl.constexpr,
    TIME: tl.constexpr, ROW: tl.constexpr, GRID_ROWS: tl.constexpr, GRID_COLUMNS: tl.constexpr,
    LISTED: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Sine and cosine of every pair of tokens, float32 [BLOCK_N, PAIRS].

    phases: int32 [2, PAIRS], in turns / 2**32: of place 0, and what a step along the pair's own
    axis adds (the first TIME pairs, the next ROW, the others). Products wrap as angles do, so they
    are right for any step. LISTED: places are given one by one; they count from a frame's start.
    """
    frame, row, column = cells(
        places_ptr, first_place, step, rows, valid, GRID_ROWS, GRID_COLUMNS, LISTED
    )  # fmt: skip
    pair = tl.arange(0, PAIRS)
    in_grid = tl.where((pair < TIME + ROW)[None, :], row[:, None], column[:, None])
    steps = tl.where((pair < TIME)[None, :], frame[:, None], in_grid)
    first = tl.load(phases_ptr + pair)[None, :]
    phase = first + steps * tl.load(phases_ptr + PAIRS + pair)[None, :]
    return sine_cosine(phase, FAST)


@triton.jit
def token_tile(
    x_ptr, x_stride_h, x_stride_n, phases_ptr, places_ptr, first_place, step, head, rows, valid,
    D: tl.constexpr, TURN: tl.constexpr, TIME: tl.constexpr, ROW: tl.constexpr,
    GRID_ROWS: tl.constexpr, GRID_COLUMNS: tl.constexpr, LISTED: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """A token block without its rotation: even and odd channels, float32 [BLOCK_N, D / 2]."""
    at = x_ptr + head * x_stride_h + rows[:, None] * x_stride_n + tl.arange(0, D)[None, :]
    x = tl.load(at, mask=valid[:, None], other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, (rows.shape[0], D // 2, 2)))
    if TURN:
        sine, cosine = turn_tiles(
            phases_ptr, places_ptr, first_place, step, rows, valid, D // 2, TIME, ROW, GRID_ROWS,
            GRID_COLUMNS, LISTED, FAST,
        )  # fmt: skip
        back = even * cosine + odd * sine
        odd = odd * cosine - even * sine
        even = back
    return even, odd

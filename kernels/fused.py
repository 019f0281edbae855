"""Launches fused attention segment by segment, and the attention whose scores are INT8 products."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise

import torch
import triton
from torch import Tensor

from kernels import checks, fused_hopper, tuning
from kernels.flash import flash_kernel, quantize_rows_kernel
from kernels.format import FUSED_HEAD_DIMS, Side
from kernels.fused_hopper import Kind, Piece
from kernels.launch import launch

LOG2_E = 1.4426950408889634
PLAIN, INT8 = 0, 3
PACKED_MATH = True
"""Two channels an instruction where the device can."""
KINDS = {"plain": PLAIN, "ternary": 1, "affine": 2}

Run = tuple[Kind | None, list[Piece]]
"""Pieces that one launch takes, and their kind; one piece for flash_kernel, without a kind."""


def unsupported_queries(q: Tensor) -> str | None:
    """Why the fused kernel does not take these queries, in a few words; None when it does."""
    if q.is_cuda and q.dtype != torch.bfloat16:
        return f"queries are {q.dtype}, the kernel takes bfloat16"
    if q.shape[2] not in FUSED_HEAD_DIMS:
        return f"head dim {q.shape[2]} is not one of {FUSED_HEAD_DIMS}"
    return None


def not_by_hopper(q: Tensor, segments: Sequence[tuple[Side, Side, int, int]]) -> str | None:
    """Why flash_kernel takes packed segments for these queries; None where it does not."""
    return fused_hopper.unsupported(q, (keys for keys, *_ in segments))


def fused(q: Tensor, segments: Sequence[tuple[Side, Side, int, int]], scale: float) -> Tensor:
    """Softmax attention of q [H, Nq, D] over segments of keys and values -> [H, Nq, D].

    segments: (keys, values, start, stop): tokens [start, stop) of both are attended. scale: of
    the scores. One launch a segment and chunk of it, or for several by kernels.flash_hopper.
    ValueError on anything else.
    """
    shown = _runs(q, (piece for segment in segments for piece in _pieces(*segment)))
    if not shown:
        raise ValueError("attention needs at least one token")
    for keys, values, _, stop in segments:
        _check(keys, q, stop), _check(values, q, stop)
    running = Running(q, scale, len(shown) > 1)
    for number, run in enumerate(shown):
        running.launch(run, number == len(shown) - 1)
    return running.out


class Running:
    """Softmax attention over segments that come one after the other.

    Between two of them the running softmax lies in float32 [H, Nq, D] and two [H, Nq], all that is
    needed beyond the output; what a segment was read from is free for others after its launch.
    """

    def __init__(
        self, q: Tensor, scale: float, several: bool = True, out: Tensor | None = None
    ) -> None:
        """q: [H, Nq, D]; several: more than one launch will come; out: contiguous, like q, made
        where none is given. ValueError on anything else."""
        reason = unsupported_queries(q)
        if reason or q.stride(2) != 1:
            raise ValueError(f"no kernel: {reason or 'channels of q must be adjacent'}")
        heads, queries, dim = q.shape
        self._q, self._scale, self._first = q, scale, True
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self.out = out
        if self.out.shape != q.shape or self.out.dtype != q.dtype or not self.out.is_contiguous():
            raise ValueError(f"out must be contiguous {q.dtype} {tuple(q.shape)}")
        self._state = (self.out, self.out, self.out)  # neither read nor written
        if several:
            rows = torch.empty((2, heads, queries), dtype=torch.float32, device=q.device)
            sums = torch.empty((heads, queries, dim), dtype=torch.float32, device=q.device)
            self._state = (sums, rows[0], rows[1])

    def add(self, keys: Side, values: Side, start: int, stop: int, last: bool) -> None:
        """Attend to tokens start .. stop - 1 of a segment; `out` is there after the last."""
        _check(keys, self._q, stop), _check(values, self._q, stop)
        runs = _runs(self._q, _pieces(keys, values, start, stop))
        if last and not runs:
            raise ValueError("the last segment needs at least one token")
        for number, run in enumerate(runs):
            self.launch(run, last and number == len(runs) - 1)

    def launch(self, run: Run, last: bool) -> None:
        kind, pieces = run
        flags = (int(self._first), int(last))
        self._first = False
        if kind is not None:
            fused_hopper.launch_rows(self._q, self.out, self._state, kind, pieces, flags,
                                     float(self._scale) * LOG2_E)  # fmt: skip
            return
        keys, values, start, stop, chunk = pieces[0]
        _launch(self._q, None, self.out, self._state, keys, values, (start, stop), chunk, flags,
                self._scale)  # fmt: skip


def _pieces(keys: Side, values: Side, start: int, stop: int) -> Iterator[Piece]:
    """The segment cut at its chunks' ends, with the number of each chunk; nothing empty."""
    stops = keys.chunk_stops or values.chunk_stops or (stop,)
    if values.chunk_stops and values.chunk_stops != stops:
        raise ValueError("keys and values of a segment must have the same chunks")
    for chunk, (first, last) in enumerate(pairwise((0, *stops))):
        if max(first, start) < min(last, stop):
            yield keys, values, max(first, start), min(last, stop), chunk


def _runs(q: Tensor, pieces: Iterable[Piece]) -> list[Run]:
    """The same pieces, in order, by the launches that take them."""
    if fused_hopper.unsupported(q):
        return [(None, [piece]) for piece in pieces]
    runs: list[Run] = []
    for kind, group in groupby(pieces, fused_hopper.kind_of):
        alike = list(group)
        runs += [(None, [piece]) for piece in alike] if kind is None else [(kind, alike)]
    return runs


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
    _launch(q_codes, q_scales, out, (out, out, out), keys, Side("plain", values=v), bounds, 0,
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
    codes, centroids = side.codes.view(torch.int32), side.centroids
    if centroids.data_ptr() % 16:
        centroids = centroids.clone()  # the kernel loads them 16 bytes at a time
    packed = (codes, side.ids, centroids, scales, side.secondary, side.zeros)
    return None, 0, 0, *packed


def _tokens(side: Side) -> int:
    held = side.ids if side.values is None else side.values
    return 0 if held is None else held.shape[1]


def _launch(
    q: Tensor, q_scales: Tensor | None, out: Tensor, state: tuple[Tensor | None, ...],
    keys: Side, values: Side, bounds: tuple[int, int], chunk: int, flags: tuple[int, int],
    scale: float,
) -> None:  # fmt: skip
    heads, queries, dim = q.shape
    k_kind = INT8 if q_scales is not None else KINDS[keys.kind]
    v_kind = KINDS[values.kind]
    rank = 0 if keys.basis is None else keys.basis.shape[2]
    if k_kind == INT8:
        table = tuning.FLASH_INT8
    else:
        small = tuning.shared_bytes(q.device) < 132 * 1024
        packed = tuning.FLASH_PACKED_SMALL if small else tuning.FLASH_PACKED
        table = tuning.FLASH if k_kind == v_kind == PLAIN else packed
    row, chunks = table[dim], len(keys.chunk_stops or values.chunk_stops)
    counts = [1 if s.centroids is None else s.centroids.shape[1] for s in (keys, values)]
    groups = [dim if s.kind == "plain" else dim // s.scales.shape[2] for s in (keys, values)]
    args = (
        q, q.stride(0), q.stride(1), q_scales, out, *state,
        *_addresses(keys), keys.coefficients, keys.row_scales, keys.basis,
        *_addresses(values), *counts,
        queries, *bounds, _tokens(keys), keys.first_corrected if rank else 0, chunk, chunks,
        *flags, float(scale) * LOG2_E,
    )  # fmt: skip
    constants = {
        "D": dim, "K_KIND": k_kind, "V_KIND": v_kind, "K_GROUP": groups[0], "V_GROUP": groups[1],
        "RANK": rank, "BLOCK_M": row.block_k, "BLOCK_N": row.block_n,
        "DOT_DTYPE": tuning.dot_mode(out)[1],
        "PACKED_MATH": PACKED_MATH and tuning.dot_mode(out)[0] == torch.bfloat16,
        "num_warps": row.num_warps, "num_stages": row.num_stages, "enable_fp_fusion": True,
    }  # fmt: skip
    if row.registers:
        constants["maxnreg"] = row.registers
    launch(flash_kernel, (triton.cdiv(queries, row.block_k), heads), args, constants)

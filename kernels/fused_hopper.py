"""Launches kernels.flash_hopper over the segments that follow each other and are of one kind.

They are rows of a table of addresses and bounds, so that the softmax' state stays in registers from
one to the next and the processors that end early wait once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from kernels import tuning
from kernels.format import Side
from kernels.launch import launch

_enabled = True
HEAD_DIM = 128
KINDS = {"ternary": 1, "affine": 2}

Piece = tuple[Side, Side, int, int, int]
"""Keys and values of a segment, the tokens of one chunk of it, and that chunk's number."""
Kind = tuple[int, int, int, int, int]
"""Kinds and groups of keys and of values, and the rank of the keys' correction."""


@lru_cache(maxsize=8)
def kernel_on(device: torch.device) -> Any:
    """The kernel, or why this device does not run it."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if major != 9:
        return f"compute capability {major}.{minor} is not 9.x"
    try:
        from kernels.flash_hopper import flash_hopper_kernel
    except ImportError as failure:
        return f"Triton {triton.__version__} lacks what kernels.flash_hopper needs ({failure})"
    return flash_hopper_kernel


def unsupported(q: Tensor, keys: Iterable[Side] = ()) -> str | None:
    """Why flash_kernel takes packed segments for these queries, or some of these keys; None when
    flash_hopper_kernel does."""
    if q.shape[2] != HEAD_DIM or q.dtype != torch.bfloat16:
        return f"head dim {q.shape[2]}, {q.dtype}; kernels.flash_hopper takes 128, torch.bfloat16"
    if not _enabled:
        return "kernels.flash_hopper is switched off"
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured, and would read the table when it is gone"
    kernel = kernel_on(q.device)
    if isinstance(kernel, str):
        return kernel
    return next((f"some keys' {reason}" for side in keys if (reason := _unread(side))), None)


def _unread(keys: Side) -> str | None:
    """Four coefficients are a word there, and as many words as can be are loaded at once."""
    if keys.basis is None or keys.coefficients is None:
        return None
    rank = keys.basis.shape[2]
    if rank % 4:
        return f"rank {rank} is no multiple of 4"
    return "coefficients lie at no multiple of 16" if keys.coefficients.data_ptr() % 16 else None


@contextmanager
def switched_off() -> Iterator[None]:
    """All is flash_kernel's: for what compares the two."""
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before


def kind_of(piece: Piece) -> Kind | None:
    """What must be the same for one launch; None for a piece that is flash_kernel's."""
    keys, values, _, stop, _ = piece
    if keys.scales is None or values.scales is None or "plain" in (keys.kind, values.kind):
        return None
    rank = 0
    if keys.basis is not None and keys.coefficients is not None and keys.first_corrected < stop:
        if _unread(keys):
            return None
        rank = keys.basis.shape[2]
    groups = [HEAD_DIM // side.scales.shape[2] for side in (keys, values)]
    return KINDS[keys.kind], KINDS[values.kind], *groups, rank


def launch_rows(
    q: Tensor, out: Tensor, state: tuple[Tensor, ...], kind: Kind, pieces: Sequence[Piece],
    flags: tuple[int, int], scale: float,
) -> None:  # fmt: skip
    """flags: whether these are the first and the last pieces. scale: with log2(e) in it."""
    heads, queries, _ = q.shape
    aligned = [tuple(_aligned(side) for side in piece[:2]) for piece in pieces]  # live till then
    rows = [_row(*sides, *piece[2:]) for sides, piece in zip(aligned, pieces, strict=True)]
    # Pinned: a copy from pageable memory would wait for all that is queued.
    table = torch.tensor(rows, dtype=torch.int64, pin_memory=q.is_cuda)
    table = table.to(q.device, non_blocking=True)
    names = ("K_KIND", "V_KIND", "K_GROUP", "V_GROUP", "RANK")
    constants = {**dict(zip(names, kind, strict=True)), **tuning.FLASH_HOPPER}
    args = (
        q, q.stride(0), q.stride(1), out, *state, table, len(rows), queries, *flags, scale,
    )  # fmt: skip
    launch(kernel_on(q.device), (triton.cdiv(queries, 192), heads), args, constants)


def _aligned(side: Side) -> Side:
    """Centroids are loaded 16 bytes at a time."""
    if side.centroids is not None and side.centroids.data_ptr() % 16:
        return side._replace(centroids=side.centroids.clone())
    return side


def _row(keys: Side, values: Side, start: int, stop: int, chunk: int) -> tuple[int, ...]:
    """As kernels.flash_hopper_tiles names its places."""
    chunks = len(keys.chunk_stops or values.chunk_stops)
    corrections = map(_address, (keys.coefficients, keys.row_scales, keys.basis))
    tokens = 0 if keys.ids is None else keys.ids.shape[1]
    return (
        start, stop, tokens, keys.first_corrected, chunk, chunks, *corrections,
        *_numbers(keys), *_numbers(values),
    )  # fmt: skip


def _numbers(side: Side) -> tuple[int, ...]:
    given = (side.codes, side.ids, side.centroids, side.scales, side.secondary, side.zeros)
    count = 0 if side.centroids is None else side.centroids.shape[1]
    return (*map(_address, given), count)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()

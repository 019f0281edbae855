"""Joining and cutting the same part of many slots' spans with a few operations.

A layer's part is small, and joining it alone is bound by the launch: 20 us of CPU for 2 us of
copying, a few hundred times a chunk. So all slots' parts go into one storage, each a contiguous
view of it. Slots of a segment live and die together, so no byte is held longer for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNED_BYTES = 16
"""What kernels are compiled for; a view that begins elsewhere would be another kernel. Not so for
parts that the kernels take `anywhere`."""

LARGE_BYTES = 32 << 20
"""Beyond this much of one part, copying counts and the temporary that batching takes is memory."""


def join_rows(
    firsts: Sequence[Tensor], seconds: Sequence[Tensor], anywhere: bool = False
) -> list[Tensor]:
    """cat((first, second), dim=1) of every pair. [H, N1, ...] and [H, N2, ...], alike in all."""
    length = firsts[0].shape[1] + seconds[0].shape[1]
    if not _batched(firsts, length, anywhere) or not _alike(seconds):
        return [torch.cat(pair, dim=1) for pair in zip(firsts, seconds, strict=True)]
    whole = torch.cat((torch.cat(list(firsts)), torch.cat(list(seconds))), dim=1)
    return list(whole.split(firsts[0].shape[0]))


def cut_rows(
    tensors: Sequence[Tensor], start: int, stop: int, anywhere: bool = False
) -> list[Tensor]:
    """tensor[:, start:stop] of every one, in storage of their own. [H, N, ...], alike in all."""
    cut = [tensor[:, start:stop] for tensor in tensors]
    if not _batched(cut, stop - start, anywhere):
        return [tensor.clone(memory_format=torch.contiguous_format) for tensor in cut]
    return list(torch.cat(cut).split(tensors[0].shape[0]))


def part_rows(tensor: Tensor, count: int, anywhere: bool = False) -> list[Tensor]:
    """[slots * H, ...] as [H, ...] of `count` slots: views, or their own where a view would begin
    at no place for a kernel."""
    parts = list(tensor.chunk(count))
    if anywhere or parts[0].nbytes % ALIGNED_BYTES == 0:
        return parts
    return [part.clone() for part in parts]


def _alike(tensors: Sequence[Tensor]) -> bool:
    return len({tensor.shape for tensor in tensors}) == 1


def _batched(tensors: Sequence[Tensor], length: int, anywhere: bool) -> bool:
    """Whether parts of this length are made together."""
    if len(tensors) < 2 or not _alike(tensors):
        return False
    one = tensors[0]
    size = one.element_size() * math.prod((one.shape[0], *one.shape[2:])) * length
    return (anywhere or size % ALIGNED_BYTES == 0) and size * len(tensors) <= LARGE_BYTES


def pick_rows(tensor: Tensor, kept: Tensor) -> Tensor:
    """[H, N, ...] -> the rows at these positions (a CPU tensor), in storage of their own."""
    return tensor.index_select(1, kept.to(tensor.device, non_blocking=True))


def pick_runs(lengths: Sequence[int], kept: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Which of consecutive runs of tokens still hold any of the kept positions, and how many.

    lengths: of the runs. kept: ascending int64 positions on the CPU.
    """
    stops = torch.tensor(lengths, dtype=torch.long).cumsum(0)
    counts = torch.searchsorted(kept, stops).diff(prepend=torch.zeros(1, dtype=torch.long))
    runs = counts.nonzero().flatten()
    return runs, tuple(counts[runs].tolist())

"""Leading eigenvectors of many symmetric matrices at once, without waiting for the device.

Block subspace iteration: Y = M M Q, orthonormalised, some times over; then the small eigenproblem
Q^T M Q is solved by Jacobi rotations and Q turned by its solution (Rayleigh-Ritz). On a GPU one
kernel does it for all layers and heads (`kernels/subspace.py`). Elsewhere every step is a product
or an elementwise operation of fixed shape over all of them together, some 1,500 launches. A
library's eigensolver reads back whether it converged: 61 ms for 10 layers x 3 heads of 128 on one
H200.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantwm.cache.dispatch import kernels_in, note_fallback

OVERSAMPLED = 8
"""Directions iterated beside the wanted ones. Their error shrinks by lambda_(block + 1) /
lambda_rank a product: 0.60 with 8 more on the recorded queries, 0.93 with none."""

COLD_STEPS, WARM_STEPS = 8, 4
"""Two products each. On the recorded query moments (layers 0, 5 and 9, rank 4 and 8, after each of
20 chunks) the energy that the best basis has and this one misses is at most 3e-6 of it cold; warm
3e-4 from the basis of the chunk before, 6e-4 from that of 16 chunks before."""

SWEEPS = 3
"""Of Jacobi rotations. With 2 the cold start above misses 7e-5, with 4 no less than with 3."""

TINY = 1e-30

EXPLAINED = 1e-6
"""Of a unit column, when the others are taken out: rounding leaves 1e-7."""

RESTART = 1e-3
"""Weight of fixed directions in a warm start, so that a head that had no queries finds some."""


BLOCKS = (16, 32)
"""Directions that are iterated together, for what the kernel keeps in registers; beyond, as many
as are wanted and `OVERSAMPLED` more."""


def leading(moments: Tensor, rank: int, start: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The `rank` leading eigenvectors and eigenvalues. moments: float32 [..., D, D], symmetric.

    start: [..., D, any] near them, as the last answer is; None begins from fixed directions.
    Returns float32 [..., D, rank], orthonormal, and [..., rank], largest first, not negative. A
    matrix that is zero gives zero columns.
    """
    shape, size = moments.shape[:-2], moments.shape[-1]
    moments = moments.reshape(-1, size, size)
    block = min(size, directions_for(rank))
    fixed = _fixed_directions(size, block, moments.device)
    if start is not None:
        start = start.reshape(-1, size, start.shape[-1])[..., :block]
    steps = COLD_STEPS if start is None else WARM_STEPS
    kernel = kernels_in("subspace", moments.device)
    covered = kernel is not None and kernel.covers(size, block)
    if kernel is not None and not covered:
        note_fallback(f"no kernel finds PSAC's bases of rank {rank} at head dim {size}")
    if kernel is None or not covered:
        vectors, values = _iterated(moments, rank, start, fixed, steps)
    else:
        limits = (RESTART, TINY, EXPLAINED)
        known = None if start is None else start.contiguous()
        given = (moments.contiguous(), rank, known, fixed, steps, SWEEPS)
        vectors, values = kernel.leading(*given, *limits)
    return vectors.reshape(*shape, size, rank), values.reshape(*shape, rank)


def directions_for(rank: int) -> int:
    """How many are iterated for so many wanted ones."""
    wanted = rank + OVERSAMPLED
    return next((block for block in BLOCKS if block >= wanted), wanted)


def _iterated(
    moments: Tensor, rank: int, start: Tensor | None, fixed: Tensor, steps: int
) -> tuple[Tensor, Tensor]:
    """What the kernel computes, in PyTorch. moments: [P, D, D]; start: [P, D, any] or None."""
    trace = moments.diagonal(dim1=1, dim2=2).sum(-1)[:, None, None]
    # Products of the matrix over its trace, so that no power of it leaves float32.
    over = torch.where(trace > 0, 1 / trace.clamp(min=TINY), 0.0)
    q = fixed.expand(len(moments), -1, -1)
    if start is not None:
        known = start.to(moments.dtype) + RESTART * q[..., : start.shape[-1]]
        q = torch.cat((known, q[..., start.shape[-1] :]), -1)
    for _ in range(steps):
        q = torch.bmm(moments, torch.bmm(moments, q) * over) * over
        q = orthonormal(torch.nn.functional.normalize(q, dim=1, eps=TINY))
    q = orthonormal(q)  # twice: what one pass leaves between nearly parallel columns
    turn, values = small_eigh(torch.bmm(q.transpose(1, 2), torch.bmm(moments, q) * over))
    vectors = torch.bmm(q, turn[..., :rank])
    return vectors, (values[..., :rank] * trace[..., 0]).clamp(min=0)


def _fixed_directions(size: int, count: int, device: torch.device) -> Tensor:
    """[D, count] without structure, computed where they are wanted."""
    steps = torch.arange(1, size * count + 1, device=device, dtype=torch.float32)
    return torch.sin(steps.square()).view(size, count) * size**-0.5


def orthonormal(y: Tensor) -> Tensor:
    """Columns of each matrix made orthonormal, in order (modified Gram-Schmidt). y: [B, D, b].

    A column that the ones before it explain wholly, to the rounding of its entries, becomes small
    or zero instead.
    """
    columns = []
    for _ in range(y.shape[-1]):
        column = torch.nn.functional.normalize(y[..., :1], dim=1, eps=EXPLAINED)
        columns.append(column)
        y = y[..., 1:]
        if y.shape[-1]:
            y = torch.baddbmm(y, column, torch.bmm(column.transpose(1, 2), y), alpha=-1)
    return torch.cat(columns, dim=-1)


def small_eigh(matrices: Tensor, sweeps: int = SWEEPS) -> tuple[Tensor, Tensor]:
    """Eigenvectors [B, b, b] (columns) and eigenvalues [B, b], largest first, by Jacobi rotations.

    matrices: symmetric [B, b, b]. Disjoint pairs of rows (2i, 2i + 1) are rotated together; between
    two rounds all but the first row move on by one place of a ring (a round-robin), so that b - 1
    rounds meet every pair.
    """
    count, size = matrices.shape[:2]
    even = size + size % 2
    a = torch.nn.functional.pad(matrices, (0, even - size, 0, even - size))
    vectors = torch.eye(even, device=a.device).expand(count, -1, -1)
    order = _ring(even, a.device)
    for _ in range(sweeps * (even - 1)):
        turn = _rotations(a)
        a = _rotated(_rotated(a, turn).transpose(1, 2), turn)
        a = a.index_select(1, order).index_select(2, order)
        vectors = _rotated(vectors, turn).index_select(1, order)
    values, places = a.diagonal(dim1=1, dim2=2).sort(dim=-1, descending=True, stable=True)
    vectors = vectors.gather(1, places.unsqueeze(-1).expand(-1, -1, even))
    return vectors.transpose(1, 2)[:, :size, :size], values[:, :size]


def _ring(size: int, device: torch.device) -> Tensor:
    """Where each row of a pair list comes from, one place further round the ring."""
    ring = [*range(2, size, 2), *range(size - 1, 0, -2)]  # upper seats rightwards, lower back
    moved = {seat: ring[place - 1] for place, seat in enumerate(ring)}
    order = torch.tensor([0, *(moved[seat] for seat in range(1, size))])
    return order.to(device, non_blocking=True)


def _rotations(a: Tensor) -> Tensor:
    """[B, b/2, 2, 2] that make entries (2i, 2i + 1) zero, each by the smaller of the two angles."""
    diagonal = a.diagonal(dim1=1, dim2=2)
    gap = diagonal[:, 1::2] - diagonal[:, 0::2] + TINY  # so that equal ones turn by 45 degrees
    beside = a.diagonal(offset=1, dim1=1, dim2=2)[:, 0::2]
    angle = torch.atan2(beside * gap * 2, gap.square()) * 0.5
    cosine, sine = angle.cos(), angle.sin()
    return torch.stack((cosine, -sine, sine, cosine), dim=-1).unflatten(-1, (2, 2))


def _rotated(a: Tensor, turn: Tensor) -> Tensor:
    """Pairs of rows turned. a: [B, b, any]; turn: [B, b/2, 2, 2]."""
    return torch.matmul(turn, a.unflatten(1, (-1, 2))).flatten(1, 2)

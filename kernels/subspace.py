"""Leading eigenvectors of many symmetric matrices in one launch: orthogonal iteration in registers.

One program a matrix (a head of a layer): it streams the matrix from the L2 cache for every product
and keeps the block of directions to itself. Floor, 12 heads x 30 layers of 128 x 128 on an H200:
24 MB read once, 6 us. Steps that wait for each other are what it takes: 9 products from a warm
start, 17 from a cold one, 16 columns made orthonormal after every second, 45 rounds of rotations.
`python -m benchmarks codebooks` times it with the host's part; by itself it has not been measured.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import checks, tuning
from kernels.launch import launch


@triton.jit
def _product(moment_ptr, q, D: tl.constexpr, B: tl.constexpr, BLOCK_K: tl.constexpr):
    """M q, float32 [D, B], in float32 throughout: the smaller directions are differences."""
    offs_d, offs_k = tl.arange(0, D), tl.arange(0, BLOCK_K)
    parts = tl.reshape(q, (D // BLOCK_K, BLOCK_K, B))
    numbers = tl.arange(0, D // BLOCK_K)[:, None, None]
    y = tl.zeros((D, B), tl.float32)
    for part in range(0, D // BLOCK_K):
        rows = tl.sum(tl.where(numbers == part, parts, 0.0), axis=0)
        place = offs_d[:, None] * D + (part * BLOCK_K + offs_k)[None, :]
        y = tl.dot(tl.load(moment_ptr + place), rows, y, input_precision="ieee")
    return y


@triton.jit
def _orthonormal(y, B: tl.constexpr, TINY: tl.constexpr, EXPLAINED: tl.constexpr):
    """Columns made orthonormal in their order, modified Gram-Schmidt; explained ones become small.

    y: float32 [D, B].
    """
    columns = tl.arange(0, B)[None, :]
    y = y / tl.maximum(tl.sqrt(tl.sum(y * y, axis=0)), TINY)[None, :]
    for j in range(0, B):
        column = tl.sum(tl.where(columns == j, y, 0.0), axis=1)
        column = column / tl.maximum(tl.sqrt(tl.sum(column * column, axis=0)), EXPLAINED)
        along = tl.sum(y * column[:, None], axis=0)[None, :]
        y = tl.where(columns > j, y - column[:, None] * along, y)
        y = tl.where(columns == j, column[:, None], y)
    return y


@triton.jit
def _gram(q, y, B: tl.constexpr):
    """q^T y, float32 [B, B], a column at a time."""
    columns = tl.arange(0, B)[None, :]
    out = tl.zeros((B, B), tl.float32)
    for j in range(0, B):
        column = tl.sum(tl.where(columns == j, y, 0.0), axis=1)
        out = tl.where(columns == j, tl.sum(q * column[:, None], axis=0)[:, None], out)
    return out


@triton.jit
def _mixed(q, turn, B: tl.constexpr):
    """q turn, float32 [D, B], a column of q at a time."""
    columns, rows = tl.arange(0, B)[None, :], tl.arange(0, B)[:, None]
    out = tl.zeros_like(q)
    for j in range(0, B):
        column = tl.sum(tl.where(columns == j, q, 0.0), axis=1)
        row = tl.sum(tl.where(rows == j, turn, 0.0), axis=0)
        out += column[:, None] * row[None, :]
    return out


@triton.jit
def _diagonalised(a, B: tl.constexpr, SWEEPS: tl.constexpr):
    """Eigenvectors [B, B] (columns) and eigenvalues [B] of a symmetric [B, B], unordered.

    Jacobi rotations of B / 2 disjoint pairs a round; in round t of B - 1 those of i + j = t modulo
    B - 1, and the one that would meet itself meets the last. Both of a pair compute its angle.
    """
    rows, columns = tl.arange(0, B)[:, None], tl.arange(0, B)[None, :]
    vectors = tl.where(rows == columns, 1.0, 0.0)
    for step in range(0, SWEEPS * (B - 1)):
        turn = step % (B - 1)
        other = (turn - rows + 2 * (B - 1)) % (B - 1)
        other = tl.where(other == rows, B - 1, other)
        other = tl.where(rows == B - 1, (turn * (B // 2)) % (B - 1), other)
        met = columns == other
        across = tl.sum(tl.where(rows == columns, a, 0.0), axis=0)[None, :]
        # Of both, as products round a[i, j] and a[j, i] each its own way: of two nearly equal
        # values only noise is beside, and two angles of it would turn the pair apart.
        pairs = tl.where(met, a, 0.0)
        beside = 0.5 * (tl.sum(pairs, axis=1) + tl.sum(pairs, axis=0))[:, None]
        theirs = tl.sum(tl.where(met, across, 0.0), axis=1)[:, None]
        own = tl.sum(tl.where(rows == columns, a, 0.0), axis=1)[:, None]
        # The smaller root of t^2 + 2 t gap / (2 beside) - 1 = 0, without dividing by `beside`.
        gap = theirs - own
        side = tl.where((gap > 0) | ((gap == 0) & (rows < other)), 1.0, -1.0)
        divisor = tl.abs(gap) + tl.sqrt(gap * gap + 4.0 * beside * beside)
        tangent = side * 2.0 * beside / tl.where(divisor > 0, divisor, 1.0)
        cosine = 1.0 / tl.sqrt(1.0 + tangent * tangent)
        sine = tangent * cosine
        turned = tl.where(rows == columns, cosine, tl.where(met, sine, 0.0))
        back = tl.where(rows == columns, cosine, tl.where(met, -sine, 0.0))
        a = tl.dot(a, turned, input_precision="ieee")
        a = tl.dot(back, a, input_precision="ieee")
        vectors = tl.dot(vectors, turned, input_precision="ieee")
    return vectors, tl.sum(tl.where(rows == columns, a, 0.0), axis=1)


@triton.jit(do_not_specialize=["steps"])
def leading_kernel(
    moments_ptr, start_ptr, directions_ptr, vectors_ptr, values_ptr,
    steps,  # runtime: two products and an orthonormalisation each
    D: tl.constexpr, B: tl.constexpr, RANK: tl.constexpr, KNOWN: tl.constexpr,
    BLOCK_K: tl.constexpr, SWEEPS: tl.constexpr, RESTART: tl.constexpr, TINY: tl.constexpr,
    EXPLAINED: tl.constexpr,
):  # fmt: skip
    """See `leading`. Grid (matrices, 1). KNOWN: columns of the warm start, 0 for a cold one.

    Products are of the matrix over its trace, so that no power of it leaves float32.
    """
    problem = tl.program_id(0).to(tl.int64)
    moment_ptr = moments_ptr + problem * D * D
    offs_d, columns = tl.arange(0, D), tl.arange(0, B)
    trace = tl.sum(tl.load(moment_ptr + offs_d * (D + 1)), axis=0)
    over = tl.where(trace > 0, 1.0 / tl.where(trace > 0, trace, 1.0), 0.0)
    q = tl.load(directions_ptr + offs_d[:, None] * B + columns[None, :])
    if KNOWN > 0:
        known = (columns < KNOWN)[None, :]
        place = (problem * D + offs_d)[:, None] * KNOWN + columns[None, :]
        start = tl.load(start_ptr + place, mask=known, other=0.0).to(tl.float32)
        q = tl.where(known, start + RESTART * q, q)
    for _ in range(0, steps):
        q = _product(moment_ptr, q, D, B, BLOCK_K) * over
        q = _product(moment_ptr, q, D, B, BLOCK_K) * over
        q = _orthonormal(q, B, TINY, EXPLAINED)
    q = _orthonormal(q, B, TINY, EXPLAINED)  # what one pass leaves between parallel columns
    seen = _product(moment_ptr, q, D, B, BLOCK_K) * over
    turn, values = _diagonalised(_gram(q, seen, B), B, SWEEPS)
    # By size, equal ones in their order: as a matrix of ones and zeros, which is exact.
    ahead = tl.reshape(values, (1, B)) > tl.reshape(values, (B, 1))
    equal = tl.reshape(values, (1, B)) == tl.reshape(values, (B, 1))
    ahead = ahead | (equal & (columns[None, :] < columns[:, None]))
    order = (tl.sum(ahead.to(tl.int32), axis=1)[:, None] == columns[None, :]).to(tl.float32)
    turn = tl.dot(turn, order, input_precision="ieee")
    vectors = _mixed(q, turn, B)
    values = tl.sum(order * values[:, None], axis=0)
    wanted = columns < RANK
    place = (problem * D + offs_d)[:, None] * RANK + columns[None, :]
    tl.store(vectors_ptr + place, vectors, mask=wanted[None, :])
    tl.store(values_ptr + problem * RANK + columns, tl.maximum(values * trace, 0.0), mask=wanted)


def covers(head_dim: int, directions: int) -> bool:
    """Whether there is a kernel for matrices of this size and this many directions."""
    return (head_dim, directions) in tuning.SUBSPACE


def leading(
    moments: Tensor, rank: int, start: Tensor | None, directions: Tensor, steps: int, sweeps: int,
    restart: float, tiny: float, explained: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The `rank` leading eigenvectors and eigenvalues of every matrix, largest first.

    moments: float32 [P, D, D], symmetric, contiguous; start: [P, D, any] near the vectors, float32
    or bfloat16, or None; directions: float32 [D, B], what is iterated from beside them, B as in
    `tuning.SUBSPACE`. steps, sweeps, restart, tiny, explained: as in
    `quantwm/cache/subspace.py`, which is the reference. Returns float32 [P, D, rank] and [P, rank].
    ValueError on anything else.
    """
    problems, dim, _ = moments.shape
    block = directions.shape[1]
    checks.geometry(dim, rank=rank)
    checks.packed("moments", moments, torch.float32, (problems, dim, dim))
    checks.packed("directions", directions, torch.float32, (dim, block))
    known = 0
    if start is not None:
        known = start.shape[2]
        checks.packed("start", start, (torch.float32, torch.bfloat16), (problems, dim, known))
    if not covers(dim, block) or not 1 <= max(rank, known) <= block:
        raise ValueError(f"no kernel: {block} directions for rank {rank} and {known} known ones")
    checks.together(moments, directions, start)
    vectors = torch.empty((problems, dim, rank), dtype=torch.float32, device=moments.device)
    values = torch.empty((problems, rank), dtype=torch.float32, device=moments.device)
    row = tuning.SUBSPACE[dim, block]
    args = (moments, start, directions, vectors, values, steps)
    constants = {
        "D": dim, "B": block, "RANK": rank, "KNOWN": known, "BLOCK_K": row.block_k,
        "SWEEPS": sweeps, "RESTART": restart, "TINY": tiny, "EXPLAINED": explained,
        **row.options,
    }  # fmt: skip
    launch(leading_kernel, (problems, 1), args, constants)
    return vectors, values

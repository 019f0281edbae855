"""The kernel of leading eigenvectors against a float64 eigensolver and against PyTorch's code."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from benchmarks.agreement import require
from quantwm.cache import subspace
from quantwm.cache.statistics import moment

LOST = 2e-3
"""Of the best directions' energy, cold, where eigenvalues fall as made here; the PyTorch code's
bound on recorded queries too."""
BESIDE_PYTORCH = 1e-4


def made_moments(
    problems: int,
    head_dim: int,
    device: torch.device | str,
    seed: int = 0,
    mixed: Tensor | None = None,
) -> Tensor:
    """Sums over queries whose directions differ by a factor of 30 in length; the last one is zero.

    float32 [problems, D, D]. mixed: of an earlier call, into which these are added.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    shape = (problems, 2 * head_dim, head_dim)
    queries = torch.randn(shape, generator=generator, device=device)
    queries *= torch.logspace(0.5, -1, head_dim, device=device)
    turn = torch.randn((problems, head_dim, head_dim), generator=generator, device=device)
    queries = torch.bmm(queries, turn * head_dim**-0.5)
    queries[-1] = 0
    moments = moment(queries)
    return moments if mixed is None else moments + mixed


def agree_subspace(
    kernel: ModuleType,
    problems: int,
    head_dim: int,
    rank: int,
    device: torch.device | str,
    runs: int = 2,
) -> None:
    """Disagreement unless a cold and a warm start find what they should, alike in every run."""
    first = made_moments(problems, head_dim, device)
    start = None
    for moments in (first, made_moments(problems, head_dim, device, 1, first * 4)):
        fixed = subspace._fixed_directions(head_dim, subspace.directions_for(rank), moments.device)
        steps = subspace.COLD_STEPS if start is None else subspace.WARM_STEPS
        limits = (subspace.SWEEPS, subspace.RESTART, subspace.TINY, subspace.EXPLAINED)
        given = (moments, rank, start, fixed, steps)
        vectors, values = kernel.leading(*given, *limits)
        for _ in range(runs - 1):
            again = kernel.leading(*given, *limits)
            same = torch.equal(vectors, again[0]) and torch.equal(values, again[1])
            require(same, "leading: two runs differ")
        require(not vectors[-1].any() and not values[-1].any(), "leading: a zero matrix has some")
        _check(moments, vectors, values)
        _beside(moments, vectors, subspace._iterated(*given)[0])
        start = vectors.to(torch.bfloat16)


def _energy(moments: Tensor, vectors: Tensor) -> Tensor:
    moments, vectors = moments[:-1].double(), vectors[:-1].double()
    return (vectors * torch.bmm(moments, vectors)).sum((1, 2))


def _check(moments: Tensor, vectors: Tensor, values: Tensor) -> None:
    rank = vectors.shape[2]
    require(bool((values[:, 1:] <= values[:, :-1]).all()), "leading: values are out of order")
    squares = torch.bmm(vectors.transpose(1, 2), vectors)[:-1]
    apart = float((squares - torch.eye(rank, device=squares.device)).abs().max())
    require(apart < 1e-4, f"leading: vectors are {apart:.1e} from orthonormal")
    best = torch.linalg.eigvalsh(moments[:-1].double())[:, -rank:].sum(-1)
    lost = float((1 - _energy(moments, vectors) / best).max())
    require(lost < LOST, f"leading: {lost:.1e} of the best energy is lost")
    claimed = float((values[:-1].sum(-1) / _energy(moments, vectors) - 1).abs().max())
    require(claimed < 1e-4, f"leading: values are {claimed:.1e} from the vectors' energy")


def _beside(moments: Tensor, vectors: Tensor, wanted: Tensor) -> None:
    behind = float((1 - _energy(moments, vectors) / _energy(moments, wanted)).max())
    require(behind < BESIDE_PYTORCH, f"leading: {behind:.1e} behind PyTorch's directions")

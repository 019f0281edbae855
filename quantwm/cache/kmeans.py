"""Batched k-means per head, reference: assignment (nearest and QSAC), centroid update, fitting."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

MAX_CENTROIDS = 256
"""A centroid id is one byte."""


def _gather(centroids: Tensor, ids: Tensor) -> Tensor:
    """Rows of centroids [H, K, D] by ids [H, N] -> float32 [H, N, D]."""
    heads, count, channels = centroids.shape
    first = torch.arange(heads, device=ids.device).unsqueeze(-1) * count
    rows = (ids.long() + first).flatten()
    return centroids.float().reshape(-1, channels).index_select(0, rows).view(heads, -1, channels)


def _distances(x: Tensor, centroids: Tensor) -> Tensor:
    """Half the squared distance without the |x|^2 term, which no argmin sees. [H, N, K]."""
    half_norms = centroids.square().sum(-1).mul_(0.5).unsqueeze(1)
    return torch.baddbmm(half_norms, x, centroids.transpose(1, 2), alpha=-1)


def assign(x: Tensor, centroids: Tensor) -> Tensor:
    """Nearest centroid, ties to the smaller index. x: [H, N, D] -> uint8 [H, N]."""
    return _distances(x.float(), centroids.float()).argmin(-1).to(torch.uint8)


def _query_distances(x: Tensor, centroids: Tensor, weights: Tensor) -> Tensor:
    """Half of (x - mu)^T M (x - mu) without the term that no argmin sees. [H, N, K].

    One product either way: M is a diagonal that both sides take the root of, or a whole matrix
    that one side takes.
    """
    if weights.dim() == 2:
        root = weights.sqrt().unsqueeze(1)
        return _distances(x * root, centroids * root)
    half_norms = (torch.bmm(centroids, weights) * centroids).sum(-1).mul_(0.5).unsqueeze(1)
    seen = torch.bmm(x, weights)
    return torch.baddbmm(half_norms, seen, centroids.transpose(1, 2), alpha=-1)


def assign_qsac(
    x: Tensor, centroids: Tensor, weights: Tensor, group_size: int, candidates: int
) -> Tensor:
    """Query-sensitivity-aware assignment (QuantWM Eq. 6-14).

    weights: float32 [H, D], mean 1; or [H, D, D], the whole moment with a trace of D (Table 10),
    whose diagonal then weighs the ranges. The residual's range is looked at for the `candidates`
    nearest centroids only.
    """
    x, centroids = x.float(), centroids.float()
    distances = _query_distances(x, centroids, weights)
    diagonal = weights if weights.dim() == 2 else weights.diagonal(dim1=-2, dim2=-1)
    group_weights = diagonal.unflatten(-1, (-1, group_size)).sum(-1).unsqueeze(1)
    best = best_score = None
    for _ in range(min(candidates, centroids.shape[1])):
        ids = distances.argmin(-1)
        residual = (x - _gather(centroids, ids)).unflatten(-1, (-1, group_size))
        low, high = torch.aminmax(residual, dim=-1)
        score = ((high - low).square_() * group_weights).sum(-1)
        if best is None or best_score is None:
            best, best_score = ids, score
        else:
            better = score < best_score
            best = torch.where(better, ids, best)
            best_score = torch.where(better, score, best_score)
        distances.scatter_(-1, ids.unsqueeze(-1), torch.inf)
    return best.to(torch.uint8)


def update(x: Tensor, ids: Tensor, centroids: Tensor) -> Tensor:
    """Mean of each cluster's tokens; an empty cluster keeps its centroid. float32 [H, K, D]."""
    x, centroids = x.float(), centroids.float()
    one_hot = torch.zeros(*ids.shape, centroids.shape[1], device=x.device)
    one_hot.scatter_(-1, ids.long().unsqueeze(-1), 1.0)
    counts = one_hot.sum(1).unsqueeze(-1)
    sums = torch.bmm(one_hot.transpose(1, 2), x)
    return torch.where(counts > 0, sums / counts.clamp(min=1), centroids)


def fit(
    x: Tensor,
    k: int,
    iterations: int,
    generator: Generator,
    init: Tensor | None = None,
    *,
    assign: Callable[[Tensor, Tensor], Tensor] = assign,
    update: Callable[[Tensor, Tensor, Tensor], Tensor] = update,
) -> Tensor:
    """Lloyd's algorithm with a fixed number of iterations (a convergence test syncs the device).

    x: [H, N, D]. init: [H, k, D] warm start; without it, k tokens drawn without replacement (the
    same positions in every head), each drawn again in turn where N < k. The generator is a CPU one
    whatever the device of x, so that a seed means the same tokens everywhere; no draw is made with
    a warm start. Returns float32 [H, k, D].
    """
    if init is None:
        drawn = torch.randperm(x.shape[1], generator=generator)[:k]
        positions = drawn.repeat(-(-k // len(drawn)))[:k]
        # Not blocking: else the copy would wait for all that is queued.
        init = x.index_select(1, positions.to(x.device, non_blocking=True))
    # As they come: of BF16 ones a kernel needs half the products, exactly.
    centroids = init
    for _ in range(iterations):
        centroids = update(x, assign(x, centroids), centroids)
    return centroids.float()

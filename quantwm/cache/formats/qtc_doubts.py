"""What `explain` is told of a layer's statistics when a basis comes of them, or stays in use.

Asked by the worker beside the stream, where reading a number of the device stalls nobody.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantwm.cache.formats import qtc_basis
from quantwm.cache.formats.qtc_statistics import Moments, SlotStatistics

ROLES = ("keys", "values")


def doubts(statistics: Sequence[SlotStatistics], shrinkage: Sequence[float]) -> list[str]:
    """A sentence for each way in which what was seen is not taken as it came; mostly none.

    shrinkage: of the covariance of keys and of values.
    """
    found: list[str] = []
    for role, name in enumerate(ROLES):
        moments = [(slot.keys, slot.values)[role] for slot in statistics]
        moments = [known for known in moments if known.count]
        if not moments:
            continue
        counts = torch.cat([known.outliers for known in moments]).sum()
        flags = torch.stack([_flags(known, shrinkage[role]) for known in moments]).any(0)
        outliers, still, indefinite = bool(counts > 0), *flags.tolist()
        if outliers:
            found.append(f"qtc learns less from {name} that lie far from all others or overflow")
        if still:
            found.append(f"qtc floors the variance of channels of {name} that never change")
        if indefinite:
            found.append(f"qtc floors variances below zero: statistics of {name} are indefinite")
    return found


def _flags(known: Moments, shrinkage: float) -> Tensor:
    """Whether some channel never changes, and whether some head's covariance is indefinite."""
    mean, scatter = known.mean, known.scatter.matrix()
    variance = scatter.diagonal(dim1=-2, dim2=-1)
    still = variance <= qtc_basis.floors(variance.double().mean(-1), mean).unsqueeze(-1)
    cov = qtc_basis.covariance(scatter, mean, shrinkage)
    failed = torch.linalg.cholesky_ex(cov).info > 0
    return torch.stack((still.any(), failed.any()))

"""Codes without a basis: Hadamard, Lloyd levels, one gain; for chunks before any statistics.

The rotation leaves no outlier channel, so the feedback of LDLQ (each channel's error is made up
for by the channels after it, in the metric of past queries) has room on a grid of few levels; one
sweep of coordinate descent then changes single codes where that lowers the cost.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from quantwm.cache.formats.qtc_levels import quantize, table

DAMPING = 0.1
"""Of the mean diagonal, added for the feedback only: full feedback overshoots four levels."""


@lru_cache(maxsize=8)
def rotation(head_dim: int, device: torch.device) -> Tensor:
    """Orthogonal and symmetric in its Hadamard part, float32 [D, D]: Hadamard x cosine transform.

    The Hadamard matrix of the largest power of two in D, the orthonormal cosine transform of the
    odd rest (1 at powers of two).
    """
    power = head_dim & -head_dim
    matrix = torch.ones(1, 1, dtype=torch.float64)
    step = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / 2**0.5
    while matrix.shape[0] < power:
        matrix = torch.kron(matrix, step)
    return torch.kron(matrix, _cosines(head_dim // power)).float().to(device)


def _cosines(size: int) -> Tensor:
    places = (torch.arange(size, dtype=torch.float64) + 0.5) * torch.pi / size
    matrix = torch.cos(torch.outer(torch.arange(size, dtype=torch.float64), places))
    matrix[0] /= 2**0.5
    return matrix * (2.0 / size) ** 0.5


def level(code: Tensor, bits: int) -> Tensor:
    """The level of a code of so many bits, float32."""
    return table(code.device)[2**bits + code.long()]


def feedback_codes(z: Tensor, metric: Tensor, bits: int) -> Tensor:
    """Codes whose error costs little in a metric: LDLQ, then one sweep of coordinate descent.

    z: float32 [H, N, D] in units of each token's gain; metric: float32 [H, D, D], positive
    definite, in the rotated domain. Returns uint8 [H, N, D].
    """
    codes, error = _ldlq(z, metric, bits)
    return _descend(z, metric, codes, error, bits)


def _ldlq(z: Tensor, metric: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """H = U D U^T with U unit upper triangular: channel k aims at z_k - sum_i<k e_i U_ik."""
    eye = torch.eye(metric.shape[-1], device=metric.device)
    mean = metric.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    # Not `cholesky`, whose check makes the host wait for the device: damping makes it definite.
    upper = torch.linalg.cholesky_ex((metric + DAMPING * mean * eye).flip(-1, -2)).L.flip(-1, -2)
    upper = upper / upper.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
    codes = torch.empty(z.shape, dtype=torch.uint8, device=z.device)
    error = torch.zeros_like(z)
    for k in range(z.shape[2]):
        aim = z[:, :, k] - (error[:, :, :k] @ upper[:, :k, k : k + 1]).squeeze(-1)
        codes[:, :, k] = quantize(aim, bits)
        error[:, :, k] = level(codes[:, :, k], bits) - z[:, :, k]
    return codes, error


def _descend(z: Tensor, metric: Tensor, codes: Tensor, error: Tensor, bits: int) -> Tensor:
    """One sweep: each channel takes the level that costs least with all others as they are."""
    slope = error @ metric
    diagonal = metric.diagonal(dim1=-2, dim2=-1)
    for k in range(z.shape[2]):
        own = error[:, :, k]
        wanted = quantize(z[:, :, k] + own - slope[:, :, k] / diagonal[:, None, k], bits)
        change = level(wanted, bits) - z[:, :, k] - own
        slope += change.unsqueeze(-1) * metric[:, None, k]
        error[:, :, k] = own + change
        codes[:, :, k] = wanted
    return codes

"""The basis of a span: where errors are plain, what each channel gets, and the rows to read it by.

With M the metric of errors and S the covariance of what is coded, M = L L^T and
L^T S L = V diag(l) V^T: analysis T = L V, synthesis T^-1 = V^T L^-1. In y = (x - mean) T the cost
of an error is its plain square and the channels are uncorrelated with variances l. (Any root of M
does; the Cholesky factor saves the eigendecomposition that M^(1/2) would take.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantwm.cache.formats.qtc_levels import DISTORTIONS
from quantwm.cache.formats.qtc_planes import BLOCK, Widths
from quantwm.cache.formats.qtc_worker import eigh

MIN_VARIANCE = 2.0**-20
"""Floor of a channel's mean variance, in squared units of x: below it gains would run out."""
ROUNDING = 2.0**-16
"""Floor of the same, as a part of the mean square of x: BF16 carries noise of 2**-9 of a number."""


@dataclass(frozen=True)
class Basis:
    """What a span is read by, per head.

    Attributes:
        rows: int8 [H, u, D], synthesis rows times their channel's deviation, widest channels first.
        row_scales: bfloat16 [H, u].
        mean: bfloat16 [H, D], of the tokens that taught the basis.
        widths: uint8 [H, u / 16], bits of each block.
        host_widths: the same on the host.
    """

    rows: Tensor
    row_scales: Tensor
    mean: Tensor
    widths: Tensor
    host_widths: tuple[Widths, ...]

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.rows, self.row_scales, self.mean, self.widths)

    def heads(self, which: slice) -> Basis:
        """Of some heads."""
        return Basis(*(t[which] for t in self.tensors()), self.host_widths[which])

    def matrix(self) -> Tensor:
        """Synthesis as it is read, float32 [H, u, D]."""
        return self.rows.float() * self.row_scales.float().unsqueeze(-1)


def basis_bytes(rows: int, head_dim: int) -> int:
    """What `Basis.tensors` hold for one head."""
    return rows * (head_dim + 2) + 2 * head_dim + rows // BLOCK


def covariance(scatter: Tensor, mean: Tensor, shrinkage: float) -> Tensor:
    """Positive definite covariance, float64 [..., D, D].

    scatter: mean of (x - m)(x - m)^T about the means of the tokens' chunks; mean: float [..., D].
    Shrunk towards its own mean variance, which is floored.
    """
    cov = scatter.double()
    cov = (cov + cov.transpose(-1, -2)) / 2
    eye = torch.eye(cov.shape[-1], dtype=torch.float64, device=cov.device)
    variance = cov.diagonal(dim1=-2, dim2=-1).mean(-1)
    level = torch.maximum(variance, floors(variance, mean))[..., None, None]
    return (1.0 - shrinkage) * cov + shrinkage * level * eye


def floors(variance: Tensor, mean: Tensor) -> Tensor:
    """Least variance that a channel may have, float64 [...]: what rounding to BF16 makes of it.

    variance: mean over channels, float64 [...]; mean: float [..., D].
    """
    power = variance + mean.double().square().mean(-1)
    return torch.clamp(ROUNDING * power, min=MIN_VARIANCE)


def fit_basis(
    cov: Tensor, metric: Tensor | None, mean: Tensor, budget: int, rows: int, max_width: int
) -> tuple[Basis, Tensor]:
    """Basis, widths and rows of many heads at once; and the cost of a token's error that it
    promises each, float64 [H].

    cov, metric: float64 [H, D, D], positive definite (metric None: the identity); mean [H, D];
    budget: bits a token; rows: channels that may be coded, a multiple of 16. Raises LinAlgError
    when there is none.
    """
    variances, synthesis = eigen_rows(cov, metric)
    if not (torch.isfinite(variances).all() and torch.isfinite(synthesis).all()):
        raise torch.linalg.LinAlgError("the statistics are not finite")
    blocks = variances[:, :rows].unflatten(1, (-1, BLOCK)).mean(-1)
    widths = allocate(blocks, budget // BLOCK, max_width)
    scaled = synthesis[:, :rows] * variances[:, :rows].sqrt().unsqueeze(-1)
    row_scales = (scaled.abs().amax(-1) / 127.0).to(torch.bfloat16)
    divisor = row_scales.double().clamp(min=torch.finfo(torch.bfloat16).tiny).unsqueeze(-1)
    coded = torch.round(scaled / divisor).clamp(-127, 127).to(torch.int8)
    basis = Basis(
        rows=coded.contiguous(),
        row_scales=row_scales,
        mean=mean.to(torch.bfloat16),
        widths=widths,
        host_widths=tuple(map(tuple, widths.tolist())),
    )
    return basis, _promised(variances, widths)


def eigen_rows(cov: Tensor, metric: Tensor | None) -> tuple[Tensor, Tensor]:
    """Variances [H, D], largest first, and synthesis rows [H, D, D] = T^-1, float64."""
    if metric is None:
        values, vectors = eigh(cov)
        return _descending(values), vectors.flip(-1).transpose(-1, -2)
    root = torch.linalg.cholesky(metric)
    values, vectors = eigh(root.transpose(-1, -2) @ cov @ root)
    rows = torch.linalg.solve_triangular(root, vectors.transpose(-1, -2), upper=False, left=False)
    return _descending(values), rows.flip(-2)


def _descending(values: Tensor) -> Tensor:
    """Largest first; rounding may leave the smallest below zero, so they are floored."""
    values = values.flip(-1)
    return torch.maximum(values, values[..., :1] * 1e-12)


def allocate(variances: Tensor, words: int, max_width: int) -> Tensor:
    """Widths of blocks with these mean variances, `words` block bits in all: greedy.

    variances: float [H, blocks], falling. Each bit goes where it takes most off the sum of
    variance * distortion(width). What a block's next bit takes falls with its width, so the bits
    are the largest of all; on a tie the earlier block's, so widths do not increase. uint8
    [H, blocks].
    """
    distortions = variances.new_tensor(DISTORTIONS[: max_width + 1])
    taken = variances.unsqueeze(1) * (distortions[:-1] - distortions[1:])[:, None]
    order = taken.flatten(1).sort(dim=1, descending=True, stable=True).indices[:, :words]
    chosen = torch.zeros_like(taken.flatten(1), dtype=torch.uint8).scatter_(1, order, 1)
    return chosen.view(taken.shape).sum(1, dtype=torch.uint8)


def _promised(variances: Tensor, widths: Tensor) -> Tensor:
    """Mean cost of a token's error [H]: coded channels by their width, the others whole."""
    left = variances.new_tensor(DISTORTIONS)[widths.long()].repeat_interleave(BLOCK, dim=1)
    coded = left.shape[1]
    return (variances[:, :coded] * left).sum(1) + variances[:, coded:].sum(1)


def channel_costs(basis: Basis, metric: Tensor | None) -> Tensor:
    """Cost of a unit error in each channel, float32 [H, u]."""
    rows = basis.matrix()
    weighted = rows if metric is None else torch.bmm(rows, metric.float())
    return (weighted * rows).sum(-1)


def analysis(basis: Basis, metric: Tensor | None) -> Tensor:
    """Projection on the rows as they are stored, float32 [H, D, u].

    The least-squares coordinates in this metric, M R^T (R M R^T)^-1, so the rounding of the rows
    costs nothing that their span can make up for.
    """
    if basis.rows.is_cuda:
        return _iterated(basis.matrix(), metric)
    rows = basis.matrix().double()
    across = rows.transpose(-1, -2)
    weighted = across if metric is None else metric.double() @ across
    gram = rows @ weighted
    scale = gram.diagonal(dim1=-2, dim2=-1).clamp(min=1e-60).rsqrt()
    normal = gram * scale.unsqueeze(-1) * scale.unsqueeze(-2)
    eye = torch.eye(gram.shape[-1], dtype=torch.float64, device=gram.device)
    factor, failed = torch.linalg.cholesky_ex(normal + 1e-9 * eye)
    target = (weighted * scale.unsqueeze(-2)).transpose(-1, -2)
    if failed.any():  # a metric from a file may be indefinite
        solved = torch.linalg.pinv(normal, hermitian=True) @ target
    else:
        solved = torch.cholesky_solve(target, factor)
    return (solved * scale.unsqueeze(-1)).transpose(-1, -2).float().contiguous()


NEWTON_STEPS = (11, 6)
"""With a metric that the basis was not made for, and with its own: 11 steps invert a condition
number of 100 to float32's last bits, and damp directions beyond it."""


def _iterated(rows: Tensor, metric: Tensor | None) -> Tensor:
    """The same on a GPU, by products alone: batched factorizations take ten times as long there.

    Newton's iteration X (2 I - G X) for the inverse of the Gram matrix G of unit diagonal, from
    I over a bound of its largest eigenvalue, from where it always converges.
    """
    weighted = rows.transpose(1, 2) if metric is None else metric.float() @ rows.transpose(1, 2)
    gram = rows @ weighted
    scale = gram.diagonal(dim1=1, dim2=2).clamp(min=1e-30).rsqrt()
    normal = gram * scale.unsqueeze(-1) * scale.unsqueeze(-2)
    eye = torch.eye(gram.shape[-1], device=gram.device)
    inverse = eye / normal.abs().sum(-1).amax(-1)[:, None, None]
    for _ in range(NEWTON_STEPS[metric is None]):
        inverse = torch.baddbmm(inverse, inverse, normal @ inverse, beta=2.0, alpha=-1.0)
    return torch.bmm(weighted * scale.unsqueeze(-2), inverse) * scale.unsqueeze(-2)

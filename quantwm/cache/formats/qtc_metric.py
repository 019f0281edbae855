"""What an error of an un-rotated key costs: the query moment over all relative positions.

A key at place p with un-rotated error e is read by queries at p + delta: its logit error is
(R_delta q0) . e with q0 the query un-rotated by its own place. So the metric is
M = E_delta[R_delta M0 R_delta^T], M0 = E[q0 q0^T]. In complex pairs z_j = x_2j + i x_2j+1 a turn
multiplies z_j by exp(i delta w_j), so E[z_j conj(z_k)] is multiplied by the characteristic
function of the offsets at w_j - w_k, and E[z_j z_k] by the one at w_j + w_k.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from quantwm.cache.positions import axes, frequencies
from quantwm.cache.spec import RopeLayout

RIDGE = 0.05
"""Of the mean diagonal, added to the metric: directions that no past query had can still come."""


def mean_over_offsets(moment: Tensor, layout: RopeLayout, horizon: int) -> Tensor:
    """E_delta[R_delta M0 R_delta^T]. moment: float64 or float32 [..., D, D], of un-rotated queries.

    Offsets: time uniform on 0 .. horizon - 1 frames (a query reads keys of the past), row and
    column the difference of two independent uniform places of the grid.
    """
    turned = sum(layout.split)
    complex_type = moment.dtype.to_complex()
    difference, total = _factors(layout, horizon, moment.device, complex_type)
    out = moment.clone()
    pairs = moment[..., :turned, :turned].unflatten(-1, (-1, 2)).unflatten(-3, (-1, 2))
    # [..., j, part of j, k, part of k]; parts 0 real, 1 imaginary.
    rr, ri = pairs[..., :, 0, :, 0], pairs[..., :, 0, :, 1]
    ir, ii = pairs[..., :, 1, :, 0], pairs[..., :, 1, :, 1]
    hermitian = torch.complex(rr + ii, ir - ri) * difference  # E z_j conj(z_k)
    symmetric = torch.complex(rr - ii, ir + ri) * total  # E z_j z_k
    block = torch.stack(
        (
            torch.stack((hermitian.real + symmetric.real, symmetric.imag - hermitian.imag), -1),
            torch.stack((symmetric.imag + hermitian.imag, hermitian.real - symmetric.real), -1),
        ),
        dim=-3,
    )  # [..., j, part of j, k, part of k]
    out[..., :turned, :turned] = block.flatten(-4, -3).flatten(-2, -1) / 2
    if turned < moment.shape[-1]:
        _turn_cross_terms(out, moment, layout, horizon, turned)
    return out


def _turn_cross_terms(
    out: Tensor, moment: Tensor, layout: RopeLayout, horizon: int, turned: int
) -> None:
    """Products of a turned pair and a channel that RoPE leaves alone: E[exp(i delta w_j)]."""
    single = _single(layout, horizon, moment.device).to(moment.dtype.to_complex())
    cross = moment[..., :turned, turned:].unflatten(-2, (-1, 2))
    z = torch.complex(cross[..., 0, :], cross[..., 1, :]) * single[:, None]
    cross = torch.stack((z.real, z.imag), dim=-2).flatten(-3, -2)
    out[..., :turned, turned:] = cross
    out[..., turned:, :turned] = cross.transpose(-1, -2)


def metric(
    moment: Tensor, layout: RopeLayout | None, horizon: int, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Positive definite metric of key errors, dtype [..., D, D], mean diagonal 1 + RIDGE.

    moment: sum or mean of q0 q0^T, float [..., D, D]; a head that saw no query gets the identity.
    horizon: latent frames of `mean_over_offsets`; 0 leaves the moment as it is.
    """
    moment = moment.to(dtype)
    if layout is not None and sum(layout.split) and horizon:
        moment = mean_over_offsets(moment, layout, horizon)
    moment = (moment + moment.transpose(-1, -2)) / 2
    eye = torch.eye(moment.shape[-1], dtype=dtype, device=moment.device)
    mean = moment.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    known = (mean > 0) & torch.isfinite(mean)
    return torch.where(known, moment / torch.where(known, mean, 1.0), eye) + RIDGE * eye


@lru_cache(maxsize=8)
def _factors(
    layout: RopeLayout, horizon: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Characteristic function at w_j - w_k and w_j + w_k, complex [pairs, pairs]."""
    speed, axis = frequencies(layout), axes(layout)
    factors = []
    for sign in (-1.0, 1.0):
        product = torch.ones(len(speed), len(speed), dtype=torch.complex128)
        for number in range(3):
            own = torch.where(axis == number, speed, 0.0)
            product *= _axis(layout, horizon, number, own[:, None] + sign * own[None, :])
        factors.append(product)
    return factors[0].to(device, dtype), factors[1].to(device, dtype)


@lru_cache(maxsize=8)
def _single(layout: RopeLayout, horizon: int, device: torch.device) -> Tensor:
    """Characteristic function at w_j, complex128 [pairs]."""
    speed, axis = frequencies(layout), axes(layout)
    product = torch.ones(len(speed), dtype=torch.complex128)
    for number in range(3):
        product *= _axis(layout, horizon, number, torch.where(axis == number, speed, 0.0))
    return product.to(device)


def _axis(layout: RopeLayout, horizon: int, axis: int, speed: Tensor) -> Tensor:
    """E exp(i delta w) along one axis."""
    if axis == 0:
        return _uniform(horizon, speed)
    return _uniform(layout.grid[axis - 1], speed).abs().square().to(torch.complex128)


def _uniform(count: int, speed: Tensor) -> Tensor:
    """Mean of exp(i n w) over n = 0 .. count - 1."""
    steps = torch.arange(count, dtype=torch.float64)
    angles = speed[..., None] * steps
    return torch.polar(torch.ones_like(angles), angles).mean(-1)

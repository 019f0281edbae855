"""One byte of gain a token, and what a chunk's mean costs: the scalars of a qtc span."""

from __future__ import annotations

import torch
from torch import Tensor

STEPS = 4
"""Gain steps per factor of two: 1/4 in log2 is .04 dB from no rounding (steps of 1/2: .15 dB)."""
ZERO = 128
"""Code of gain 1; code 0 is gain 0, for a token that is its chunk's mean."""


def gain_codes(deviation: Tensor) -> Tensor:
    """Nearest gain code of a root mean square. float32, any shape -> int32 1..255, 0 for 0."""
    codes = torch.round(torch.log2(deviation.clamp(min=1e-38)) * STEPS) + ZERO
    return torch.where(deviation > 0, codes.clamp(1, 255), 0.0).to(torch.int32)


def gains(codes: Tensor) -> Tensor:
    """float32 gains of codes of any integer type; code 0 is 0."""
    exponent = (codes.float() - ZERO) / STEPS
    return torch.where(codes > 0, torch.exp2(exponent), torch.zeros_like(exponent))


def inverses(codes: Tensor) -> Tensor:
    """Reciprocals of the gains of codes, float32: gains of 256 - code; 1 for the gain of 0."""
    return gains(torch.where(codes > 0, 2 * ZERO - codes, ZERO))


def mean_codes(mean: Tensor, about: Tensor) -> tuple[Tensor, Tensor]:
    """A chunk's mean as INT8 steps from the span's. mean, about: float32 [H, D].

    Returns int8 [H, 1, D] and bfloat16 [H, 1].
    """
    apart = (mean - about).unsqueeze(1)
    scale = (apart.abs().amax(-1) / 127.0).to(torch.bfloat16)
    divisor = scale.float().clamp(min=torch.finfo(torch.bfloat16).tiny)
    codes = torch.round(apart / divisor.unsqueeze(-1)).clamp(-127, 127).to(torch.int8)
    return codes, scale


def decoded_means(codes: Tensor, scales: Tensor, about: Tensor) -> Tensor:
    """float32 [H, C, D]. codes: int8 [H, C, D]; scales: bfloat16 [H, C]; about: [H, D]."""
    return about.float().unsqueeze(1) + codes.float() * scales.float().unsqueeze(-1)

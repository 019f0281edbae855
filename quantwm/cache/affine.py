"""Group quantizers, reference: 4-level affine (QuantWM), ternary (QVG), affine with a real zero.

The first two work on float32 residuals [H, N, D] in groups of `group_size` channels of one token,
the third (RTN, KIVI) along any dimension. All quantize against the scale as it is stored, so that
rounding the scale does not add to the error. Rounding is floor(x + 0.5), because Triton's
interpreter has no rint and both must agree; QVG's ternary code rounds halves away from zero, as its
public code does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantwm.cache.pack import LEVELS

E4M3_MAX = 448.0
FLOAT16_MAX = 65504.0
SCALE_CODES = 255


def round_half_up(x: Tensor) -> Tensor:
    return torch.floor(x + 0.5)


def _safe_divide(x: Tensor, scale: Tensor) -> Tensor:
    return torch.where(scale > 0, x / scale, 0.0)


def quantize_affine(
    residual: Tensor, group_size: int, clip: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """4-level affine quantizer with a 2-bit integer zero (QuantWM Eq. 1-4).

    The range of a group is extended to hold 0, because a zero in 0..3 cannot express any other,
    then shrunk by `clip`. The scale code is rounded up: with the stored scale s at least the exact
    one, zero = round(-min / s) leaves every value within s / 2 of a level. (Rounding to nearest
    may leave it outside by up to 1.5 steps of the scale code.)

    Returns codes uint8 [H, N, D] in 0..3, scale codes uint8 [H, N, D/G], secondary float16 [H]
    (the largest scale of the head), zeros uint8 [H, N, D/G] in 0..3.
    """
    groups = residual.unflatten(-1, (-1, group_size))
    low, high = torch.aminmax(groups, dim=-1)
    low, high = low.clamp(max=0) * clip, high.clamp(min=0) * clip
    exact = (high - low) / (LEVELS - 1)
    secondary = exact.amax(dim=(1, 2)).clamp(max=FLOAT16_MAX).to(torch.float16)
    largest = secondary.float()[:, None, None]
    scale_codes = torch.ceil(_safe_divide(exact * SCALE_CODES, largest)).clamp(0, SCALE_CODES)
    scale_codes = scale_codes.to(torch.uint8)
    scale = affine_scales(scale_codes, secondary[:, None])
    zeros = round_half_up(_safe_divide(-low, scale)).clamp(0, LEVELS - 1)
    codes = round_half_up(_safe_divide(groups, scale.unsqueeze(-1))) + zeros.unsqueeze(-1)
    codes = codes.clamp(0, LEVELS - 1).to(torch.uint8)
    return codes.flatten(-2), scale_codes, secondary, zeros.to(torch.uint8)


def affine_scales(scale_codes: Tensor, secondary: Tensor) -> Tensor:
    """scale = code * (secondary / 255), float32 [H, N, D/G]. secondary: [H, N] or [H, 1]."""
    return scale_codes.float() * (secondary.float() / SCALE_CODES).unsqueeze(-1)


def quantize_ternary(residual: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """QVG's symmetric quantizer: the residual in BF16, scale = E4M3(max of its magnitude).

    Returns codes uint8 [H, N, D] in 0..2 (the value -1..1 plus 1), scales float8_e4m3fn
    [H, N, D/G]. A scale below E4M3's smallest number is 0 and its group decodes to 0.
    """
    groups = residual.to(torch.bfloat16).float().unflatten(-1, (-1, group_size))
    largest = groups.abs().amax(dim=-1).clamp(max=E4M3_MAX)
    scales = largest.to(torch.float8_e4m3fn)
    ratio = _safe_divide(groups, scales.float().unsqueeze(-1))
    codes = 1 + (ratio >= 0.5).to(torch.uint8) - (ratio <= -0.5).to(torch.uint8)
    return codes.flatten(-2), scales


def quantize_real_zero(x: Tensor, dim: int, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Affine quantizer whose zero is the group's least value (KIVI, arXiv 2402.02750, Eq. 1).

    x: float32, one group along `dim`; x = zero + code * scale. The zero is a real number in FP16,
    never clamped to the codes, so that groups of one sign lose nothing; what is outside FP16
    saturates. Returns codes uint8 like x, scales and zeros float16 without `dim`.

    A code is round((x - zero) / scale), halves up, as if divided exactly, up to 16 levels. Let d =
    x - zero as rounded, s the scale, t = (k - 1/2) s, which float32 holds. d >= t gives a rounded
    quotient of at least k - 1/2. d < t is at most t (1 - 2^-24): for k > 1 the quotient rounds to
    the number before k - 1/2 or below, and that plus 1/2 is a number below k; for k = 1 it rounds
    below 1/2, but 1/2 more may round to 1.
    """
    # Plus 0: of two zeros the positive one, whichever a minimum returns.
    low, high = (end + 0.0 for end in torch.aminmax(x.clamp(-FLOAT16_MAX, FLOAT16_MAX), dim=dim))
    zeros = low.to(torch.float16)
    scales = ((high - zeros.float()) / (levels - 1)).clamp(0, FLOAT16_MAX).to(torch.float16)
    zero, scale = (t.float().unsqueeze(dim) for t in (zeros, scales))
    ratio = _safe_divide(x - zero, scale)
    codes = torch.where(ratio < 0.5, 0.0, round_half_up(ratio)).clamp_(max=levels - 1)
    return codes.to(torch.uint8), scales, zeros

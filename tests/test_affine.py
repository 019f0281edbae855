"""Group quantizers: error bounds, exact cases, the stored scale."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quantwm.cache.affine import affine_scales, quantize_affine, quantize_ternary

GROUP = 16


def _dequantize(parts: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    codes, scale_codes, secondary, zeros = parts
    scale = affine_scales(scale_codes, secondary[:, None])
    levels = codes.unflatten(-1, (-1, GROUP)).float() - zeros.unsqueeze(-1)
    return (levels * scale.unsqueeze(-1)).flatten(-2), scale


def _residual(seed: int, tokens: int, shift: float, spread: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(spread * torch.randn(2, tokens, 2, 1, generator=generator))
    x = torch.randn(2, tokens, 2, GROUP, generator=generator) * sizes
    return (x + shift * sizes).flatten(-2)


@given(
    st.integers(0, 2**31),
    st.integers(1, 9),
    st.floats(-6, 6),
    st.floats(0, 2),
)
def test_affine_error_is_at_most_half_a_step(
    seed: int, tokens: int, shift: float, spread: float
) -> None:
    residual = _residual(seed, tokens, shift, spread)
    decoded, scale = _dequantize(quantize_affine(residual, GROUP, 1.0))
    bound = scale.repeat_interleave(GROUP, dim=-1) * (0.5 + 3 * 2**-10) + 1e-6
    assert bool(((decoded - residual).abs() <= bound).all())


@given(st.integers(0, 2**31), st.integers(1, 9), st.floats(0, 2))
def test_affine_scale_covers_the_range_and_no_more_than_a_code(
    seed: int, tokens: int, spread: float
) -> None:
    residual = _residual(seed, tokens, 0.0, spread)
    _, scale = _dequantize(quantize_affine(residual, GROUP, 1.0))
    groups = residual.unflatten(-1, (-1, GROUP))
    exact = (groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)) / 3
    step = exact.amax(dim=(1, 2), keepdim=True) / 255
    assert bool((scale >= exact * (1 - 2**-10)).all())
    assert bool((scale <= exact + step * 1.01).all())


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_affine_range_is_extended_to_zero(sign: float) -> None:
    """A group of one sign must not be clipped by the 2-bit zero."""
    residual = sign * (torch.arange(GROUP).float() / GROUP + 5.0).view(1, 1, GROUP)
    decoded, scale = _dequantize(quantize_affine(residual, GROUP, 1.0))
    assert float(scale) >= residual.abs().max() / 3 * (1 - 2**-10)
    assert bool(((decoded - residual).abs() <= scale * 0.502).all())


@pytest.mark.parametrize("low", [-3, -2, -1, 0])
def test_affine_is_exact_on_four_even_levels(low: int) -> None:
    residual = (torch.arange(GROUP) % 4 + low).float().view(1, 1, GROUP) * 0.5
    decoded, _ = _dequantize(quantize_affine(residual, GROUP, 1.0))
    torch.testing.assert_close(decoded, residual, atol=2e-3, rtol=0)


def test_affine_of_zeros_is_zero() -> None:
    decoded, scale = _dequantize(quantize_affine(torch.zeros(1, 3, GROUP), GROUP, 1.0))
    assert not decoded.any() and not scale.any()


def test_affine_clip_narrows_the_levels() -> None:
    residual = _residual(0, 50, 0.0, 0.0)
    wide, narrow = (quantize_affine(residual, GROUP, clip) for clip in (1.0, 0.65))
    assert _dequantize(narrow)[1].mean() < 0.7 * _dequantize(wide)[1].mean()
    errors = [(_dequantize(p)[0] - residual).square().mean() for p in (wide, narrow)]
    assert errors[1] < errors[0]  # of a Gaussian


def test_affine_permutes_with_heads_and_tokens() -> None:
    residual = _residual(3, 7, 0.0, 1.0)
    order = torch.tensor([4, 2, 6, 0, 1, 5, 3])
    whole = quantize_affine(residual, GROUP, 1.0)
    moved = quantize_affine(residual[[1, 0]][:, order], GROUP, 1.0)
    assert torch.equal(moved[0], whole[0][[1, 0]][:, order])
    assert torch.equal(moved[2], whole[2][[1, 0]])


@given(st.integers(0, 2**31), st.integers(1, 9), st.floats(0, 2))
def test_ternary_error_is_at_most_half_a_step_or_the_saturation(
    seed: int, tokens: int, spread: float
) -> None:
    residual = _residual(seed, tokens, 0.0, spread).to(torch.bfloat16).float()
    codes, scales = quantize_ternary(residual, GROUP)
    assert int(codes.max()) <= 2
    scale = scales.float().unsqueeze(-1)
    groups = residual.unflatten(-1, (-1, GROUP))
    decoded = (codes.unflatten(-1, (-1, GROUP)).float() - 1) * scale
    beyond = (groups.abs() - scale).clamp(min=0)
    assert bool(((decoded - groups).abs() <= scale / 2 + beyond + 1e-6).all())


def test_ternary_guards_a_scale_that_vanishes_or_overflows() -> None:
    tiny, huge = torch.full((1, 1, GROUP), 1e-5), torch.full((1, 1, GROUP), 1e4)
    codes, scales = quantize_ternary(torch.cat((tiny, huge), dim=1), GROUP)
    assert scales.float().flatten().tolist() == [0.0, 448.0]
    assert codes[0, 0].tolist() == [1] * GROUP and codes[0, 1].tolist() == [2] * GROUP

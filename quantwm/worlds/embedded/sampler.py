"""Few-step flow-matching sampler for a model that predicts clean latents."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quantwm.errors import UserError

MAX_STEPS = 64


def noise_levels(steps: int, shift: float) -> list[float]:
    """Falling levels from 1 to above 0, `steps` of them; 0 follows the last.

    u = 1, 1 - 1/steps, ... mapped to shift * u / (1 + (shift - 1) * u): more steps where the
    noise is high and the layout of the picture is decided.
    """
    if not 1 <= steps <= MAX_STEPS:
        raise UserError(f"denoising steps must be 1 to {MAX_STEPS}, got {steps}")
    levels = (1 - i / steps for i in range(steps))
    return [shift * u / (1 + (shift - 1) * u) for u in levels]


def sample(
    predict: Callable[[torch.Tensor, float], torch.Tensor],
    noise: torch.Tensor,
    steps: int,
    shift: float,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Euler steps along x_sigma = (1 - sigma) x0 + sigma * noise, in float32.

    predict: (noisy latents, sigma) -> clean latents. Returns the result and each step's x0.
    """
    levels = noise_levels(steps, shift)
    x = noise.float()
    predictions = []
    for sigma, following in zip(levels, [*levels[1:], 0.0], strict=True):
        x0 = predict(x, sigma).float()
        predictions.append(x0)
        x = x0 + (following / sigma) * (x - x0)
    return x, tuple(predictions)

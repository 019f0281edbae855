"""Noise schedules of the Wan families: timesteps, sigmas, x0 and re-noising as published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quantwm.errors import UserError

TRAIN_STEPS = 1000


def shifted(sigma: torch.Tensor, shift: float) -> torch.Tensor:
    """Flow-matching time shift: shift * s / (1 + (shift - 1) * s)."""
    return shift * sigma / (1 + (shift - 1) * sigma)


@dataclass(frozen=True)
class Step:
    """One denoising step: the timestep given to the model and the sigmas around it.

    Attributes:
        timestep: what the model's time embedding gets.
        sigma: x0 = x - sigma * flow.
        renoise_sigma: x = (1 - s) * x0 + s * noise, for entering this step from the last one.
        table_sigma: the schedule's own entry; LingBot's integer timesteps blur it.
    """

    timestep: float
    sigma: float
    renoise_sigma: float
    table_sigma: float


def flow_match_steps(steps: Sequence[int], shift: float) -> tuple[Step, ...]:
    """Causal-Forcing and Matrix-Game-2: entries of a 1,000-step FP32 table.

    `steps` are in 1..1000 (1000 is pure noise). Sigma is read from the table, not computed from
    the timestep: the two differ in the last FP32 bit.
    """
    table = shifted(torch.linspace(1.0, 0.0, TRAIN_STEPS + 1)[:-1], shift)
    times = table * TRAIN_STEPS
    out = []
    for step in steps:
        if not 1 <= step <= TRAIN_STEPS:
            raise UserError(f"a denoising step lies in 1..{TRAIN_STEPS}, got {step}")
        time = times[TRAIN_STEPS - step]
        sigma = float(table[int((times - time).abs().argmin())])
        out.append(Step(float(time), sigma, sigma, sigma))
    return tuple(out)


def unipc_steps(indices: Sequence[int], shift: float) -> tuple[Step, ...]:
    """LingBot: entries of a 1,000-step table whose timesteps are truncated to integers.

    Truncation lets several entries share one value. x0 takes the sigma of the first entry with
    the value and re-noising that of the second, as published.
    """
    largest = 1.0 - 1.0 / TRAIN_STEPS
    table = torch.linspace(largest, 0.0, TRAIN_STEPS + 1, dtype=torch.float64)[:-1]
    table = shifted(table, shift)
    times = (table * TRAIN_STEPS).to(torch.int64)
    sigmas = table.to(torch.float32)
    out = []
    for index in indices:
        if not 0 <= index < TRAIN_STEPS:
            raise UserError(f"a timestep index lies in 0..{TRAIN_STEPS - 1}, got {index}")
        same = (times == times[index]).nonzero().flatten()
        first, second = int(same[0]), int(same[min(1, len(same) - 1)])
        out.append(
            Step(
                float(times[index]),
                float(sigmas[first]),
                float(sigmas[second]),
                float(sigmas[index]),
            )
        )
    return tuple(out)


def euler_steps(timesteps: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """HY: (timestep, sigma_next - sigma) of each Euler step; the last timestep is the end, 0."""
    sigmas = torch.tensor(timesteps, dtype=torch.float32) / TRAIN_STEPS
    changes = (sigmas[1:] - sigmas[:-1]).tolist()
    return tuple(zip(timesteps[:-1], changes, strict=True))


def to_x0(x: torch.Tensor, flow: torch.Tensor, sigma: float) -> torch.Tensor:
    """x - sigma * flow in float64, rounded to the dtype of flow."""
    return (x.double() - sigma * flow.double()).to(flow.dtype)


def add_noise(x0: torch.Tensor, noise: torch.Tensor, sigma: float) -> torch.Tensor:
    """(1 - sigma) * x0 + sigma * noise in FP32, rounded to the dtype of x0.

    Sigma is an FP32 number, so 1 - sigma in Python rounds to what FP32 subtraction gives.
    """
    return ((1 - sigma) * x0.float() + sigma * noise.float()).to(x0.dtype)

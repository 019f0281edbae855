"""Histories of the model's own making: what a rollout will show it, made for all chunks at once.

Teacher forcing never shows the model its own errors, so in a rollout they grow. Here two forwards
without gradients generate every chunk of a clip from the true past with the product's two steps,
and a training step then sees some of these chunks as its history, with the truth as its target.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quantwm.worlds.embedded.sampler import noise_levels
from quantwm.worlds.embedded.transformer import Attend, Transformer
from training.teacher_forcing import predict_clip

STEPS = 2


@dataclass(frozen=True)
class OwnRollout:
    """entering: the latents that the last step starts from, at noise level `level`; chunks: what
    it makes of them. Both [B, T, C, H, W], float32, without gradients."""

    entering: torch.Tensor
    level: float
    chunks: torch.Tensor


@torch.no_grad()
def own_rollout(
    model: Transformer,
    history: torch.Tensor,
    keys: torch.Tensor,
    pose: torch.Tensor | None,
    tables: tuple[torch.Tensor, torch.Tensor],
    attend: Attend,
    shift: float,
    generator: torch.Generator,
    residual_dtype: torch.dtype,
    finish: bool = True,
) -> OwnRollout:
    """Every chunk generated from `history` [B, T, C, H, W], as the product's sampler would.

    Without `finish` the last step is left out, and the chunks are those that it would start from.
    """
    levels = noise_levels(STEPS, shift)
    x = torch.randn(history.shape, generator=generator, device=history.device)
    entering = x
    for sigma, following in zip(levels, [*levels[1:], 0.0], strict=True):
        entering = x
        if sigma == levels[-1] and not finish:
            break
        level = torch.full(history.shape[:2], sigma, device=history.device)
        out = predict_clip(
            model, history, x, level, keys, tables, attend, residual_dtype, pose
        )  # fmt: skip
        x = out + (following / sigma) * (x - out)
    return OwnRollout(entering, levels[-1], x)


def mixed_history(
    clean: torch.Tensor, own: torch.Tensor, per_chunk: int, share: float, context_chunks: int,
    generator: torch.Generator,
) -> torch.Tensor:  # fmt: skip
    """The truth with some chunks replaced; the first `context_chunks` stay, as in a session.

    Each clip draws how much of it is its own, from nothing to all of it; `share` of the clips are
    mixed at all.
    """
    batch, frames = clean.shape[:2]
    like = {"generator": generator, "device": clean.device}
    amount = torch.rand(batch, 1, **like) * (torch.rand(batch, 1, **like) < share)
    amount = (2 * amount).clamp_max(1.0)  # half of the mixed clips are all of their own making
    replaced = torch.rand(batch, frames // per_chunk, **like) < amount
    replaced[:, :context_chunks] = False
    mask = replaced.repeat_interleave(per_chunk, dim=1)[:, :, None, None, None]
    return torch.where(mask, own, clean)

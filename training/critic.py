"""A small critic of latents, which keeps edges in what few denoising steps draw.

A mean-squared error is least for the mean of all that may come, which is a blur, and a rollout
blurs its own blur on: 64 free frames of the first run kept a fifth of the truth's edges. The
critic sees a chunk after the true frame before it, and says where it is not like a true one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from quantwm.worlds.embedded.config import TransformerConfig


class Critic(nn.Module):
    """Chunk and the frame before it -> a map of scores; spectral norms keep it smooth."""

    def __init__(self, config: TransformerConfig, width: int = 128) -> None:
        super().__init__()
        channels = config.latent_channels * (config.frames_per_chunk + 1)
        self.net = nn.Sequential(
            spectral_norm(nn.Conv2d(channels, width, 3, padding=1)),
            nn.SiLU(),
            spectral_norm(nn.Conv2d(width, width, 3, padding=1)),
            nn.SiLU(),
            spectral_norm(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)),
            nn.SiLU(),
            spectral_norm(nn.Conv2d(2 * width, 2 * width, 3, padding=1)),
            nn.SiLU(),
            spectral_norm(nn.Conv2d(2 * width, 1, 3, padding=1)),
        )

    def forward(self, chunks: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """chunks [N, frames, C, H, W], before [N, C, H, W] -> scores [N, 1, H/2, W/2]."""
        return self.net(torch.cat((chunks.flatten(1, 2), before), dim=1))


def chunks_of(
    clips: torch.Tensor, clean: torch.Tensor, per_chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clips [B, T, C, H, W] -> all chunks but each first one, and the true frame before each."""
    parts = clips.unflatten(1, (-1, per_chunk))[:, 1:].flatten(0, 1)
    before = clean.unflatten(1, (-1, per_chunk))[:, :-1, -1].flatten(0, 1)
    return parts, before


def critic_loss(
    critic: Critic, real: torch.Tensor, fake: torch.Tensor, before: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Hinge loss. real, fake: [N, frames, C, H, W]; counts [N]: 1 where the fake is one, else 0."""
    on_real = F.relu(1 - critic(real, before)).mean()
    on_fake = F.relu(1 + critic(fake, before)).mean(dim=(1, 2, 3))
    return on_real + (on_fake * counts).sum() / counts.sum().clamp_min(1)


def add_critic_gradient(
    critic: Critic, out: torch.Tensor, loss: torch.Tensor, clean: torch.Tensor,
    counts: torch.Tensor, share: float, per_chunk: int,
) -> None:  # fmt: skip
    """Backward through `out` with the loss's gradient plus the critic's, `share` times as long.

    Measuring the two where they meet, at the predicted latents, makes the weight mean the same
    whatever the critic's scale. out [B, T, C, H, W] is part of loss's graph.
    """
    (from_loss,) = torch.autograd.grad(loss, out, retain_graph=True)
    parts, before = chunks_of(out.detach().requires_grad_(True), clean, per_chunk)
    parts = parts.detach().requires_grad_(True)
    scores = critic(parts, before).float().mean(dim=(1, 2, 3))
    (pushed,) = torch.autograd.grad(-(scores * counts).sum(), parts)
    from_critic = torch.zeros_like(out)
    from_critic.unflatten(1, (-1, per_chunk))[:, 1:] = pushed.unflatten(0, (len(out), -1)).float()
    judged = counts.view(len(out), -1, 1, 1, 1, 1)
    there = from_loss.unflatten(1, (-1, per_chunk))[:, 1:] * judged
    scale = share * there.norm() / from_critic.norm().clamp_min(1e-12)
    out.backward(from_loss + scale * from_critic)

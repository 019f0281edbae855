"""A critic of pictures, two frames in a row at a time, and what the edges of many have in common.

The decoder is judged by it where no truth exists: pictures of latents that were made up. It sees
both frames and their difference, so texture must look like texture and move with what it
lies on; a pattern that stays in place or crawls while the camera turns is told from a true pair.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

DIFFERENCE_GAIN = 2.0
"""Two frames in a row differ by a tenth of what they span."""


@dataclass(frozen=True)
class PictureCriticConfig:
    """widths: of a scale's convolutions; the first two halve the picture. scales: 2 is whole and
    half size. A score sees 23 pixels of its scale across."""

    widths: tuple[int, int, int] = (64, 128, 192)
    scales: int = 2


class PictureCritic(nn.Module):
    """Pairs of pictures -> maps of scores at several scales; spectral norms keep them smooth."""

    def __init__(self, config: PictureCriticConfig) -> None:
        super().__init__()
        w1, w2, w3 = config.widths
        self.nets = nn.ModuleList(
            nn.Sequential(
                spectral_norm(nn.Conv2d(9, w1, 4, stride=2, padding=1)),
                nn.LeakyReLU(0.2),
                spectral_norm(nn.Conv2d(w1, w2, 4, stride=2, padding=1)),
                nn.LeakyReLU(0.2),
                spectral_norm(nn.Conv2d(w2, w3, 3, padding=1)),
                nn.LeakyReLU(0.2),
                spectral_norm(nn.Conv2d(w3, 1, 3, padding=1)),
            )
            for _ in range(config.scales)
        )

    def forward(self, pairs: torch.Tensor) -> list[torch.Tensor]:
        """pairs [N, 2, 3, H, W] in [-1, 1] -> per scale, scores [N, 1, H/4, W/4] and halves."""
        before, after = pairs.unbind(dim=1)
        seen = torch.cat((before, after, DIFFERENCE_GAIN * (after - before)), dim=1)
        seen = seen.contiguous(memory_format=torch.channels_last)
        scores = []
        for index, net in enumerate(self.nets):
            scores.append(net(F.avg_pool2d(seen, 2**index) if index else seen))
        return scores


def critic_hinge(
    critic: PictureCritic, real: torch.Tensor, fake: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs [N, 2, 3, H, W] and [M, 2, 3, H, W] -> (hinge loss, share of the fakes' and real pairs'
    scores on the right side), means over scales; at 2 and 0.5 it sees nothing."""
    scores = critic(torch.cat((real, fake)))
    losses, right = [], []
    for score in scores:
        of_real, of_fake = score.float().split((len(real), len(fake)))
        losses.append(F.relu(1 - of_real).mean() + F.relu(1 + of_fake).mean())
        right.append(0.5 * ((of_real > 0).float().mean() + (of_fake < 0).float().mean()))
    return torch.stack(losses).mean(), torch.stack(right).mean().detach()


def edge_strengths(pictures: torch.Tensor, patch: int = 8) -> torch.Tensor:
    """[N, 3, H, W] -> float32 [N, H/patch, W/patch]: root of the mean squared step to the right
    and down neighbour together, whose square is what `quantwm.metrics.sharpness` measures."""
    x = pictures.float()
    across = F.pad(x.diff(dim=3).square(), (0, 1))
    down = F.pad(x.diff(dim=2).square(), (0, 0, 0, 1))
    energy = F.avg_pool2d((across + down).mean(dim=1, keepdim=True), patch)
    return (energy.squeeze(1) + 1e-6).sqrt()


def edge_distance(drawn: torch.Tensor, real: torch.Tensor, patch: int = 8) -> torch.Tensor:
    """How far the strengths of edges of two batches [N, 3, H, W] of pictures are apart, whatever
    lies where: the mean difference of both sorted (their Wasserstein distance). A plain wall may
    stay plain, because among the true patches there are as many plain ones."""
    ours, theirs = (edge_strengths(x, patch).flatten().sort().values for x in (drawn, real))
    return (ours - theirs).abs().mean()


def phase_strengths(pictures: torch.Tensor, period: int = 8) -> torch.Tensor:
    """[N, 3, H, W] -> float32 [2, period]: mean magnitude of the step to the right neighbour by
    column, and of the step down by row, modulo the period; over their mean, so 1 is even.

    A decoder that draws each latent as 8 x 8 pixels can make edges most cheaply at the borders of
    its own squares. True frames have none there: 0.94 to 1.06.
    """
    found = []
    for axis in (3, 2):
        steps = pictures.float().diff(dim=axis).abs().mean(dim=(0, 1, 5 - axis))
        whole = steps[: len(steps) // period * period].unflatten(0, (-1, period)).mean(dim=0)
        found.append(whole / whole.mean().clamp_min(1e-6))
    return torch.stack(found)


def grid_error(pictures: torch.Tensor) -> torch.Tensor:
    """Mean square by which `phase_strengths` of pictures [N, 3, H, W] are off 1."""
    return (phase_strengths(pictures) - 1).square().mean()

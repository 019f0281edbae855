"""The autoencoder: pictures to latents and back, frame by frame, 8x smaller in each direction."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from quantwm.worlds.embedded.config import AutoencoderConfig


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with group norm."""

    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, width)
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.norm2 = nn.GroupNorm(groups, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        return x + self.conv2(F.silu(self.norm2(y)))


class Autoencoder(nn.Module):
    """encode: pictures to normalised latents (mean 0, deviation 1 per channel); decode: back."""

    def __init__(self, config: AutoencoderConfig) -> None:
        super().__init__()
        self.config = config
        groups, latent = config.groups, config.latent_channels
        e1, e2, e3 = config.encoder_widths
        n1, n2, n3 = config.encoder_depths
        self.encoder = nn.Sequential(
            nn.PixelUnshuffle(2),
            nn.Conv2d(12, e1, 3, padding=1),
            *(ResidualBlock(e1, groups) for _ in range(n1)),
            nn.Conv2d(e1, e2, 3, stride=2, padding=1),
            *(ResidualBlock(e2, groups) for _ in range(n2)),
            nn.Conv2d(e2, e3, 3, stride=2, padding=1),
            *(ResidualBlock(e3, groups) for _ in range(n3)),
            nn.GroupNorm(groups, e3),
            nn.SiLU(),
            nn.Conv2d(e3, latent, 1),
        )
        d1, d2, d3 = config.decoder_widths
        m1, m2, m3 = config.decoder_depths
        self.decoder = nn.Sequential(
            nn.Conv2d(latent, d3, 3, padding=1),
            *(ResidualBlock(d3, groups) for _ in range(m3)),
            nn.Upsample(scale_factor=2, mode="nearest"),
            nn.Conv2d(d3, d2, 3, padding=1),
            *(ResidualBlock(d2, groups) for _ in range(m2)),
            nn.Upsample(scale_factor=2, mode="nearest"),
            nn.Conv2d(d2, d1, 3, padding=1),
            *(ResidualBlock(d1, groups) for _ in range(m1)),
            nn.GroupNorm(groups, d1),
            nn.SiLU(),
            nn.Conv2d(d1, 12, 3, padding=1),
            nn.PixelShuffle(2),
        )
        self.register_buffer("latent_mean", torch.zeros(latent))
        self.register_buffer("latent_std", torch.ones(latent))

    def encode(self, pictures: torch.Tensor) -> torch.Tensor:
        """[N, 3, H, W] in [-1, 1] -> normalised latents float32 [N, C, H/8, W/8]."""
        raw = self.encoder(pictures).float()
        return (raw - self._per_channel(self.latent_mean)) / self._per_channel(self.latent_std)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Normalised latents [N, C, H/8, W/8] -> pictures float32 [N, 3, H, W], about [-1, 1]."""
        raw = latents.float() * self._per_channel(self.latent_std)
        raw = raw + self._per_channel(self.latent_mean)
        return self.decoder(raw.to(self.decoder[0].weight.dtype)).float()

    def _per_channel(self, x: torch.Tensor) -> torch.Tensor:
        return x.float().view(1, -1, 1, 1)


def to_signed(frames: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """uint8 [N, H, W, 3] -> [N, 3, H, W] in [-1, 1], channels last in memory."""
    return (frames.permute(0, 3, 1, 2).to(torch.float32) / 127.5 - 1).to(dtype)


def to_bytes(pictures: torch.Tensor) -> torch.Tensor:
    """[N, 3, H, W] in [-1, 1] -> uint8 [N, H, W, 3], clamped and rounded."""
    scaled = (pictures.float().clamp(-1, 1) + 1) * 127.5
    return scaled.round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()

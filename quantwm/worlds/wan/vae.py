"""The Wan 2.1 and 2.2 video autoencoders, decoding frame by frame with kept state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from quantwm.errors import UserError
from quantwm.worlds.wan.vae_layers import (
    CausalConv3d,
    ChannelNorm,
    Downsample,
    MidBlock,
    ResidualBlock,
    State,
    Upsample,
)

MEAN_21 = (-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
           0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921)  # fmt: skip
STD_21 = (2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
          3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.916)  # fmt: skip


@dataclass(frozen=True)
class VaeConfig:
    """One autoencoder.

    Attributes:
        base, decoder_base: widths at full resolution.
        latent_channels: channels of a latent.
        resnets: residual blocks per encoder level; a decoder level has one more.
        multipliers: width of each level over the base.
        time_levels: whether the step below each level also halves time.
        residual: the 2.2 kind, with averaging shortcuts and 2x2 pixel patches.
        mean, std: of the latents, by channel.
    """

    base: int = 96
    decoder_base: int = 96
    latent_channels: int = 16
    resnets: int = 2
    multipliers: tuple[int, ...] = (1, 2, 4, 4)
    time_levels: tuple[bool, ...] = (False, True, True)
    residual: bool = False
    mean: tuple[float, ...] = MEAN_21
    std: tuple[float, ...] = STD_21

    def __post_init__(self) -> None:
        if len(self.mean) != self.latent_channels or len(self.std) != self.latent_channels:
            raise UserError(
                f"a VAE of {self.latent_channels} latent channels needs as many means and "
                f"deviations, got {len(self.mean)} and {len(self.std)}"
            )

    @property
    def patch(self) -> int:
        return 2 if self.residual else 1

    @property
    def stride(self) -> int:
        """Pixels per latent cell."""
        return self.patch * 2 ** len(self.time_levels)


class DownBlock(nn.Module):
    """One encoder level; the residual kind adds its averaged input."""

    def __init__(self, width_in: int, width: int, resnets: int, step: bool | None, residual: bool):
        """step: None at the lowest level, otherwise whether time is halved as well."""
        super().__init__()
        self.width, self.residual = width, residual
        self.factor_t = 2 if step else 1
        self.factor_s = 1 if step is None else 2
        widths = [width_in] + [width] * (resnets - 1)
        self.resnets = nn.ModuleList([ResidualBlock(w, width) for w in widths])
        self.downsampler = None if step is None else Downsample(width, step)

    def forward(self, x: torch.Tensor, state: State) -> torch.Tensor:
        started = self in state
        state[self] = x.new_empty(0)  # a view would hold all of x
        out = x
        for resnet in self.resnets:
            out = resnet(out, state)
        if self.downsampler is not None:
            out = self.downsampler(out, state)
        return out + self._averaged(x, started) if self.residual else out

    def _averaged(self, x: torch.Tensor, started: bool) -> torch.Tensor:
        if not started and self.factor_t > 1 and x.shape[2] > 1:
            return torch.cat([self._mean(x[:, :, :1]), self._mean(x[:, :, 1:])], dim=2)
        return self._mean(x)

    def _mean(self, x: torch.Tensor) -> torch.Tensor:
        """Cells folded into channels, then averaged in groups; a lone frame is paired with 0."""
        t, s = self.factor_t, self.factor_s
        x = F.pad(x, (0, 0, 0, 0, -x.shape[2] % t, 0))
        _, width, frames, rows, columns = x.shape
        cells = x.view(1, width, frames // t, t, rows // s, s, columns // s, s)
        cells = cells.permute(0, 1, 3, 5, 7, 2, 4, 6).flatten(1, 4)
        return cells.unflatten(1, (self.width, -1)).mean(dim=2)


class UpBlock(nn.Module):
    """One decoder level; the residual kind adds its repeated input."""

    def __init__(self, width_in: int, width: int, resnets: int, step: bool | None, residual: bool):
        """step: None at the top level, otherwise whether time is doubled as well."""
        super().__init__()
        self.width, self.shortcut = width, residual and step is not None
        self.factor_t = 2 if step else 1
        widths = [width_in] + [width] * resnets
        self.resnets = nn.ModuleList([ResidualBlock(w, width) for w in widths])
        width_out = width if residual else width // 2
        self.upsampler = None if step is None else Upsample(width, width_out, step)

    def forward(self, x: torch.Tensor, state: State) -> torch.Tensor:
        started = self in state
        state[self] = x.new_empty(0)  # a view would hold all of x
        out = x
        for resnet in self.resnets:
            out = resnet(out, state)
        if self.upsampler is not None:
            out = self.upsampler(out, state)
        return out + self._repeated(x, started) if self.shortcut else out

    def _repeated(self, x: torch.Tensor, started: bool) -> torch.Tensor:
        t, s = self.factor_t, 2
        _, width, frames, rows, columns = x.shape
        repeats = self.width * t * s * s // width
        x = x.repeat_interleave(repeats, dim=1).view(1, self.width, t, s, s, frames, rows, columns)
        x = x.permute(0, 1, 5, 2, 6, 3, 7, 4).reshape(
            1, self.width, frames * t, rows * s, columns * s
        )
        # The first frame of all is one frame, not t.
        return x if started else x[:, :, t - 1 :]


class Encoder(nn.Module):
    def __init__(self, config: VaeConfig) -> None:
        super().__init__()
        widths = [config.base * m for m in (1, *config.multipliers)]
        steps = [*config.time_levels, None]
        self.conv_in = CausalConv3d(3 * config.patch**2, widths[0], 3)
        self.down_blocks = nn.ModuleList(
            [
                DownBlock(widths[i], widths[i + 1], config.resnets, step, config.residual)
                for i, step in enumerate(steps)
            ]
        )
        self.mid_block = MidBlock(widths[-1])
        self.norm_out = ChannelNorm(widths[-1])
        self.conv_out = CausalConv3d(widths[-1], 2 * config.latent_channels, 3)

    def forward(self, x: torch.Tensor, state: State) -> torch.Tensor:
        x = self.conv_in(x, state)
        for block in self.down_blocks:
            x = block(x, state)
        x = self.mid_block(x, state)
        return self.conv_out(F.silu(self.norm_out(x)), state)


class Decoder(nn.Module):
    def __init__(self, config: VaeConfig) -> None:
        super().__init__()
        multipliers = config.multipliers[::-1]
        widths = [config.decoder_base * m for m in (multipliers[0], *multipliers)]
        steps = [*config.time_levels[::-1], None]
        self.conv_in = CausalConv3d(config.latent_channels, widths[0], 3)
        self.mid_block = MidBlock(widths[0])
        blocks = []
        for i, step in enumerate(steps):
            # A 2.1 upsampler halves the width on its way up.
            width_in = widths[i] if config.residual or i == 0 else widths[i] // 2
            blocks.append(UpBlock(width_in, widths[i + 1], config.resnets, step, config.residual))
        self.up_blocks = nn.ModuleList(blocks)
        self.norm_out = ChannelNorm(widths[-1])
        self.conv_out = CausalConv3d(widths[-1], 3 * config.patch**2, 3)

    def forward(self, x: torch.Tensor, state: State) -> torch.Tensor:
        x = self.mid_block(self.conv_in(x, state), state)
        for block in self.up_blocks:
            x = block(x, state)
        return self.conv_out(F.silu(self.norm_out(x)), state)


class WanVae(nn.Module):
    """Latents are normalised, [C, F, h, w]; pixels lie in -1..1, [3, T, H, W], T = 1 + 4(F-1)."""

    def __init__(self, config: VaeConfig) -> None:
        super().__init__()
        self.config = config
        channels = config.latent_channels
        self.encoder = Encoder(config)
        self.quant_conv = CausalConv3d(2 * channels, 2 * channels, 1)
        self.post_quant_conv = CausalConv3d(channels, channels, 1)
        self.decoder = Decoder(config)

    def decode(self, latents: torch.Tensor, state: State) -> torch.Tensor:
        """The next frames; `state` is empty before the first and kept by the caller."""
        return self.raw_decode(latents, state).clamp(-1, 1)

    def raw_decode(self, latents: torch.Tensor, state: State) -> torch.Tensor:
        """`decode` before pixels are clamped to -1..1."""
        weight = self.post_quant_conv.weight
        mean, std = (
            torch.tensor(values, dtype=weight.dtype, device=weight.device)[:, None, None, None]
            for values in (self.config.mean, self.config.std)
        )
        x = latents.to(weight.device, weight.dtype) * std + mean
        x = self.decoder(self.post_quant_conv(x[None]), state)[0]
        return _unpatched(x, self.config.patch)

    def encode(self, video: torch.Tensor) -> torch.Tensor:
        """[3, 1 + 4n, H, W] -> normalised mean of the distribution [C, 1 + n, h, w].

        The first frame alone, then four at a time, so that memory does not grow with length.
        """
        weight, stride = self.quant_conv.weight, self.config.stride
        if (video.shape[1] - 1) % 4 or video.shape[2] % stride or video.shape[3] % stride:
            raise UserError(
                f"a video to encode has 1 + 4n frames and sides that {stride} divides, got "
                f"{list(video.shape[1:])}"
            )
        state: State = {}
        x = _patched(video.to(weight.device, weight.dtype), self.config.patch)[None]
        pieces = [x[:, :, :1], *x[:, :, 1:].split(4, dim=2)]
        parts = [self.encoder(piece, state) for piece in pieces if piece.shape[2]]
        moments = self.quant_conv(torch.cat(parts, dim=2))[0]
        mean, std = (
            torch.tensor(values, dtype=weight.dtype, device=weight.device)[:, None, None, None]
            for values in (self.config.mean, self.config.std)
        )
        return (moments[: self.config.latent_channels] - mean) / std


def _patched(x: torch.Tensor, patch: int) -> torch.Tensor:
    """[3, T, H, W] -> [3 * patch^2, T, H / patch, W / patch], column of the patch outermost."""
    if patch == 1:
        return x
    channels, frames, height, width = x.shape
    cells = x.view(channels, frames, height // patch, patch, width // patch, patch)
    return cells.permute(0, 5, 3, 1, 2, 4).flatten(0, 2)


def _unpatched(x: torch.Tensor, patch: int) -> torch.Tensor:
    if patch == 1:
        return x
    _, frames, height, width = x.shape
    cells = x.view(-1, patch, patch, frames, height, width).permute(0, 3, 4, 2, 5, 1)
    return cells.reshape(-1, frames, height * patch, width * patch)

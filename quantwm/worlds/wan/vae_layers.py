"""Building blocks of the Wan VAEs: causal in time, so that frames can be decoded as they come."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

State = dict[nn.Module, torch.Tensor]
"""What each causal layer keeps of the frames before; empty before the first frame."""


class CausalConv3d(nn.Conv3d):
    """A convolution that sees the past only; its state is the newest kernel - 1 input frames."""

    def __init__(self, width_in: int, width: int, kernel: tuple[int, int, int] | int) -> None:
        kernel = (kernel,) * 3 if isinstance(kernel, int) else kernel
        super().__init__(width_in, width, kernel, padding=(0, kernel[1] // 2, kernel[2] // 2))

    def forward(self, x: torch.Tensor, state: State | None = None) -> torch.Tensor:
        """x: [1, C, T, H, W], T new frames -> [1, width, T, H, W]."""
        keep = self.kernel_size[0] - 1
        if keep:
            past = None if state is None else state.get(self)
            x = F.pad(x, (0, 0, 0, 0, keep, 0)) if past is None else torch.cat([past, x], dim=2)
            if state is not None:
                state[self] = x[:, :, -keep:].clone()
        return super().forward(x)


class ChannelNorm(nn.Module):
    """RMS norm over channels; images have one spatial axis fewer in the weight."""

    def __init__(self, width: int, images: bool = False) -> None:
        super().__init__()
        self.scale = width**0.5
        self.gamma = nn.Parameter(torch.ones(width, *(1,) * (2 if images else 3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.normalize(x, dim=1) * self.scale * self.gamma


class ResidualBlock(nn.Module):
    """Norm, SiLU, causal convolution, twice, around a shortcut."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.norm1 = ChannelNorm(width_in)
        self.conv1 = CausalConv3d(width_in, width, 3)
        self.norm2 = ChannelNorm(width)
        self.conv2 = CausalConv3d(width, width, 3)
        self.conv_shortcut = CausalConv3d(width_in, width, 1) if width_in != width else None

    def forward(self, x: torch.Tensor, state: State | None) -> torch.Tensor:
        shortcut = x if self.conv_shortcut is None else self.conv_shortcut(x)
        x = self.conv1(F.silu(self.norm1(x)), state)
        return self.conv2(F.silu(self.norm2(x)), state) + shortcut


class FrameAttention(nn.Module):
    """Single-head attention over the cells of each frame by itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = ChannelNorm(width, images=True)
        self.to_qkv = nn.Conv2d(width, 3 * width, 1)
        self.proj = nn.Conv2d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, width, _, height, columns = x.shape
        frames = x[0].transpose(0, 1)
        qkv = self.to_qkv(self.norm(frames)).flatten(2).transpose(1, 2)[:, None]
        out = F.scaled_dot_product_attention(*qkv.chunk(3, dim=-1))
        out = out[:, 0].transpose(1, 2).reshape(-1, width, height, columns)
        return x + self.proj(out).transpose(0, 1)[None]


class MidBlock(nn.Module):
    """Residual block, attention, residual block at the lowest resolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList([ResidualBlock(width, width) for _ in range(2)])
        self.attentions = nn.ModuleList([FrameAttention(width)])

    def forward(self, x: torch.Tensor, state: State | None) -> torch.Tensor:
        return self.resnets[1](self.attentions[0](self.resnets[0](x, state)), state)


def per_frame(layers: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Apply an image layer to each frame of [1, C, T, H, W]."""
    return layers(x[0].transpose(0, 1)).transpose(0, 1)[None]


class Downsample(nn.Module):
    """Halve rows and columns, and with `time` the frames after the very first one."""

    def __init__(self, width: int, time: bool) -> None:
        super().__init__()
        self.resample = nn.Sequential(
            nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(width, width, 3, stride=2)
        )
        if time:
            self.time_conv = nn.Conv3d(width, width, (3, 1, 1), stride=(2, 1, 1))
        self.time = time

    def forward(self, x: torch.Tensor, state: State) -> torch.Tensor:
        x = per_frame(self.resample, x)
        if not self.time:
            return x
        past = state.get(self)
        state[self] = x[:, :, -1:].clone()
        if past is not None:
            return self.time_conv(torch.cat([past, x], dim=2))
        # The first frame of all passes as it is; the others are paired up behind it.
        return x if x.shape[2] == 1 else torch.cat([x[:, :, :1], self.time_conv(x)], dim=2)


class Upsample(nn.Module):
    """Double rows and columns, and with `time` the frames after the very first one."""

    def __init__(self, width: int, width_out: int, time: bool) -> None:
        super().__init__()
        self.resample = nn.ModuleList([nn.Identity(), nn.Conv2d(width, width_out, 3, padding=1)])
        if time:
            self.time_conv = CausalConv3d(width, 2 * width, (3, 1, 1))
        self.time = time

    def forward(self, x: torch.Tensor, state: State) -> torch.Tensor:
        if self.time:
            x = self._more_frames(x, state)
        return per_frame(self._larger, x)

    def _larger(self, frames: torch.Tensor) -> torch.Tensor:
        return self.resample[1](F.interpolate(frames, scale_factor=2.0, mode="nearest-exact"))

    def _more_frames(self, x: torch.Tensor, state: State) -> torch.Tensor:
        """The first frame of all stays one, and the convolution's past does not hold it."""
        first = x[:, :, :0]
        if self not in state:
            first, x = x[:, :, :1], x[:, :, 1:]
            state[self] = x.new_empty(0)  # a view would hold all of x
        if not x.shape[2]:
            return first
        pairs = self.time_conv(x, state).unflatten(1, (2, -1))
        return torch.cat([first, torch.stack(pairs.unbind(1), dim=3).flatten(2, 3)], dim=2)

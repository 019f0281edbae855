"""Small layers of the Wan transformers with the rounding that the published weights saw."""

from __future__ import annotations

import math
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import nn

from quantwm.cache.dispatch import pass_kernels
from quantwm.worlds.wan.rotary import Turns, rotate

EPS = 1e-6


def kernels_for(x: torch.Tensor, width: int, head_dim: int) -> ModuleType | None:
    """The kernels that do a row's work at once, where there are such for x."""
    if not x.is_cuda or x.dtype != torch.bfloat16:
        return None
    found = pass_kernels(x.device)
    return found if found is not None and found.covers(width, head_dim) else None


class RMSNorm(nn.Module):
    """Normalise in FP32, round to the input's dtype, then multiply by the weight in that dtype.

    torch.nn.RMSNorm multiplies before rounding; after a BF16 rollout that alone is visible.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float32:
            return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + EPS) * self.weight
        # Without a weight PyTorch's own does just that in one launch instead of six; its FP32
        # differs in the last bit, where the goldens are met exactly.
        return F.rms_norm(x, x.shape[-1:], None, EPS) * self.weight


def split_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[N, heads * D] -> [heads, N, D]."""
    return x.unflatten(-1, (heads, -1)).transpose(0, 1)


def merge_heads(x: torch.Tensor) -> torch.Tensor:
    """[heads, N, D] -> [N, heads * D]."""
    return x.transpose(0, 1).flatten(1)


def normed_heads(
    norm: RMSNorm, x: torch.Tensor, heads: int, turns: Turns | None = None
) -> torch.Tensor:
    """x [N, heads * D] normed over its whole width -> [heads, N, D], rotated where turns say so."""
    width = x.shape[-1]
    kernels = kernels_for(x, width, width // heads)
    if kernels is not None:
        return kernels.turn(split_heads(x, heads), norm.weight, turns, EPS)
    split = split_heads(norm(x), heads)
    return split if turns is None else rotate(split, *turns)


def layer_norm(
    x: torch.Tensor, affine: nn.LayerNorm | None = None, fp32: bool = False
) -> torch.Tensor:
    """Layer norm over the last axis; in FP32 and rounded to the dtype of x, or native.

    PyTorch's native BF16 layer norm rounds inside, and the BF16-native models saw that: doing
    it in FP32 instead moves a tiny BF16 rollout by 0.04 of values up to 7.
    """
    weight, bias = (None, None) if affine is None else (affine.weight, affine.bias)
    if not fp32:
        return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)
    if affine is not None:
        weight, bias = weight.float(), bias.float()
    return F.layer_norm(x.float(), x.shape[-1:], weight, bias, EPS).to(x.dtype)


def linear(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """The layer in the dtype of its weights, whatever x is."""
    return layer(x.to(layer.weight.dtype))


def linear_fp32(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """The layer in FP32 with its weights upcast."""
    bias = None if layer.bias is None else layer.bias.float()
    return F.linear(x.float(), layer.weight.float(), bias)


def sinusoid(values: torch.Tensor, dim: int, fp64: bool) -> torch.Tensor:
    """values [N] -> [N, dim]: cosines, then sines, of values * 10000^(-i / half)."""
    half = dim // 2
    dtype = torch.float64 if fp64 else torch.float32
    index = torch.arange(half, dtype=dtype, device=values.device)
    # The two families raise 10000 in two ways, whose last bits differ.
    rates = torch.pow(10000, -index / half) if fp64 else torch.exp(-math.log(10000) * index / half)
    table = torch.outer(values.to(dtype), rates)
    return torch.cat([table.cos(), table.sin()], dim=1)


class Embedding(nn.Module):
    """Two linear layers with an activation between, under diffusers' names."""

    def __init__(self, width_in: int, width: int, gelu: bool) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(width_in, width)
        self.linear_2 = nn.Linear(width, width)
        self.gelu = gelu

    def forward(self, x: torch.Tensor, fp32: bool = False) -> torch.Tensor:
        apply = linear_fp32 if fp32 else linear
        hidden = apply(self.linear_1, x)
        hidden = F.gelu(hidden, approximate="tanh") if self.gelu else F.silu(hidden)
        return apply(self.linear_2, hidden)


class _Projection(nn.Module):
    """Holds a linear layer under the name `proj`, as diffusers does."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width_in, width)


class FeedForward(nn.Module):
    """Linear, GELU, linear; diffusers' names net.0.proj and net.2."""

    def __init__(self, width: int, hidden: int, width_out: int, tanh: bool) -> None:
        super().__init__()
        self.net = nn.ModuleList(
            [_Projection(width, hidden), nn.Identity(), nn.Linear(hidden, width_out)]
        )
        self.approximate = "tanh" if tanh else "none"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(linear(self.net[0].proj, x), approximate=self.approximate)
        return linear(self.net[2], hidden)


class ImageEmbedding(nn.Module):
    """CLIP rows to context rows: norm, linear, exact GELU, linear, norm."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width_in)
        self.ff = FeedForward(width_in, width_in, width, tanh=False)
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm2(self.ff(self.norm1(x)))

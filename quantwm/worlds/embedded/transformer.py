"""The causal transformer: one forward for training and for inference, attention passed in.

The shape is that of Wan's blocks: full-width RMSNorm with gain on queries and keys, biases, 3D
RoPE, and six modulation vectors per block (table of the block + a projection shared by all). How
queries meet keys is the caller's business: training passes a masked attention over the whole
clip, inference passes the cache. So both run this very code.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from quantwm.worlds.embedded.config import KEYS, TransformerConfig
from quantwm.worlds.embedded.pose import FEATURES
from quantwm.worlds.embedded.rope import apply_rope

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(q, k, v), each [..., heads, tokens, head_dim] -> the same shape."""

EPS = 1e-6


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, in float32, with gain."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(dim=-1, keepdim=True) + EPS)
        return (y * self.gain.float()).to(x.dtype)


def modulated_norm(
    x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """LayerNorm without parameters, then x * (1 + scale) + shift, in float32; cast to dtype."""
    y = F.layer_norm(x.float(), x.shape[-1:], eps=EPS)
    return (y * (1 + scale) + shift).to(dtype)


def add_gated(x: torch.Tensor, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x + gate * y in float32, in the dtype of the residual stream x."""
    return (x.float() + gate * y.float()).to(x.dtype)


class Block(nn.Module):
    """Self-attention and feed-forward, modulated per frame."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.heads = config.heads
        inner = config.heads * config.head_dim
        self.q = nn.Linear(config.width, inner)
        self.k = nn.Linear(config.width, inner)
        self.v = nn.Linear(config.width, inner)
        self.o = nn.Linear(inner, config.width)
        self.q_norm = RMSNorm(inner)
        self.k_norm = RMSNorm(inner)
        self.up = nn.Linear(config.width, config.ffn)
        self.down = nn.Linear(config.ffn, config.width)
        self.table = nn.Parameter(torch.zeros(6, config.width))

    def forward(
        self,
        x: torch.Tensor,
        modulation: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        """x: [..., frames, tokens_per_frame, width]; modulation: float32 [..., frames, 6, width].

        `modulation` is the shared projection plus this block's table.
        """
        q, k, v = self.before(x, modulation, cos, sin)
        return self.after(x, attend(q, k, v), modulation)

    def before(
        self, x: torch.Tensor, modulation: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Everything up to the attention: q, k (turned), v, each contiguous [..., heads, tokens,
        head_dim]; the cache copies, encodes and multiplies them, which strides would slow down."""
        shift, scale = modulation.unsqueeze(-2).unbind(-3)[:2]
        y = modulated_norm(x, shift, scale, self.q.weight.dtype).flatten(-3, -2)
        q = apply_rope(self._heads(self.q_norm(self.q(y))), cos, sin)
        k = apply_rope(self._heads(self.k_norm(self.k(y))), cos, sin)
        return q.contiguous(), k.contiguous(), self._heads(self.v(y)).contiguous()

    def after(
        self, x: torch.Tensor, attended: torch.Tensor, modulation: torch.Tensor
    ) -> torch.Tensor:
        """Everything from the attention's output [..., heads, tokens, head_dim] on."""
        gate1, shift2, scale2, gate2 = modulation.unsqueeze(-2).unbind(-3)[2:]
        y = self.o(attended.transpose(-3, -2).flatten(-2))
        x = add_gated(x, y.unflatten(-2, x.shape[-3:-1]), gate1)
        y = modulated_norm(x, shift2, scale2, self.up.weight.dtype)
        y = self.down(F.gelu(self.up(y), approximate="tanh"))
        return add_gated(x, y, gate2)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(-3, -2)


class Transformer(nn.Module):
    """Predicts clean latents (x-prediction) from noisy ones, noise level and keys per frame."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.patch_in = nn.Linear(config.patch_features, width)
        self.sigma_in = nn.Sequential(
            nn.Linear(config.sigma_features, width), nn.SiLU(), nn.Linear(width, width)
        )
        self.keys_in = nn.Sequential(
            nn.Linear(len(KEYS), width), nn.SiLU(), nn.Linear(width, width)
        )
        self.pose_in = nn.Linear(FEATURES, width, bias=False) if config.pose else None
        self.project = nn.Linear(width, 6 * width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.head_table = nn.Parameter(torch.zeros(2, width))
        self.patch_out = nn.Linear(width, config.patch_features)

    def init_weights(self, generator: torch.Generator) -> None:
        """Matrices at 1/sqrt(fan in); every block starts as the identity behind open gates."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                std = module.in_features**-0.5
                with torch.no_grad():
                    module.weight.normal_(0.0, std, generator=generator)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        if self.pose_in is not None:
            nn.init.zeros_(self.pose_in.weight)
        nn.init.zeros_(self.project.weight)
        nn.init.zeros_(self.patch_out.weight)
        for block in self.blocks:
            nn.init.zeros_(block.o.weight)
            nn.init.zeros_(block.down.weight)
            with torch.no_grad():
                block.table[2].fill_(1.0)
                block.table[5].fill_(1.0)

    def condition(
        self, sigma: torch.Tensor, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Noise level [..., frames] and keys [..., frames, 6] -> modulations, float32.

        Returns the blocks' [..., frames, 6, width] (before their tables) and the head's
        [..., frames, 1, width].
        """
        dtype = self.project.weight.dtype
        features = sigma_features(sigma, self.config.sigma_features).to(dtype)
        e = self.sigma_in(features) + self.keys_in(keys.to(dtype))
        shared = self.project(F.silu(e)).unflatten(-1, (6, -1))
        return shared.float(), e.float().unsqueeze(-2)

    def patchify(self, latents: torch.Tensor) -> torch.Tensor:
        """[..., frames, C, H, W] -> [..., frames, tokens_per_frame, C * patch**2]."""
        p = self.config.patch
        x = latents.unflatten(-1, (-1, p)).unflatten(-3, (-1, p))  # [..., C, h, p, w, p]
        x = x.movedim(-5, -1)  # [..., h, p, w, p, C]
        return x.transpose(-4, -3).flatten(-3).flatten(-3, -2)

    def unpatchify(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of patchify."""
        p, (rows, columns) = self.config.patch, self.config.grid
        x = x.unflatten(-2, (rows, columns)).unflatten(-1, (p, p, -1))  # [..., h, w, p, p, C]
        x = x.transpose(-4, -3).movedim(-1, -5)  # [..., C, h, p, w, p]
        return x.flatten(-2).flatten(-3, -2)

    def forward(
        self,
        latents: torch.Tensor,
        shared: torch.Tensor,
        head: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend_at: Callable[[int], Attend],
        residual_dtype: torch.dtype = torch.float32,
        pose: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Clean prediction, float32, shaped as latents [..., frames, C, H, W].

        shared, head: from `condition`; cos, sin: [frames * tokens_per_frame, head_dim]; pose:
        from `pose_features`, [..., frames, columns, FEATURES], None where it is unknown;
        attend_at: layer -> its attention. (Not one function of the layer: the compiler would then
        build every block of the training run anew.)
        """
        x = self.enter(latents, residual_dtype, pose)
        for layer, block in enumerate(self.blocks):
            x = block(x, shared + block.table.float(), cos, sin, attend_at(layer))
        return self.leave(x, head)

    def enter(
        self,
        latents: torch.Tensor,
        residual_dtype: torch.dtype = torch.float32,
        pose: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Latents [..., frames, C, H, W] -> residual stream [..., frames, tokens, width]."""
        x = self.patch_in(self.patchify(latents).to(self.patch_in.weight.dtype))
        if pose is not None and self.pose_in is not None:
            told = self.pose_in(pose.to(self.pose_in.weight.dtype)).unsqueeze(-3)
            x = (x.unflatten(-2, self.config.grid) + told).flatten(-3, -2)
        return x.to(residual_dtype)

    def leave(self, x: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """Residual stream -> clean prediction, float32, shaped as latents."""
        shift, scale = (head + self.head_table.float()).unsqueeze(-2).unbind(-3)
        y = modulated_norm(x, shift, scale, self.patch_out.weight.dtype)
        return self.unpatchify(self.patch_out(y).float())


def sigma_features(sigma: torch.Tensor, features: int) -> torch.Tensor:
    """Sines and cosines of 1000 * sigma: float32 [..., features]."""
    half = features // 2
    rates = torch.exp(-math.log(10000.0) * torch.arange(half, device=sigma.device) / half)
    angles = 1000.0 * sigma.float().unsqueeze(-1) * rates
    return torch.cat((angles.cos(), angles.sin()), dim=-1)

"""The vision transformer of DINO's checkpoints, read from a state dict of any size."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from quantwm.errors import UserError

HEAD_DIM = 64
"""Channels of a head in every published DINO model."""


class VisionTransformer:
    """Pre-norm ViT with a class token; `__call__` gives the normalised class token [N, width].

    weights: cls_token, pos_embed, patch_embed.proj, blocks.i.{norm1, attn.qkv, attn.proj, norm2,
    mlp.fc1, mlp.fc2}, norm, as in dino_vitbase16_pretrain.pth.
    """

    def __init__(self, weights: Mapping[str, Tensor], device: torch.device | str) -> None:
        try:
            self._w = {name: value.to(device).float() for name, value in weights.items()}
            self._patch = self._w["patch_embed.proj.weight"].shape[-1]
            self._width = self._w["cls_token"].shape[-1]
            self._check()
        except (KeyError, AttributeError) as error:
            raise UserError(
                f"these are not the weights of a DINO vision transformer: {error} is missing"
            ) from error
        self._heads = max(1, self._width // HEAD_DIM)

    def _check(self) -> None:
        self._depth = sum(name.endswith(".attn.qkv.weight") for name in self._w)
        for name in ("pos_embed", "norm.weight", "norm.bias", "patch_embed.proj.bias"):
            if name not in self._w:
                raise KeyError(name)

    @torch.no_grad()
    def __call__(self, pictures: Tensor) -> Tensor:
        """pictures: float32 [N, 3, H, W], normalised; H and W are cut to whole patches."""
        height, width = (side // self._patch * self._patch for side in pictures.shape[2:])
        x = F.conv2d(
            pictures[..., :height, :width],
            self._w["patch_embed.proj.weight"],
            self._w["patch_embed.proj.bias"],
            stride=self._patch,
        )
        grid = (x.shape[2], x.shape[3])
        x = torch.cat((self._w["cls_token"].expand(len(x), 1, -1), x.flatten(2).mT), dim=1)
        x = x + self._positions(grid)
        for index in range(self._depth):
            x = self._block(x, f"blocks.{index}")
        return self._norm(x, "norm")[:, 0]

    def _block(self, x: Tensor, name: str) -> Tensor:
        joint = self._linear(self._norm(x, f"{name}.norm1"), f"{name}.attn.qkv")
        q, k, v = (
            part.view(len(x), -1, self._heads, self._width // self._heads).transpose(1, 2)
            for part in joint.chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self._linear(seen, f"{name}.attn.proj")
        hidden = F.gelu(self._linear(self._norm(x, f"{name}.norm2"), f"{name}.mlp.fc1"))
        return x + self._linear(hidden, f"{name}.mlp.fc2")

    def _positions(self, grid: tuple[int, int]) -> Tensor:
        """Learned positions, resized from the square grid that they were trained on."""
        table = self._w["pos_embed"]
        side = round((table.shape[1] - 1) ** 0.5)
        if grid == (side, side):
            return table
        square = table[:, 1:].mT.reshape(1, self._width, side, side)
        resized = F.interpolate(square, size=grid, mode="bicubic", align_corners=False)
        return torch.cat((table[:, :1], resized.flatten(2).mT), dim=1)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self._w[f"{name}.weight"], self._w.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self._w[f"{name}.weight"], self._w[f"{name}.bias"]
        return F.layer_norm(x, (self._width,), weight, bias, eps=1e-6)

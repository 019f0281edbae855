"""CLIP ViT-H/14 image features for Matrix-Game-2: patch rows before the last block."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from quantwm.errors import UserError
from quantwm.worlds.wan.checkpoint import Weights, open_weights, shape_of
from quantwm.worlds.wan.loading import Progress, assign, on_meta

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
HEAD_DIM = 80


@dataclass(frozen=True)
class ClipConfig:
    """Sizes of the vision tower; the defaults are ViT-H/14 at 224 pixels.

    layers counts the blocks that are run: the features are taken before the tower's last block.
    """

    width: int = 1280
    heads: int = 16
    layers: int = 31
    hidden: int = 5120
    patch: int = 14
    rows: int = 257

    @property
    def side(self) -> int:
        """Pixels of a square input."""
        return int((self.rows - 1) ** 0.5) * self.patch


class _Attention(nn.Module):
    def __init__(self, config: ClipConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.to_qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.to_qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.proj(out.transpose(1, 2).flatten(2))


class _Block(nn.Module):
    def __init__(self, config: ClipConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attn = _Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, config.hidden),
            nn.GELU(),
            nn.Linear(config.hidden, config.width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ClipVision(nn.Module):
    """Pictures to patch features; no pooling and no last norm."""

    def __init__(self, config: ClipConfig) -> None:
        super().__init__()
        self.config = config
        width, patch = config.width, config.patch
        self.patch_embedding = nn.Conv2d(3, width, patch, patch, bias=False)
        self.cls_embedding = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embedding = nn.Parameter(torch.zeros(1, config.rows, width))
        self.pre_norm = nn.LayerNorm(width)
        self.transformer = nn.ModuleList([_Block(config) for _ in range(config.layers)])

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """pixels: [B, 3, side, side], normalised -> [B, rows, width]."""
        x = self.patch_embedding(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_embedding.expand(len(x), -1, -1), x], dim=1)
        x = self.pre_norm(x + self.pos_embedding)
        for block in self.transformer:
            x = block(x)
        return x

    def encode(self, picture: torch.Tensor) -> torch.Tensor:
        """One picture [3, H, W] in -1..1 -> context rows [rows, width]."""
        weight, side = self.cls_embedding, self.config.side
        resized = F.interpolate(
            picture[None].float(), size=(side, side), mode="bicubic", align_corners=False
        )
        mean, std = (
            torch.tensor(values, device=resized.device)[:, None, None] for values in (MEAN, STD)
        )
        pixels = (resized * 0.5 + 0.5 - mean) / std
        return self(pixels.to(weight.device, weight.dtype))[0]


_FROM_TRANSFORMERS = (
    (r"^embeddings\.class_embedding$", "cls_embedding"),
    (r"^embeddings\.patch_embedding\.", "patch_embedding."),
    (r"^embeddings\.position_embedding\.weight$", "pos_embedding"),
    (r"^pre_layrnorm\.", "pre_norm."),
    (r"^encoder\.layers\.(\d+)\.layer_norm([12])\.", r"transformer.\1.norm\2."),
    (r"^encoder\.layers\.(\d+)\.self_attn\.out_proj\.", r"transformer.\1.attn.proj."),
    (r"^encoder\.layers\.(\d+)\.self_attn\.([qkv])_proj\.", r"transformer.\1.attn.\2."),
    (r"^encoder\.layers\.(\d+)\.mlp\.fc1\.", r"transformer.\1.mlp.0."),
    (r"^encoder\.layers\.(\d+)\.mlp\.fc2\.", r"transformer.\1.mlp.2."),
)
# Of the published files and not of the features: text tower, pooling, projections.
_UNUSED = re.compile(
    r"^(textual\.|text_model\.|logit_scale|log_scale|post_norm\.|post_layernorm\.|head"
    r"|visual_projection\.|text_projection\.|embeddings\.position_ids)"
)


def canonical_clip(weights: Mapping[str, torch.Tensor]) -> Weights:
    """Original (`visual.`) or transformers (`vision_model.`) names -> this module's.

    The last block is left out, since the features are taken before it.
    """
    out: Weights = {}
    for name, tensor in weights.items():
        name = re.sub(r"^(model\.)?(visual|vision_model)\.", "", name)
        if _UNUSED.match(name):
            continue
        for pattern, new in _FROM_TRANSFORMERS:
            name = re.sub(pattern, new, name)
        if name in ("cls_embedding", "pos_embedding") and tensor.ndim and tensor.numel():
            tensor = tensor.reshape(1, -1, tensor.shape[-1])
        out[name] = tensor
    _join_qkv(out)
    numbers = map(re.compile(r"transformer\.(\d{1,4})\.").match, out)
    blocks = {int(found[1]) for found in numbers if found}
    if not blocks:
        raise UserError("these are not the weights of a CLIP vision tower: no transformer blocks")
    last = f"transformer.{max(blocks)}."
    return {name: tensor for name, tensor in out.items() if not name.startswith(last)}


def _join_qkv(weights: Weights) -> None:
    """transformers keeps q, k and v apart; they become one to_qkv, in place."""
    for name in [name for name in weights if re.search(r"\.attn\.q\.(weight|bias)$", name)]:
        parts = [name.replace(".attn.q.", f".attn.{part}.") for part in "qkv"]
        missing = [part for part in parts if part not in weights]
        if missing:
            raise UserError(f"half a CLIP vision tower: {missing[0]} is missing")
        joined = torch.cat([weights.pop(part) for part in parts])
        weights[name.replace(".attn.q.", ".attn.to_qkv.")] = joined


def infer_clip_config(weights: Mapping[str, torch.Tensor], head_dim: int = HEAD_DIM) -> ClipConfig:
    """Sizes of canonical weights; heads cannot be read from shapes, so head_dim is given."""
    what = "a CLIP vision tower"
    width, _, patch, _ = shape_of(weights, "patch_embedding.weight", 4, what)
    blocks = {name.split(".")[1] for name in weights if name.startswith("transformer.")}
    if width % head_dim:
        raise UserError(f"{what} of {width} channels is not heads of {head_dim}: another model's")
    return ClipConfig(
        width=width,
        heads=width // head_dim,
        layers=len(blocks),
        hidden=shape_of(weights, "transformer.0.mlp.0.weight", 2, what)[0],
        patch=patch,
        rows=shape_of(weights, "pos_embedding", 3, what)[1],
    )


def load_clip(
    path: Path | str,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
) -> ClipVision:
    """models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth, or a transformers folder."""
    weights = canonical_clip(open_weights(path))
    config = infer_clip_config(weights)
    tower = on_meta(lambda: ClipVision(config))
    assign(tower, weights, "a CLIP vision tower", dtype, device, progress)
    return tower

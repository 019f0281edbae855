"""Tiny Wan models, caches and checkpoints for the tests of the Wan family."""

from __future__ import annotations

import re

import torch

from quantwm.cache import CachePolicy, KVCache, make_format
from quantwm.worlds.wan.backbone import CausalWan
from quantwm.worlds.wan.config import ActionConfig, WanConfig
from quantwm.worlds.wan.geometry import cache_spec
from quantwm.worlds.wan.names import _RENAMES

GRID = (2, 3)
CELLS = GRID[0] * GRID[1]
LATENT = (2 * GRID[0], 2 * GRID[1])

TINY = WanConfig(
    layers=2, heads=2, ffn_dim=64, in_channels=16, out_channels=16, context_dim=32,
    context_len=8, freq_dim=32,
)  # fmt: skip


def tiny_action(mouse: bool = True, keys: int = 4) -> ActionConfig:
    return ActionConfig(
        layers=(0,), heads=2, head_dim=64, keyboard_dim=keys, mouse_dim=2 if mouse else 0,
        embed_dim=16,
    )  # fmt: skip


def make_model(config: WanConfig = TINY, seed: int = 0, dtype=torch.float32) -> CausalWan:
    torch.manual_seed(seed)
    model = CausalWan(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.06)
    return model.to(dtype).requires_grad_(False)


def make_cache(
    model: CausalWan,
    frames_per_chunk: int = 3,
    window: int | None = None,
    sink: int = 0,
    method: str = "bf16",
    cells: int = CELLS,
    compress_sink: bool = False,
    **settings: object,
) -> KVCache:
    settings = {"exact": model.dtype == torch.float32} if method == "bf16" else settings
    return KVCache(
        cache_spec(model.config, cells, frames_per_chunk),
        make_format(method, **settings),
        CachePolicy(
            sink_frames=sink,
            window_frames=window,
            span_tokens=4 * CELLS,
            compress_sink=compress_sink,
        ),
        dtype=model.dtype,
    )


def upstream_name(name: str) -> str:
    """diffusers' name -> the original Wan name, for checkpoints as they are published."""
    if ".action_model." in name:
        return name
    name = re.sub(r"(blocks\.\d+)\.norm2\.", r"\1.norm3.", name)
    if name == "scale_shift_table":
        return "head.modulation"
    for old, new in reversed(_RENAMES):
        if old in ("head.modulation",):
            continue
        if name.startswith(new) or (new.startswith(".") and new in name):
            name = name.replace(new, old, 1)
    return name


def upstream_weights(model: CausalWan, prefix: str = "model.") -> dict[str, torch.Tensor]:
    keep = model.config.prope
    return {
        prefix + (name if keep else upstream_name(name)): tensor.clone()
        for name, tensor in model.state_dict().items()
    }

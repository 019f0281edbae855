"""Worlds of published sizes with random weights: same code and work, no files."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from quantwm.errors import UserError
from quantwm.worlds.wan.backbone import CausalWan
from quantwm.worlds.wan.catalog import ENTRIES, Entry
from quantwm.worlds.wan.clip import ClipConfig, ClipVision
from quantwm.worlds.wan.kinds import world_class
from quantwm.worlds.wan.loading import on_meta
from quantwm.worlds.wan.vae import WanVae
from quantwm.worlds.wan.world import Report, WanWorld

WEIGHT_STD = 0.02
PROMPT_TOKENS = 60


def fill(module: nn.Module, device: torch.device, dtype: torch.dtype, seed: int) -> nn.Module:
    """Give a meta-device module random weights on `device`, biases 0 and norms 1."""
    module.to(dtype).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in module.named_parameters():
        leaf = name.rpartition(".")[2]
        if leaf == "bias":
            nn.init.zeros_(parameter)
        elif leaf == "gamma" or (parameter.ndim == 1 and leaf == "weight"):
            nn.init.ones_(parameter)
        else:
            nn.init.normal_(parameter, std=WEIGHT_STD, generator=generator)
    return module.requires_grad_(False).eval()


def random_world(
    name: str,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    latent: tuple[int, int] | None = None,
) -> WanWorld:
    """A full-size world of random weights; latent: another height and width of a latent frame."""
    if name not in ENTRIES:
        raise UserError(f"unknown Wan world {name!r}; there are {', '.join(ENTRIES)}")
    entry = ENTRIES[name] if latent is None else replace(ENTRIES[name], latent=latent)
    device = torch.device(device)
    model = fill(on_meta(lambda: CausalWan(entry.config)), device, dtype, seed)
    vae = fill(on_meta(lambda: WanVae(entry.vae)), device, dtype, seed + 1)
    clip = None
    if "clip" in entry.parts:
        clip = fill(on_meta(lambda: ClipVision(ClipConfig())), device, dtype, seed + 2)
    return _world(entry, model, vae, clip, seed)


def _world(entry: Entry, model: nn.Module, vae: nn.Module, clip: nn.Module | None, seed: int):
    kind = world_class(entry.kind)

    def prompts(prompt: str, report: Report) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(PROMPT_TOKENS, entry.config.context_dim, generator=generator)
        return rows.to(model.device, model.dtype)

    return kind(entry, model, vae, prompts=prompts, clip=clip)

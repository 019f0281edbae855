"""How the registry sees each Wan world before and while it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from quantwm.errors import UserError
from quantwm.worlds.base import Scene, World, WorldSpec
from quantwm.worlds.registry import Presence, Progress
from quantwm.worlds.wan import files
from quantwm.worlds.wan.catalog import ENTRIES, Entry
from quantwm.worlds.wan.clip import load_clip
from quantwm.worlds.wan.loading import load_transformer
from quantwm.worlds.wan.memory_world import MemoryWorld
from quantwm.worlds.wan.needs import needs, require_device, umt5_bytes
from quantwm.worlds.wan.prompts import PromptEncoder
from quantwm.worlds.wan.self_forcing_world import SelfForcingWorld
from quantwm.worlds.wan.vae_names import load_vae
from quantwm.worlds.wan.world import WanWorld

TRANSFORMER_SHARE = 0.9  # of the progress bar; the rest is the autoencoder and CLIP


class WanModule:
    """The registry's functions for one entry."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry

    def world_spec(self) -> WorldSpec:
        return self.entry.spec()

    def world_scenes(self) -> Sequence[Scene]:
        return []

    def presence(self) -> Presence:
        """weight_bytes: of the files, or of BF16 weights as long as some are missing."""
        found = files.presence(self.entry)
        if found.present:
            return found
        needed = needs(self.entry, formats=())
        return replace(found, weight_bytes=sum(needed.weights.values()) + needed.text_encoder)

    def terms(self) -> str:
        return self.entry.agree

    def download(self, agreed: bool, progress: Progress | None) -> None:
        files.download(self.entry, agreed, progress)

    def load_world(self, device: torch.device, progress: Progress | None) -> World:
        """Load transformer, autoencoder and image encoder; the text encoder comes with a prompt."""
        files.require(self.entry)
        require_device(self.entry, device)
        return load(self.entry, device, progress)


def load(entry: Entry, device: torch.device, progress: Progress | None = None) -> WanWorld:
    """A world from its files: BF16 on a GPU, FP32 on a CPU, which has no fast BF16."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    report = progress or (lambda stage, share: None)

    def transformer_progress(done: int, total: int) -> None:
        report("Loading the transformer", TRANSFORMER_SHARE * done / max(total, 1))

    part = entry.parts["transformer"]
    model = load_transformer(
        files.part_path(part), dtype, device, expect=entry.family, prefer_ema=part.ema,
        progress=transformer_progress,
    )  # fmt: skip
    _check_size(entry, model.config.layers, model.config.width)
    report("Loading the autoencoder", TRANSFORMER_SHARE)
    vae = load_vae(files.part_path(entry.parts["vae"]), dtype, device)
    clip = prompts = None
    if "clip" in entry.parts:
        report("Loading the image encoder", 0.95)
        clip = load_clip(files.part_path(entry.parts["clip"]), dtype, device)
    if entry.prompted:
        text, tokenizer = (files.part_path(entry.parts[name]) for name in ("text", "tokenizer"))
        prompts = PromptEncoder(text, tokenizer, umt5_bytes(), device)
    report("Loaded", 1.0)
    kind = MemoryWorld if entry.kind == "memory" else SelfForcingWorld
    return kind(
        entry, model, vae, prompts=prompts, clip=clip, sha256=lambda: files.weights_sha256(entry)
    )


def _check_size(entry: Entry, layers: int, width: int) -> None:
    """The 1.3B and the 14B model are one family; the file must be the size that was chosen."""
    if (layers, width) != (entry.config.layers, entry.config.width):
        raise UserError(
            f"{entry.name} has {entry.config.layers} layers of width {entry.config.width}, the "
            f"file holds {layers} of {width}: choose the other size or another folder"
        )


def __getattr__(name: str) -> WanModule:
    """`entry.<world>`: the registry's target of every world of the family."""
    if name not in ENTRIES:
        raise AttributeError(name)
    return WanModule(ENTRIES[name])

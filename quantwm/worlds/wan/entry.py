"""How the registry sees each Wan world before and while it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from quantwm.cache.remedy import gib, is_out_of_memory
from quantwm.errors import UserError
from quantwm.memory import free_bytes
from quantwm.worlds.base import Scene, Script, World, WorldSpec
from quantwm.worlds.registry import Placement, Presence, Progress
from quantwm.worlds.room import Room, capacity_of, require_room
from quantwm.worlds.wan import files, presets
from quantwm.worlds.wan.catalog import ENTRIES, Entry
from quantwm.worlds.wan.clip import load_clip
from quantwm.worlds.wan.config import WanConfig
from quantwm.worlds.wan.downloads import download
from quantwm.worlds.wan.kinds import world_class
from quantwm.worlds.wan.loading import load_transformer
from quantwm.worlds.wan.needs import room, text_encoder_bytes, weights_by_part
from quantwm.worlds.wan.offload import offload_blocks
from quantwm.worlds.wan.prompts import ROOM, PromptEncoder
from quantwm.worlds.wan.vae import VaeConfig
from quantwm.worlds.wan.vae_names import load_vae
from quantwm.worlds.wan.world import WanWorld


class WanModule:
    """The registry's functions for one entry."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry

    def at(self, size: tuple[int, int]) -> WanModule:
        """The same world at another width and height of its video."""
        stride = self.entry.vae.stride
        return WanModule(replace(self.entry, latent=(size[1] // stride, size[0] // stride)))

    def world_spec(self) -> WorldSpec:
        return self.entry.spec()

    def world_scenes(self) -> Sequence[Scene]:
        return presets.scenes() if self.entry.pictured else []

    def prompts(self) -> tuple[str, ...]:
        return presets.PROMPTS if self.entry.prompted else ()

    def scripts(self) -> list[Script]:
        return presets.scripts(self.entry.keys)

    def presence(self) -> Presence:
        """weight_bytes: of the files, or of BF16 weights as long as some are missing."""
        found = files.presence(self.entry)
        if found.present:
            return found
        weights = sum(weights_by_part(self.entry).values()) + text_encoder_bytes(self.entry)
        return replace(found, weight_bytes=weights)

    def terms(self) -> str:
        return self.entry.agree

    def room(self, lanes: tuple[str, ...], item: int) -> Room:
        return room(self.entry, lanes, item)

    def download(self, agreed: bool, progress: Progress | None) -> None:
        download(self.entry, agreed, progress)

    def load_world(self, device: torch.device, progress: Progress | None) -> World:
        return self.load_world_at(device, Placement(), progress)

    def load_world_at(
        self, device: torch.device, placement: Placement, progress: Progress | None
    ) -> World:
        """Load transformer, autoencoder and image encoder; the text encoder comes with a prompt.

        On a GPU that the weights would fill, the blocks wait on the CPU unless told otherwise.
        """
        files.require(self.entry)
        if device.type == "cuda" and placement.offload != "blocks":
            capacity = capacity_of(device)
            needed = room(self.entry, ("quantwm",))
            if capacity is not None and needed.total(("quantwm",)) > capacity:
                if placement.offload != "auto":
                    require_room(self.entry.name, ("quantwm",), device, offload=False)
                if needed.total(("quantwm",), offload=True) > capacity:
                    require_room(self.entry.name, ("quantwm",), device, offload=True)
                placement = replace(placement, offload="blocks")
        try:
            return load(self.entry, device, progress, placement)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            title = self.entry.title.partition(":")[0]
            raise UserError(
                f"{title} does not fit into the memory that is free on {device}: end what else "
                "runs there, or keep the transformer's blocks on the CPU (--offload blocks)"
            ) from None


PINNED = 1.2
"""Bytes of pinned memory for a byte of a block's weights, given out in powers of two: a block of
LingBot 14B has 0.85 GiB and takes 1."""


def _require_host(entry: Entry, device: torch.device, blocks_wait: bool) -> None:
    """UserError where main memory is short of the weights that are to lie there; a system would end
    the program instead."""
    if device.type != "cpu" and not blocks_wait:
        return
    weights = weights_by_part(entry, 4 if device.type == "cpu" else 2)
    needed = weights["transformer"]
    needed = int(needed * PINNED) if blocks_wait else needed + weights["autoencoder"]
    free = free_bytes(torch.device("cpu"))
    if free is not None and needed > free:
        title = entry.title.partition(":")[0]
        raise UserError(
            f"{title} keeps {gib(needed)} of weights in main memory here and {gib(free)} is free: "
            "end what else runs, or take a smaller world"
        )


def _encoder_comes_first(entry: Entry, device: torch.device) -> bool:
    """Whether the text encoder would not fit beside the other weights, where it does alone."""
    weights = sum(weights_by_part(entry, 4 if device.type == "cpu" else 2).values())
    free = free_bytes(device)
    return free is not None and free < weights + ROOM * text_encoder_bytes(entry)


def load(
    entry: Entry,
    device: torch.device,
    progress: Progress | None = None,
    placement: Placement | None = None,
) -> WanWorld:
    """A world from its files: BF16 on a GPU, FP32 on a CPU, which has no fast BF16.

    progress: gets each part's name with its own share, from 0 to 1.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    placement = placement or Placement()
    report = progress or (lambda stage, share: None)
    waits = placement.offload == "blocks"

    def shares(stage: str) -> Callable[[int, int], None]:
        return lambda done, total: report(stage, done / max(total, 1))

    _require_host(entry, device, waits)
    prompts = None
    if entry.prompted:
        text, tokenizer = (files.part_path(entry.parts[name]) for name in ("text", "tokenizer"))
        width = entry.config.context_dim
        prompts = PromptEncoder(text, tokenizer, text_encoder_bytes(entry), device, width)
        if _encoder_comes_first(entry, device):
            prompts(placement.prompt or presets.PROMPTS[0], report)
    part = entry.parts["transformer"]
    report("Opening the transformer", 0.0)
    model = load_transformer(
        files.part_path(part), dtype, torch.device("cpu") if waits else device,
        expect=entry.family, prefer_ema=part.ema, progress=shares("Loading the transformer"),
    )  # fmt: skip
    _check_size(entry, model.config)
    if waits:
        report("Moving all but the blocks to the device", 0.0)
        offload_blocks(model, device)
    vae = load_vae(
        files.part_path(entry.parts["vae"]), dtype, device, shares("Loading the autoencoder")
    )
    _check_vae(entry, vae.config)
    clip = None
    if "clip" in entry.parts:
        clip = load_clip(
            files.part_path(entry.parts["clip"]), dtype, device, shares("Loading the image encoder")
        )
    kind = world_class(entry.kind)
    return kind(
        entry, model, vae, prompts=prompts, clip=clip, sha256=lambda: files.weights_sha256(entry),
        tile=placement.tile, vae_waits=placement.offload == "vae",
    )  # fmt: skip


def _check_size(entry: Entry, found: WanConfig) -> None:
    """The 1.3B and the 14B model are one family; the file must be the size that was chosen."""
    wanted = entry.config
    if (found.layers, found.width) != (wanted.layers, wanted.width):
        raise UserError(
            f"{entry.name} has {wanted.layers} layers of width {wanted.width}, the "
            f"file holds {found.layers} of {found.width}: choose the other size or another folder"
        )
    for name, size in vars(wanted).items():
        if name != "context_len" and getattr(found, name) != size:  # which no shape tells
            raise UserError(
                f"{entry.name} has {name} {size}, the file {getattr(found, name)}: it is of "
                "another world or version"
            )


def _check_vae(entry: Entry, found: VaeConfig) -> None:
    """The 2.1 and the 2.2 autoencoder have other latents."""
    has, wanted = ((c.latent_channels, c.stride) for c in (found, entry.vae))
    if has != wanted:
        raise UserError(
            f"{entry.name} wants an autoencoder of {wanted[0]} channels and {wanted[1]} pixels a "
            f"cell, the file holds one of {has[0]} and {has[1]}: it is of another world"
        )


def __getattr__(name: str) -> WanModule:
    """`entry.<world>`: the registry's target of every world of the family."""
    if name not in ENTRIES:
        raise AttributeError(name)
    return WanModule(ENTRIES[name])

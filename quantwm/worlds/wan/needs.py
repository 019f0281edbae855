"""What a Wan world needs, known before it is loaded: bytes by part, counted on the meta device."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import nn

from quantwm.cache.plan import plan_lanes
from quantwm.lanes import lanes_for
from quantwm.worlds.room import Room
from quantwm.worlds.wan.backbone import CausalWan
from quantwm.worlds.wan.catalog import Entry
from quantwm.worlds.wan.clip import ClipConfig, ClipVision
from quantwm.worlds.wan.config import WanConfig
from quantwm.worlds.wan.graphs import worthwhile
from quantwm.worlds.wan.loading import on_meta
from quantwm.worlds.wan.umt5 import Umt5Config, Umt5Encoder
from quantwm.worlds.wan.vae import VaeConfig, WanVae

DECODING = {False: (3_620, 96), True: (3_575, 256)}
"""Numbers a pixel of a frame that an autoencoder of this width holds while it decodes, beside the
states, of the 2.1 and the 2.2 kind: peaks of six worlds on an H200 agree within 2 %, BF16 lanes of
LingBot 14B apart."""
RECORDED = 19
"""Tensors as large as the stream that what is recorded between attentions keeps: three worlds on an
H200 agree within 5 %."""
WORKSPACES = 128 * 2**20
"""Bytes that cuBLAS keeps on a GPU: 64 to 127 MB were seen."""


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@lru_cache
def transformer_weights(config: WanConfig) -> tuple[int, int]:
    """Numbers in all, and in the largest block."""
    model = on_meta(lambda: CausalWan(config))
    return _count(model), max(_count(block) for block in model.blocks)


@lru_cache
def vae_weights(config: VaeConfig) -> int:
    return _count(on_meta(lambda: WanVae(config)))


@lru_cache
def clip_weights() -> int:
    return _count(on_meta(lambda: ClipVision(ClipConfig())))


@lru_cache
def umt5_weights() -> int:
    return _count(on_meta(lambda: Umt5Encoder(Umt5Config())))


def weights_by_part(entry: Entry, item: int = 2) -> dict[str, int]:
    """Bytes of the parts that stay loaded. item: bytes of a number."""
    found = {
        "transformer": transformer_weights(entry.config)[0] * item,
        "autoencoder": vae_weights(entry.vae) * item,
    }
    if "clip" in entry.parts:
        found["image encoder"] = clip_weights() * item
    return found


def text_encoder_bytes(entry: Entry) -> int:
    """Of the encoder that is used for a prompt and released; it always runs in BF16."""
    return umt5_weights() * 2 if entry.prompted else 0


def room(entry: Entry, lanes: tuple[str, ...], item: int = 2) -> Room:
    """Bytes on the device. item: bytes of a number, 2 on a GPU, 4 on a CPU."""
    spec = entry.spec()
    weights = weights_by_part(entry, item)
    caches, held, scratch = {}, {}, 0
    for method, lane in zip(lanes, lanes_for(spec, lanes) if lanes else (), strict=True):
        planned = plan_lanes(spec.cache, [lane], itemsize=item, remade=spec.remade)
        caches[method] = planned.peak_bytes
        held[method] = sum(m.bytes_total for m in planned.methods)
        scratch = max(scratch, *(m.scratch_bytes for m in planned.methods))
    whole, block = transformer_weights(entry.config)
    stays = sum(weights.values())
    # Two blocks: one at work, one whose memory the allocator has not given back yet.
    least = stays - (whole - transformer_rest(entry.config) - 2 * block) * item
    return Room(
        stays, text_encoder_bytes(entry), caches, min(least, stays), held,
        # An engine keeps the states of before a chunk until all lanes have finished it.
        streaming=2 * state_numbers(entry.vae, entry.latent) * item,
        working=decoding_numbers(entry.vae, entry.latent) * item + scratch,
        kept=kept_numbers(entry) * item + (WORKSPACES if item == 2 else 0),
    )  # fmt: skip


def kept_numbers(entry: Entry) -> int:
    """Keys and values of the prompt or picture, and what is recorded where a world records."""
    config, cache = entry.config, entry.spec().cache
    width = config.heads * config.head_dim
    tokens = cache.frames_per_chunk * cache.tokens_per_frame
    model = on_meta(lambda: CausalWan(config))
    recorded = RECORDED * tokens if worthwhile(model, tokens) else 0
    return (2 * config.layers * config.context_len + recorded) * width


def decoding_numbers(config: VaeConfig, latent: tuple[int, int]) -> int:
    """Held while a latent frame is decoded, beside the states."""
    numbers, width = DECODING[config.residual]
    pixels = latent[0] * latent[1] * config.stride**2
    return numbers * config.decoder_base // width * pixels


@lru_cache
def state_numbers(config: VaeConfig, latent: tuple[int, int]) -> int:
    """What a video's causal layers keep of the frames before."""
    vae, state = on_meta(lambda: WanVae(config)), {}
    frame = torch.empty(config.latent_channels, 1, *latent, device="meta")
    for _ in range(2):  # the very first frame's are smaller
        vae.raw_decode(frame, state)
    return sum(tensor.numel() for tensor in state.values())


@lru_cache
def transformer_rest(config: WanConfig) -> int:
    """Numbers outside of the blocks."""
    model = on_meta(lambda: CausalWan(config))
    return _count(model) - _count(model.blocks)

"""What a Wan world needs, known before it is loaded: bytes by part, and what would fit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn

from quantwm.cache.plan import plan_lanes
from quantwm.errors import UserError
from quantwm.lanes import lanes_for
from quantwm.worlds.wan.backbone import CausalWan
from quantwm.worlds.wan.catalog import Entry
from quantwm.worlds.wan.clip import ClipConfig, ClipVision
from quantwm.worlds.wan.config import WanConfig
from quantwm.worlds.wan.loading import on_meta
from quantwm.worlds.wan.umt5 import Umt5Config, Umt5Encoder
from quantwm.worlds.wan.vae import VaeConfig, WanVae

ITEM = 2  # bytes of a BF16 weight


def _bytes(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters()) * ITEM


@lru_cache
def transformer_bytes(config: WanConfig) -> int:
    return _bytes(on_meta(lambda: CausalWan(config)))


@lru_cache
def vae_bytes(config: VaeConfig) -> int:
    return _bytes(on_meta(lambda: WanVae(config)))


@lru_cache
def clip_bytes() -> int:
    return _bytes(on_meta(lambda: ClipVision(ClipConfig())))


@lru_cache
def umt5_bytes() -> int:
    return _bytes(on_meta(lambda: Umt5Encoder(Umt5Config())))


@dataclass(frozen=True)
class Needs:
    """Bytes on the device by part, BF16 weights, activations left out.

    Attributes:
        weights: part name -> bytes that stay.
        text_encoder: bytes while a prompt is encoded; on the CPU where they do not fit.
        caches: format -> peak bytes of one lane's cache with its window full.
    """

    weights: dict[str, int]
    text_encoder: int
    caches: dict[str, int]

    def total(self, lanes: tuple[str, ...]) -> int:
        return sum(self.weights.values()) + sum(self.caches[lane] for lane in lanes)


def needs(entry: Entry, formats: tuple[str, ...] = ("bf16", "qvg", "quantwm")) -> Needs:
    """What a world needs; nothing is allocated."""
    spec = entry.spec()
    weights = {"transformer": transformer_bytes(entry.config), "autoencoder": vae_bytes(entry.vae)}
    if "clip" in entry.parts:
        weights["image encoder"] = clip_bytes()
    # The action streams stay BF16 in every format, one window long.
    beside = sum(
        stream.bf16_bytes_per_token * stream.tokens_per_frame * (spec.policy.window_frames or 0)
        for _, stream in spec.cache.companions
    )
    caches = {
        name: plan_lanes(spec.cache, lanes_for(spec, (name,))).peak_bytes + beside
        for name in formats
    }
    return Needs(weights, umt5_bytes() if entry.prompted else 0, caches)


def advice(entry: Entry, capacity: int) -> str | None:
    """One line when the device is too small for three lanes, with what would fit; else None."""
    found = needs(entry)
    choices = (("bf16", "qvg", "quantwm"), ("bf16", "quantwm"), ("quantwm",))
    for lanes in choices:
        if found.total(lanes) <= capacity:
            if lanes == choices[0]:
                return None
            return (
                f"{entry.name} needs {_gib(found.total(choices[0]))} for three lanes, this device "
                f"has {_gib(capacity)}: run --lanes {','.join(lanes)} ({_gib(found.total(lanes))})"
            )
    return (
        f"{entry.name} needs {_gib(found.total(('quantwm',)))} for its smallest lane, this device "
        f"has {_gib(capacity)}: take a smaller world or a larger device"
    )


def require_device(entry: Entry, device: torch.device) -> None:
    """UserError when not even the weights and one lane fit on a GPU."""
    if device.type != "cuda":
        return
    capacity = torch.cuda.get_device_properties(device).total_memory
    if needs(entry).total(("quantwm",)) > capacity:
        raise UserError(advice(entry, capacity) or f"{entry.name} does not fit on {device}")


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"

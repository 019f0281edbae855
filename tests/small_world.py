"""A test double of a world: random projections, two layers, real caches, faults on demand."""

from __future__ import annotations

import numpy as np
import torch

from quantwm.cache.spec import CachePolicy, CacheSpec
from quantwm.errors import UserError
from quantwm.worlds.base import (
    ChunkAction,
    ChunkOutput,
    LaneState,
    Scene,
    StartState,
    WorldSpec,
)
from quantwm.worlds.registry import Presence

SPEC = WorldSpec(
    name="small",
    title="Small test world",
    licence="Apache-2.0",
    source="tests",
    cache=CacheSpec(layers=2, heads=2, head_dim=64, tokens_per_frame=6, frames_per_chunk=2),
    policy=CachePolicy(span_tokens=48),
    format_settings={"qvg": {"centroids": 8}, "quantwm": {"centroids": 8}},
    latent_shape=(4, 2, 3),
    video_size=(12, 8),
    fps=8.0,
    frames_per_latent=1,
    keys={"w": "forward", "left": "turn left", "right": "turn right"},
    default_steps={"cpu": 2, "cuda": 2},
    context_frames=4,
)


class SmallWorld:
    """World protocol; `fail` maps "generate" or "commit" to (lane, error) raised once there."""

    def __init__(self) -> None:
        self.spec = SPEC
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.fail: dict[str, tuple[str, BaseException]] = {}
        self.noises: list[torch.Tensor] = []
        generator = torch.Generator().manual_seed(0)
        cache = SPEC.cache
        width = cache.heads * cache.head_dim
        self._in = torch.randn(4, width, generator=generator)
        self._qkv = torch.randn(cache.layers, 3, width, width, generator=generator) / width**0.5
        self._out = torch.randn(width, 4, generator=generator) / width**0.5

    def scenes(self):
        return [Scene("room", "A room", "room.png"), Scene("hall", "A hall", "hall.png")]

    def start(self, scene, image, prompt, seed):
        if scene not in (None, "room", "hall"):
            raise UserError(f"unknown scene {scene!r}; there are room, hall")
        generator = torch.Generator().manual_seed(1 if scene == "hall" else 0)
        latents = torch.randn(4, *SPEC.latent_shape, generator=generator)
        if image is not None:
            latents = latents + float(np.mean(image)) / 255
        actions = (ChunkAction.held(frozenset(), 2), ChunkAction.held(frozenset({"w"}), 2))
        return StartState(latents, actions, self.decode(latents))

    def generate_chunk(self, lane: LaneState, action, noise, steps):
        self._maybe_fail("generate", lane)
        self.noises.append(noise.clone())
        lane.cache.begin_chunk(lane.next_frame, 2)
        x, found = noise, []
        for _ in range(steps):
            clean = self._pass(lane, x, action, clean=False)
            found.append(clean)
            x = (x + clean) / 2
        lane.cache.abort_chunk()
        return ChunkOutput(x, tuple(found))

    def commit_chunk(self, lane: LaneState, latents, action):
        lane.cache.begin_chunk(lane.next_frame, 2)
        self._maybe_fail("commit", lane)
        self._pass(lane, latents, action, clean=True)
        lane.cache.finalize_chunk()
        lane.next_frame += 2

    def decode(self, latents):
        levels = torch.sigmoid(latents[:, :3]).mul(255).round().to(torch.uint8)
        return levels.permute(0, 2, 3, 1).numpy().repeat(4, 1).repeat(4, 2)

    def weight_bytes(self):
        return sum(t.numel() * t.element_size() for t in (self._in, self._qkv, self._out))

    def weights_sha256(self):
        return "5" * 64

    def _pass(self, lane, latents, action, clean):
        cache = SPEC.cache
        x = latents.permute(0, 2, 3, 1).reshape(12, 4) @ self._in
        x = x + 0.1 * sum(len(frame) for frame in action.frames)
        for layer in range(cache.layers):
            q, k, v = (
                (x @ w).view(12, cache.heads, cache.head_dim).transpose(0, 1)
                for w in self._qkv[layer]
            )
            out = lane.cache.attend(layer, q, k, v, clean=clean)
            x = x + out.float().transpose(0, 1).reshape(12, -1)
        y = torch.tanh(x @ self._out)
        return y.view(2, 2, 3, 4).permute(0, 3, 1, 2)

    def _maybe_fail(self, where, lane):
        name, error = self.fail.get(where, (None, None))
        if name == lane.name:
            del self.fail[where]
            raise error


# the module of an adapter, as quantwm.worlds.registry asks for it


def world_spec():
    return SPEC


def world_scenes():
    return SmallWorld().scenes()


def presence():
    return Presence(present=True, where="tests", weight_bytes=SmallWorld().weight_bytes())


def load_world(device, progress):
    return SmallWorld()

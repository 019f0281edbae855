"""Frames a second of a world in several lanes whose histories are full."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from quantwm.cache.formats import make_format
from quantwm.cache.kv_cache import KVCache
from quantwm.cache.workspace import Workspace
from quantwm.engine import chunk_noise
from quantwm.lanes import lanes_for, limit_history
from quantwm.worlds.base import ChunkAction, LaneState

if TYPE_CHECKING:
    from quantwm.worlds.base import World

LANES = ("bf16", "qvg", "quantwm")


def frames_per_second(
    world: World, tokens: int, chunks: int, steps: int, names: Sequence[str] = LANES
) -> float:
    """Of all lanes in lock-step: denoising, decoding and clean pass, median over `chunks`.

    Each lane's history holds `tokens` at least and no longer grows. It is filled by clean passes
    over noise, whose cost does not depend on what they see.
    """
    spec = world.spec
    size, per_chunk = spec.cache.frames_per_chunk, spec.cache.tokens_per_chunk
    filled = -(-tokens // per_chunk)
    workspace = Workspace()
    lanes = []
    for config in lanes_for(spec, names):
        policy = limit_history(config.policy, spec.cache, (filled + 1) * per_chunk)
        cache = KVCache(
            spec.cache, make_format(config.method, **config.settings), policy,
            device=world.device, dtype=world.dtype, workspace=workspace,
        )  # fmt: skip
        lanes.append(LaneState(config.name, cache))
    action = ChunkAction.held(frozenset(), size)
    noises = [
        chunk_noise(0, index, (size, *spec.latent_shape)).to(world.device)
        for index in range(filled + chunks + 1)
    ]
    for noise in noises[:filled]:
        for lane in lanes:
            world.commit_chunk(lane, noise.to(world.dtype), action)
    seconds = []
    for noise in noises[filled:]:
        began = time.perf_counter()
        for lane in lanes:
            latents = world.generate_chunk(lane, action, noise, steps).latents
            world.decode(latents)
            world.commit_chunk(lane, latents, action)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        seconds.append(time.perf_counter() - began)
    # the first one warms up
    return size * spec.frames_per_latent / statistics.median(seconds[1:])

"""Several sessions of the embedded world in one pass: their heads lie side by side in one cache.

A small world on a GPU is bound by its launches, and a launch for eight sessions costs no more than
one for one. Everything that a cache does, it does head by head, so a session's history is what it
would be alone, up to the rounding of larger matrix products (and qtc asks about all heads together
when a new basis is worth its bytes).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from quantwm.errors import UserError
from quantwm.worlds.base import ChunkAction, LaneState, StartState
from quantwm.worlds.embedded.autoencoder import to_bytes
from quantwm.worlds.embedded.keys import KeyVector, action_map
from quantwm.worlds.embedded.pose import START, Walk, as_array, follow, pose_features
from quantwm.worlds.embedded.sampler import sample
from quantwm.worlds.embedded.transformer import Attend

if TYPE_CHECKING:
    from quantwm.worlds.embedded.adapter import EmbeddedWorld

WALKS = "walks"  # key of a lane's extra: the walk of every session so far

Vectors = tuple[tuple[KeyVector, ...], ...]
"""Keys of every session's frames."""


class Together:
    """`count` sessions of a loaded world, B below; they begin together and take the same steps.

    `spec` is the world's with B times the heads: session b has heads b * H to (b + 1) * H - 1.
    Results are float32 on a CPU for tests, what the world computes in elsewhere.
    """

    def __init__(self, world: EmbeddedWorld, count: int) -> None:
        if count < 1:
            raise UserError(f"sessions that run together are 1 or more, got {count}")
        self.count, self._world = count, world
        cache = replace(world.spec.cache, heads=count * world.spec.cache.heads)
        self.spec = replace(world.spec, cache=cache)
        self.device, self.dtype = world.device, world.dtype
        self._transformer, self._autoencoder = world.models
        self._rope = world.tables()
        self._graphed = world.capture(self._rope, (count,)) if world.graphed else None
        # Asked for again in every lane.
        self._condition = functools.lru_cache(maxsize=64)(self._make_condition)
        self._pose = functools.lru_cache(maxsize=16)(self._make_pose)

    def value_metric(self, layer: int, stream: str) -> torch.Tensor:
        """As the world's, for all heads: float32 [B * H, D, D]."""
        return self._world.value_metric(layer, stream).repeat(self.count, 1, 1)

    def prefill(self, lane: LaneState, starts: Sequence[StartState]) -> None:
        """Clean passes of every session's context, which is of one length."""
        size = self.spec.cache.frames_per_chunk
        latents = torch.stack([start.latents for start in starts])
        for number, actions in enumerate(zip(*(s.actions for s in starts), strict=True)):
            self.commit_chunk(lane, latents[:, number * size : (number + 1) * size], actions)

    @torch.no_grad()
    def generate_chunk(
        self, lane: LaneState, actions: Sequence[ChunkAction], noise: torch.Tensor, steps: int
    ) -> torch.Tensor:
        """Denoised latents [B, frames, C, h, w] of the next chunk; the history stays as it is.

        actions: one a session. noise: float32 [B, frames, C, h, w].
        """
        vectors = self._vectors(actions)
        lane.cache.begin_chunk(lane.next_frame, self.spec.cache.frames_per_chunk)
        try:
            with self._world.attention_kernels():
                latents, _ = sample(
                    lambda x, sigma: self._pass(lane, x, sigma, vectors, clean=False),
                    noise.to(self.device),
                    steps,
                    self._world.config.sampler.shift,
                )
        finally:
            lane.cache.abort_chunk()
        return latents.to(self.dtype)

    @torch.no_grad()
    def commit_chunk(
        self, lane: LaneState, latents: torch.Tensor, actions: Sequence[ChunkAction]
    ) -> None:
        """The clean pass: keys and values of every session's chunk go to the cache for good."""
        vectors, frames = self._vectors(actions), self.spec.cache.frames_per_chunk
        lane.cache.begin_chunk(lane.next_frame, frames)
        try:
            with self._world.attention_kernels():
                self._pass(lane, latents, 0.0, vectors, clean=True)
            lane.cache.finalize_chunk()
        finally:
            lane.cache.abort_chunk()  # nothing is open once it is finalized
        lane.next_frame += frames
        walks = zip(self._walks(lane), vectors, strict=True)
        lane.extra[WALKS] = tuple(follow(walk, keys)[1] for walk, keys in walks)

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> np.ndarray:
        """latents [B, frames, C, h, w] -> uint8 [B, frames, H, W, 3]."""
        flat = latents.flatten(0, 1)
        if self._graphed is not None:
            pictures = self._graphed[1](flat).to("cpu", copy=True)
        else:
            pictures = to_bytes(self._autoencoder.decode(flat.to(self.device))).cpu()
        return pictures.unflatten(0, latents.shape[:2]).numpy()

    def _pass(
        self, lane: LaneState, latents: torch.Tensor, sigma: float, vectors: Vectors, clean: bool
    ) -> torch.Tensor:
        shared, head = self._condition(sigma, vectors)
        told = self._world.config.transformer.pose
        pose = self._pose(self._walks(lane), vectors) if told else None
        cos, sin = self._rope.seek(lane.next_frame)

        def attend_at(layer: int) -> Attend:
            def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                flat = (part.flatten(0, 1) for part in (q, k, v))
                out = lane.cache.attend(layer, *flat, clean=clean)
                return out.unflatten(0, (self.count, -1))

            return attend

        if self._graphed is not None:
            return self._graphed[0](latents, shared, head, attend_at, pose)
        return self._transformer(latents, shared, head, cos, sin, attend_at, pose=pose)

    def _vectors(self, actions: Sequence[ChunkAction]) -> Vectors:
        if len(actions) != self.count:
            raise UserError(f"{self.count} sessions take as many actions, got {len(actions)}")
        frames = self.spec.cache.frames_per_chunk
        return tuple(action_map(action, frames) for action in actions)

    def _walks(self, lane: LaneState) -> tuple[Walk, ...]:
        return cast("tuple[Walk, ...]", lane.extra.get(WALKS, (START,) * self.count))

    def _make_condition(self, sigma: float, vectors: Vectors) -> tuple[torch.Tensor, torch.Tensor]:
        keys = torch.tensor(vectors, device=self.device)
        return self._transformer.condition(torch.full_like(keys[..., 0], sigma), keys)

    def _make_pose(self, walks: tuple[Walk, ...], vectors: Vectors) -> torch.Tensor:
        """Features of every session's tokens, built on the CPU in float32 as the world does."""
        followed = (follow(walk, keys)[0] for walk, keys in zip(walks, vectors, strict=True))
        poses = torch.stack([torch.from_numpy(as_array(walk)) for walk in followed])
        return pose_features(poses, self._world.config.transformer.grid[1]).to(self.device)

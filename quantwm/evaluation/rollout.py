"""A world run along a truth episode, in one BF16 lane of the product's own cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from quantwm.cache.formats import make_format
from quantwm.cache.kv_cache import KVCache
from quantwm.cache.workspace import Workspace
from quantwm.engine import chunk_noise
from quantwm.evaluation.episodes import Episode
from quantwm.worlds.base import ChunkAction, LaneState

if TYPE_CHECKING:
    from quantwm.tensor_files import TensorRecorder
    from quantwm.worlds.embedded.adapter import EmbeddedWorld


@dataclass
class Run:
    """One lane along one episode.

    window: frames of history that are seen, the current chunk beside them; None: the world's own.
    steps: denoising steps. The noise of a chunk depends on the episode's map and the chunk alone,
    so two runs of one episode differ in their history only.
    """

    world: EmbeddedWorld
    episode: Episode
    steps: int
    window: int | None = None
    recorder: TensorRecorder | None = None

    def __post_init__(self) -> None:
        spec = self.world.spec
        self.size = spec.cache.frames_per_chunk
        self._seed = int(self.episode.origin.get("map_seed", 0))
        policy = spec.policy
        if self.window is not None:
            policy = replace(policy, window_frames=self.window + self.size)
        cache = KVCache(
            spec.cache, make_format("bf16"), policy,
            device=self.world.device, dtype=self.world.dtype, workspace=Workspace(),
        )  # fmt: skip
        if self.recorder is not None:
            cache = self.recorder.attach(cache, spec.cache)
        self._lane = LaneState("bf16", cache)

    def action(self, chunk: int) -> ChunkAction:
        """The episode's keys of a chunk."""
        frames = range(chunk * self.size, (chunk + 1) * self.size)
        return ChunkAction(tuple(self.episode.held(frame) for frame in frames))

    def follow(self, chunks: Iterable[int]) -> None:
        """Truth becomes history: the clean passes of some chunks."""
        for chunk in chunks:
            self._commit(chunk, self._truth(chunk))

    def free(self, chunks: Iterable[int]) -> np.ndarray:
        """The world goes on by itself: its frames, uint8 [chunks * size, H, W, 3]."""
        frames = []
        for chunk in chunks:
            latents = self._generate(chunk)
            self._commit(chunk, latents)
            frames.append(self.world.decode(latents))
        return np.concatenate(frames)

    def forced(self, chunks: Iterable[int]) -> Iterator[np.ndarray]:
        """Each chunk from a history of truth: its frames, uint8 [size, H, W, 3]."""
        for chunk in chunks:
            yield self.world.decode(self._generate(chunk))
            self._commit(chunk, self._truth(chunk))

    def _truth(self, chunk: int) -> torch.Tensor:
        frames = self.episode.clip(chunk * self.size, (chunk + 1) * self.size)
        return self.world.encode(frames)

    def _generate(self, chunk: int) -> torch.Tensor:
        noise = chunk_noise(self._seed, chunk, (self.size, *self.world.spec.latent_shape))
        noise = noise.to(self.world.device)
        return self.world.generate_chunk(self._lane, self.action(chunk), noise, self.steps).latents

    def _commit(self, chunk: int, latents: torch.Tensor) -> None:
        self.world.commit_chunk(self._lane, latents, self.action(chunk))

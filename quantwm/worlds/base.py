"""The protocol that every world model adapter implements, and the plain data it exchanges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from quantwm.cache.spec import CachePolicy, CacheSpec

if TYPE_CHECKING:
    from quantwm.cache.kv_cache import KVCache

KeySet = frozenset[str]
"""Names of the keys held during one latent frame, e.g. frozenset({"w", "right"})."""


@dataclass(frozen=True)
class ChunkAction:
    """Keys held during each latent frame of one chunk; `len(frames) == frames_per_chunk`."""

    frames: tuple[KeySet, ...]

    @classmethod
    def held(cls, keys: KeySet, frames_per_chunk: int) -> ChunkAction:
        return cls((frozenset(keys),) * frames_per_chunk)


@dataclass(frozen=True)
class WorldSpec:
    """What a world is, before anything is loaded.

    Attributes:
        name: the word used on the command line and the page.
        title, licence, source: for people.
        cache: geometry of its KV cache.
        policy: default cache policy (window, sink, codebook span).
        format_settings: per format name, the settings that suit this world (e.g. centroids).
        latent_shape: [channels, height, width] of one latent frame.
        video_size: (width, height) of a decoded frame in pixels.
        fps: frames a second at which its training data ran.
        frames_per_latent: decoded video frames per latent frame.
        keys: physical key name -> what it does, in words (the action map's legend).
        default_steps: denoising steps by device type ("cpu", "cuda").
        context_frames: latent frames that a start scene provides.
        resolutions: other (width, height) that its weights were trained for.
        remade: whether its history is chosen and cached anew for every chunk, as one chunk.
    """

    name: str
    title: str
    licence: str
    source: str
    cache: CacheSpec
    policy: CachePolicy
    format_settings: Mapping[str, Mapping[str, object]]
    latent_shape: tuple[int, int, int]
    video_size: tuple[int, int]
    fps: float
    frames_per_latent: int
    keys: Mapping[str, str]
    default_steps: Mapping[str, int]
    context_frames: int
    resolutions: tuple[tuple[int, int], ...] = ()
    remade: bool = False


@dataclass(frozen=True)
class Scene:
    """A start scene that ships with a world."""

    name: str
    title: str
    thumbnail: str  # path of a PNG or WebP


@dataclass(frozen=True)
class Script:
    """Keys to play instead of a person's: actions as the command line takes them ("w-8, right-12").

    scene: the start scene that it was written for, None for any.
    """

    name: str
    title: str
    actions: str
    scene: str | None = None


@dataclass(frozen=True)
class StartState:
    """Context that a rollout starts from.

    Attributes:
        latents: [frames, channels, height, width], clean, compute dtype; frames is a multiple
            of frames_per_chunk.
        actions: one ChunkAction per context chunk.
        frames: uint8 [video frames, H, W, 3], what the viewer sees as the context.
    """

    latents: torch.Tensor
    actions: tuple[ChunkAction, ...]
    frames: np.ndarray


@dataclass
class LaneState:
    """What one lane carries from chunk to chunk: its cache and the world's own per-lane state."""

    name: str
    cache: KVCache
    next_frame: int = 0
    extra: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class ChunkOutput:
    """latents: [frames, C, H, W], the denoised chunk; x0: clean prediction of each step."""

    latents: torch.Tensor
    x0: tuple[torch.Tensor, ...]


class World(Protocol):
    """One loaded world model. Weights are shared by all lanes; per-lane state is LaneState."""

    spec: WorldSpec
    device: torch.device
    dtype: torch.dtype

    def scenes(self) -> Sequence[Scene]: ...

    def start(
        self, scene: str | None, image: np.ndarray | None, prompt: str, seed: int
    ) -> StartState:
        """Encode a start scene (or a person's picture). UserError on an unknown scene."""
        ...

    def generate_chunk(
        self, lane: LaneState, action: ChunkAction, noise: torch.Tensor, steps: int
    ) -> ChunkOutput:
        """Denoise one chunk against lane.cache (no clean pass, the cache's history is unchanged).

        noise: [frames_per_chunk, C, H, W] float32, the same for every lane.
        """
        ...

    def commit_chunk(self, lane: LaneState, latents: torch.Tensor, action: ChunkAction) -> None:
        """Clean pass: write the K/V of finished latents to lane.cache and finalize the chunk."""
        ...

    def decode(self, latents: torch.Tensor) -> np.ndarray:
        """latents [frames, C, H, W] -> uint8 [frames * frames_per_latent, H, W, 3]."""
        ...

    def weight_bytes(self) -> int: ...

    def weights_sha256(self) -> str:
        """One hash over all weight files, from the manifest (files are checked at load)."""
        ...

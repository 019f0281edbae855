"""Plain data that the engine hands to the page, the recorder and the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from quantwm.cache.spec import CachePolicy
from quantwm.worlds.base import ChunkAction


@dataclass(frozen=True)
class LaneConfig:
    """One lane: a label, a cache format with its settings, and the cache policy.

    `settings` are keyword arguments of the format's config (quantwm.cache.make_format).
    """

    name: str
    method: str
    settings: Mapping[str, object]
    policy: CachePolicy


@dataclass(frozen=True)
class LaneResult:
    """One lane's part of a chunk.

    Attributes:
        frames: uint8 [T, H, W, 3].
        ms: wall time of this lane's denoising and clean pass, synchronised, milliseconds.
        kv_bytes: bytes its cache holds (ledger total, scratch excluded).
        ratio: nominal ratio (compressed tokens only); 1.0 for BF16, None before any is encoded.
        resident_ratio: BF16 bytes of all tokens over everything held.
        tokens: tokens of history held.
    """

    name: str
    frames: np.ndarray
    ms: float
    kv_bytes: int
    ratio: float | None
    resident_ratio: float
    tokens: int


@dataclass(frozen=True)
class MemoryReading:
    """Bytes on the device that runs the model, by part; `source` says where each number is from.

    parts: ordered part name -> bytes ("weights", "kv:<lane>", "scratch", "other", ...).
    total: capacity of the device (or of the machine's RAM on a CPU); used: what is taken of it.
    """

    source: str
    parts: Mapping[str, int]
    used: int
    total: int


@dataclass(frozen=True)
class BlockResult:
    """What one chunk produced, for every lane, from the same action and the same noise.

    index 0 holds the start scene's context frames (the same pictures for all lanes).
    prompt: what the chunk is the first to be made under, None where the prompt did not change.
    """

    index: int
    first_frame: int
    action: ChunkAction
    lanes: tuple[LaneResult, ...]
    memory: MemoryReading
    ms: float
    x0: Mapping[str, tuple[torch.Tensor, ...]]
    prompt: str | None = None


class EngineLike(Protocol):
    """What the page needs of an engine; tests put a small deterministic one behind it."""

    lanes: Sequence[LaneConfig]

    def start(self) -> BlockResult: ...

    def step(self, action: ChunkAction) -> BlockResult: ...

    def change_prompt(self, prompt: str) -> None: ...

    def explain(self) -> str:
        """Which kernels run and why, one line."""
        ...

    def close(self) -> None: ...

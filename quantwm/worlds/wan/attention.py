"""Where positions meet the cache: one attention object per forward pass and key convention."""

from __future__ import annotations

from functools import lru_cache

import torch

from quantwm.cache.attention import attention
from quantwm.cache.kv_cache import KVCache
from quantwm.worlds.wan.layers import EPS, kernels_for
from quantwm.worlds.wan.prope import Cameras, apply
from quantwm.worlds.wan.rotary import Turns, frame_angles, rotate, table_dtype

Grid = tuple[int, int]
"""Rows and columns of tokens in one latent frame."""


def softmax_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [H, Nq, D], k and v [H, Nk, D] -> [H, Nq, D], by the backend that the cache would take."""
    return attention(q, k, v)


class Positions:
    """Rotary table of a run of latent frames, in the dtype that rotate wants."""

    def __init__(self, frames: torch.Tensor, grid: Grid, head_dim: int, dtype: torch.dtype) -> None:
        cos, sin = frame_angles(frames, grid, head_dim)
        self.turns: Turns = (cos.to(table_dtype(dtype)), sin.to(table_dtype(dtype)))

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        """x: [H, frames * tokens, D] -> the same, rotated."""
        kernels = kernels_for(x, x.shape[0] * x.shape[2], x.shape[2])
        if kernels is not None:
            return kernels.turn(x, None, self.turns, EPS)
        return rotate(x, *self.turns)


def frame_range(first: int, count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(first, first + count, device=device)


@lru_cache(maxsize=2)
def chunk_positions(
    first: int, frames: int, grid: Grid, head_dim: int, dtype: torch.dtype, device: torch.device
) -> Positions:
    """The table of one chunk; every pass of every lane asks for it again."""
    with torch.inference_mode(False):
        return Positions(frame_range(first, frames, device), grid, head_dim, dtype)


class AbsoluteAttention:
    """Keys are cached after RoPE at absolute frame positions (Causal-Forcing, LingBot,
    Matrix-Game-2)."""

    def __init__(
        self, cache: KVCache, first_frame: int, frames: int, grid: Grid, clean: bool
    ) -> None:
        self.cache, self.clean = cache, clean
        self.lasting = False  # who calls it with static tensors says so
        self.positions = chunk_positions(
            first_frame, frames, grid, cache.spec.head_dim, cache.dtype, cache.device
        )
        self.turns: Turns | None = self.positions.turns

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return (self.cache.attend(layer, q, k, v, clean=self.clean, lasting=self.lasting),)


class StreamHistory:
    """Keys and values of another cached stream (Matrix-Game-2's mouse and keyboard)."""

    def __init__(self, cache: KVCache, stream: str, clean: bool) -> None:
        self.cache, self.stream, self.clean = cache, stream, clean

    def __call__(
        self, layer: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cache.gather(layer, k, v, clean=self.clean, stream=self.stream)


class MemoryAttention:
    """Keys and values are cached un-rotated, once; RoPE and PRoPE are derived at every read.

    Both are exact invertible maps of the same k and v, so one stored copy serves two branches.
    Positions are those of the memory in its order, then of the chunk; nothing is absolute.
    """

    turns: Turns | None = None

    def __init__(self, cache: KVCache, cameras: Cameras, frames: int, grid: Grid, clean: bool):
        """cameras: of all attended latent frames, memory first; frames: of the chunk itself."""
        self.cache, self.cameras, self.clean = cache, cameras, clean
        total = cameras.projection.shape[0]
        self.own = slice(total - frames, total)
        head_dim, dtype, device = cache.spec.head_dim, cache.dtype, cache.device
        self.keys = Positions(frame_range(0, total, device), grid, head_dim, dtype)
        self.queries = Positions(frame_range(total - frames, frames, device), grid, head_dim, dtype)

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        keys, values = self.cache.gather(layer, k, v, clean=self.clean, q=q)
        rotary = softmax_attention(self.queries.turn(q), self.keys.turn(keys), values)
        projection, inverse = self.cameras.projection, self.cameras.inverse
        own = projection[self.own]
        projective = softmax_attention(
            apply(own.transpose(1, 2), q), apply(inverse, keys), apply(inverse, values)
        )
        return rotary, apply(own, projective)


class AnchoredAttention:
    """Long-video mode: the first chunk's keys are cached un-rotated and turned at every read.

    The anchor's position moves with the window, so its distance to the newest frames stays what
    training saw.
    """

    turns: Turns | None = None

    def __init__(
        self,
        cache: KVCache,
        first_frame: int,
        frames: int,
        grid: Grid,
        clean: bool,
        anchor_frames: int,
        attended: tuple[int, ...],
        anchored: int,
        anchor_start: int | None,
    ) -> None:
        """attended: history frames seen besides the anchor, ascending; anchored: how many of the
        anchor's newest frames are seen; anchor_start: position of the first of them."""
        self.cache, self.clean = cache, clean
        self.tokens = grid[0] * grid[1]
        self.is_anchor = first_frame == 0
        self.attended = attended
        head_dim, dtype, device = cache.spec.head_dim, cache.dtype, cache.device

        def at(first: int, count: int) -> Positions:
            return Positions(frame_range(first, count, device), grid, head_dim, dtype)

        self.positions = at(first_frame, frames)
        self.anchor = None if anchor_start is None else at(anchor_start, anchored)
        self.anchor_tokens = slice(
            (anchor_frames - anchored) * self.tokens, anchor_frames * self.tokens
        )

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        q = self.positions.turn(q)
        turned = self.positions.turn(k)
        keys, values = self.cache.gather(
            layer, k if self.is_anchor else turned, v, clean=self.clean, q=q
        )
        keys, values = self._select(keys, values, turned.shape[1])
        return (softmax_attention(q, torch.cat([keys, turned], dim=1), values),)

    def _select(
        self, keys: torch.Tensor, values: torch.Tensor, own: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """History keys that are seen, and values of history and chunk."""
        per_frame, past = self.tokens, keys.shape[1] - own
        newest = len(self.attended) * per_frame
        picked_k, picked_v = [], []
        if self.anchor is not None:
            picked_k.append(self.anchor.turn(keys[:, self.anchor_tokens]))
            picked_v.append(values[:, self.anchor_tokens])
        picked_k.append(keys[:, past - newest : past])
        picked_v.append(values[:, past - newest :])
        return torch.cat(picked_k, dim=1), torch.cat(picked_v, dim=1)

"""Batched rollouts through a plain dense history, to measure the model itself during training."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from quantwm.worlds.embedded.config import TransformerConfig
from quantwm.worlds.embedded.pose import pose_features
from quantwm.worlds.embedded.rope import ChunkTables
from quantwm.worlds.embedded.sampler import sample
from quantwm.worlds.embedded.transformer import Attend, Transformer


class DenseHistory:
    """Keys and values of all past chunks per layer, [B, heads, tokens, head_dim], uncompressed.

    Memory for `capacity` chunks is taken at the first one. window: how many past chunks are seen;
    None sees all.
    """

    def __init__(self, config: TransformerConfig, capacity: int, window: int | None = None) -> None:
        self._chunk, self._capacity, self._window = config.tokens_per_chunk, capacity, window
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._chunks = 0
        self._config = config
        self._tables: ChunkTables | None = None

    def tables(self, first_frame: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """RoPE tables of the chunk that begins at first_frame."""
        config = self._config
        if self._tables is None:
            self._tables = ChunkTables(
                config.frames_per_chunk, config.grid, config.head_dim, config.rope_theta, device
            )
        return self._tables.seek(first_frame)

    def attend_at(self, layer: int, clean: bool) -> Attend:
        """The attention of a layer; clean keeps this chunk's keys and values."""

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if layer == len(self._layers):
                shape = (*k.shape[:-2], self._capacity * self._chunk, k.shape[-1])
                self._layers.append((k.new_empty(shape), v.new_empty(shape)))
            keys, values = self._layers[layer]
            start = self._chunks * self._chunk
            end = start + self._chunk
            first = 0
            if self._window is not None:
                first = max(0, start - self._window * self._chunk)
            # the place of this chunk is written by noisy passes too, and last by the clean one
            keys[..., start:end, :], values[..., start:end, :] = k, v
            out = F.scaled_dot_product_attention(
                q, keys[..., first:end, :], values[..., first:end, :]
            )
            if clean and layer == self._config.layers - 1:
                self._chunks += 1
            return out

        return attend


@torch.no_grad()
def forward_chunk(
    model: Transformer,
    history: DenseHistory,
    latents: torch.Tensor,
    sigma: float,
    keys: torch.Tensor,
    first_frame: int,
    clean: bool,
    pose: torch.Tensor | None = None,
) -> torch.Tensor:
    """One pass over a chunk [B, frames, C, H, W]; pose: its features.

    clean writes its keys and values to history.
    """
    device = latents.device
    cos, sin = history.tables(first_frame, device)
    levels = torch.full(latents.shape[:2], sigma, device=device)
    shared, head = model.condition(levels, keys)
    attend_at = partial(history.attend_at, clean=clean)
    return model(latents, shared, head, cos, sin, attend_at, pose=pose)


@torch.no_grad()
def roll_out(
    model: Transformer,
    truth: torch.Tensor,
    keys: torch.Tensor,
    context_chunks: int | torch.Tensor,
    steps: int,
    shift: float,
    seed: int,
    teacher_forced: bool,
    window: int | None = None,
    poses: torch.Tensor | None = None,
    told: torch.Tensor | None = None,
) -> torch.Tensor:
    """Continues clips after their context; returns latents shaped as truth [B, T, C, H, W].

    context_chunks: of all clips, or [B] on the CPU, of each. poses: [B, T, 3] of
    `reckoned_poses`; told: their features where these exist already. The context is copied. With
    teacher_forced every chunk's history holds the truth; otherwise the model's own chunks.
    """
    per_chunk, device = model.config.frames_per_chunk, truth.device
    history = DenseHistory(model.config, truth.shape[1] // per_chunk, window)
    generator = torch.Generator(device).manual_seed(seed)
    out = truth.float().clone()
    if poses is not None:
        told = pose_features(poses, model.config.grid[1])
    contexts = torch.as_tensor(context_chunks).expand(len(truth))
    shortest, given = int(contexts.min()), contexts.to(device)[:, None, None, None, None]
    for start in range(0, truth.shape[1], per_chunk):
        span = slice(start, start + per_chunk)
        held, pose = keys[:, span], None if told is None else told[:, span]
        chunk = start // per_chunk
        if chunk >= shortest:
            noise = torch.randn(out[:, span].shape, generator=generator, device=device)

            def predict(
                x: torch.Tensor, sigma: float, first: int = start, held: torch.Tensor = held,
                pose: torch.Tensor | None = pose,
            ) -> torch.Tensor:  # fmt: skip
                return forward_chunk(model, history, x, sigma, held, first, False, pose)

            drawn, _ = sample(predict, noise, steps, shift)
            out[:, span] = torch.where(chunk < given, out[:, span], drawn)
        past = truth[:, span].float() if teacher_forced else out[:, span]
        forward_chunk(model, history, past, 0.0, held, start, True, pose)
    return out

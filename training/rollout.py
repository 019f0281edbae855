"""Batched rollouts through a plain dense history, to measure the model itself during training."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F

from quantwm.worlds.embedded.pose import pose_features
from quantwm.worlds.embedded.rope import rope_tables
from quantwm.worlds.embedded.sampler import sample
from quantwm.worlds.embedded.transformer import Attend, Transformer


@dataclass
class DenseHistory:
    """Keys and values of all past chunks per layer, [B, heads, tokens, head_dim], uncompressed.

    window: how many past chunks are seen; None sees all.
    """

    chunk_tokens: int
    window: int | None = None
    _keys: dict[int, torch.Tensor] = field(default_factory=dict)
    _values: dict[int, torch.Tensor] = field(default_factory=dict)

    def attend_at(self, layer: int, clean: bool) -> Attend:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if layer in self._keys:
                past_k, past_v = self._keys[layer], self._values[layer]
                if self.window is not None:
                    start = max(0, past_k.shape[-2] - self.window * self.chunk_tokens)
                    past_k, past_v = past_k[..., start:, :], past_v[..., start:, :]
                k, v = torch.cat((past_k, k), dim=-2), torch.cat((past_v, v), dim=-2)
            out = F.scaled_dot_product_attention(q, k, v)
            if clean:
                self._keys[layer], self._values[layer] = k, v
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
    config, device = model.config, latents.device
    frames = latents.shape[1]
    cos, sin = rope_tables(
        first_frame, frames, config.grid, config.head_dim, config.rope_theta, device
    )
    levels = torch.full(latents.shape[:2], sigma, device=device)
    shared, head = model.condition(levels, keys)
    attend_at = partial(history.attend_at, clean=clean)
    return model(latents, shared, head, cos, sin, attend_at, pose=pose)


@torch.no_grad()
def roll_out(
    model: Transformer,
    truth: torch.Tensor,
    keys: torch.Tensor,
    context_chunks: int,
    steps: int,
    shift: float,
    seed: int,
    teacher_forced: bool,
    window: int | None = None,
    poses: torch.Tensor | None = None,
) -> torch.Tensor:
    """Continues clips after their context; returns latents shaped as truth [B, T, C, H, W].

    poses: [B, T, 3] of `reckoned_poses`. The context is copied. With teacher_forced every chunk's
    history holds the truth; otherwise the model's own chunks.
    """
    per_chunk, device = model.config.frames_per_chunk, truth.device
    history = DenseHistory(model.config.tokens_per_chunk, window)
    generator = torch.Generator(device).manual_seed(seed)
    out = truth.float().clone()
    columns = model.config.grid[1]
    told = None if poses is None else pose_features(poses, columns)
    for start in range(0, truth.shape[1], per_chunk):
        span = slice(start, start + per_chunk)
        held, pose = keys[:, span], None if told is None else told[:, span]
        if start >= context_chunks * per_chunk:
            noise = torch.randn(out[:, span].shape, generator=generator, device=device)

            def predict(
                x: torch.Tensor, sigma: float, first: int = start, held: torch.Tensor = held,
                pose: torch.Tensor | None = pose,
            ) -> torch.Tensor:  # fmt: skip
                return forward_chunk(model, history, x, sigma, held, first, False, pose)

            out[:, span], _ = sample(predict, noise, steps, shift)
        past = truth[:, span].float() if teacher_forced else out[:, span]
        forward_chunk(model, history, past, 0.0, held, start, True, pose)
    return out

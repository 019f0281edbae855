"""The causal Wan transformer that four model families share, on diffusers' parameter names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from quantwm.errors import UserError
from quantwm.worlds.wan.action_module import ActionModule, ActionPass
from quantwm.worlds.wan.config import WanConfig
from quantwm.worlds.wan.layers import (
    EPS,
    Embedding,
    FeedForward,
    ImageEmbedding,
    RMSNorm,
    kernels_for,
    layer_norm,
    linear,
    linear_fp32,
    merge_heads,
    normed_heads,
    sinusoid,
    split_heads,
)
from quantwm.worlds.wan.rotary import Turns

ContextKV = tuple[tuple[torch.Tensor, torch.Tensor], ...]
"""Cross-attention keys and values of every layer, each [heads, rows, head_dim]."""


class SelfAttention(Protocol):
    """Owns positions and history.

    Attributes:
        turns: by which q and k come rotated; None where they come un-rotated.
    """

    turns: Turns | None

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """q, k, v: [heads, N, head_dim] -> one [heads, N, head_dim], two with a PRoPE branch."""
        ...


@dataclass
class Pass:
    """What one forward pass needs besides the latents.

    Attributes:
        timesteps: [F] per latent frame, on the 0..1000 scale.
        attention: self-attention over history and chunk.
        context: cross-attention keys and values (see CausalWan.context_kv).
        camera: [N, width] embedded camera condition (see CausalWan.camera_rows).
        labels: [F] integer action labels of the PRoPE models.
        action: Matrix-Game-2's action rows and their caches.
    """

    timesteps: torch.Tensor
    attention: SelfAttention
    context: ContextKV
    camera: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    action: ActionPass | None = None


Vectors = tuple[torch.Tensor, ...]
"""Shift, scale and gate of the attention, then of the feed-forward."""
Forward = Callable[[torch.Tensor, Pass], torch.Tensor]
"""Latents [in_channels, F, H, W] and what goes with them -> flow [out_channels, F, H, W]."""


def by_frame(x: torch.Tensor, frames: int) -> torch.Tensor:
    """[frames * tokens, C] -> [frames, tokens, C], a view: one modulation row per frame."""
    return x.unflatten(0, (frames, -1))


class Attention(nn.Module):
    """Projections and norms of one attention; qk-norm runs over the whole width."""

    def __init__(self, width: int, heads: int, prope: bool) -> None:
        super().__init__()
        self.heads = heads
        self.norm_q = RMSNorm(width)
        self.norm_k = RMSNorm(width)
        self.to_q = nn.Linear(width, width)
        self.to_k = nn.Linear(width, width)
        self.to_v = nn.Linear(width, width)
        self.to_out = nn.ModuleList([nn.Linear(width, width)])
        if prope:
            self.to_out_prope = nn.ModuleList([nn.Linear(width, width)])

    def queries(self, x: torch.Tensor, turns: Turns | None = None) -> torch.Tensor:
        return normed_heads(self.norm_q, linear(self.to_q, x), self.heads, turns)

    def keys_values(
        self, x: torch.Tensor, turns: Turns | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k = normed_heads(self.norm_k, linear(self.to_k, x), self.heads, turns)
        return k, split_heads(linear(self.to_v, x), self.heads)

    def output(self, *branches: torch.Tensor) -> torch.Tensor:
        out = linear(self.to_out[0], merge_heads(branches[0]))
        if len(branches) == 2:
            out = out + linear(self.to_out_prope[0], merge_heads(branches[1]))
        return out


class Block(nn.Module):
    """Self-attention, camera, cross-attention, actions, feed-forward; each where configured."""

    def __init__(self, config: WanConfig, index: int) -> None:
        super().__init__()
        width = config.width
        self.index = index
        self.rules = config.rules
        self.attn1 = Attention(width, config.heads, config.prope)
        self.attn2 = Attention(width, config.heads, prope=False)
        self.norm2 = nn.LayerNorm(width)
        self.ffn = FeedForward(width, config.ffn_dim, width, tanh=True)
        self.scale_shift_table = nn.Parameter(torch.zeros(1, 6, width))
        self.camera = config.camera
        if config.camera:
            self.cam_injector_layer1 = nn.Linear(width, width)
            self.cam_injector_layer2 = nn.Linear(width, width)
            self.cam_scale_layer = nn.Linear(width, width)
            self.cam_shift_layer = nn.Linear(width, width)
        if config.action is not None and index in config.action.layers:
            self.action_model = ActionModule(config.action, width)
            self.action_index = config.action.layers.index(index)

    def forward(self, x: torch.Tensor, modulation: torch.Tensor, inputs: Pass) -> torch.Tensor:
        """x: [N, width]; modulation: [F, 6, width] -> [N, width]."""
        vectors = self.vectors(modulation)
        attention = inputs.attention
        attended = attention(self.index, *self.before(x, vectors, attention.turns))
        x = self.after(x, attended, vectors, inputs.context[self.index], inputs.camera)
        if inputs.action is not None and self.acts:
            x = self.action_model(self.action_index, x, inputs.action)
        return self.finish(x, vectors)

    @property
    def acts(self) -> bool:
        return hasattr(self, "action_model")

    def vectors(self, modulation: torch.Tensor) -> Vectors:
        """The six modulation vectors, each [F, 1, width] and broadcast over a frame's tokens.

        Rows per token would cost 0.8 GB of writes per block of the 14B model.
        """
        table = self.scale_shift_table
        rows = (table.float() if self.rules.modulation_fp32 else table) + modulation
        return rows[:, :, None].unbind(1)

    def before(
        self, x: torch.Tensor, vectors: Vectors, turns: Turns | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v [heads, N, head_dim] of the self-attention, q and k rotated by turns, if any."""
        hidden = self._modulated(x, vectors[0], vectors[1])
        return self.attn1.queries(hidden, turns), *self.attn1.keys_values(hidden, turns)

    def after(
        self,
        x: torch.Tensor,
        attended: Sequence[torch.Tensor],
        vectors: Vectors,
        context: tuple[torch.Tensor, torch.Tensor],
        camera: torch.Tensor | None,
    ) -> torch.Tensor:
        """Self-attention's result, camera and cross-attention into the stream."""
        x = self._added(x, self.attn1.output(*attended), vectors[2])
        if self.camera and camera is not None:
            x = self._with_camera(x, camera)
        return x + self._cross_attention(self._norm(x, self.norm2), context)

    def finish(self, x: torch.Tensor, vectors: Vectors) -> torch.Tensor:
        """The feed-forward."""
        hidden = self._modulated(x, vectors[3], vectors[4])
        return self._added(x, self.ffn(hidden), vectors[5])

    def _modulated(self, x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        if not self.rules.modulation_fp32:
            kernels = kernels_for(x, x.shape[-1], x.shape[-1] // self.attn1.heads)
            if kernels is not None:
                return kernels.modulate(x, shift, scale, EPS)
            normed = layer_norm(x)
        elif self.rules.residual_fp32:
            # Under autocast the norm of a BF16 stream is rounded before it is modulated.
            normed = self._norm(x).float()
        else:
            normed = layer_norm(x.float())
        modulated = by_frame(normed, len(scale)) * (1 + scale) + shift
        return modulated.flatten(0, 1).to(x.dtype)

    def _norm(self, x: torch.Tensor, affine: nn.LayerNorm | None = None) -> torch.Tensor:
        return layer_norm(x, affine, fp32=self.rules.modulation_fp32)

    def _added(self, x: torch.Tensor, update: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        if not self.rules.modulation_fp32:
            kernels = kernels_for(x, x.shape[-1], x.shape[-1] // self.attn1.heads)
            if kernels is not None:
                return kernels.gated(x, update, gate)
        total = x + (by_frame(update, len(gate)) * gate).flatten(0, 1)
        return total if self.rules.residual_fp32 else total.to(x.dtype)

    def _with_camera(self, x: torch.Tensor, camera: torch.Tensor) -> torch.Tensor:
        hidden = linear(self.cam_injector_layer2, F.silu(linear(self.cam_injector_layer1, camera)))
        hidden = hidden + camera
        scale, shift = linear(self.cam_scale_layer, hidden), linear(self.cam_shift_layer, hidden)
        return (1 + scale) * x + shift

    def _cross_attention(
        self, x: torch.Tensor, context: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        k, v = context
        q = self.attn2.queries(x)
        return self.attn2.output(F.scaled_dot_product_attention(q[None], k[None], v[None])[0])


class ConditionEmbedder(nn.Module):
    """Time, context and action-label embeddings."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        width = config.width
        self.time_embedder = Embedding(config.freq_dim, width, gelu=False)
        self.time_proj = nn.Linear(width, 6 * width)
        if config.context == "text":
            self.text_embedder = Embedding(config.context_dim, width, gelu=True)
        else:
            self.image_embedder = ImageEmbedding(config.context_dim, width)
        if config.prope:
            self.action_embedder = Embedding(config.freq_dim, width, gelu=False)


class CausalWan(nn.Module):
    """The transformer: latents of a chunk in, flow of the chunk out, batch of one.

    Constructible on the meta device; holds no buffers.
    """

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.config = config
        # Entered around a block's work: where its weights wait on the CPU, they visit.
        self.visit: Callable[[nn.Module], AbstractContextManager[object]] = nullcontext
        width = config.width
        self.patch_embedding = nn.Conv3d(config.in_channels, width, (1, 2, 2), (1, 2, 2))
        self.condition_embedder = ConditionEmbedder(config)
        self.blocks = nn.ModuleList([Block(config, index) for index in range(config.layers)])
        self.proj_out = nn.Linear(width, 4 * config.out_channels)
        self.scale_shift_table = nn.Parameter(torch.zeros(1, 2, width))
        if config.camera:
            self.patch_embedding_wancamctrl = nn.Linear(4 * config.camera_channels, width)
            self.c2ws_hidden_states_layer1 = nn.Linear(width, width)
            self.c2ws_hidden_states_layer2 = nn.Linear(width, width)

    @property
    def dtype(self) -> torch.dtype:
        return self.proj_out.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.proj_out.weight.device

    def context_kv(self, rows: torch.Tensor) -> ContextKV:
        """rows: [n, context_dim] text or image features -> cross-attention K/V of every layer.

        Text rows are filled up with zero rows to context_len, which the cross-attention sees.
        """
        config = self.config
        if rows.shape[-1] != config.context_dim:
            raise UserError(
                f"the text or image encoder is of another model: its features have "
                f"{rows.shape[-1]} channels, the transformer takes {config.context_dim}"
            )
        rows = rows.to(self.dtype)
        if len(rows) > config.context_len:
            raise UserError(f"at most {config.context_len} context rows, got {len(rows)}")
        if config.context == "text":
            rows = F.pad(rows, (0, 0, 0, config.context_len - len(rows)))
            rows = self.condition_embedder.text_embedder(rows)
        else:
            rows = self.condition_embedder.image_embedder(rows)
        found = []
        for block in self.blocks:
            with self.visit(block):
                found.append(block.attn2.keys_values(rows))
        return tuple(found)

    def camera_rows(self, embedding: torch.Tensor) -> torch.Tensor:
        """Camera embedding [camera_channels, F, H, W] -> [N, width], once per chunk."""
        channels, frames, height, width = embedding.shape
        cells = embedding.to(self.dtype).reshape(channels, frames, height // 2, 2, width // 2, 2)
        rows = cells.permute(1, 2, 4, 0, 3, 5).reshape(-1, 4 * channels)
        rows = linear(self.patch_embedding_wancamctrl, rows)
        hidden = F.silu(linear(self.c2ws_hidden_states_layer1, rows))
        return rows + linear(self.c2ws_hidden_states_layer2, hidden)

    def forward(self, latents: torch.Tensor, inputs: Pass) -> torch.Tensor:
        """latents: [in_channels, F, H, W] -> flow [out_channels, F, H, W]."""
        frames, height, width = latents.shape[1:]
        x = self.enter(latents)
        time, modulation = self.times(inputs.timesteps, inputs.labels)
        for block in self.blocks:
            with self.visit(block):
                x = block(x, modulation, inputs)
        return self.leave(x, time, (frames, height // 2, width // 2))

    def enter(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents to tokens [N, width], in the order frame, row, column."""
        return self.patch_embedding(latents[None].to(self.dtype))[0].flatten(1).T.contiguous()

    def times(
        self, timesteps: torch.Tensor, labels: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Time vector [F, width] and modulation [F, 6, width]."""
        rules, embedder = self.config.rules, self.condition_embedder
        # Autocast models keep the whole time path in FP32, the others in the weights' dtype.
        fp32 = rules.residual_fp32
        wave = sinusoid(timesteps, self.config.freq_dim, rules.sinusoid_fp64)
        time = embedder.time_embedder(wave.float() if fp32 else wave.to(self.dtype), fp32=fp32)
        if labels is not None:
            wave = sinusoid(labels, self.config.freq_dim, rules.sinusoid_fp64)
            time = time + embedder.action_embedder(wave.to(self.dtype))
        apply = linear_fp32 if fp32 else linear
        modulation = apply(embedder.time_proj, F.silu(time)).unflatten(1, (6, -1))
        return time, modulation.float() if rules.modulation_fp32 else modulation

    def leave(
        self, x: torch.Tensor, time: torch.Tensor, grid: tuple[int, int, int]
    ) -> torch.Tensor:
        """Tokens to flow; grid: frames, rows and columns of tokens."""
        rules = self.config.rules
        table = self.scale_shift_table.float() if rules.modulation_fp32 else self.scale_shift_table
        shift, scale = (table + time[:, None])[:, :, None].unbind(1)
        normed = layer_norm(x.float() if rules.modulation_fp32 else x)
        out = (by_frame(normed, grid[0]) * (1 + scale) + shift).flatten(0, 1)
        if rules.residual_fp32:
            out = linear_fp32(self.proj_out, out)
        else:
            out = linear(self.proj_out, out.to(x.dtype))
        frames, rows, columns = grid
        patches = out.reshape(frames, rows, columns, 2, 2, -1)
        return patches.permute(5, 0, 1, 3, 2, 4).reshape(-1, frames, 2 * rows, 2 * columns)

"""Matrix-Game-2's action module: keyboard and mouse rows attended over time, per block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from quantwm.worlds.wan.config import ActionConfig
from quantwm.worlds.wan.layers import EPS, linear
from quantwm.worlds.wan.rotary import angles, rotate


class ActionHistory(Protocol):
    """Keys and values of one stream, history then chunk; frames in time order."""

    def __call__(
        self, layer: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """k, v of the chunk [heads, N, D] -> of everything attended [heads, M, D]."""
        ...


@dataclass
class ActionPass:
    """Action inputs of one chunk.

    Attributes:
        keyboard: [F, rows, keyboard_dim] windows of action rows (see action_windows).
        mouse: [F, rows, mouse_dim], or None for a model without a mouse.
        first_frame: absolute latent frame of the chunk's first frame.
        keyboard_history, mouse_history: the two cached streams.
    """

    keyboard: torch.Tensor
    mouse: torch.Tensor | None
    first_frame: int
    keyboard_history: ActionHistory
    mouse_history: ActionHistory | None


def action_windows(
    rows: torch.Tensor, first_frame: int, frames: int, config: ActionConfig
) -> torch.Tensor:
    """The action rows that each latent frame sees.

    rows: [N, dim], one per video frame from the start of the rollout -> [frames, window rows,
    dim]. Latent frame f sees rows 4f-12 .. 4f-1; negative rows repeat row 0.
    """
    ends = torch.arange(first_frame, first_frame + frames, device=rows.device)
    offsets = torch.arange(-config.rows, 0, device=rows.device)
    index = ends[:, None] * config.rows_per_frame + offsets[None]
    return rows[index.clamp(min=0)]


def _unit_rms(x: torch.Tensor) -> torch.Tensor:
    """RMS norm in the dtype of x; its stored weight is never applied by the published model."""
    return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + EPS)


class _Weight(nn.Module):
    """A norm weight that the checkpoint holds and the published model does not apply."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


class ActionModule(nn.Module):
    """Mouse: temporal attention per latent cell. Keyboard: cells attend to embedded key rows."""

    def __init__(self, config: ActionConfig, width: int) -> None:
        super().__init__()
        self.config = config
        inner, embed = config.width, config.embed_dim
        self.keyboard_embed = nn.Sequential(
            nn.Linear(config.keyboard_dim, embed), nn.SiLU(), nn.Linear(embed, embed)
        )
        if config.mouse_dim:
            self.mouse_mlp = nn.Sequential(
                nn.Linear(width + config.rows * config.mouse_dim, inner),
                nn.GELU(approximate="tanh"),
                nn.Linear(inner, inner),
                nn.LayerNorm(inner),
            )
            self.t_qkv = nn.Linear(inner, 3 * inner, bias=False)
            self.img_attn_q_norm = _Weight(config.head_dim)
            self.img_attn_k_norm = _Weight(config.head_dim)
            self.proj_mouse = nn.Linear(inner, width, bias=False)
        self.key_attn_q_norm = _Weight(config.head_dim)
        self.key_attn_k_norm = _Weight(config.head_dim)
        self.mouse_attn_q = nn.Linear(width, inner, bias=False)
        self.keyboard_attn_kv = nn.Linear(config.rows * embed, 2 * inner, bias=False)
        self.proj_keyboard = nn.Linear(inner, width, bias=False)

    def forward(self, layer: int, x: torch.Tensor, action: ActionPass) -> torch.Tensor:
        """x: [F * cells, width] -> the same, actions added."""
        if action.mouse is not None and self.config.mouse_dim:
            x = x + self._mouse(layer, x, action)
        return x + self._keyboard(layer, x, action)

    def _turn(self, x: torch.Tensor, first_frame: int) -> torch.Tensor:
        """Rotate x [..., F, D] by its latent frames."""
        positions = torch.arange(first_frame, first_frame + x.shape[-2], device=x.device)
        table = angles(positions, self.config.rope_dim, self.config.rope_theta)
        return rotate(x, table.cos(), table.sin())

    def _mouse(self, layer: int, x: torch.Tensor, action: ActionPass) -> torch.Tensor:
        config, frames = self.config, len(action.mouse)
        cells = x.shape[0] // frames
        rows = action.mouse.flatten(1).to(x.dtype)[:, None].expand(-1, cells, -1)
        mixed = torch.cat([x.unflatten(0, (frames, cells)), rows], dim=-1)
        qkv = self.t_qkv(self.mouse_mlp(mixed)).unflatten(-1, (3, config.heads, -1))
        q, k, v = qkv.permute(2, 3, 1, 0, 4)  # each [heads, cells, frames, D]
        q = self._turn(_unit_rms(q), action.first_frame)
        k = self._turn(_unit_rms(k), action.first_frame)
        by_frame = [t.transpose(1, 2).flatten(1, 2) for t in (k, v)]  # [heads, frames*cells, D]
        keys, values = action.mouse_history(layer, *by_frame)
        keys, values = (t.unflatten(1, (-1, cells)).permute(2, 0, 1, 3) for t in (keys, values))
        out = F.scaled_dot_product_attention(q.transpose(0, 1), keys, values)
        return self.proj_mouse(out.permute(2, 0, 1, 3).flatten(2).flatten(0, 1))

    def _keyboard(self, layer: int, x: torch.Tensor, action: ActionPass) -> torch.Tensor:
        config, frames = self.config, len(action.keyboard)
        cells = x.shape[0] // frames
        embedded = self.keyboard_embed(action.keyboard.to(x.dtype)).flatten(1)
        kv = self.keyboard_attn_kv(embedded).unflatten(-1, (2, config.heads, -1))
        k, v = kv.permute(1, 2, 0, 3)  # each [heads, frames, D]
        q = linear(self.mouse_attn_q, x).unflatten(-1, (config.heads, -1))
        q = q.unflatten(0, (frames, cells)).permute(1, 2, 0, 3)  # [cells, heads, frames, D]
        q = self._turn(_unit_rms(q), action.first_frame)
        k = self._turn(_unit_rms(k), action.first_frame)
        keys, values = action.keyboard_history(layer, k, v)
        expand = (cells, -1, -1, -1)
        out = F.scaled_dot_product_attention(
            q, keys[None].expand(expand), values[None].expand(expand)
        )
        return self.proj_keyboard(out.permute(2, 0, 1, 3).flatten(2).flatten(0, 1))

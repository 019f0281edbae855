"""Matrix-Game-2's action module: keyboard and mouse rows attended over time, per block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from quantwm.worlds.wan.config import ActionConfig
from quantwm.worlds.wan.layers import EPS, kernels_for, linear, merge_heads, split_heads
from quantwm.worlds.wan.rotary import Turns, angles, rotate, table_dtype

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


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
        turns: cosines and sines [F, rope_dim / 2] of the chunk's latent frames (see frame_turns).
        keyboard_history, mouse_history: the two cached streams.
    """

    keyboard: torch.Tensor
    mouse: torch.Tensor | None
    turns: Turns
    keyboard_history: ActionHistory
    mouse_history: ActionHistory | None


def frame_turns(
    first_frame: int, frames: int, config: ActionConfig, device: torch.device, dtype: torch.dtype
) -> Turns:
    """Rotary cosines and sines of latent frames, for every block's action module alike.

    dtype: of what is to be rotated.
    """
    positions = torch.arange(first_frame, first_frame + frames, device=device)
    table = angles(positions, config.rope_dim, config.rope_theta)
    return table.cos().to(table_dtype(dtype)), table.sin().to(table_dtype(dtype))


def action_windows(
    rows: torch.Tensor, first_frame: int, frames: int, config: ActionConfig, first_row: int = 0
) -> torch.Tensor:
    """The action rows that each latent frame sees.

    rows: [N, dim], one per video frame from row first_row of the rollout on -> [frames, window
    rows, dim]. Latent frame f sees rows 4f-12 .. 4f-1; negative rows repeat row 0.
    """
    ends = torch.arange(first_frame, first_frame + frames, device=rows.device)
    offsets = torch.arange(-config.rows, 0, device=rows.device)
    index = ends[:, None] * config.rows_per_frame + offsets[None]
    return rows[index.clamp(min=0) - first_row]


def _unit_rms(x: torch.Tensor) -> torch.Tensor:
    """RMS norm in the dtype of x; its stored weight is never applied by the published model."""
    return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + EPS)


def _turned(x: torch.Tensor, turns: Turns) -> torch.Tensor:
    """x [heads, N, D] of the frames that turns is of -> the same, normed and rotated."""
    frames = len(turns[0])
    kernels = kernels_for(x, x.shape[0] * x.shape[2], x.shape[2])
    if kernels is not None:
        return kernels.action_turn(x, turns, frames, EPS)
    cos, sin = turns
    by_frame = _unit_rms(x).unflatten(1, (frames, -1))
    return rotate(by_frame, cos[:, None], sin[:, None]).flatten(1, 2)


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

    @property
    def has_mouse(self) -> bool:
        return bool(self.config.mouse_dim)

    def forward(self, layer: int, x: torch.Tensor, action: ActionPass) -> torch.Tensor:
        """x: [F * cells, width] -> the same, actions added."""
        if action.mouse is not None and action.mouse_history is not None and self.has_mouse:
            q, k, v = self.mouse_in(x, action.mouse, action.turns)
            attended = mouse_attention(q, k, v, len(action.mouse), layer, action.mouse_history)
            x = x + self.mouse_out(attended)
        q, k, v = self.keyboard_in(x, action.keyboard, action.turns)
        attended = keyboard_attention(q, k, v, layer, action.keyboard_history)
        return x + self.keyboard_out(attended)

    def mouse_in(self, x: torch.Tensor, mouse: torch.Tensor, turns: Turns) -> QKV:
        """q, k, v [heads, F * cells, D]."""
        config, frames = self.config, len(mouse)
        cells = x.shape[0] // frames
        rows = mouse.flatten(1).to(x.dtype)[:, None].expand(-1, cells, -1)
        mixed = torch.cat([x.unflatten(0, (frames, cells)), rows], dim=-1)
        qkv = self.t_qkv(self.mouse_mlp(mixed)).flatten(0, 1)
        q, k, v = (split_heads(part, config.heads) for part in qkv.chunk(3, dim=-1))
        return _turned(q, turns), _turned(k, turns), v

    def mouse_out(self, attended: torch.Tensor) -> torch.Tensor:
        """[heads, F * cells, D] -> [F * cells, width]."""
        return self.proj_mouse(merge_heads(attended))

    def keyboard_in(self, x: torch.Tensor, keyboard: torch.Tensor, turns: Turns) -> QKV:
        """q [heads, F * cells, D]; k and v [heads, F, D]: all cells see the same key rows."""
        config = self.config
        embedded = self.keyboard_embed(keyboard.to(x.dtype)).flatten(1)
        kv = self.keyboard_attn_kv(embedded)
        k, v = (split_heads(part, config.heads) for part in kv.chunk(2, dim=-1))
        q = split_heads(linear(self.mouse_attn_q, x), config.heads)
        return _turned(q, turns), _turned(k, turns), v

    def keyboard_out(self, attended: torch.Tensor) -> torch.Tensor:
        """[heads, F * cells, D] -> [F * cells, width]."""
        return self.proj_keyboard(merge_heads(attended))


def mouse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    frames: int,
    layer: int,
    history: ActionHistory,
) -> torch.Tensor:
    """Every cell over its own past: q [heads, frames * cells, D] -> the same.

    As 14,080 attentions of 3 queries over 6 keys, PyTorch's own would fill one row in twenty of
    the tiles that it computes.
    """
    keys, values = history(layer, k, v)
    kernels = kernels_for(q, q.shape[0] * q.shape[2], q.shape[2])
    if kernels is not None:
        return kernels.cell_attention(q, keys, values, frames)
    cells = q.shape[1] // frames
    parts = (t.unflatten(1, (-1, cells)).permute(2, 0, 1, 3) for t in (q, keys, values))
    return F.scaled_dot_product_attention(*parts).permute(1, 2, 0, 3).flatten(1, 2)


def keyboard_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, history: ActionHistory
) -> torch.Tensor:
    """All cells over the same key rows, as the queries of one attention: q [heads, N, D] -> same.

    Cell by cell it would be 880 attentions over copies of the same rows.
    """
    keys, values = history(layer, k, v)
    return F.scaled_dot_product_attention(q[None], keys[None], values[None])[0]

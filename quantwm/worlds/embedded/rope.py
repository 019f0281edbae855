"""3D rotary position embedding: absolute (frame, row, column) baked into queries and keys.

Channel pairs (2j, 2j+1) of a head are turned by position * theta**(-2j/d). The first pairs turn
with the frame, the next with the row, the last with the column (44/42/42 channels of 128), as in
Wan; because cached keys hold their rotation, a history never has to be touched again.
"""

from __future__ import annotations

import torch

from quantwm.errors import UserError


def rope_split(head_dim: int) -> tuple[int, int, int]:
    """Channels for (frame, row, column): a third each, rounded to pairs, the rest to the frame."""
    if head_dim < 6 or head_dim % 2:
        raise UserError(f"head_dim must be even and at least 6, got {head_dim}")
    side = 2 * (head_dim // 6)
    return head_dim - 2 * side, side, side


def rope_tables(
    first_frame: int,
    frames: int,
    grid: tuple[int, int],
    head_dim: int,
    theta: float = 10000.0,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines, float32 [frames * rows * columns, head_dim].

    Both values of a pair share a cosine; the sine is negative for the first (see apply_rope).

    Angles are built in float64: frame 100,000 times frequency 1 keeps every digit that float32
    can hold of a cosine, so a long rollout sees the same rotations as a short one.
    """
    rows, columns = grid
    positions = (
        torch.arange(first_frame, first_frame + frames, dtype=torch.float64),
        torch.arange(rows, dtype=torch.float64),
        torch.arange(columns, dtype=torch.float64),
    )
    parts = []
    for axis, (position, channels) in enumerate(zip(positions, rope_split(head_dim), strict=True)):
        exponent = torch.arange(0, channels, 2, dtype=torch.float64) / channels
        angles = position[:, None] * theta**-exponent
        shape = [1, 1, 1, channels // 2]
        shape[axis] = len(position)
        parts.append(angles.view(shape).expand(frames, rows, columns, channels // 2))
    angles = torch.cat(parts, dim=-1).reshape(frames * rows * columns, head_dim // 2)
    cos = angles.cos().repeat_interleave(2, dim=-1)
    sin = torch.stack((-angles.sin(), angles.sin()), dim=-1).flatten(-2)
    return cos.float().to(device), sin.float().to(device)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns the pairs of x [..., tokens, head_dim] by tables [tokens, head_dim], in float32.

    (a, b) becomes (a cos - b sin, b cos + a sin): x * cos + (pairs swapped) * signed sin.
    """
    x32 = x.float()
    swapped = x32.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return (x32 * cos + swapped * sin).to(x.dtype)

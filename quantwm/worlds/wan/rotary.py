"""Rotary positions of latent frames: computed for the positions asked for, so no table ends."""

from __future__ import annotations

import torch

THETA = 10000.0
Turns = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of a rotation, in the dtype of `table_dtype`."""


def axis_split(head_dim: int) -> tuple[int, int, int]:
    """Channels of a head given to time, row and column: 44/42/42 at 128."""
    spatial = 2 * (head_dim // 6)
    return head_dim - 2 * spatial, spatial, spatial


def angles(positions: torch.Tensor, dim: int, theta: float = THETA) -> torch.Tensor:
    """positions [N] -> [N, dim / 2] angles in float64."""
    exponent = torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim
    return torch.outer(positions.to(torch.float64), 1.0 / theta**exponent)


def frame_angles(
    frames: torch.Tensor, grid: tuple[int, int], head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [frames * rows * columns, head_dim / 2] in float64.

    frames: [F] positions on the time axis, any integers; grid: rows and columns of tokens.
    Token order is frame, row, column.
    """
    rows, columns = grid
    time_dim, row_dim, column_dim = axis_split(head_dim)
    device = frames.device
    time = angles(frames, time_dim)[:, None, None].expand(-1, rows, columns, -1)
    row = angles(torch.arange(rows, device=device), row_dim)[None, :, None]
    column = angles(torch.arange(columns, device=device), column_dim)[None, None]
    shape = (len(frames), rows, columns, -1)
    table = torch.cat([time, row.expand(shape), column.expand(shape)], dim=-1).flatten(0, 2)
    return table.cos(), table.sin()


def table_dtype(dtype: torch.dtype) -> torch.dtype:
    """What `rotate` computes in for input of this dtype, so that tables need no conversion."""
    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the leading 2 * cos.shape[-1] channels of x [..., N, D] as interleaved pairs.

    FP32 input is rotated in float64 as published. BF16 input is rotated in FP32: its result is
    rounded to 8 bits, so float64 would cost a doubled pass for a flip of one in thousands.
    """
    dtype = table_dtype(x.dtype)
    turned = 2 * cos.shape[-1]
    pairs = x[..., :turned].to(dtype).unflatten(-1, (-1, 2))
    # One complex product is 4 launches less than its parts, and the same bits.
    out = torch.view_as_complex(pairs) * torch.complex(cos.to(dtype), sin.to(dtype))
    out = torch.view_as_real(out).flatten(-2).to(x.dtype)
    return out if turned == x.shape[-1] else torch.cat([out, x[..., turned:]], dim=-1)

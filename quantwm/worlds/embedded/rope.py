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
    starts, counts = (first_frame, 0, 0), (frames, *grid)
    parts = [
        axis_tables(start, count, channels, theta)
        for start, count, channels in zip(starts, counts, rope_split(head_dim), strict=True)
    ]
    tables = []
    for kind in (0, 1):
        spread = []
        for axis, part in enumerate(parts):
            shape = [1, 1, 1, part[kind].shape[1]]
            shape[axis] = counts[axis]
            spread.append(part[kind].view(shape).expand(*counts, -1))
        tables.append(torch.cat(spread, dim=-1).reshape(-1, head_dim).to(device))
    return tables[0], tables[1]


def axis_tables(
    start: int, count: int, channels: int, theta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines of one axis at start, start + 1, ...: float32 [count, channels]."""
    exponent = torch.arange(0, channels, 2, dtype=torch.float64) / channels
    position = torch.arange(start, start + count, dtype=torch.float64)
    angles = position[:, None] * theta**-exponent
    cos, sin = angles.cos().float(), angles.sin().float()
    return cos.repeat_interleave(2, dim=-1), torch.stack((-sin, sin), dim=-1).flatten(-2)


class ChunkTables:
    """The tables of the chunk at hand, in memory that stays where it is.

    CUDA graphs read that memory; only the channels of the frame axis change from chunk to chunk,
    and those come from a table of the next `AHEAD` frames on the device.
    """

    AHEAD = 1024  # frames; 360 KB with 44 channels, made anew every 256 chunks of 4 frames

    def __init__(
        self,
        frames: int,
        grid: tuple[int, int],
        head_dim: int,
        theta: float,
        device: torch.device | str,
    ) -> None:
        self.cos, self.sin = rope_tables(0, frames, grid, head_dim, theta, device)
        self._frames, self._grid, self._theta = frames, grid, theta
        self._channels = rope_split(head_dim)[0]
        self._at = 0
        self._known_from = 0
        self._known: tuple[torch.Tensor, ...] = ()

    def seek(self, first_frame: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin of the chunk that begins at first_frame: what `rope_tables` gives, in place."""
        if first_frame != self._at:
            offset = first_frame - self._known_from
            if not self._known or not 0 <= offset <= self.AHEAD - self._frames:
                made = axis_tables(first_frame, self.AHEAD, self._channels, self._theta)
                self._known = tuple(table.to(self.cos.device) for table in made)
                self._known_from, offset = first_frame, 0
            for table, known in zip((self.cos, self.sin), self._known, strict=True):
                turned = table.view(self._frames, *self._grid, -1)[..., : self._channels]
                turned.copy_(known[offset : offset + self._frames, None, None])
            self._at = first_frame
        return self.cos, self.sin


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns the pairs of x [..., tokens, head_dim] by tables [tokens, head_dim], in float32.

    (a, b) becomes (a cos - b sin, b cos + a sin): x * cos + (pairs swapped) * signed sin.
    """
    x32 = x.float()
    swapped = x32.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return (x32 * cos + swapped * sin).to(x.dtype)

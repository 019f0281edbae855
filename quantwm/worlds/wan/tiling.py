"""Decoding a video frame in tiles: each with its own streaming state, blended where they meet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from quantwm.worlds.wan.vae_layers import State

Decode = Callable[[torch.Tensor, State], torch.Tensor]
"""Latents [C, F, h, w] and a state -> the next frames [3, T, H, W]."""

OVERLAP = 4
"""A tile shares one part in so many of its side with its neighbour."""


@dataclass
class TileStates:
    """The streaming states of the tiles of one video, by their corner."""

    by_corner: dict[tuple[int, int], State] = field(default_factory=dict)

    def copy(self) -> TileStates:
        return TileStates({corner: dict(state) for corner, state in self.by_corner.items()})


def starts(size: int, tile: int) -> list[int]:
    """Where tiles of one side begin: evenly enough that all overlap by a part in OVERLAP."""
    if size <= tile:
        return [0]
    step = tile - tile // OVERLAP
    count = -(-(size - tile) // step) + 1
    return [round(index * (size - tile) / (count - 1)) for index in range(count)]


def decode_tiled(
    decode: Decode, latents: torch.Tensor, states: TileStates, tile: int, stride: int
) -> torch.Tensor:
    """[C, F, h, w] -> [3, T, H, W]. One tile that holds the whole frame decodes it as it is.

    What is computed at a time is a tile; the states of all tiles are larger than a whole frame's.
    Where tiles meet, their pixels are mixed along a linear ramp; the autoencoder's attention sees
    its tile only, so colours may differ a little from the whole.
    """
    height, width = latents.shape[2:]
    rows, columns = starts(height, tile), starts(width, tile)
    out = weight = None
    for top in rows:
        for left in columns:
            state = states.by_corner.setdefault((top, left), {})
            part = decode(latents[:, :, top : top + tile, left : left + tile], state)
            if len(rows) == len(columns) == 1:
                return part
            if out is None:
                shape = (*part.shape[:2], height * stride, width * stride)
                out = part.new_zeros(shape, dtype=torch.float32)
                weight = part.new_zeros(shape[2:], dtype=torch.float32)
            ramp = _outer(_ramp(top, tile, height, stride), _ramp(left, tile, width, stride), part)
            where = (slice(top * stride, top * stride + part.shape[2]),
                     slice(left * stride, left * stride + part.shape[3]))  # fmt: skip
            out[:, :, *where] += part.float() * ramp
            weight[*where] += ramp
    return (out / weight).to(latents.dtype)


def _ramp(start: int, tile: int, size: int, stride: int) -> torch.Tensor:
    """Weights of a tile's pixels along one side: rising where a tile lies before, falling where
    one lies behind, 1 elsewhere."""
    length = min(tile, size) * stride
    slope = max(tile // OVERLAP, 1) * stride
    weights = torch.ones(length)
    rising = (torch.arange(slope) + 0.5) / slope
    if start > 0:
        weights[:slope] = rising
    if start + tile < size:
        weights[-slope:] = torch.minimum(weights[-slope:], rising.flip(0))
    return weights


def _outer(rows: torch.Tensor, columns: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return torch.outer(rows, columns).to(like.device)

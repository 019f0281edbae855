"""Where cached tokens stand and how RoPE turned their keys: positions, angles, rotation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from quantwm.cache.spec import RopeLayout


@dataclass(frozen=True)
class TokenPositions:
    """Absolute places of tokens; place = latent frame * tokens_per_frame + cell of the frame.

    Attributes:
        first: place of the first token.
        count: tokens.
        places: int32 [count] on the CPU once tokens between were dropped; None while the tokens
            follow each other without a gap.
    """

    first: int
    count: int
    places: Tensor | None = None

    def select(self, keep: slice | Tensor) -> TokenPositions:
        """Of the tokens in a range, or at ascending int64 positions (a CPU tensor)."""
        if isinstance(keep, slice) and self.places is None:
            start, stop, _ = keep.indices(self.count)
            return TokenPositions(self.first + start, max(stop - start, 0))
        return _compact(self.tensor(0, self.count)[keep])

    def joined(self, later: TokenPositions) -> TokenPositions:
        """These and later tokens behind them."""
        follows = self.first + self.count == later.first
        if follows and self.places is None and later.places is None:
            return TokenPositions(self.first, self.count + later.count)
        ours, theirs = (p.tensor(0, p.count) for p in (self, later))
        return _compact(torch.cat((ours, theirs)))

    def tensor(self, start: int, stop: int) -> Tensor:
        """Places of tokens start..stop-1, int64 on the CPU."""
        if self.places is not None:
            return self.places[start:stop].long()
        return torch.arange(self.first + start, self.first + stop)


def _compact(places: Tensor) -> TokenPositions:
    count = len(places)
    if not count:
        return TokenPositions(0, 0)
    first, last = int(places[0]), int(places[-1])
    gapless = last - first + 1 == count
    return TokenPositions(first, count, None if gapless else places.to(torch.int32))


def frequencies(layout: RopeLayout) -> Tensor:
    """Angle of each pair per step along its axis, float64 [pairs]."""
    parts = [
        layout.theta ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
        for size in layout.split
        if size
    ]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def axes(layout: RopeLayout) -> Tensor:
    """Axis of each pair: 0 time, 1 row, 2 column; int64 [pairs]."""
    return torch.repeat_interleave(torch.arange(3), torch.tensor(layout.split) // 2)


def turns(
    layout: RopeLayout, positions: TokenPositions, start: int, stop: int, device: torch.device
) -> Tensor:
    """As `_turns`; the newest are kept, as all layers and passes of a chunk ask for the same."""
    if positions.places is not None:
        return _turns(layout, positions, start, stop, device)
    return _kept_turns(layout, positions.first + start, stop - start, device)


@lru_cache(maxsize=4)
def _kept_turns(layout: RopeLayout, first: int, count: int, device: torch.device) -> Tensor:
    return _turns(layout, TokenPositions(first, count), 0, count, device)


def _turns(
    layout: RopeLayout, positions: TokenPositions, start: int, stop: int, device: torch.device
) -> Tensor:
    """exp(i angle) of every pair of tokens start..stop-1, complex64 [stop - start, pairs].

    Angles are built in float64 per axis (a frame number times frequency 1 keeps every digit that
    float32 can hold of a cosine) and gathered per token, so one call costs few transcendentals.
    """
    rows, columns = layout.grid
    places = positions.tensor(start, stop)
    if device.type == "cuda":
        return _turns_there(layout, places.to(device, non_blocking=True))  # a copy without a wait
    frame, cell = places // (rows * columns), places % (rows * columns)
    seen, of_token = frame.unique_consecutive(return_inverse=True)  # places ascend
    steps = (seen, torch.arange(rows), torch.arange(columns))
    where = (of_token, cell // columns, cell % columns)
    speeds = frequencies(layout).split([size // 2 for size in layout.split])
    parts = []
    for step, index, speed in zip(steps, where, speeds, strict=True):
        angles = torch.outer(step.double(), speed)
        table = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
        parts.append(table.to(device).index_select(0, index.to(device)))
    return torch.cat(parts, dim=1)


def _turns_there(layout: RopeLayout, places: Tensor) -> Tensor:
    """The same where the places are: no table comes from the host, which would wait for it."""
    rows, columns = layout.grid
    cell = places % (rows * columns)
    steps = torch.stack((places // (rows * columns), cell // columns, cell % columns), dim=1)
    speed, axis = _speeds(layout, places.device)
    angles = steps.index_select(1, axis).double() * speed
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


@lru_cache(maxsize=8)
def _speeds(layout: RopeLayout, device: torch.device) -> tuple[Tensor, Tensor]:
    return frequencies(layout).to(device), axes(layout).to(device)


def rotate_(x: Tensor, turn: Tensor, inverse: bool = False) -> Tensor:
    """Turn the leading pairs (2j, 2j+1) of x in place. x: float32 [H, N, D], D contiguous."""
    turned = 2 * turn.shape[1]
    pairs = torch.view_as_complex(x[..., :turned].unflatten(-1, (-1, 2)))
    pairs *= turn.conj() if inverse else turn
    return x


PHASE_FRAMES = 1 << 16
"""`phases` begin at a multiple of this: beyond 65,536 frames ahead of it a speed rounded to 2**-33
of a turn is off by 5e-5 rad, a fiftieth of what BF16 rounds."""


def phase_origin(positions: TokenPositions, layout: RopeLayout) -> int:
    """Frame that `phases` of these positions begin with."""
    return positions.first // math.prod(layout.grid) // PHASE_FRAMES * PHASE_FRAMES


@lru_cache(maxsize=16)
def phases(layout: RopeLayout, origin: int, head_dim: int, device: torch.device) -> Tensor:
    """Angles in turns / 2**32, int32 [2, head_dim / 2] that wrap as angles do.

    Of every pair in cell 0 of frame `origin`, and what a step along its axis adds; 0 for channels
    behind the split.
    """
    speed = torch.zeros(head_dim // 2, dtype=torch.float64)
    axis = torch.ones(head_dim // 2, dtype=torch.long)
    turned = sum(layout.split) // 2
    speed[:turned], axis[:turned] = frequencies(layout) / (2 * math.pi), axes(layout)
    first = torch.where(axis == 0, origin * speed, 0.0)
    found = torch.stack((first, speed))
    steps = torch.round((found - found.floor()) * 2.0**32).long()
    return ((steps + 2**31) % 2**32 - 2**31).to(torch.int32).to(device)

"""Finds the frames that show again what was seen before, but not lately: where memory matters."""

from __future__ import annotations

import math

import torch

RECENT = 16  # frames: what the memory ablation's window holds
FRESH = 8  # views turn over smoothly: the frame just before always shows nearly the same
NEAR = 48.0  # map units
SAME_VIEW = math.radians(15.0)
LIKE_VIEW = math.radians(40.0)  # a view 90 degrees wide still shows most of it


def find_revisits(poses: torch.Tensor, batch: int = 32) -> torch.Tensor:
    """poses [E, T, 3] -> int64 [n, 3]: episode, frame, and the last earlier frame of the same view.

    A frame counts when a frame more than `RECENT` before it stood near and looked the same way,
    and none of those `FRESH` to `RECENT` before it looked that way at all. Poses are those
    reckoned from keys, so what comes after a bump is found a little off, or not.
    """
    found = [_find(poses[first : first + batch], first) for first in range(0, len(poses), batch)]
    return torch.cat(found) if found else torch.zeros(0, 3, dtype=torch.int64)


def _find(poses: torch.Tensor, first: int) -> torch.Tensor:
    frames = poses.shape[1]
    apart = torch.cdist(poses[..., 1:], poses[..., 1:])
    turned = poses[:, :, None, 0] - poses[:, None, :, 0]
    turned = torch.atan2(turned.sin(), turned.cos()).abs()
    index = torch.arange(frames, device=poses.device)
    ago = index[:, None] - index[None, :]
    seen_lately = (apart < 3 * NEAR) & (turned < LIKE_VIEW) & (ago >= FRESH) & (ago <= RECENT)
    seen_before = (apart < NEAR) & (turned < SAME_VIEW) & (ago > RECENT)
    last = torch.where(seen_before, index, -1).amax(dim=-1)
    counts = (last >= 0) & ~seen_lately.any(dim=-1)
    episode, frame = counts.nonzero(as_tuple=True)
    return torch.stack((episode + first, frame, last[episode, frame]), dim=1)


def fitting_revisits(
    revisits: torch.Tensor, frames: int, length: int, shown_within: int | None = None
) -> torch.Tensor:
    """Those of `find_revisits` for which a clip of so many frames can hold both visits.

    length: of an episode. shown_within: the first visit must lie in that many first frames.
    """
    _, frame, before = revisits.unbind(dim=1)
    fits = frame - before <= frames - 8
    if shown_within is not None:
        fits &= (before >= 2) & (before - shown_within + 3 <= length - frames)
        fits &= frame - before <= frames - shown_within
    return revisits[fits]


def starts_with_revisit(
    fits: torch.Tensor, count: int, frames: int, length: int, generator: torch.Generator,
    shown_within: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Episodes and first frames [count] of clips that hold a revisit and what it revisits, and
    where both lie in the clip [count, 2]. fits: of `fitting_revisits`, not empty.
    """
    like = {"generator": generator, "device": fits.device}
    chosen = fits[torch.randint(len(fits), (count,), **like)]
    episode, frame, before = chosen.unbind(dim=1)
    low = (frame - frames + 4).clamp(0, length - frames)  # the revisit lies inside,
    high = torch.minimum((before - 4).clamp_min(0), low.new_tensor(length - frames))
    high = torch.maximum(high, low)  # and where possible so does the first visit
    if shown_within is not None:
        low = torch.maximum(low, before - shown_within + 3).clamp(0, length - frames)
        high = torch.maximum((before - 2).clamp(0, length - frames), low)
    start = low + (torch.rand(count, **like) * (high - low + 1)).long()
    start = torch.minimum(start, high)
    return episode, start, torch.stack((frame - start, before - start), dim=1)

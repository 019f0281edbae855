"""Which earlier latent frames a memory pass sees: the newest ones and the clips that look alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch

RADIUS = 8.0
HALF_VIEW = (30.0, 17.5)  # degrees to the side and up or down
CLIP = 4  # latent frames of an aligned clip; also of the chunk that asks
SCORED = (0, 2)  # frames of a clip that are compared with the chunk
POINTS = 50_000


@dataclass(frozen=True)
class MemoryRule:
    """How many latent frames a chunk remembers.

    Attributes:
        frames: most frames remembered; all of them as long as no more exist.
        recent: newest frames, always remembered.
        always: leading frames, always remembered; clips are sought after them.
    """

    frames: int
    recent: int
    always: int = 0


WAN_5B = MemoryRule(frames=16, recent=12)
MMDIT_8B = MemoryRule(frames=20, recent=12, always=4)


def sample_points(count: int, seed: int) -> torch.Tensor:
    """[count, 3] points, uniform in a ball of RADIUS; from a generator of their own."""
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(count, 3, generator=generator)
    direction = direction / direction.norm(dim=-1, keepdim=True)
    return direction * RADIUS * torch.rand(count, 1, generator=generator) ** (1 / 3)


def _directions(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """vectors [..., 3], x right, y down, z forward -> degrees to the side and downwards."""
    x, y, z = vectors.unbind(-1)
    side = torch.rad2deg(torch.atan2(x, z))
    return side, torch.rad2deg(torch.atan2(y, torch.sqrt(x**2 + z**2)))


def _in_view(points: torch.Tensor, c2w: torch.Tensor) -> torch.Tensor:
    """points [N, 3], cameras c2w [M, 4, 4] -> bool [M, N]: within HALF_VIEW of where each looks."""
    side, down = _directions(points - c2w[:, None, :3, 3])
    ahead_side, ahead_down = _directions(c2w[:, :3, 2])
    turned = (side - ahead_side[:, None] + 180.0) % 360.0 - 180.0
    tilted = (down - ahead_down[:, None]).abs()
    return (turned.abs() <= HALF_VIEW[0]) & (tilted <= HALF_VIEW[1])


def visible_points(points: torch.Tensor) -> torch.Tensor:
    """Those of the sample points [N, 3] that a camera at the origin sees: about 5 % of them."""
    return points[_in_view(points, torch.eye(4, dtype=points.dtype)[None])[0]]


def overlaps(query: torch.Tensor, history: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Share of the query camera's visible points that each history camera sees as well: [M].

    query: [4, 4], history: [M, 4, 4] world-to-camera; visible: [N, 3] from visible_points, in the
    query camera's axes. A history camera is looked at from the query camera, its roll ignored,
    as published.
    """
    query, history = query.to(visible.dtype), history.to(visible.dtype)
    relative = query @ torch.linalg.inv(history)
    near = (visible - relative[:, None, :3, 3]).norm(dim=-1) < RADIUS
    shared = near & _in_view(visible, relative)
    return shared.sum(dim=-1) / max(len(visible), 1)


def select(
    w2c: torch.Tensor, current: int, points: torch.Tensor, rule: MemoryRule = WAN_5B
) -> list[int]:
    """Sorted latent frames that the chunk starting at frame `current` remembers.

    w2c: [F, 4, 4] of all frames up to the end of the chunk; F > current. points: [N, 3] in a ball
    of RADIUS.
    """
    if current <= rule.frames:
        return list(range(current))
    chosen = set(range(rule.always)) | set(range(current - rule.recent, current))
    starts = torch.arange(rule.always, current - rule.recent, CLIP)
    compared = w2c[(starts[:, None] + torch.tensor(SCORED)).flatten()]
    visible = visible_points(points)
    queries = w2c[current : current + CLIP]
    scores = torch.stack([overlaps(query, compared, visible) for query in queries]).mean(0)
    best = scores.unflatten(0, (-1, len(SCORED))).mean(1).argsort(descending=True, stable=True)
    for start in starts[best].tolist():
        if len(chosen) >= rule.frames:
            break
        chosen |= set(range(start, start + CLIP))
    return sorted(chosen)

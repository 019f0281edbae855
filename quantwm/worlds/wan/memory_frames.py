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
    """points [N, 3] -> bool [N]: within HALF_VIEW of where the camera c2w [4, 4] looks."""
    side, down = _directions(points - c2w[:3, 3])
    ahead_side, ahead_down = _directions(c2w[:3, 2])
    turned = (side - ahead_side + 180.0) % 360.0 - 180.0
    return (turned.abs() <= HALF_VIEW[0]) & ((down - ahead_down).abs() <= HALF_VIEW[1])


def overlap(query: torch.Tensor, history: torch.Tensor, points: torch.Tensor) -> float:
    """Share of the query camera's visible sample points that the history camera sees as well.

    query, history: [4, 4] world-to-camera; points: [N, 3] around the query camera, in its axes.
    The history camera is looked at from the query camera, its roll ignored, as published.
    """
    query, history = query.to(points.dtype), history.to(points.dtype)
    seen = _in_view(points, torch.eye(4, dtype=points.dtype))
    relative = query @ torch.linalg.inv(history)
    near = (points - relative[:3, 3]).norm(dim=-1) < RADIUS
    shared = seen & near & _in_view(points, relative)
    return float(shared.sum() / seen.sum().clamp(min=1))


def select(
    w2c: torch.Tensor, current: int, points: torch.Tensor, rule: MemoryRule = WAN_5B
) -> list[int]:
    """Sorted latent frames that the chunk starting at frame `current` remembers.

    w2c: [F, 4, 4] of all frames up to the end of the chunk; F > current.
    """
    if current <= rule.frames:
        return list(range(current))
    chosen = set(range(rule.always)) | set(range(current - rule.recent, current))
    starts = range(rule.always, current - rule.recent, CLIP)
    queries = range(current, min(current + CLIP, len(w2c)))
    scores = {}
    for start in starts:
        values = [
            overlap(w2c[query], w2c[start + frame], points) for frame in SCORED for query in queries
        ]
        scores[start] = sum(values) / len(values)
    for start in sorted(scores, key=lambda start: -scores[start]):
        if len(chosen) >= rule.frames:
            break
        chosen |= set(range(start, start + CLIP))
    return sorted(chosen)

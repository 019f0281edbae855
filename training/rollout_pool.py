"""A pool of clips that the model itself has walked on from their first true frames.

Histories made chunk by chunk from the truth (own_history.py) hold errors one or two chunks deep.
What the product shows the model has drifted for a hundred frames, and only there can it learn to
trust old true frames more than young wrong ones. So clips are rolled out with the product's
sampler, and serve as histories of training steps whose target is the truth.
"""

from __future__ import annotations

import time

import torch

from quantwm.worlds.embedded.transformer import Transformer
from training.data import ClipBatch, LatentPool
from training.losses import TransformerTraining, training_pose
from training.own_history import STEPS
from training.rollout import roll_out

NEAR = 96.0  # map units: three steps
LIKE_VIEW = 0.8  # radians: half of a view 90 degrees wide is seen in both
RETURN_CHUNKS = 4


def known_chunks(poses: torch.Tensor, contexts: torch.Tensor, per_chunk: int) -> torch.Tensor:
    """bool [B, chunks]: whether most of a chunk's frames look where a true frame looked.

    poses [B, T, 3]; contexts int64 [B], true chunks at the start. Of what no true frame showed,
    the history holds only the model's own invention, and the truth is another one.
    """
    frames = poses.shape[1]
    apart = torch.cdist(poses[..., 1:], poses[..., 1:])
    turned = poses[:, :, None, 0] - poses[:, None, :, 0]
    turned = torch.atan2(turned.sin(), turned.cos()).abs()
    true = torch.arange(frames, device=poses.device) < (contexts * per_chunk)[:, None]
    seen = ((apart < NEAR) & (turned < LIKE_VIEW) & true[:, None, :]).any(dim=-1)
    return seen.unflatten(1, (-1, per_chunk)).float().mean(dim=-1) >= 0.5


def chunk_weights(
    known: torch.Tensor, contexts: torch.Tensor, invented: float, returned: float
) -> torch.Tensor:
    """float32 [B, chunks] of `known_chunks`: 1 for what goes on from the context."""
    late = torch.arange(known.shape[1], device=known.device) >= contexts[:, None] + RETURN_CHUNKS
    return torch.where(known, torch.where(late, returned, 1.0), invented)


class RolloutPool:
    """Clips with the history that the model made of them; refilled as they are used up."""

    def __init__(self, training: TransformerTraining, frames: int, seed: int) -> None:
        self._config, self._frames, self._seed = training.rollouts, frames, seed
        self._shift, self._lost = training.sigma_shift, training.lost
        self._context = training.context_chunks
        self._invented, self._returned = training.invented, training.returned
        self._used, self._began, self._spent = 0, time.monotonic(), 0.0
        self._clips: ClipBatch | None = None
        self._drawn = self._known = self._weight = torch.zeros(0)
        self.refills = 0

    @property
    def busy(self) -> float:
        """Share of the time since the start that went into rollouts."""
        return self._spent / max(time.monotonic() - self._began, 1e-6)

    def is_stale(self) -> bool:
        """Whether all clips should be made anew: used up, and there is time for it."""
        if self._clips is None:
            return True
        return self._used >= self._config.uses * self._config.clips and (
            self.busy < self._config.busy
        )

    def refill(
        self, model: Transformer, pool: LatentPool, generator: torch.Generator
    ) -> dict[str, float]:
        """Rolls out new clips with `model`, as it would ship.

        Returns seconds, the share of the stage that all rollouts took, and how the free chunks
        are: mean squared error of known and of invented ones, edges over the truth's.
        """
        started = time.monotonic()
        config, per_chunk = self._config, model.config.frames_per_chunk
        clips = pool.random_clips(
            config.clips, self._frames, generator, config.revisits, self._context * per_chunk
        )
        chooser = torch.Generator().manual_seed(self._seed + self.refills)
        longest = min(config.longest_context, self._frames // per_chunk - 1)
        spread = max(longest - self._context + 1, 1)
        contexts = self._context + torch.randint(spread, (config.clips,), generator=chooser)
        few = torch.rand(config.clips, generator=chooser) < 0.5
        contexts[few] = self._context
        told = None
        if model.config.pose:
            told = training_pose(clips.poses, model.config.grid[1], self._lost, generator)
        self._drawn = roll_out(
            model, clips.latents, clips.keys, contexts, STEPS, self._shift,
            self._seed + self.refills, teacher_forced=False, told=told,
        ).to(clips.latents.dtype)  # fmt: skip
        given = contexts.to(clips.poses.device)
        self._known = known_chunks(clips.poses, given, per_chunk)
        self._weight = chunk_weights(self._known, given, self._invented, self._returned)
        self._clips = clips
        self.refills += 1
        self._used = 0
        facts = self._facts(given, per_chunk)  # waits for the device
        self._spent += (seconds := time.monotonic() - started)
        return {"seconds": round(seconds, 2), "busy": round(self.busy, 3), **facts}

    def _facts(self, contexts: torch.Tensor, per_chunk: int) -> dict[str, float]:
        truth, drawn = self._clips.latents.float(), self._drawn.float()
        chunks = truth.shape[1] // per_chunk
        error = (drawn - truth).square().mean(dim=(2, 3, 4))
        error = error.unflatten(1, (-1, per_chunk)).mean(dim=2)
        free = torch.arange(chunks, device=error.device) >= contexts[:, None]
        facts = {}
        for name, which in (("known", free & self._known), ("invented", free & ~self._known)):
            total = (error * which).sum() / which.sum().clamp_min(1)
            facts[f"{name}_mse"] = round(float(total), 4)
        last = slice(-4 * per_chunk, None)
        edges = [x[:, last].diff(dim=4).abs().mean() for x in (drawn, truth)]
        return {**facts, "edges": round(float(edges[0] / edges[1]), 3)}

    def draw(
        self, count: int, generator: torch.Generator
    ) -> tuple[ClipBatch, torch.Tensor, torch.Tensor]:
        """`count` clips, the history of each [count, T, C, h, w], and its chunks' weights."""
        device = self._known.device
        chosen = torch.randint(len(self._known), (count,), generator=generator, device=device)
        self._used += count
        return self._clips.chosen(chosen), self._drawn[chosen], self._weight[chosen]

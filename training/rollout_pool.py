"""A pool of clips that the model itself has walked on from their first true frames.

Histories made chunk by chunk from the truth (own_history.py) hold errors one or two chunks deep.
What the product shows the model has drifted for a hundred frames, and only there can it learn to
trust old true frames more than young wrong ones. So clips are rolled out with the product's
sampler, and serve as histories of training steps. Where a true frame showed what is seen, the
target is the truth. Elsewhere the truth is another room than the history's, and whoever aims at it
learns to pass over the history; there the target is how a teacher goes on from that history.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from quantwm.worlds.embedded.transformer import Transformer
from training.data import ClipBatch, LatentPool
from training.losses import TransformerTraining, training_pose
from training.own_history import STEPS
from training.rollout import roll_out

NEAR = 96.0  # map units: three steps
HALF_VIEW = math.pi / 4
RETURN_CHUNKS = 4
LIKE_FRAMES = 128  # of the clips that `RolloutConfig.clips` counts; of longer ones there are fewer
TEACHER_STEPS = 4  # 4 give a quarter to a third more squared gradient than the product's 2


def known_columns(
    poses: torch.Tensor, contexts: torch.Tensor, per_chunk: int, columns: int
) -> torch.Tensor:
    """bool [B, T, columns]: whether a true frame looked where a column of a frame looks.

    poses [B, T, 3]; contexts int64 [B], true chunks at the start. Of what no true frame showed,
    the history holds only the model's own invention, and the truth is another one. Pictures have
    no depth here: a true frame from NEAR by, whose view holds the column's direction, counts. A
    frame at the edge of what is known is known in some of its columns only.
    """
    frames, half = poses.shape[1], columns / 2
    true = torch.arange(frames, device=poses.device) < (contexts * per_chunk)[:, None]
    near = (torch.cdist(poses[..., 1:], poses[..., 1:]) < NEAR) & true[:, None, :]
    offsets = torch.atan((torch.arange(columns, device=poses.device) + 0.5 - half) / half)
    turned = poses[:, :, None, 0] - poses[:, None, :, 0]
    found = []
    for offset in offsets:  # one by one: all at once would be [B, T, T, columns]
        away = torch.remainder(turned - offset + math.pi, 2 * math.pi) - math.pi
        found.append((near & (away.abs() <= HALF_VIEW)).any(dim=-1))
    return torch.stack(found, dim=-1)


def column_weights(
    known: torch.Tensor, contexts: torch.Tensor, per_chunk: int, invented: float, returned: float
) -> torch.Tensor:
    """float32 [B, T, columns] of `known_columns`: 1 for what goes on from the context."""
    index = torch.arange(known.shape[1], device=known.device)
    late = (index >= (contexts[:, None] + RETURN_CHUNKS) * per_chunk).unsqueeze(2)
    return torch.where(known, torch.where(late, returned, 1.0), invented)


@dataclass(frozen=True)
class OwnClips:
    """True clips, the history that a rollout made of each [B, T, C, h, w], what to aim at after it,
    and of every frame's columns [B, T, w] the error's weight and whether a true frame showed it."""

    clips: ClipBatch
    history: torch.Tensor
    target: torch.Tensor
    weight: torch.Tensor
    known: torch.Tensor


class RolloutPool:
    """Clips with the history that the model made of them; refilled as they are used up."""

    def __init__(self, training: TransformerTraining, frames: int, seed: int) -> None:
        self._config, self._frames, self._seed = training.rollouts, frames, seed
        self._count = max(2, training.rollouts.clips * LIKE_FRAMES // max(LIKE_FRAMES, frames))
        self.has_teacher = training.continuation
        self._shift, self._lost = training.sigma_shift, training.lost
        self._context = training.context_chunks
        self._invented, self._returned = training.invented, training.returned
        self._used, self._began, self._spent = 0, time.monotonic(), 0.0
        self._own: OwnClips | None = None
        self.refills = 0

    @property
    def busy(self) -> float:
        """Share of the time since the start that went into rollouts."""
        return self._spent / max(time.monotonic() - self._began, 1e-6)

    def is_stale(self) -> bool:
        """Whether all clips should be made anew: used up, and there is time for it."""
        if self._own is None:
            return True
        return self._used >= self._config.uses * self._count and self.busy < self._config.busy

    def refill(
        self, model: Transformer, teacher: Transformer | None, pool: LatentPool,
        generator: torch.Generator,
    ) -> dict[str, float]:  # fmt: skip
        """Rolls out new clips with `model`, as it would ship; the teacher, if there is one, goes on
        from each of their histories by a chunk.

        Returns seconds, the share of the stage that all rollouts took, and how the free frames
        are: mean squared error to the truth of known and of invented columns, of the invented ones
        to the teacher's, edges over the truth's.
        """
        started = time.monotonic()
        config, per_chunk = self._config, model.config.frames_per_chunk
        clips = pool.random_clips(
            self._count, self._frames, generator, config.revisits, self._context * per_chunk
        )
        chooser = torch.Generator().manual_seed(self._seed + self.refills)
        longest = min(config.longest_context, self._frames // per_chunk - 1)
        spread = max(longest - self._context + 1, 1)
        contexts = self._context + torch.randint(spread, (self._count,), generator=chooser)
        few = torch.rand(self._count, generator=chooser) < 0.5
        contexts[few] = self._context
        told = None
        if model.config.pose:
            told = training_pose(clips.poses, model.config.grid[1], self._lost, generator)
        given = contexts.to(clips.poses.device)
        known = known_columns(clips.poses, given, per_chunk, model.config.latent_width)
        target, seed = clips.latents, self._seed + self.refills
        history = roll_out(
            model, target, clips.keys, contexts, STEPS, self._shift, seed,
            teacher_forced=False, told=told,
        ).to(target.dtype)  # fmt: skip
        if teacher is not None:
            after = roll_out(
                teacher, history, clips.keys, contexts, TEACHER_STEPS, self._shift, seed,
                teacher_forced=True, told=told,
            ).to(target.dtype)  # fmt: skip
            target = torch.where(known[:, :, None, None, :], target, after)
        weight = column_weights(known, given, per_chunk, self._invented, self._returned)
        self._own = OwnClips(clips, history, target, weight, known)
        self.refills += 1
        self._used = 0
        facts = self._facts(given * per_chunk, per_chunk)  # waits for the device
        self._spent += (seconds := time.monotonic() - started)
        return {"seconds": round(seconds, 2), "busy": round(self.busy, 3), **facts}

    def _facts(self, contexts: torch.Tensor, per_chunk: int) -> dict[str, float]:
        """contexts: in frames."""
        own = self._own
        truth, drawn, target = (x.float() for x in (own.clips.latents, own.history, own.target))
        index = torch.arange(truth.shape[1], device=truth.device)
        free = (index >= contexts[:, None]).unsqueeze(2)
        every = free.expand_as(own.known)
        facts = {"known": round(float((every & own.known).sum() / every.sum().clamp_min(1)), 3)}
        for name, aim, which in (
            ("known", truth, free & own.known),
            ("invented", truth, free & ~own.known),
            ("continued", target, free & ~own.known),
        ):
            error = (drawn - aim).square().mean(dim=(2, 3))
            total = (error * which).sum() / which.sum().clamp_min(1)
            facts[f"{name}_mse"] = round(float(total), 4)
        last = slice(-4 * per_chunk, None)
        edges = [x[:, last].diff(dim=4).abs().mean() for x in (drawn, truth)]
        return {**facts, "edges": round(float(edges[0] / edges[1]), 3)}

    def draw(self, count: int, generator: torch.Generator) -> OwnClips:
        """`count` of the clips, as they come."""
        own = self._own
        device = own.known.device
        chosen = torch.randint(len(own.known), (count,), generator=generator, device=device)
        self._used += count
        return OwnClips(
            own.clips.chosen(chosen), own.history[chosen], own.target[chosen], own.weight[chosen],
            own.known[chosen],
        )  # fmt: skip

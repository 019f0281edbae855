"""What the decoder's stage learns from: true frames, and latents that have drifted in rollouts."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from quantwm.errors import UserError
from quantwm.worlds.embedded.autoencoder import Autoencoder
from quantwm.worlds.embedded.transformer import Transformer
from training.data import FramePool, LatentPool
from training.decoder_step import DecoderBatch
from training.progress import Log
from training.rollout import roll_out
from training.rollout_pool import known_columns


@dataclass(frozen=True)
class DriftConfig:
    """clips of so many frames are rolled out with the product's steps, `together` at a time, until
    there are enough or `seconds` are over; half of them from `context_chunks`, half from up to
    `longest_context`."""

    clips: int = 96
    frames: int = 256
    together: int = 48
    seconds: float = 40.0
    context_chunks: int = 4
    longest_context: int = 16
    steps: int = 2


class Drifted:
    """Clips as the model rolled them out, with what was true and what the decoder drew at first.

    latents [B, T, C, h, w]; truth uint8 [B, T, H, W, 3]; squares float32 [B, T, 3, H/4, W/4];
    known bool [B, T, w]; contexts int64 [B]: true frames at each start.
    """

    def __init__(self, pool: FramePool, config: DriftConfig, seed: int) -> None:
        self._pool, self._config = pool, config
        device = pool.frames.device
        self._generator = torch.Generator(device).manual_seed(seed)
        self._chooser = torch.Generator().manual_seed(seed)
        self._parts: list[tuple[torch.Tensor, ...]] = []
        self.seconds = 0.0

    def roll(
        self, model: Transformer, autoencoder: Autoencoder, shift: float, seed: int, log: Log
    ) -> None:
        """Fills the clips; model and autoencoder as they ship."""
        config, began, made = self._config, time.monotonic(), 0
        while made < config.clips and (made == 0 or self.seconds < config.seconds):
            count = min(config.together, config.clips - made)
            self._parts.append(self._some(model, autoencoder, shift, seed + made, count))
            made += count
            self.seconds = time.monotonic() - began
            log.event("rolled out", clips=made, seconds=round(self.seconds, 1))
        names = ("latents", "truth", "squares", "known", "contexts")
        for name, parts in zip(names, zip(*self._parts, strict=True), strict=True):
            setattr(self, name, torch.cat(parts))
        self._parts.clear()

    @torch.no_grad()
    def _some(
        self, model: Transformer, autoencoder: Autoencoder, shift: float, seed: int, count: int
    ) -> tuple[torch.Tensor, ...]:
        config, pool, per_chunk = self._config, self._pool, model.config.frames_per_chunk
        device = pool.frames.device
        episodes, length = pool.count, pool.frames.shape[1]
        e = torch.randint(episodes, (count,), generator=self._generator, device=device)
        t = torch.randint(
            length - config.frames + 1, (count,), generator=self._generator, device=device
        )
        index = e[:, None], t[:, None] + torch.arange(config.frames, device=device)
        truth, keys, poses = pool.frames[index], pool.keys[index], pool.poses[index]
        clips = LatentPool.encode(autoencoder, truth, keys, poses)
        spread = config.longest_context - config.context_chunks + 1
        contexts = config.context_chunks + torch.randint(spread, (count,), generator=self._chooser)
        contexts[: (count + 1) // 2] = config.context_chunks
        latents = roll_out(
            model, clips.latents, keys.float(), contexts, config.steps, shift, seed,
            teacher_forced=False, poses=poses if model.config.pose else None,
        )  # fmt: skip
        given = contexts.to(device)
        known = known_columns(poses, given, per_chunk, model.config.latent_width)
        flat = latents.flatten(0, 1)
        squares = [F.avg_pool2d(autoencoder.decode(part), 4) for part in flat.split(256)]
        squares = torch.cat(squares).unflatten(0, (count, config.frames))
        return latents, truth, squares, known, given * per_chunk

    def draw(self, true_pairs: int, drifted_pairs: int) -> DecoderBatch:
        """Pairs of frames in a row: true ones of all episodes, free-running ones of the clips."""
        pool, device, generator = self._pool, self.latents.device, self._generator
        both = torch.arange(2, device=device)
        e = torch.randint(pool.count, (true_pairs, 1), generator=generator, device=device)
        last = pool.frames.shape[1] - 1
        t = torch.randint(last, (true_pairs, 1), generator=generator, device=device) + both
        c = torch.randint(len(self.latents), (drifted_pairs, 1), generator=generator, device=device)
        share = torch.rand((drifted_pairs, 1), generator=generator, device=device)
        first = self.contexts[c]
        at = first + (share * (self.latents.shape[1] - 1 - first)).long() + both
        return DecoderBatch(
            pool.frames[e, t], self.latents[c, at], self.truth[c, at], self.squares[c, at],
            self.known[c, at],
        )  # fmt: skip


def check_lengths(pool: FramePool, config: DriftConfig) -> None:
    """UserError when episodes are too short for the clips."""
    length = pool.frames.shape[1]
    if config.frames > length:
        raise UserError(
            f"rollouts of {config.frames} frames need episodes at least as long, these have "
            f"{length}; record others: python -m training.frames --length {config.frames}"
        )

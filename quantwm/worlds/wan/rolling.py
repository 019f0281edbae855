"""Long-video rollout: a window of chunks at rising noise levels, and a moving anchor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quantwm.cache.kv_cache import KVCache
from quantwm.cache.spec import CachePolicy
from quantwm.worlds.wan.attention import AnchoredAttention, Grid
from quantwm.worlds.wan.backbone import CausalWan, ContextKV, Pass
from quantwm.worlds.wan.schedules import Step, add_noise, to_x0

Renoise = Callable[[int, int], torch.Tensor]
"""(window, chunk) -> noise [F, C, H, W] that carries the chunk to the next lower noise level."""


@dataclass(frozen=True)
class RollingRule:
    """Sizes of the rolling window, in latent frames.

    Attributes:
        chunk_frames: frames of one chunk; the first chunk is the anchor.
        attention_frames: most frames that one pass attends, anchor and window counted.
        cache_frames: frames that the cache keeps, anchor and newest chunk counted.
    """

    chunk_frames: int = 3
    attention_frames: int = 21
    cache_frames: int = 24

    @property
    def others(self) -> int:
        """Cached frames besides the anchor and the chunk that is written."""
        return self.cache_frames - 2 * self.chunk_frames

    def policy(self, span_tokens: int) -> CachePolicy:
        """The cache policy that keeps cache_frames, the chunk that is written among them; more
        where one pass attends more, because a cache's window counts all of a pass."""
        return CachePolicy(
            sink_frames=self.chunk_frames,
            window_frames=max(self.cache_frames, self.attention_frames),
            span_tokens=span_tokens,
        )


@dataclass(frozen=True)
class WindowTrace:
    """One window: its chunks, per-frame timesteps [F], flow [F, C, H, W], clean-pass flow."""

    first_chunk: int
    last_chunk: int
    timesteps: torch.Tensor
    flow: torch.Tensor
    clean_flow: torch.Tensor


class RollingForcing:
    """One lane's long-video rollout with the Causal-Forcing weights."""

    def __init__(
        self,
        model: CausalWan,
        cache: KVCache,
        context: ContextKV,
        grid: Grid,
        steps: Sequence[Step],
        rule: RollingRule,
    ) -> None:
        self.model, self.cache, self.context, self.grid = model, cache, context, grid
        self.steps, self.rule = tuple(steps), rule

    def run(
        self, noise: torch.Tensor, renoise: Renoise, every_clean: bool = False
    ) -> tuple[torch.Tensor, list[WindowTrace]]:
        """noise: [F, C, H, W] of all frames, F a multiple of chunk_frames -> latents, windows.

        Window w holds chunks max(0, w - steps + 1) .. min(last, w). The newest chunk is pure
        noise, and every chunk goes one noise level down per window. Its first chunk is then run
        alone at timestep 0 and cached. In the first windows that chunk is not finished: upstream
        runs the clean pass all the same and overwrites it later; every_clean does so too, for
        its flow, and the cache takes the finished chunk only.
        """
        n, depth = self.rule.chunk_frames, len(self.steps)
        chunks = len(noise) // n
        latents = noise.to(self.model.dtype).clone()
        traces = []
        for window in range(chunks + depth - 1):
            first, last = max(0, window - depth + 1), min(chunks - 1, window)
            span = slice(first * n, (last + 1) * n)
            # Chunk c entered in window c, so this is its level number window - c.
            levels = [self.steps[window - chunk] for chunk in range(first, last + 1)]
            times, flow, x0 = self.window(first, latents[span], levels)
            clean_flow = flow[:0]
            if every_clean or window - first == depth - 1:
                done = window - first == depth - 1
                clean_flow = self.clean(first, x0[:n], commit=done)
            for i, chunk in enumerate(range(first, last + 1)):
                part, level = x0[i * n : i * n + n], window - chunk + 1
                if level < depth:
                    part = add_noise(part, renoise(window, chunk), self.steps[level].renoise_sigma)
                latents[chunk * n : chunk * n + n] = part
            traces.append(WindowTrace(first, last, times, flow, clean_flow))
        return latents, traces

    def window(
        self, first: int, x: torch.Tensor, levels: Sequence[Step]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One pass over the chunks from `first` on, each at its own noise level; writes nothing.

        x: [F, C, H, W] -> per-frame timesteps [F], flow and x0, both of the shape of x.
        """
        n = self.rule.chunk_frames
        times = torch.tensor([step.timestep for step in levels], device=x.device)
        times = times.repeat_interleave(n)
        flow = self._noisy(first, x, times)
        x0 = torch.cat([
            to_x0(x[i * n : i * n + n], flow[i * n : i * n + n], step.sigma)
            for i, step in enumerate(levels)
        ])  # fmt: skip
        return times, flow, x0

    def _noisy(self, first: int, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        """Flow of a window: the anchor just before the oldest frame used, newest frames, itself.

        The window that holds the first chunk attends to itself only.
        """
        start, rule = first * self.rule.chunk_frames, self.rule
        seen: tuple[int, ...] = ()
        anchor = None
        if first:
            room = max(rule.attention_frames - len(x) - rule.chunk_frames, 0)
            oldest = start - min(room, rule.others)
            seen = tuple(range(max(rule.chunk_frames, oldest), start))
            anchor = (seen[0] if seen else start) - rule.chunk_frames
        self.cache.begin_chunk(start, len(x))
        try:
            return self._flow(start, x, times, False, seen, rule.chunk_frames, anchor)
        finally:
            self.cache.abort_chunk()

    def clean(self, first: int, x: torch.Tensor, commit: bool) -> torch.Tensor:
        """Flow of the first chunk alone at timestep 0, and its keys and values to the cache.

        It sees the newest cached frames; the anchor, unmoved, as far as it is among them.
        """
        start, rule = first * self.rule.chunk_frames, self.rule
        room = rule.attention_frames - len(x)
        seen = tuple(range(max(rule.chunk_frames, start - min(room, rule.others)), start))
        anchored = min(rule.chunk_frames, room - len(seen)) if first else 0
        times = torch.zeros(len(x), device=x.device)
        anchor = rule.chunk_frames - anchored if anchored else None
        self.cache.begin_chunk(start, len(x))
        try:
            flow = self._flow(start, x, times, commit, seen, anchored, anchor)
            if commit:
                self.cache.finalize_chunk()
            return flow
        finally:
            self.cache.abort_chunk()

    def _flow(
        self,
        start: int,
        x: torch.Tensor,
        times: torch.Tensor,
        clean: bool,
        seen: tuple[int, ...],
        anchored: int,
        anchor_start: int | None,
    ) -> torch.Tensor:
        attention = AnchoredAttention(
            self.cache, start, len(x), self.grid, clean, self.rule.chunk_frames, seen, anchored,
            anchor_start,
        )  # fmt: skip
        inputs = Pass(timesteps=times, attention=attention, context=self.context)
        return self.model(x.transpose(0, 1), inputs).transpose(0, 1)

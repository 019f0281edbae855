"""Memory rollout (HY Wan-5B): the cache is rebuilt per chunk from selected clean latents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quantwm.cache.kv_cache import KVCache
from quantwm.worlds.wan.attention import Grid, MemoryAttention
from quantwm.worlds.wan.backbone import CausalWan, ContextKV, Forward, Pass
from quantwm.worlds.wan.prope import Cameras
from quantwm.worlds.wan.schedules import TRAIN_STEPS, euler_steps

CONTEXT_TIMESTEP = 14.0  # memory frames and the start image are shown at this noise level
TIMESTEPS = (1000.0, 960.0, 888.8889, 727.2728, 0.0)  # the distilled model's four Euler steps


@dataclass(frozen=True)
class EulerTrace:
    """One Euler step: sigma, per-frame timesteps [F], input and flow [F, C, H, W]."""

    sigma: float
    timesteps: torch.Tensor
    x: torch.Tensor
    flow: torch.Tensor


class MemoryRollout:
    """One lane's rollout. Latents are [F, C, H, W]; kept in FP32, read in the weights' dtype."""

    def __init__(
        self,
        model: CausalWan,
        cache: KVCache,
        context: ContextKV,
        grid: Grid,
        timesteps: Sequence[float] = TIMESTEPS,
        context_timestep: float = CONTEXT_TIMESTEP,
        forward: Forward | None = None,
    ) -> None:
        """forward: another way to run the model's pass, with the same result (CUDA graphs)."""
        self.forward = model if forward is None else forward
        self.model, self.cache, self.context, self.grid = model, cache, context, grid
        self.steps = euler_steps(timesteps)
        self.context_timestep = context_timestep

    def remember(self, latents: torch.Tensor, cameras: Cameras, labels: torch.Tensor) -> None:
        """Replace the cache by the keys and values of these frames, layer by layer.

        latents: [n, C, H, W] clean; cameras and labels of the same frames, in the same order.
        They see each other and nothing else, so the pass begins with an empty cache.
        """
        frames = len(latents)
        self.cache.clear()
        self.cache.begin_chunk(0, frames)
        try:
            times = torch.full((frames,), self.context_timestep, device=latents.device)
            self._flow(latents.to(self.model.dtype), times, cameras, labels, clean=True)
            self.cache.finalize_chunk()
        finally:
            self.cache.abort_chunk()

    def append(
        self, first: int, latents: torch.Tensor, seen: Cameras, labels: torch.Tensor
    ) -> None:
        """Add a finished chunk's keys and values behind those that are there.

        seen: cameras of every attended frame, the chunk's own last. An approximation: older keys
        keep the context that they were computed in, as QVG's integration does.
        """
        frames = len(latents)
        self.cache.begin_chunk(first, frames)
        try:
            times = torch.full((frames,), self.context_timestep, device=latents.device)
            self._flow(latents.to(self.model.dtype), times, seen, labels, clean=True)
            self.cache.finalize_chunk()
        finally:
            self.cache.abort_chunk()

    def denoise(
        self,
        noise: torch.Tensor,
        memory: Cameras | None,
        cameras: Cameras,
        labels: torch.Tensor,
        image: torch.Tensor | None = None,
        appended: int | None = None,
    ) -> tuple[torch.Tensor, list[EulerTrace]]:
        """Euler steps of one chunk after its memory; nothing is written.

        noise: [F, C, H, W]; memory: cameras of the remembered frames, None before any;
        image: [C, H, W] latent that frame 0 holds and keeps; appended: the chunk's own frame
        number where the cache holds a history that grows, instead of a memory made for it.
        """
        frames, dtype = len(noise), self.model.dtype
        x = noise.to(dtype)
        if image is not None:
            x = torch.cat([image[None].to(dtype), x[1:]])
        seen = cameras if memory is None else memory.joined(cameras)
        first = 0 if memory is None else memory.projection.shape[0]
        trace = []
        if appended is not None:
            first = appended
        elif memory is None:
            self.cache.clear()
        self.cache.begin_chunk(first, frames)
        try:
            for timestep, change in self.steps:
                times = torch.full((frames,), timestep, device=x.device)
                if image is not None:
                    times[0] = self.context_timestep
                flow = self._flow(x, times, seen, labels, clean=False)
                trace.append(EulerTrace(timestep / TRAIN_STEPS, times, x, flow))
                moved = x + change * flow
                x = moved if image is None else torch.cat([x[:1], moved[1:]])
        finally:
            self.cache.abort_chunk()
        return x, trace

    def _flow(
        self,
        x: torch.Tensor,
        times: torch.Tensor,
        cameras: Cameras,
        labels: torch.Tensor,
        clean: bool,
    ) -> torch.Tensor:
        attention = MemoryAttention(self.cache, cameras, len(x), self.grid, clean)
        inputs = Pass(timesteps=times, attention=attention, context=self.context, labels=labels)
        return self.forward(x.transpose(0, 1), inputs).transpose(0, 1)

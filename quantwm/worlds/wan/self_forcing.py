"""Self-forcing rollout: denoise a chunk against the cache, then write it with a clean pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quantwm.cache.kv_cache import KVCache
from quantwm.worlds.wan.action_module import ActionPass, action_windows, frame_turns
from quantwm.worlds.wan.attention import AbsoluteAttention, Grid, StreamHistory
from quantwm.worlds.wan.backbone import CausalWan, ContextKV, Forward, Pass
from quantwm.worlds.wan.schedules import Step, add_noise, to_x0

Renoise = Callable[[int], torch.Tensor]
"""Step index -> fresh noise [F, C, H, W] that turns x0 of the step before into its input."""


@dataclass(frozen=True)
class StepTrace:
    """One denoising step: timestep, input, flow and x0, tensors [F, C, H, W]."""

    timestep: float
    x: torch.Tensor
    flow: torch.Tensor
    x0: torch.Tensor


@dataclass(frozen=True)
class Conditions:
    """What a chunk is conditioned on besides its prompt.

    Attributes:
        channels: [C, F, H, W] joined behind the latents (mask and image latent).
        camera: [camera_channels, F, H, W] Pluecker embedding.
        keyboard, mouse: [rows, dim] action rows of the rollout from row first_row on; they must
            reach back as far as the chunk's windows do.
    """

    channels: torch.Tensor | None = None
    camera: torch.Tensor | None = None
    keyboard: torch.Tensor | None = None
    mouse: torch.Tensor | None = None
    first_row: int = 0


class SelfForcing:
    """One lane's rollout. Latents are [F, C, H, W]; FP32 where the model keeps FP32 residuals,
    otherwise in the dtype of the weights."""

    def __init__(
        self,
        model: CausalWan,
        cache: KVCache,
        context: ContextKV,
        grid: Grid,
        forward: Forward | None = None,
    ) -> None:
        """forward: another way to run the model's pass, with the same result (CUDA graphs)."""
        self.model, self.cache, self.context, self.grid = model, cache, context, grid
        self.forward = model if forward is None else forward
        self.clean_timestep = 0.0

    @property
    def latent_dtype(self) -> torch.dtype:
        return torch.float32 if self.model.config.rules.residual_fp32 else self.model.dtype

    def denoise(
        self,
        first_frame: int,
        noise: torch.Tensor,
        steps: Sequence[Step],
        renoise: Renoise,
        conditions: Conditions,
    ) -> list[StepTrace]:
        """Denoise the chunk at first_frame; the cache's history is left as it was."""
        x = noise.to(self.latent_dtype)
        trace: list[StepTrace] = []
        self.cache.begin_chunk(first_frame, len(x))
        try:
            camera = self._camera(conditions)
            action = self._action(first_frame, len(x), conditions, clean=False)
            for index, step in enumerate(steps):
                if index:
                    x = add_noise(trace[-1].x0, renoise(index), step.renoise_sigma)
                given = (conditions, camera, action)
                flow = self._flow(first_frame, x, step.timestep, *given, clean=False)
                trace.append(StepTrace(step.timestep, x, flow, to_x0(x, flow, step.sigma)))
        finally:
            self.cache.abort_chunk()
        return trace

    def commit(
        self, first_frame: int, latents: torch.Tensor, conditions: Conditions
    ) -> torch.Tensor:
        """Clean pass: the chunk's keys and values become history. Returns the unused flow."""
        x = latents.to(self.latent_dtype)
        self.cache.begin_chunk(first_frame, len(x))
        try:
            camera = self._camera(conditions)
            action = self._action(first_frame, len(x), conditions, clean=True)
            given = (conditions, camera, action)
            flow = self._flow(first_frame, x, self.clean_timestep, *given, clean=True)
            self.cache.finalize_chunk()
        finally:
            self.cache.abort_chunk()
        return flow

    def _camera(self, conditions: Conditions) -> torch.Tensor | None:
        return None if conditions.camera is None else self.model.camera_rows(conditions.camera)

    def _flow(
        self,
        first_frame: int,
        x: torch.Tensor,
        timestep: float,
        conditions: Conditions,
        camera: torch.Tensor | None,
        action: ActionPass | None,
        clean: bool,
    ) -> torch.Tensor:
        frames = len(x)
        latents = x.transpose(0, 1)
        if conditions.channels is not None:
            latents = torch.cat([latents, conditions.channels.to(x.dtype)])
        inputs = Pass(
            timesteps=torch.full((frames,), timestep, device=x.device),
            attention=AbsoluteAttention(self.cache, first_frame, frames, self.grid, clean),
            context=self.context,
            camera=camera,
            action=action,
        )
        return self.forward(latents, inputs).transpose(0, 1)

    def _action(
        self, first_frame: int, frames: int, conditions: Conditions, clean: bool
    ) -> ActionPass | None:
        config = self.model.config.action
        if config is None or conditions.keyboard is None:
            return None
        mouse = conditions.mouse

        def windows(rows: torch.Tensor) -> torch.Tensor:
            own = rows.to(self.model.dtype)
            return action_windows(own, first_frame, frames, config, conditions.first_row)

        return ActionPass(
            keyboard=windows(conditions.keyboard),
            mouse=None if mouse is None else windows(mouse),
            turns=frame_turns(first_frame, frames, config, self.model.device, self.model.dtype),
            keyboard_history=StreamHistory(self.cache, "keyboard", clean),
            mouse_history=None if mouse is None else StreamHistory(self.cache, "mouse", clean),
        )

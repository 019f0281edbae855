"""Causal-Forcing, LingBot and Matrix-Game-2 as worlds: self-forcing under live controls."""

from __future__ import annotations

from functools import lru_cache

import torch

from quantwm.worlds.base import ChunkAction, ChunkOutput, KeySet, LaneState
from quantwm.worlds.wan import lingbot_actions, matrix_actions
from quantwm.worlds.wan.lingbot_actions import Gaze
from quantwm.worlds.wan.schedules import Step, flow_match_steps, unipc_steps
from quantwm.worlds.wan.self_forcing import Conditions, SelfForcing
from quantwm.worlds.wan.world import Session, WanWorld, extra_list, sent, step_noise


@lru_cache(maxsize=16)
def _listed_steps(steps: tuple[int, ...], shift: float, kind: str) -> tuple[Step, ...]:
    """Every lane asks again in every chunk."""
    return unipc_steps(steps, shift) if kind == "camera" else flow_match_steps(steps, shift)


class SelfForcingWorld(WanWorld):
    """Denoises against the cache in few steps, then writes the chunk with a clean pass."""

    @torch.inference_mode()
    def generate_chunk(
        self, lane: LaneState, action: ChunkAction, noise: torch.Tensor, steps: int
    ) -> ChunkOutput:
        self._check_steps(steps)
        session, first = self._session_of(lane), lane.next_frame

        def renoise(step: int) -> torch.Tensor:
            return sent(step_noise(session.seed, first, step, noise.shape), self.device)

        trace = self._driver(lane, session).denoise(
            first, noise, self._steps(first), renoise, self._conditions(lane, session, action)
        )
        return ChunkOutput(trace[-1].x0, tuple(step.x0 for step in trace))

    @torch.inference_mode()
    def commit_chunk(self, lane: LaneState, latents: torch.Tensor, action: ChunkAction) -> None:
        session = self._session_of(lane)
        conditions = self._conditions(lane, session, action)
        self._driver(lane, session).commit(lane.next_frame, latents, conditions)
        if self.entry.kind == "camera":
            lane.extra["gaze"] = self._posed(lane, action)[1]
        if self.entry.kind == "keys":
            held = [*extra_list(lane.extra, "held"), *action.frames]
            lane.extra["held"] = held[-self.model.config.action.window :]
        self._committed(lane, len(latents))

    def _driver(self, lane: LaneState, session: Session) -> SelfForcing:
        return SelfForcing(self.model, lane.cache, session.context, self.grid, self.forward)

    def _steps(self, first_frame: int) -> tuple[Step, ...]:
        entry = self.entry
        listed = entry.first_steps if entry.first_steps and first_frame == 0 else entry.steps
        return _listed_steps(tuple(int(step) for step in listed), entry.shift, entry.kind)

    def _conditions(self, lane: LaneState, session: Session, action: ChunkAction) -> Conditions:
        if self.entry.kind == "text":
            return Conditions()
        channels = self._channels(session, lane.next_frame, len(action.frames))
        if self.entry.kind == "camera":
            return Conditions(channels, camera=self._camera(self._posed(lane, action)[0]))
        return self._keyed(channels, extra_list(lane.extra, "held"), action, lane.next_frame)

    def _channels(self, session: Session, first: int, frames: int) -> torch.Tensor:
        """Mask (1 in latent frame 0) and image latents of the chunk, [20, F, h, w].

        The picture was encoded with grey behind it; past its end its last latent holds.
        """
        image = session.image
        if image is None:
            raise RuntimeError("a pictured world started without image latents")
        index = torch.arange(first, first + frames, device=image.device)
        held = image[:, index.clamp(max=image.shape[1] - 1)]
        mask = (index == 0).to(held.dtype)[None, :, None, None].expand(4, -1, *held.shape[2:])
        return torch.cat([mask, held])

    def _posed(self, lane: LaneState, action: ChunkAction) -> tuple[torch.Tensor, Gaze]:
        """Relative poses of the chunk, and where the lane's camera looks after it."""
        held = lane.extra.get("gaze")
        gaze = held if isinstance(held, Gaze) else Gaze()
        return lingbot_actions.live_poses(action.frames, lane.next_frame, gaze)

    def _camera(self, poses: torch.Tensor) -> torch.Tensor:
        width, height = self.spec.video_size
        poses = poses.to(self.device)
        lens = lingbot_actions.scaled_intrinsics(lingbot_actions.INTRINSICS, height, width)
        rays = lingbot_actions.pluecker(poses, lens, height, width)
        return lingbot_actions.folded(rays)

    def _keyed(
        self, channels: torch.Tensor, held: list[KeySet], action: ChunkAction, first: int
    ) -> Conditions:
        """Action rows of the frames before the chunk that its windows reach, and of its own."""
        oldest = first - len(held)
        keyboard, mouse = matrix_actions.action_rows(
            self.entry.mode, [*held, *action.frames], oldest
        )
        # Latent frame 0 has one row, every later one four.
        first_row = 4 * oldest - 3 if oldest else 0
        return Conditions(
            channels,
            keyboard=sent(keyboard, self.device),
            mouse=None if mouse is None else sent(mouse, self.device),
            first_row=first_row,
        )

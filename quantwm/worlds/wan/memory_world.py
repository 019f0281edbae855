"""HY-World 1.5 (Wan 5B) as a world: remembered frames are chosen and cached for every chunk."""

from __future__ import annotations

import numpy as np
import torch

from quantwm.errors import UserError
from quantwm.worlds.base import ChunkAction, ChunkOutput, LaneState
from quantwm.worlds.wan import hy_actions
from quantwm.worlds.wan.memory_frames import POINTS, WAN_5B, sample_points, select
from quantwm.worlds.wan.memory_rollout import MemoryRollout
from quantwm.worlds.wan.prope import Cameras, cameras
from quantwm.worlds.wan.world import Session, WanWorld, extra_list


class MemoryWorld(WanWorld):
    """Keeps all clean latents of a lane; the cache holds those a chunk remembers."""

    @torch.inference_mode()
    def generate_chunk(
        self, lane: LaneState, action: ChunkAction, noise: torch.Tensor, steps: int
    ) -> ChunkOutput:
        self._check_steps(steps)
        self._check_window(lane)
        session, first, size = self._session_of(lane), lane.next_frame, len(action.frames)
        walk = self._walk(lane, action)
        w2c = hy_actions.world_to_camera(np.stack(walk.c2w))
        lenses = self._lenses(w2c)
        labels = torch.tensor(walk.labels, device=self.device)
        driver = self._driver(lane, session)
        own = torch.arange(first, first + size, device=self.device)
        memory, appended = None, None
        if self.entry.appends:
            appended = first
            memory = lenses.select(self._history(lane, first, size)) if first else None
        elif first:
            points = sample_points(POINTS, session.seed)
            chosen = torch.tensor(select(w2c, first, points, WAN_5B), device=self.device)
            memory = lenses.select(chosen)
            driver.remember(self._remembered(lane, chosen.tolist()), memory, labels[chosen])
        image = None
        if first == 0 and session.image is not None:
            image = session.image[:, 0]
        x, trace = driver.denoise(noise, memory, lenses.select(own), labels[own], image, appended)
        # The flow points from data to noise: x0 = x - sigma * flow.
        x0 = tuple(step.x - step.sigma * step.flow for step in trace)
        return ChunkOutput(x.float(), x0)

    @torch.inference_mode()
    def commit_chunk(self, lane: LaneState, latents: torch.Tensor, action: ChunkAction) -> None:
        """The next chunk's memory is chosen by its own camera, so only latents are kept here.

        A world that appends writes the chunk's keys and values instead, once and for all.
        """
        walk = self._walk(lane, action)
        if self.entry.appends:
            self._append(lane, latents, walk)
        else:
            lane.extra["latents"] = [*extra_list(lane.extra, "latents"), latents.float()]
        lane.extra["walk"] = walk
        self._committed(lane, len(latents))

    def _append(self, lane: LaneState, latents: torch.Tensor, walk: hy_actions.Walk) -> None:
        first, size = lane.next_frame, len(latents)
        lenses = self._lenses(hy_actions.world_to_camera(np.stack(walk.c2w)))
        own = torch.arange(first, first + size, device=self.device)
        seen = torch.cat([self._history(lane, first, size), own])
        labels = torch.tensor(walk.labels, device=self.device)[own]
        driver = self._driver(lane, self._session_of(lane))
        driver.append(first, latents, lenses.select(seen), labels)

    def _history(self, lane: LaneState, first: int, size: int) -> torch.Tensor:
        """Numbers of the cached frames that a chunk sees: the newest of its window."""
        window = lane.cache.policy.window_frames
        oldest = 0 if window is None else max(first + size - window, 0)
        return torch.arange(oldest, first, device=self.device)

    def _walk(self, lane: LaneState, action: ChunkAction) -> hy_actions.Walk:
        """The lane's camera with this chunk's frames behind it; the lane's own is untouched."""
        held = lane.extra.get("walk")
        walk = held.copy() if isinstance(held, hy_actions.Walk) else hy_actions.Walk()
        walk.advance(action.frames)
        return walk

    def _lenses(self, w2c: torch.Tensor) -> Cameras:
        found = cameras(w2c, hy_actions.intrinsics(len(w2c)), self.dtype)
        return Cameras(found.projection.to(self.device), found.inverse.to(self.device))

    def _remembered(self, lane: LaneState, frames: list[int]) -> torch.Tensor:
        """Clean latents of these frames; all of a long session's together would be gigabytes."""
        chunks, size = extra_list(lane.extra, "latents"), self.entry.frames_per_chunk
        return torch.stack([chunks[frame // size][frame % size] for frame in frames])

    def _driver(self, lane: LaneState, session: Session) -> MemoryRollout:
        return MemoryRollout(
            self.model, lane.cache, session.context, self.grid, self.entry.steps,
            forward=self.forward,
        )  # fmt: skip

    def _check_window(self, lane: LaneState) -> None:
        window, needed = (
            lane.cache.policy.window_frames,
            WAN_5B.frames + self.entry.frames_per_chunk,
        )
        if window is not None and window < needed:
            raise UserError(
                f"{self.spec.name} remembers {WAN_5B.frames} latent frames beside its chunk: its "
                f"window must be at least {needed}, got {window}"
            )

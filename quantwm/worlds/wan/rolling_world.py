"""Causal-Forcing's long-video mode as a world: chunks in flight at rising noise levels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quantwm.worlds.base import ChunkAction, ChunkOutput, LaneState
from quantwm.worlds.wan.rolling import RollingForcing, RollingRule
from quantwm.worlds.wan.schedules import add_noise, flow_match_steps
from quantwm.worlds.wan.world import Session, WanWorld, step_noise


@dataclass(frozen=True)
class Flight:
    """Chunks that are not finished yet, the oldest first.

    Attributes:
        first: number of the oldest. latents: [chunks * frames, C, H, W], each at its noise level.
    """

    first: int
    latents: torch.Tensor


class RollingWorld(WanWorld):
    """A pass takes every chunk in flight one noise level down and finishes the oldest.

    What a person asks for (a prompt) is seen by the chunks that enter from then on, and by those
    in flight for the rest of their way.
    """

    @torch.inference_mode()
    def generate_chunk(
        self, lane: LaneState, action: ChunkAction, noise: torch.Tensor, steps: int
    ) -> ChunkOutput:
        """The first call fills the flight, every other one needs a single pass.

        noise: not used; a chunk enters before its turn, so its noise is made from the seed.
        """
        self._check_steps(steps)
        session, driver = self._session_of(lane), self._driver(lane)
        flight = lane.extra.get("flight")
        if not isinstance(flight, Flight):
            flight = Flight(0, noise[:0].to(self.dtype))
        depth = len(driver.steps)
        while True:
            flight = self._entered(session, flight)
            count = len(flight.latents) // self.entry.frames_per_chunk
            levels = [driver.steps[count - 1 - index] for index in range(count)]
            _, _, x0 = driver.window(flight.first, flight.latents, levels)
            if count == depth:
                break
            flight = self._renoised(session, driver, flight, x0)
        rest = self._renoised(session, driver, flight, x0)
        size = self.entry.frames_per_chunk
        lane.extra["flight_next"] = Flight(flight.first + 1, rest.latents[size:])
        return ChunkOutput(x0[:size].float(), (x0[:size].float(),))

    @torch.inference_mode()
    def commit_chunk(self, lane: LaneState, latents: torch.Tensor, action: ChunkAction) -> None:
        driver = self._driver(lane)
        number = lane.next_frame // self.entry.frames_per_chunk
        driver.clean(number, latents.to(self.dtype), commit=True)
        if "flight_next" in lane.extra:
            lane.extra["flight"] = lane.extra.pop("flight_next")
        self._committed(lane, len(latents))

    def _entered(self, session: Session, flight: Flight) -> Flight:
        """One more chunk of pure noise behind those in flight."""
        size = self.entry.frames_per_chunk
        number = flight.first + len(flight.latents) // size
        shape = (size, *self.spec.latent_shape)
        fresh = step_noise(session.seed, number * size, 0, shape).to(flight.latents)
        return Flight(flight.first, torch.cat([flight.latents, fresh]))

    def _renoised(
        self, session: Session, driver: RollingForcing, flight: Flight, x0: torch.Tensor
    ) -> Flight:
        """Every unfinished chunk's x0 at its next lower noise level."""
        size, depth = self.entry.frames_per_chunk, len(driver.steps)
        parts = list(x0.split(size))
        for index, part in enumerate(parts):
            level = len(parts) - index  # passes that this chunk has had
            if level < depth:
                frame = (flight.first + index) * size
                noise = step_noise(session.seed, frame, level, part.shape).to(part)
                parts[index] = add_noise(part, noise, driver.steps[level].renoise_sigma)
        return Flight(flight.first, torch.cat(parts))

    def _driver(self, lane: LaneState) -> RollingForcing:
        steps = flow_match_steps([int(step) for step in self.entry.steps], self.entry.shift)
        rule = RollingRule(
            chunk_frames=self.entry.frames_per_chunk,
            cache_frames=self.entry.window or RollingRule.cache_frames,
        )
        context = self._session_of(lane).context
        return RollingForcing(self.model, lane.cache, context, self.grid, steps, rule)

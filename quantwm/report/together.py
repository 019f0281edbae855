"""Several rollouts of the report at once, where the world can run sessions together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from quantwm.cache.kv_cache import KVCache
from quantwm.cache.workspace import Workspace
from quantwm.engine import chunk_noise
from quantwm.engine_checks import steps_for
from quantwm.errors import UserError
from quantwm.lanes import limit_history, max_tokens_for, read_through, with_output_weights
from quantwm.report.jobs import (
    REFERENCE,
    Job,
    JobResult,
    Look,
    Watch,
    lanes_of,
    look_at,
    result_of,
    run_job,
)
from quantwm.report.schedule import check_time
from quantwm.report.variants import ALL, format_of
from quantwm.worlds.base import ChunkAction, LaneState, World


def batches(jobs: Sequence[Job], size: int) -> list[list[Job]]:
    """Jobs that may run together, at most `size` of them, in the order of their first one.

    They share lanes, mode, history and the seed of their caches; of those, jobs of like length go
    together, since all take as many chunks as the longest.
    """
    groups: dict[tuple[Any, ...], list[Job]] = {}
    for job in jobs:
        alike = (job.experiment, job.lanes, job.mode, job.seed, job.max_tokens, job.consistency)
        groups.setdefault(alike, []).append(job)
    found = []
    for group in groups.values():
        waiting = iter(sorted(group, key=lambda job: len(job.actions)))
        while batch := list(islice(waiting, size)):
            found.append(batch)
    return found


def run_jobs(world: World, jobs: Sequence[Job], deadline: float = float("inf")) -> list[JobResult]:
    """Results of jobs of one batch; one after the other where the world runs one session.

    deadline: seconds since the epoch, OutOfTime when they have not ended by then.
    """
    if len(jobs) == 1 or not hasattr(world, "together"):
        return [run_job(world, job, deadline) for job in jobs]
    return _Rollouts(world, jobs, deadline).run()


class _Rollouts:
    """Jobs of one batch, in lock-step lanes as `Engine` runs them, with a cache for all a lane."""

    def __init__(self, world: Any, jobs: Sequence[Job], deadline: float) -> None:
        self._world, self._jobs, self._deadline = world, jobs, deadline
        self._sessions = world.together(len(jobs))
        self._steps = steps_for(world, None)
        self._workspace = Workspace()
        self._lanes = {name: self._lane(name) for name in lanes_of(jobs[0])}
        self._watch = [{name: Watch(job) for name in self._lanes} for job in jobs]

    def run(self) -> list[JobResult]:
        starts = [
            self._world.start(None if j.picture is not None else j.scene, j.picture, "", j.seed)
            for j in self._jobs
        ]
        for lane in self._lanes.values():
            check_time(self._deadline, time.time())
            self._sessions.prefill(lane, starts)
        for index in range(max(len(job.actions) for job in self._jobs)):
            self._step(index)
        return [result_of(job, w) for job, w in zip(self._jobs, self._watch, strict=True)]

    def _lane(self, name: str) -> LaneState:
        sessions, job = self._sessions, self._jobs[0]
        config = ALL[name].lane(self._world.spec)
        limit = max_tokens_for(self._world.device, job.max_tokens)
        cache = KVCache(
            sessions.spec.cache,
            with_output_weights(format_of(config), sessions),
            limit_history(config.policy, sessions.spec.cache, limit),
            device=sessions.device,
            dtype=sessions.dtype,
            workspace=self._workspace,
            seed=job.seed,
        )
        # It stands in for a cache, as in the engine.
        state: Any = read_through(config, cache)
        return LaneState(name, state)

    def _step(self, index: int) -> None:
        """One chunk of every lane; jobs that have ended go on without keys, and are not watched."""
        sessions, size = self._sessions, self._world.spec.cache.frames_per_chunk
        idle = ChunkAction.held(frozenset(), size)
        actions = [j.actions[index] if index < len(j.actions) else idle for j in self._jobs]
        shape = (size, *self._world.spec.latent_shape)
        noise = torch.stack([chunk_noise(j.seed, index + 1, shape) for j in self._jobs])
        noise = noise.to(self._world.device)
        frames: dict[str, np.ndarray] = {}
        latents: dict[str, torch.Tensor] = {}
        for name, lane in self._lanes.items():
            check_time(self._deadline, time.time())
            latents[name] = sessions.generate_chunk(lane, actions, noise, self._steps)
            if not bool(torch.isfinite(latents[name]).all()):
                raise UserError(
                    f"lane {name} produced NaN or infinite latents in chunk {index + 1}"
                )
            frames[name] = sessions.decode(latents[name])
        teacher = REFERENCE if self._jobs[0].mode == "teacher" else None
        for name, lane in self._lanes.items():
            sessions.commit_chunk(lane, latents[teacher or name], actions)
        self._look(index, frames)

    def _look(self, index: int, frames: dict[str, np.ndarray]) -> None:
        going = [i for i, job in enumerate(self._jobs) if index < len(job.actions)]
        flat = {name: found.reshape(-1, *found.shape[2:]) for name, found in frames.items()}
        before = [watch[REFERENCE].last for watch in self._watch]
        for name, lane in self._lanes.items():
            seen = look_at(self._world, self._jobs[0], flat[name], flat[REFERENCE])
            for i in going:
                self._add(i, name, frames, seen, before[i])
                self._note(i, name, lane)

    def _add(
        self,
        job: int,
        name: str,
        frames: dict[str, np.ndarray],
        seen: Look,
        before: np.ndarray | None,
    ) -> None:
        count = frames[name].shape[1]
        own = seen.of(slice(job * count, (job + 1) * count))
        self._watch[job][name].add(frames[name][job], own, frames[REFERENCE][job], before)

    def _note(self, job: int, name: str, lane: LaneState) -> None:
        """One session's share of the cache; all hold as many tokens.

        What is of no head (where chunks and token groups end) is counted once for all sessions,
        which takes 0.04 % off KIVI's bytes and less off the others'.
        """
        series, ledger = self._watch[job][name].series, lane.cache.ledger()
        series.kv_bytes = ledger.total // self._sessions.count
        series.held.append(series.kv_bytes)
        series.ratio, series.resident_ratio = ledger.nominal_ratio, ledger.resident_ratio
        series.tokens = ledger.tokens

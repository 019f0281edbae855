"""One rollout of the report: lanes in lock-step over one scene, reduced to curves as it goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from quantwm.actions import parse_actions
from quantwm.engine import Engine
from quantwm.engine_types import BlockResult, LaneResult
from quantwm.metrics import frame_mse, sharpness, ssim_per_frame
from quantwm.metrics.flicker import change
from quantwm.report.variants import ALL, format_of
from quantwm.worlds.base import ChunkAction, World

REFERENCE = "bf16"
POOLED = (3, 4)
"""Rows and columns to which the autoencoder's features are averaged before they are compared."""


@dataclass(frozen=True)
class Job:
    """A rollout.

    Attributes:
        experiment: which part of the report it belongs to. label: of its scene, for people.
        lanes: names of `variants.ALL`; every figure is against bf16, which is always one of them.
        picture: uint8 [T, H, W, 3], a start of its own instead of a scene.
        max_tokens: of history, in every lane; the device's default when None.
        keep: frames of the run that are kept as pictures.
        consistency: whether to compare features of frames (VBench's formula).
    """

    experiment: str
    label: str
    scene: str | None
    seed: int
    actions: tuple[ChunkAction, ...]
    lanes: tuple[str, ...]
    mode: str = "free"
    picture: np.ndarray | None = None
    max_tokens: int | None = None
    keep: tuple[int, ...] = ()
    consistency: bool = False


@dataclass
class LaneSeries:
    """One lane over one rollout: a value a frame, or a step between frames where it says so.

    mse, ssim: against bf16. temporal, excess (steps): grey levels. sharpness: gradient energy.
    consistency: (cos to the first frame + cos to the one before) / 2, from the second frame on.
    kv_bytes, ratio, resident_ratio, tokens: at the end. ms: of each chunk.
    """

    mse: list[float] = field(default_factory=list)
    ssim: list[float] = field(default_factory=list)
    temporal: list[float] = field(default_factory=list)
    excess: list[float] = field(default_factory=list)
    sharpness: list[float] = field(default_factory=list)
    consistency: list[float] = field(default_factory=list)
    kv_bytes: int = 0
    ratio: float | None = None
    resident_ratio: float = 1.0
    tokens: int = 0
    ms: list[float] = field(default_factory=list)


@dataclass
class JobResult:
    """series, frames: by lane; frames uint8 [kept, H, W, 3] in the order of the job's `keep`."""

    job: Job
    series: dict[str, LaneSeries]
    frames: dict[str, np.ndarray]


def script(text: str, chunks: int, world: World) -> tuple[ChunkAction, ...]:
    """The first chunks of an action string."""
    spec = world.spec
    return parse_actions(text, spec.keys, spec.cache.frames_per_chunk)[:chunks]


def run_job(world: World, job: Job) -> JobResult:
    """Run a rollout. Frames live for one chunk, but for those in `keep`."""
    names = tuple(dict.fromkeys((REFERENCE, *job.lanes)))
    lanes = [ALL[name].lane(world.spec) for name in names]
    watch = {name: _Watch(world, job) for name in names}
    with Engine(
        world,
        lanes,
        seed=job.seed,
        scene=None if job.picture is not None else job.scene,
        image=job.picture,
        mode=job.mode,
        max_tokens=job.max_tokens,
        format_of=format_of,
    ) as engine:
        engine.start()
        for action in job.actions:
            _measure(engine.step(action), watch)
    return JobResult(
        job,
        {name: found.series for name, found in watch.items()},
        {name: np.stack(found.kept) for name, found in watch.items() if found.kept},
    )


def _measure(block: BlockResult, watch: Mapping[str, _Watch]) -> None:
    results = {lane.name: lane for lane in block.lanes}
    reference = results[REFERENCE]
    before = watch[REFERENCE].last
    for name, lane in results.items():
        watch[name].add(lane, reference.frames, before)


class _Watch:
    """Turns one lane's frames into its series."""

    def __init__(self, world: World, job: Job) -> None:
        self.series = LaneSeries()
        self.kept: list[np.ndarray] = []
        self.last: np.ndarray | None = None
        self._keep, self._device = set(job.keep), world.device
        self._encode: Any = getattr(world, "encode", None) if job.consistency else None
        self._first: torch.Tensor | None = None
        self._before: torch.Tensor | None = None

    def add(self, lane: LaneResult, reference: np.ndarray, before: np.ndarray | None) -> None:
        """One chunk. before: the reference's last frame of the chunk before it."""
        series, frames = self.series, lane.frames
        for offset in range(len(frames)):
            if len(series.mse) + offset in self._keep:
                self.kept.append(frames[offset].copy())
        self._add_steps(frames, reference, before)
        series.mse += frame_mse(frames, reference).tolist()
        series.ssim += ssim_per_frame(frames, reference, self._device).tolist()
        series.sharpness += sharpness(frames).tolist()
        if self._encode is not None:
            self._add_consistency(frames)
        series.kv_bytes, series.ratio, series.tokens = lane.kv_bytes, lane.ratio, lane.tokens
        series.resident_ratio = lane.resident_ratio
        series.ms.append(lane.ms)
        self.last = frames[-1].copy()

    def _add_steps(
        self, frames: np.ndarray, reference: np.ndarray, before: np.ndarray | None
    ) -> None:
        own = frames if self.last is None else np.concatenate((self.last[None], frames))
        other = reference if before is None else np.concatenate((before[None], reference))
        for i in range(1, len(own)):
            step = change(own[i - 1], own[i])
            self.series.temporal.append(float(step.mean(dtype=np.float64)))
            excess = np.abs(step - change(other[i - 1], other[i]))
            self.series.excess.append(float(excess.mean(dtype=np.float64)))

    def _add_consistency(self, frames: np.ndarray) -> None:
        features = F.adaptive_avg_pool2d(self._encode(frames).float(), POOLED).flatten(1)
        for feature in F.normalize(features, dim=1):
            if self._first is None or self._before is None:
                self._first = feature
            else:
                score = (feature @ self._first + feature @ self._before) / 2
                self.series.consistency.append(float(score))
            self._before = feature

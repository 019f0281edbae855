"""One rollout of the report: lanes in lock-step over one scene, reduced to curves as it goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from quantwm.actions import parse_actions
from quantwm.engine import Engine
from quantwm.engine_types import LaneResult
from quantwm.metrics import frame_mse, sharpness, ssim_per_frame
from quantwm.metrics.flicker import change
from quantwm.metrics.learned import load_lpips
from quantwm.report.schedule import check_time
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
        size: (width, height), another than the world's own resolution; None for that.
        consistency: whether to compare features of frames (VBench's formula). lpips: whether to
        measure LPIPS, which needs weights.
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
    lpips: bool = False
    size: tuple[int, int] | None = None


@dataclass
class LaneSeries:
    """One lane over one rollout: a value a frame, or a step between frames where it says so.

    mse, ssim, lpips (where measured): against bf16. temporal, excess (steps): grey levels.
    sharpness: gradient energy.
    consistency: (cos to the first frame + cos to the one before) / 2, from the second frame on.
    kv_bytes, ratio, resident_ratio, tokens: at the end. held: kv_bytes after each chunk. ms: of
    each chunk; none of rollouts that ran together, whose chunks take no time of their own.
    """

    mse: list[float] = field(default_factory=list)
    ssim: list[float] = field(default_factory=list)
    lpips: list[float] = field(default_factory=list)
    temporal: list[float] = field(default_factory=list)
    excess: list[float] = field(default_factory=list)
    sharpness: list[float] = field(default_factory=list)
    consistency: list[float] = field(default_factory=list)
    kv_bytes: int = 0
    held: list[int] = field(default_factory=list)
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
    """The first chunks of an action string; keys that the world does not have are not pressed."""
    spec = world.spec
    items = []
    for item in text.split(","):
        held, _, count = item.strip().rpartition("-")
        known = [key for key in held.split("+") if key in spec.keys]
        items.append(f"{'+'.join(known) or 'none'}-{count}")
    return parse_actions(", ".join(items), spec.keys, spec.cache.frames_per_chunk)[:chunks]


def run_job(
    world: World, job: Job, deadline: float = float("inf"), enough: int | None = None
) -> JobResult:
    """Run a rollout. Frames live for one chunk, but for those in `keep`.

    deadline: seconds since the epoch, OutOfTime then. enough: chunks after which the deadline ends
    the run instead.
    """
    names = lanes_of(job)
    watch = {name: Watch(job) for name in names}
    world = sized(world, job)
    with Engine(
        world,
        [ALL[name].lane(world.spec) for name in names],
        seed=job.seed,
        scene=None if job.picture is not None else job.scene,
        image=job.picture,
        mode=job.mode,
        max_tokens=job.max_tokens,
        format_of=format_of,
    ) as engine:
        engine.start()
        for done, action in enumerate(job.actions):
            if enough is None:
                check_time(deadline, time.time())
            elif done >= enough and time.time() >= deadline:
                break
            block = engine.step(action)
            frames = {lane.name: lane.frames for lane in block.lanes}
            before = watch[REFERENCE].last
            for lane in block.lanes:
                look = look_at(world, job, lane.frames, frames[REFERENCE])
                watch[lane.name].add(lane.frames, look, frames[REFERENCE], before)
                watch[lane.name].note(lane)
    return result_of(job, watch)


def sized(world: World, job: Job) -> World:
    """The world at the job's resolution: the same weights."""
    if job.size is None:
        return world
    at_size: Any = world
    return at_size.at_size(job.size)


def lanes_of(job: Job) -> tuple[str, ...]:
    """The reference, then the others."""
    return tuple(dict.fromkeys((REFERENCE, *job.lanes)))


def result_of(job: Job, watch: Mapping[str, Watch]) -> JobResult:
    """What the watchers of a rollout's lanes have seen."""
    return JobResult(
        job,
        {name: found.series for name, found in watch.items()},
        {name: np.stack(found.kept) for name, found in watch.items() if found.kept},
    )


@dataclass(frozen=True)
class Look:
    """What the device says of N frames. ssim: [N], to the reference; features: float32 [N, F] of
    unit length, None where consistency is not wanted; lpips: [N], or empty."""

    ssim: np.ndarray
    features: torch.Tensor | None
    lpips: Sequence[float] = ()

    def of(self, frames: slice) -> Look:
        """Of some of them."""
        features = None if self.features is None else self.features[frames]
        return Look(self.ssim[frames], features, self.lpips[frames])


def look_at(world: World, job: Job, frames: np.ndarray, reference: np.ndarray) -> Look:
    """frames, reference: uint8 [N, H, W, 3]; of several rollouts, one behind the other."""
    encode: Any = getattr(world, "encode", None) if job.consistency else None
    features = None
    if encode is not None:
        pooled = F.adaptive_avg_pool2d(encode(frames).float(), POOLED)
        features = F.normalize(pooled.flatten(1), dim=1)
    ssim = ssim_per_frame(frames, reference, world.device)
    return Look(ssim, features, _lpips(world, frames, reference) if job.lpips else ())


def _lpips(world: World, frames: np.ndarray, reference: np.ndarray) -> list[float]:
    distance = lpips_on(str(world.device))
    return [distance(own, other) for own, other in zip(frames, reference, strict=True)]


@cache
def lpips_on(device: str) -> Callable[[np.ndarray, np.ndarray], float]:
    """LPIPS of a pair of frames, its weights loaded once a process."""
    return load_lpips(device)


class Watch:
    """Turns one lane's frames into its series."""

    def __init__(self, job: Job) -> None:
        self.series = LaneSeries()
        self.kept: list[np.ndarray] = []
        self.last: np.ndarray | None = None
        self._keep = set(job.keep)
        self._first: torch.Tensor | None = None
        self._before: torch.Tensor | None = None

    def add(
        self, frames: np.ndarray, look: Look, reference: np.ndarray, before: np.ndarray | None
    ) -> None:
        """One chunk. before: the reference's last frame of the chunk before it."""
        series = self.series
        for offset in range(len(frames)):
            if len(series.mse) + offset in self._keep:
                self.kept.append(frames[offset].copy())
        self._add_steps(frames, reference, before)
        series.mse += frame_mse(frames, reference).tolist()
        series.ssim += look.ssim.tolist()
        series.lpips += look.lpips
        series.sharpness += sharpness(frames).tolist()
        if look.features is not None:
            self._add_consistency(look.features)
        self.last = frames[-1].copy()

    def note(self, lane: LaneResult) -> None:
        """What the lane holds, and what its chunk took."""
        series = self.series
        series.kv_bytes, series.ratio, series.tokens = lane.kv_bytes, lane.ratio, lane.tokens
        series.resident_ratio = lane.resident_ratio
        series.held.append(lane.kv_bytes)
        series.ms.append(lane.ms)

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

    def _add_consistency(self, features: torch.Tensor) -> None:
        if self._first is None or self._before is None:
            self._first = self._before = features[0]
            features = features[1:]
        before = torch.cat((self._before[None], features[:-1]))
        scores = (features @ self._first + (features * before).sum(1)) / 2
        self.series.consistency += scores.tolist()
        self._before = features[-1] if len(features) else self._before

"""Per-frame curves of a clip, measured in the background while the person already looks."""

from __future__ import annotations

import csv
import io
import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from app.inspector.clips import Clip, ClipInfo
from quantwm.metrics import FidelityMeter, divergence_frame, has_flow
from quantwm.metrics.flow import SMALLEST as SMALLEST_FLOW
from quantwm.metrics.learned import SMALLEST_LPIPS, load_lpips, missing_for_lpips
from quantwm.metrics.ssim import WINDOW as SMALLEST_SSIM

log = logging.getLogger("quantwm.app")

IDENTICAL_DB = 99.0
"""Stands for the infinite PSNR of identical pictures, which JSON cannot carry."""
STEPS = ("temporal", "temporal_reference", "excess", "warping", "warping_reference")
"""Curves of steps between frames."""
KEPT = 12
"""Clips whose curves are remembered; a page keeps three."""


@dataclass
class _Job:
    """One clip's measurement.

    Attributes:
        meters: lane -> its curves but LPIPS. frames: how many are done.
        lpips: lane -> LPIPS by frame, measured when the others are there: it is much slower.
        finished: whether anything more will come. failed: why nothing more will.
    """

    clip: Clip
    meters: dict[str, FidelityMeter] = field(default_factory=dict)
    frames: int = 0
    lpips: dict[str, list[float]] = field(default_factory=dict)
    finished: bool = False
    failed: str = ""
    dropped: bool = False

    def columns(self, lane: str) -> dict[str, list[float]]:
        """Every curve of a lane, as far as it is measured."""
        found = self.meters[lane].columns()
        if self.lpips.get(lane):
            found["lpips"] = self.lpips[lane]
        return found


class CurveJobs:
    """Measures clips one after the other on one thread: lanes must not wait for curves."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="curves")
        self._jobs: OrderedDict[str, _Job] = OrderedDict()
        self._lock = threading.Lock()

    def start(self, clip: Clip) -> None:
        """Measure a clip, in turn. The oldest of many is given up."""
        job = _Job(clip)
        reference, others = clip.info.lanes[0], clip.info.lanes[1:]
        side = min(clip.info.size)
        flow = has_flow() and side >= SMALLEST_FLOW
        # A single lane is measured against itself: its own flicker and sharpness are still curves.
        for lane in others or (reference,):
            job.meters[lane] = FidelityMeter(ssim=side >= SMALLEST_SSIM, flow=flow, appearance=True)
        with self._lock:
            self._jobs[clip.token] = job
            while len(self._jobs) > KEPT:
                _, old = self._jobs.popitem(last=False)
                old.dropped = True
        self._pool.submit(_measure, job)

    def state(self, clip: Clip) -> dict[str, object]:
        """{"done", "frames", "reference", "lanes": {lane: {curve: values}}, "diverged", "note"}."""
        job = self._job(clip)
        if job is None:
            return {"done": True, "frames": 0, "reference": "", "lanes": {}, "note": ""}
        done = job.finished  # first: what is read after it is then whole
        lanes = {name: _finite(job.columns(name)) for name in job.meters}
        return {
            "done": done,
            "frames": job.frames,
            "reference": clip.info.lanes[0],
            "lanes": lanes,
            "diverged": _diverged(clip.info, job),
            "note": job.failed or _note(clip.info),
        }

    def csv(self, clip: Clip) -> str:
        """Every curve: a row a frame and lane. Steps (changes from the frame before) begin at 1."""
        job, out = self._job(clip), io.StringIO()
        rows = csv.writer(out)
        names = [*FidelityMeter().__dataclass_fields__, "lpips"]
        rows.writerow(["frame", "lane", "reference", *names])
        for lane in job.meters if job else ():
            columns = job.columns(lane)
            for frame in range(job.frames):
                values = [_at(columns.get(name, []), name, frame) for name in names]
                rows.writerow([clip.info.first + frame, lane, clip.info.lanes[0], *values])
        return out.getvalue()

    def _job(self, clip: Clip) -> _Job | None:
        with self._lock:
            return self._jobs.get(clip.token)


def _measure(job: _Job) -> None:
    steps = (
        (_measure_frames, "The curves end early"),
        (_measure_lpips, "No whole LPIPS curve"),
    )
    for step, lost in steps:
        try:
            step(job)
        except Exception:
            log.exception("curves of %s: %s", job.clip.info.title, lost)
            job.failed = f"{lost}: see the server's log."
            break
    job.finished = True


def _measure_frames(job: _Job) -> None:
    lanes = job.clip.info.lanes
    for frame, pictures in _frames(job):
        for lane, meter in job.meters.items():
            meter.update(pictures[lanes.index(lane)], pictures[0])
        job.frames = frame + 1


def _measure_lpips(job: _Job) -> None:
    lanes = job.clip.info.lanes
    if _without_lpips(job.clip.info) or job.dropped:
        return
    distance = load_lpips("cpu")
    job.lpips = {lane: [] for lane in job.meters}
    for _, pictures in _frames(job):
        for lane, values in job.lpips.items():
            values.append(distance(pictures[lanes.index(lane)], pictures[0]))


def _frames(job: _Job) -> Iterator[tuple[int, np.ndarray]]:
    """The clip's frames with their numbers, [lanes, H, W, 3], until the job or clip is dropped."""
    for frame in range(job.clip.info.frames):
        if job.dropped or not job.clip.path.exists():
            return
        yield frame, job.clip.read(frame, frame + 1)[0].copy()


def _without_lpips(info: ClipInfo) -> str:
    """Why there is no LPIPS curve, a sentence; empty where there will be one."""
    if len(info.lanes) < 2:
        return "No LPIPS: it needs a second lane."
    if min(info.size) < SMALLEST_LPIPS:
        return f"No LPIPS: it needs pictures of at least {SMALLEST_LPIPS} pixels a side."
    if missing_for_lpips() is not None:
        return "No LPIPS: this server lacks torchmetrics, torchvision or AlexNet's weights."
    return ""


def _diverged(info: ClipInfo, job: _Job) -> dict[str, int]:
    """Lane -> frame of the clip from which a free-running lane has parted from the reference."""
    if info.mode == "teacher" or len(info.lanes) < 2:
        return {}
    found = {name: divergence_frame(list(meter.psnr)) for name, meter in job.meters.items()}
    return {name: frame for name, frame in found.items() if frame is not None}


def _note(info: ClipInfo) -> str:
    """What is not measured and why."""
    flow = "Flow-warping error needs OpenCV (pip install opencv-python-headless)."
    return " ".join(filter(None, ("" if has_flow() else flow, _without_lpips(info))))


def _at(values: list[float], name: str, frame: int) -> str:
    """A value as text. A curve of steps is one shorter and belongs to the later frame."""
    index = frame - (name in STEPS)
    return f"{values[index]:.6g}" if 0 <= index < len(values) else ""


def _plain(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


def _finite(columns: dict[str, list[float]]) -> dict[str, list[float | None]]:
    return {
        name: [IDENTICAL_DB if v == math.inf else _plain(v) for v in list(values)]
        for name, values in columns.items()
    }

"""Per-frame curves of a clip, measured in the background while the person already looks."""

from __future__ import annotations

import csv
import io
import logging
import math
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from app.inspector.clips import Clip, ClipInfo
from quantwm.metrics import FidelityMeter, divergence_frame, has_flow
from quantwm.metrics.flow import SMALLEST as SMALLEST_FLOW
from quantwm.metrics.ssim import WINDOW as SMALLEST_SSIM

log = logging.getLogger("quantwm.app")

IDENTICAL_DB = 99.0
"""Stands for the infinite PSNR of identical pictures, which JSON cannot carry."""
KEPT = 12
"""Clips whose curves are remembered; a page keeps three."""


@dataclass
class _Job:
    """One clip's measurement. `frames` says how many are done; `failed` why no more will come."""

    clip: Clip
    meters: dict[str, FidelityMeter] = field(default_factory=dict)
    frames: int = 0
    failed: str = ""
    dropped: bool = False


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
        lanes = {name: _finite(meter.columns()) for name, meter in job.meters.items()}
        return {
            "done": job.frames == clip.info.frames or bool(job.failed),
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
        names = list(FidelityMeter().__dataclass_fields__)
        rows.writerow(["frame", "lane", "reference", *names])
        for lane, meter in job.meters.items() if job else ():
            columns = meter.columns()
            for frame in range(job.frames):
                values = [_at(columns.get(name, []), frame, job.frames) for name in names]
                rows.writerow([clip.info.first + frame, lane, clip.info.lanes[0], *values])
        return out.getvalue()

    def _job(self, clip: Clip) -> _Job | None:
        with self._lock:
            return self._jobs.get(clip.token)


def _measure(job: _Job) -> None:
    clip = job.clip
    try:
        for frame in range(clip.info.frames):
            if job.dropped or not clip.path.exists():
                return
            pictures = clip.read(frame, frame + 1)[0].copy()
            for lane, meter in job.meters.items():
                meter.update(pictures[clip.info.lanes.index(lane)], pictures[0])
            job.frames = frame + 1
    except Exception:
        log.exception("the curves of %s ended", clip.info.title)
        job.failed = f"The curves end at frame {job.frames}: see the server's log."


def _diverged(info: ClipInfo, job: _Job) -> dict[str, int]:
    """Lane -> frame of the clip from which a free-running lane has parted from the reference."""
    if info.mode == "teacher" or len(info.lanes) < 2:
        return {}
    found = {name: divergence_frame(list(meter.psnr)) for name, meter in job.meters.items()}
    return {name: frame for name, frame in found.items() if frame is not None}


def _note(info: ClipInfo) -> str:
    return (
        ""
        if has_flow()
        else "Flow-warping error needs OpenCV (pip install opencv-python-headless)."
    )


def _at(values: list[float], frame: int, frames: int) -> str:
    """A value as text. A curve of steps is one shorter and belongs to the later frame."""
    index = frame - (frames - len(values)) if len(values) in (frames, frames - 1) else frame
    return f"{values[index]:.6g}" if 0 <= index < len(values) else ""


def _plain(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


def _finite(columns: dict[str, list[float]]) -> dict[str, list[float | None]]:
    return {
        name: [IDENTICAL_DB if v == math.inf else _plain(v) for v in list(values)]
        for name, values in columns.items()
    }

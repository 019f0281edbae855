"""What a whole run says about each lane: bytes, ratios, time and PSNR to the BF16 lane."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from quantwm.engine_types import BlockResult, LaneConfig, LaneResult
from quantwm.lanes import is_bf16
from quantwm.metrics import frame_mse, psnr_of_mse, temporal_difference, temporal_excess


@dataclass
class LaneTotals:
    """What a whole run says about one lane."""

    name: str
    kv_bytes: int = 0
    ratio: float | None = None
    resident_ratio: float = 1.0
    ms: float = 0.0
    blocks: int = 0
    squared_error: float = 0.0
    frames: int = 0

    def add(self, lane: LaneResult, mse: np.ndarray | None) -> None:
        """Count one generated chunk; mse: of each frame to the BF16 lane, if there is one."""
        self.kv_bytes, self.ratio, self.resident_ratio = (
            lane.kv_bytes,
            lane.ratio,
            lane.resident_ratio,
        )
        self.ms += lane.ms
        self.blocks += 1
        if mse is not None:
            self.squared_error += float(mse.sum())
            self.frames += len(mse)

    @property
    def psnr_to_bf16(self) -> float | None:
        """PSNR of the mean squared error over all generated frames; infinite when identical."""
        return psnr_of_mse(self.squared_error / self.frames) if self.frames else None

    def to_json(self) -> dict[str, object]:
        """A lane's entry on the last line of `play`; infinite PSNR is null there."""
        return {
            "lane": self.name,
            "psnr_to_bf16": finite_or_none(self.psnr_to_bf16),
            "kv_bytes": self.kv_bytes,
            "ratio": self.ratio,
            "resident_ratio": self.resident_ratio,
            "ms_per_chunk": self.ms / self.blocks if self.blocks else None,
        }


@dataclass
class RunTotals:
    """Running totals of a session, with or without a recording."""

    lanes: dict[str, LaneTotals] = field(default_factory=dict)
    frames: int = 0
    ms: float = 0.0

    def add(self, block: BlockResult, mse: Mapping[str, np.ndarray]) -> None:
        """Count one block; the start block (index 0) only sets the bytes."""
        for lane in block.lanes:
            totals = self.lanes.setdefault(lane.name, LaneTotals(lane.name))
            if block.index == 0:
                totals.kv_bytes, totals.ratio = lane.kv_bytes, lane.ratio
                totals.resident_ratio = lane.resident_ratio
            else:
                totals.add(lane, mse.get(lane.name))
        if block.index > 0:
            self.frames += len(block.lanes[0].frames)
            self.ms += block.ms

    @property
    def fps(self) -> float | None:
        """Generated frames per second of all lanes together, start block excluded."""
        return self.frames / self.ms * 1000 if self.ms else None


@dataclass
class ChangeWatch:
    """Mean change a frame of every lane, and its excess over the BF16 lane's, chunk by chunk."""

    _last: dict[str, np.ndarray] = field(default_factory=dict)

    def add(
        self, block: BlockResult, lanes: Sequence[LaneConfig]
    ) -> dict[str, tuple[float | None, float | None]]:
        """Lane -> (temporal difference, excess flicker) in grey levels, the step from the chunk
        before counted; None where there is no step or no BF16 lane."""
        clips = {lane.name: self._with_last(lane) for lane in block.lanes}
        self._last = {lane.name: lane.frames[-1].copy() for lane in block.lanes}
        name = _reference_name(lanes)
        return {
            lane: (
                _mean(temporal_difference(clip)),
                None if name is None else _mean(temporal_excess(clip, clips[name])),
            )
            for lane, clip in clips.items()
        }

    def _with_last(self, lane: LaneResult) -> np.ndarray:
        last = self._last.get(lane.name)
        return lane.frames if last is None else np.concatenate((last[None], lane.frames))


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


def _reference_name(lanes: Sequence[LaneConfig]) -> str | None:
    return next((lane.name for lane in lanes if is_bf16(lane)), None)


def errors_to_bf16(block: BlockResult, lanes: Sequence[LaneConfig]) -> dict[str, np.ndarray]:
    """Per lane the squared error of each frame to the BF16 lane; empty without a BF16 lane."""
    reference_name = _reference_name(lanes)
    if reference_name is None or block.index == 0:
        return {}
    reference = next(lane.frames for lane in block.lanes if lane.name == reference_name)
    return {lane.name: frame_mse(lane.frames, reference) for lane in block.lanes}


def finite_or_none(value: float | None) -> float | None:
    """JSON has no infinity: an infinite PSNR (identical pictures) is null."""
    return None if value is None or not math.isfinite(value) else value

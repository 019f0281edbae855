"""Two videos side by side, frame by frame: every weightless metric as a curve, nothing held."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from itertools import zip_longest

import numpy as np
import torch

from quantwm.errors import UserError
from quantwm.metrics.appearance import colour_difference, mean_colour, sharpness
from quantwm.metrics.fidelity import check_pair, frame_mse, psnr_of_mse
from quantwm.metrics.flicker import change
from quantwm.metrics.flow import FlowMeter
from quantwm.metrics.ssim import ssim_per_frame


@dataclass
class Curves:
    """One value a frame, or a step from frame t - 1 to t (those with "step" below).

    psnr: dB, infinite where identical. ssim, warping, warping_reference: empty unless asked for.
    temporal, temporal_reference, excess, warping, warping_reference: step, grey levels.
    sharpness, sharpness_reference: squared grey levels. colour: distance of mean colours, levels.
    drift, drift_reference: distance of the mean colour from the first frame's, grey levels.
    """

    psnr: list[float] = field(default_factory=list)
    ssim: list[float] = field(default_factory=list)
    temporal: list[float] = field(default_factory=list)
    temporal_reference: list[float] = field(default_factory=list)
    excess: list[float] = field(default_factory=list)
    warping: list[float] = field(default_factory=list)
    warping_reference: list[float] = field(default_factory=list)
    sharpness: list[float] = field(default_factory=list)
    sharpness_reference: list[float] = field(default_factory=list)
    colour: list[float] = field(default_factory=list)
    drift: list[float] = field(default_factory=list)
    drift_reference: list[float] = field(default_factory=list)

    def columns(self) -> dict[str, list[float]]:
        """Name -> values, of the curves that were measured."""
        found = {f.name: getattr(self, f.name) for f in fields(Curves)}
        return {name: values for name, values in found.items() if values}


class FidelityMeter(Curves):
    """Compares two videos frame by frame without holding them; the curves grow as it goes.

    Args:
        ssim, flow, appearance: whether to measure these too.
        device: where SSIM is computed.

    Raises:
        UserError: flow is asked for and OpenCV is missing.
    """

    def __init__(
        self,
        *,
        ssim: bool = False,
        flow: bool = False,
        appearance: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self._with_ssim, self._with_appearance, self._device = ssim, appearance, device
        self._flow = FlowMeter() if flow else None
        self._squared = 0.0
        self._last: tuple[np.ndarray, np.ndarray] | None = None
        self._first: tuple[np.ndarray, np.ndarray] | None = None

    def update(self, frame: np.ndarray, reference: np.ndarray) -> None:
        """Add one frame of each video, uint8 [H, W, 3]."""
        own, other = frame[None], reference[None]
        check_pair(own, other)
        mse = float(frame_mse(own, other)[0])
        self._squared += mse
        self.psnr.append(psnr_of_mse(mse))
        if self._with_ssim:
            self.ssim.append(float(ssim_per_frame(own, other, self._device)[0]))
        if self._with_appearance:
            self._measure_appearance(own, other)
        if self._last is not None:
            self._measure_step(*self._last, frame, reference)
        self._last = (frame.copy(), reference.copy())

    @property
    def psnr_pooled(self) -> float:
        """PSNR of the mean squared error over all frames seen so far."""
        return psnr_of_mse(self._squared / len(self.psnr)) if self.psnr else float("inf")

    def _measure_step(
        self, before: np.ndarray, reference_before: np.ndarray, after: np.ndarray, other: np.ndarray
    ) -> None:
        own_change, other_change = change(before, after), change(reference_before, other)
        self.temporal.append(float(own_change.mean(dtype=np.float64)))
        self.temporal_reference.append(float(other_change.mean(dtype=np.float64)))
        self.excess.append(float(np.abs(own_change - other_change).mean(dtype=np.float64)))
        if self._flow is not None:
            own, reference = self._flow.step(before, after, reference_before, other)
            self.warping.append(own)
            self.warping_reference.append(reference)

    def _measure_appearance(self, own: np.ndarray, other: np.ndarray) -> None:
        self.sharpness.append(float(sharpness(own)[0]))
        self.sharpness_reference.append(float(sharpness(other)[0]))
        self.colour.append(float(colour_difference(own, other)[0]))
        means = mean_colour(own)[0], mean_colour(other)[0]
        self._first = self._first or means
        self.drift.append(float(np.linalg.norm(means[0] - self._first[0])))
        self.drift_reference.append(float(np.linalg.norm(means[1] - self._first[1])))


def measure(
    frames: Iterable[np.ndarray],
    reference: Iterable[np.ndarray],
    *,
    ssim: bool = True,
    flow: bool = False,
    appearance: bool = True,
    device: torch.device | str = "cpu",
) -> FidelityMeter:
    """Curves of two videos of one length, read once: uint8 frames [H, W, 3], arrays or iterators.

    Raises:
        UserError: different lengths or sizes, no frame, or OpenCV missing where flow is asked for.
    """
    meter = FidelityMeter(ssim=ssim, flow=flow, appearance=appearance, device=device)
    for frame, other in zip_longest(frames, reference):
        if frame is None or other is None:
            raise UserError(
                f"the two videos differ in length: one ends after {len(meter.psnr)} frames"
            )
        meter.update(frame, other)
    if not meter.psnr:
        raise UserError("nothing to compare: the videos hold no frame")
    return meter

"""Metrics of frames: fidelity to a reference, flicker, flow, sharpness, windows, learned scores."""

from quantwm.metrics.appearance import colour_difference, colour_drift, sharpness
from quantwm.metrics.fidelity import (
    PEAK,
    frame_mse,
    psnr_of_mse,
    psnr_per_frame,
    psnr_pooled,
)
from quantwm.metrics.flicker import (
    is_standing_still,
    temporal_difference,
    temporal_excess,
    vbench_temporal_flickering,
)
from quantwm.metrics.flow import has_flow, warping_error
from quantwm.metrics.meter import Curves, FidelityMeter, measure
from quantwm.metrics.ssim import ssim_per_frame
from quantwm.metrics.windows import (
    WINDOWS,
    Interval,
    Window,
    bootstrap,
    divergence_frame,
    frames_of,
)

__all__ = [
    "PEAK",
    "WINDOWS",
    "Curves",
    "FidelityMeter",
    "Interval",
    "Window",
    "bootstrap",
    "colour_difference",
    "colour_drift",
    "divergence_frame",
    "frame_mse",
    "frames_of",
    "has_flow",
    "is_standing_still",
    "measure",
    "psnr_of_mse",
    "psnr_per_frame",
    "psnr_pooled",
    "sharpness",
    "ssim_per_frame",
    "temporal_difference",
    "temporal_excess",
    "vbench_temporal_flickering",
    "warping_error",
]

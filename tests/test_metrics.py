"""PSNR and flicker against hand-computed values and against skimage where it is installed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quantwm.errors import UserError
from quantwm.metrics import (
    FidelityMeter,
    frame_mse,
    psnr_per_frame,
    psnr_pooled,
    temporal_difference,
    temporal_excess,
)


def noise(seed: int, frames: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (frames, 7, 9, 3), dtype=np.uint8)


def test_identical_is_infinite():
    a = noise(0)
    assert math.isinf(psnr_pooled(a, a))
    assert np.isinf(psnr_per_frame(a, a)).all()


def test_known_error():
    a = np.zeros((2, 4, 4, 3), np.uint8)
    b = a.copy()
    b[1] = 10
    assert frame_mse(b, a).tolist() == [0.0, 100.0]
    assert psnr_per_frame(b, a)[1] == pytest.approx(10 * math.log10(255**2 / 100))
    # pooled is the PSNR of the mean error 50, not a mean with an infinite member
    assert psnr_pooled(b, a) == pytest.approx(10 * math.log10(255**2 / 50))


def test_uint8_does_not_wrap():
    a = np.full((1, 2, 2, 3), 255, np.uint8)
    assert frame_mse(np.zeros_like(a), a)[0] == 255**2


def test_matches_skimage():
    metrics = pytest.importorskip("skimage.metrics")
    a, b = noise(1), noise(2)
    want = [metrics.peak_signal_noise_ratio(x, y) for x, y in zip(a, b, strict=True)]
    assert psnr_per_frame(a, b) == pytest.approx(want)


def test_temporal_difference_and_excess():
    reference = np.zeros((4, 3, 3, 3), np.uint8)
    flicker = reference.copy()
    flicker[1::2] = 6
    assert temporal_difference(flicker).tolist() == [6.0, 6.0, 6.0]
    assert temporal_excess(flicker, reference).tolist() == [6.0, 6.0, 6.0]
    moving = np.arange(4, dtype=np.uint8)[:, None, None, None] + reference
    assert temporal_excess(moving, moving).tolist() == [0.0, 0.0, 0.0]
    assert temporal_difference(moving).tolist() == [1.0, 1.0, 1.0]


def test_excess_sees_flicker_that_means_cancel():
    # half of the pixels flicker more, half less than the reference: equal means, excess 4
    reference = np.zeros((2, 2, 2, 3), np.uint8)
    reference[1, 0], reference[1, 1] = 4, 4
    frames = np.zeros_like(reference)
    frames[1, 0] = 8
    assert temporal_difference(frames) == pytest.approx(temporal_difference(reference))
    assert temporal_excess(frames, reference).tolist() == [4.0]


def test_meter_equals_whole_array_functions():
    a, b = noise(3), noise(4)
    meter = FidelityMeter()
    for x, y in zip(a, b, strict=True):
        meter.update(x, y)
    assert meter.psnr == pytest.approx(psnr_per_frame(a, b).tolist())
    assert meter.psnr_pooled == pytest.approx(psnr_pooled(a, b))
    assert meter.temporal == pytest.approx(temporal_difference(a).tolist())
    assert meter.temporal_reference == pytest.approx(temporal_difference(b).tolist())
    assert meter.excess == pytest.approx(temporal_excess(a, b).tolist())


def test_shapes_and_types_are_checked():
    with pytest.raises(UserError, match="one shape"):
        psnr_pooled(noise(0), noise(0, 4))
    with pytest.raises(UserError, match="uint8"):
        psnr_pooled(noise(0).astype(np.float32), noise(0).astype(np.float32))
    with pytest.raises(UserError, match="no frame"):
        psnr_pooled(noise(0)[:0], noise(0)[:0])

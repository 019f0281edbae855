"""Flow-warping error, sharpness, colour, windows, bootstrap, divergence and the pair meter."""

from __future__ import annotations

import importlib.util
import math

import numpy as np
import pytest

import quantwm.metrics.flow as flow
from quantwm.errors import UserError
from quantwm.metrics import (
    WINDOWS,
    FidelityMeter,
    bootstrap,
    colour_difference,
    colour_drift,
    divergence_frame,
    frames_of,
    is_standing_still,
    measure,
    psnr_of_mse,
    sharpness,
    vbench_temporal_flickering,
    warping_error,
)
from tests.test_metrics_agreement import smooth_clip

needs_cv2 = pytest.mark.skipif(
    importlib.util.find_spec("cv2") is None, reason="OpenCV is not installed"
)


def moving(frames: int = 4) -> np.ndarray:
    """A texture that moves 2 pixels a frame to the left, uint8 [T, 64, 96, 3]."""
    rng = np.random.default_rng(3)
    coarse = rng.integers(40, 216, (17, 34, 3)).astype(np.float32)
    y, x = np.linspace(0, 15.99, 64), np.linspace(0, 32.99, 128)
    y0, x0 = y.astype(int), x.astype(int)
    fy, fx = (y - y0)[:, None, None], (x - x0)[None, :, None]
    top = coarse[y0][:, x0] * (1 - fx) + coarse[y0][:, x0 + 1] * fx
    low = coarse[y0 + 1][:, x0] * (1 - fx) + coarse[y0 + 1][:, x0 + 1] * fx
    wide = (top * (1 - fy) + low * fy).astype(np.uint8)
    return np.stack([wide[:, 2 * t : 2 * t + 96] for t in range(frames)])


@needs_cv2
def test_warping_error_follows_motion_and_sees_flicker():
    clip = moving()
    assert warping_error(clip).max() < 1.0  # DIS explains the motion
    flicker = clip.copy()
    flicker[1::2] += 9
    errors = warping_error(flicker, clip)
    assert errors == pytest.approx([9.0] * 3, abs=1.0)


@needs_cv2
def test_warping_error_leaves_out_what_enters_the_picture():
    clip = moving()
    clip[1:, :, 90:] = 255  # a bright bar that was not there before
    assert warping_error(clip)[0] < 6.0
    with pytest.raises(UserError, match="at least 16 pixels"):
        warping_error(clip[:, :8])


def test_without_opencv_one_clear_word(monkeypatch):
    monkeypatch.setattr(flow, "has_flow", lambda: False)
    with pytest.raises(UserError, match="pip install opencv-python-headless"):
        FidelityMeter(flow=True)


def test_sharpness_is_gradient_energy():
    stripes = np.zeros((1, 4, 4, 3), np.uint8)
    stripes[:, :, ::2] = 10
    assert sharpness(stripes).tolist() == [100.0]  # 10 to the right, 0 down
    assert sharpness(stripes[:, :, :1]).tolist() == [0.0]
    blurred = smooth_clip(0)
    assert (sharpness(blurred // 2) < sharpness(blurred)).all()


def test_colour():
    a = np.zeros((3, 4, 4, 3), np.uint8)
    b = a.copy()
    b[1, ..., 0], b[2, ..., 2] = 3, 4
    assert colour_drift(b).tolist() == [0.0, 3.0, 4.0]
    assert colour_difference(b, a).tolist() == [0.0, 3.0, 4.0]


def test_vbench_flickering_and_standing_still():
    still = np.full((4, 4, 4, 3), 100, np.uint8)
    assert vbench_temporal_flickering(still) == 1.0
    still[1::2] += 51
    assert vbench_temporal_flickering(still) == pytest.approx(0.8)
    assert not is_standing_still(still)
    with pytest.raises(UserError, match="at least 2"):
        vbench_temporal_flickering(still[:1])


def test_windows_at_a_broken_rate():
    early, middle, late = (frames_of(window, 8.75, 60) for window in WINDOWS)
    assert (early, middle, late) == (slice(0, 18), slice(18, 44), slice(44, 60))
    assert frames_of(WINDOWS[2], 8.75, 20) == slice(20, 20)


def test_divergence_needs_a_run_of_low_frames():
    assert divergence_frame([30, 19, 19, 19, 25, 19, 19, 19, 19, 18]) == 5
    assert divergence_frame([30, 19, 19, 19]) is None
    assert divergence_frame([math.inf] * 5) is None


def test_bootstrap_covers_and_repeats():
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(100):
        interval = bootstrap(rng.normal(5, 1, 32), samples=400, seed=trial)
        hits += interval.low <= 5 <= interval.high
    assert 85 <= hits <= 100
    values = rng.normal(0, 1, 20)
    assert bootstrap(values) == bootstrap(values)
    assert bootstrap([3.0]).to_json() == {"mean": 3.0, "low": 3.0, "high": 3.0, "count": 1}
    assert bootstrap([math.inf, 3.0]).to_json()["mean"] is None
    with pytest.raises(UserError, match="at least one scene"):
        bootstrap([])


def test_bootstrap_of_a_pooled_figure():
    mse = np.asarray([[10.0, 30.0], [50.0, 70.0]])
    pooled = bootstrap(mse, statistic=lambda m: 10 * np.log10(255**2 / m.mean(axis=(1, 2))))
    assert pooled.mean == pytest.approx(psnr_of_mse(40.0))


def test_measure_gives_every_curve_and_checks_lengths():
    a, b = smooth_clip(0, 4), smooth_clip(1, 4)
    found = measure(a, b)
    columns = found.columns()
    assert len(columns["psnr"]) == len(columns["ssim"]) == len(columns["drift"]) == 4
    assert len(columns["temporal"]) == len(columns["excess"]) == 3
    assert columns["drift"] == pytest.approx(colour_drift(a).tolist())
    assert columns["sharpness_reference"] == pytest.approx(sharpness(b).tolist())
    assert "warping" not in columns
    with pytest.raises(UserError, match="one ends after 2 frames"):
        measure(a[:2], b)
    with pytest.raises(UserError, match="no frame"):
        measure([], [])

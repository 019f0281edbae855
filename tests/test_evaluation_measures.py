"""Measures against clips whose answer is known: a blur, a drift of colour, known bootstraps."""

from __future__ import annotations

import numpy as np
import pytest

from quantwm.evaluation.measures import (
    bootstrap,
    brightness,
    colourfulness,
    contrast,
    gradient_energy,
    mean_psnr,
    ratio,
)
from quantwm.evaluation.table import ROWS, Row, RowSpec, make_rows


def clip(frames: int = 6) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (frames, 24, 32, 3), dtype=np.uint8)


def test_psnr_of_a_known_error_and_of_none():
    truth = np.full((3, 8, 8, 3), 100, np.uint8)
    assert mean_psnr(truth + 5, truth) == pytest.approx(20 * np.log10(255 / 5))
    assert mean_psnr(truth, truth) == 60.0


def test_a_blurred_clip_loses_gradient_energy():
    sharp = clip()
    values = sharp.astype(np.float32)
    blurred = ((values + np.roll(values, 1, axis=2)) / 2).astype(np.uint8)
    # of noise, a mean of two neighbours leaves 1/4 of the energy across it and 1/2 along it
    assert gradient_energy(blurred) / gradient_energy(sharp) == pytest.approx(0.375, abs=0.03)
    step = np.zeros((1, 4, 4, 3), np.uint8)
    step[:, :, 2:] = 90  # one edge of 90 in three columns of differences, none down
    assert gradient_energy(step) == pytest.approx(90**2 / 3)


def test_a_drift_to_grey_and_to_one_colour_is_seen():
    frames = clip()
    grey = np.repeat(frames.mean(axis=-1, keepdims=True).astype(np.uint8), 3, axis=-1)
    assert colourfulness(grey) == 0.0 < colourfulness(frames)
    one = np.broadcast_to(np.uint8([200, 10, 10]), frames.shape).copy()
    assert contrast(one) == 0.0 < contrast(frames)
    assert brightness(one) == pytest.approx(220 / 3)


def test_bootstrap_of_known_tables():
    same = bootstrap([[3.0]] * 5)
    assert (same.value, same.low, same.high, same.maps) == (3.0, 3.0, 3.0, 5)
    spread = bootstrap([[float(i)] for i in range(40)])
    error = np.std(range(40)) / np.sqrt(40)
    assert spread.value == pytest.approx(19.5)
    assert spread.low == pytest.approx(19.5 - 1.96 * error, abs=0.6)
    assert spread.high == pytest.approx(19.5 + 1.96 * error, abs=0.6)
    assert bootstrap([[1.0]]).low is None
    # a ratio of means: 4 / 6, not the mean of 1/2 and 3/4
    assert bootstrap([[1.0, 2.0], [3.0, 4.0]], ratio).value == pytest.approx(4 / 6)


def test_rows_say_what_is_wanted_and_reached():
    spec = RowSpec("x", "a measure", "dB", 3.0)
    assert Row(spec, 3.0).ok and not Row(spec, 2.99).ok
    both = RowSpec("y", "a ratio", "", 0.75, 1.25)
    assert [Row(both, value).ok for value in (0.74, 0.75, 1.25, 1.26)] == [False, True, True, False]
    assert Row(RowSpec("z", "for information", "dB"), 1.0).ok is None
    assert both.wanted == "0.75 to 1.25" and spec.wanted == "at least 3 dB"
    estimate = bootstrap([[26.0], [28.0]])
    rows = make_rows({"next_chunk": estimate}, {"weights_mb": 43.2})
    assert [row.spec.key for row in rows] == ["next_chunk", "weights_mb"]
    assert rows[0].to_json()["reached"] == 27.0 and rows[0].ok and rows[1].ok
    assert rows[0].cells()[-1] == "yes"
    assert len({row.key for row in ROWS}) == len(ROWS)

"""The inspector's curves in headless Chromium: seeking, borders, divergence, and slow playing."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from test_browser import browser, open_page, server  # noqa: F401
from test_inspector_browser import drawn, live, measured, ready  # noqa: F401
from test_inspector_clips import write_video

pytestmark = pytest.mark.browser

HIGH, LEFT, RIGHT, BOTTOM = 240, 46, 10, 52
"""Of the plot in curves.js (HIGH, PAD), in CSS pixels: its height, beside and below the curves."""

INK = """(_, [x, y, wide, high]) => {
  const canvas = document.querySelector('[data-plot="curve"]'), zoom = devicePixelRatio;
  const box = [x, y, wide, high].map((length) => length * zoom);
  const data = canvas.getContext("2d").getImageData(...box).data;
  let found = 0;
  for (let i = 3; i < data.length; i += 4) found += data[i] > 60;
  return found;
}"""


def inked(page, x: float, y: float, wide: float, high: float) -> int:
    """Pixels of the plot that are drawn on, in a box of CSS pixels."""
    return page.locator('[data-plot="curve"]').evaluate(INK, [round(x), round(y), wide, high])


def place(page, frame: float) -> float:
    """Where a frame lies on the plot, CSS pixels from its left."""
    wide = page.locator('[data-plot="curve"]').bounding_box()["width"]
    frames = int(page.get_attribute('[data-in="frame"]', "max")) + 1
    return LEFT + (wide - LEFT - RIGHT) * (frame + 0.5) / frames


def click(page, frame: int) -> None:
    plot = page.locator('[data-plot="curve"]')
    plot.click(position={"x": place(page, frame), "y": 60})


def shown(page) -> int:
    return int(page.input_value('[data-in="frame"]'))


@pytest.fixture
def parted(open_page: Callable[..., object], server, tmp_path: Path):  # noqa: F811
    """Two videos of 20 frames that are nearly equal for 8 and then show other things."""
    rng = np.random.default_rng(0)
    a = rng.integers(60, 200, (20, 24, 32, 3), np.uint8)
    b = a + rng.integers(0, 3, a.shape, np.uint8)
    b[8:] = rng.integers(0, 256, b[8:].shape, np.uint8)
    files = [write_video(tmp_path / name, clip) for name, clip in (("a.mkv", a), ("b.mkv", b))]
    page = open_page(server.url + "inspect", '[data-do="files"]')
    page.set_input_files('[data-in="files"]', [str(path) for path in files])
    ready(page, "a.mkv | b.mkv")
    measured(page)
    return page


def test_a_click_into_the_curves_goes_to_its_frame_and_a_drag_follows(parted) -> None:
    for frame in (13, 0, 19, 6):
        click(parted, frame)
        assert shown(parted) == frame
        assert f"frame {frame}" in parted.inner_text('[data-out="values"] th')
        assert parted.get_attribute('[data-plot="curve"]', "aria-valuenow") == str(frame)
    box = parted.locator('[data-plot="curve"]').bounding_box()
    parted.mouse.move(box["x"] + place(parted, 3), box["y"] + 60)
    parted.mouse.down()
    parted.mouse.move(box["x"] + place(parted, 17), box["y"] + 60, steps=4)
    parted.mouse.up()
    assert shown(parted) == 17
    parted.focus('[data-plot="curve"]')
    parted.keyboard.press("ArrowLeft")
    assert shown(parted) == 16


def test_where_free_lanes_have_parted_is_a_dashed_line_and_a_sentence(parted) -> None:
    assert "b.mkv has parted from a.mkv at frame 8" in parted.inner_text('[data-out="parted"]')
    click(parted, 0)  # the playhead out of the way
    parted.select_option('[data-in="curve"]', "colour")  # a curve far below the line's top
    at = place(parted, 8)
    line = inked(parted, at - 1, 60, 3, 60)
    beside = inked(parted, at - 9, 60, 3, 60)
    assert 20 <= line - beside <= 150, (line, beside)  # dashes: 3 drawn, 3 left out


def test_chunks_begin_at_ticks_and_held_keys_are_bars(live) -> None:  # noqa: F811
    _, frame = live
    measured(frame)
    count = int(frame.get_attribute('[data-in="frame"]', "max")) + 1
    below = HIGH - BOTTOM + 2  # behind the axis, above the seconds
    ticks = [n for n in range(count) if inked(frame, place(frame, n - 0.5) - 1, below, 2, 4)]
    assert ticks == [0, *range(16, count, 4)], "a start of 16 frames, then chunks of four"
    assert "a chunk begins" in frame.inner_text('[data-out="curve-help"]')
    held = [n for n in range(count) if inked(frame, place(frame, n) - 1, HIGH - 20, 2, 12)]
    assert held and held[0] >= 16 and held == list(range(held[0], held[-1] + 1))


def test_a_tenth_of_the_speed_is_a_tenth_of_the_frames(parted) -> None:
    parted.select_option('[data-in="speed"]', "0.1")  # 8 frames a second become 0.8
    click(parted, 0)
    parted.focus(".panes")
    drawn(parted)
    parted.clock.install()  # the page's time goes on when the test says so
    parted.clock.pause_at(time.time() + 3600)
    parted.keyboard.press("Space")
    # the first step is at once, each other waits 1.25 s
    for milliseconds, frame in ((100, 1), (1100, 1), (100, 2), (1100, 2), (150, 3)):
        parted.clock.run_for(milliseconds)
        assert shown(parted) == frame
    parted.keyboard.press("Space")
    parted.clock.run_for(5000)
    assert shown(parted) == 3

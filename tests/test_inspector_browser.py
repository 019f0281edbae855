"""The inspector in headless Chromium: real keys and pointers, pictures compared byte by byte."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from browser_page import drive, equal, keys_now, made, reads, until
from fake_engine import read_bar_code
from test_browser import browser, open_page, server  # noqa: F401
from test_inspector_clips import random_frames, write_video

pytestmark = pytest.mark.browser

SHOWN = """([width, height]) => [...document.querySelectorAll('.panes canvas')].map((canvas) => {
  const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  const found = [];
  for (let y = 0; y < height; y += 1)
    for (let x = 0; x < width; x += 1) {
      const row = Math.floor(((y + 0.5) * canvas.height) / height);
      const i = (row * canvas.width + Math.floor(((x + 0.5) * canvas.width) / width)) * 4;
      found.push(data[i], data[i + 1], data[i + 2]);
    }
  return found;
})"""
"""Every pane by one sample in the middle of each pixel of the video."""

BLINKS = """(label) => new Promise((done) => {
  const read = () => document.querySelector(label).textContent;
  const times = [];
  let before = read();
  new MutationObserver(() => {
    if (read() === before) return;
    before = read();
    times.push(performance.now());
    if (times.length === 10) done(times[9] - times[0]);
  }).observe(document.querySelector(".panes"), { subtree: true, childList: true });
})"""
"""Milliseconds from the first change of what is shown to the tenth, by the page's own clock."""

SIZE = (128, 96)
STATE = '[data-out="curve-state"]'


def pictures(frame, size: tuple[int, int] = SIZE) -> list[np.ndarray]:
    """What the panes show, uint8 [H, W, 3] each, at the video's own size (width, height)."""
    return [
        np.array(found, np.uint8).reshape(size[1], size[0], 3)
        for found in frame.evaluate(SHOWN, list(size))
    ]


def ready(frame, text: str) -> None:
    """Waits until a clip is open and its pictures are there."""
    reads(frame, '[data-out="title"]', text)
    drawn(frame)


def drawn(frame) -> None:
    """Waits until no picture of the frame that is shown is on the way."""
    equal(lambda: frame.get_attribute(".panes", "aria-busy"), "false", "panes are drawn")


def measured(frame) -> None:
    """Waits until every curve is measured."""
    plot = '[data-plot="curve"]'
    look = lambda: [frame.get_attribute(plot, "aria-busy"), frame.inner_text(STATE)]  # noqa: E731
    until(lambda: look()[0] == "false", "curves are measured", seen=look)


def frames_made(page) -> int:
    shown = page.inner_text('[data-out="frames"]')
    return int(shown) if shown.isdecimal() else 0


@pytest.fixture
def live(open_page, server) -> Iterator[tuple[object, object]]:  # noqa: F811
    """A page that drove for a moment, W held for the last of it, and its inspector."""
    page = open_page()
    drive(page)
    page.keyboard.down("w")
    equal(lambda: keys_now(server), {"w"}, "W held")
    enough = max(21, 4 * made(server))  # frames up to the first that W made
    until(lambda: frames_made(page) >= enough, "W is seen", seen=lambda: frames_made(page))
    page.keyboard.up("w")
    page.click('[data-do="inspect"]')
    page.wait_for_selector(".qwm-inspector iframe")
    until(lambda: len(page.frames) == 2, "the inspector is there")
    frame = page.frames[-1]
    ready(frame, "Live run")
    until(lambda: frame.input_value('[data-in="frame"]') != "0", "it opens where the run stands")
    frame.focus(".panes")
    page.keyboard.press("Home")
    yield page, frame
    if page.is_visible(".qwm-inspector"):
        page.click('[data-do="inspect"]')


def numbers(frame) -> list[int]:
    """The bar code in every pane."""
    return [read_bar_code(shown) for shown in pictures(frame)]


def wait_frame(frame, number: int) -> None:
    equal(lambda: numbers(frame), [number] * 3, "the frame that all lanes show")
    drawn(frame)
    assert numbers(frame) == [number] * 3


def test_the_last_minute_steps_frame_by_frame_in_lock_step(live) -> None:
    page, frame = live
    wait_frame(frame, 0)
    frame.focus(".panes")
    for number in (1, 2, 3):
        page.keyboard.press(".")
        wait_frame(frame, number)
    page.keyboard.press(",")
    wait_frame(frame, 2)
    assert "Frame 2" in frame.inner_text('[data-out="status"]')
    page.keyboard.press("]")
    page.keyboard.press("Space")
    until(lambda: frame.input_value('[data-in="frame"]') == "0", "the loop goes back to its start")
    page.keyboard.press("Space")
    page.keyboard.press("\\")
    assert "loop" not in frame.inner_text('[data-out="frame"]')
    measured(frame)
    assert "w" in str(frame.evaluate("document.querySelector('[data-out=values]').innerText"))


def test_every_view_shows_what_it_says(live) -> None:
    page, frame = live
    frame.focus(".panes")
    page.keyboard.press(".")
    wait_frame(frame, 1)
    side = [shown.astype(int) for shown in pictures(frame)]
    page.keyboard.press("4")
    until(lambda: len(pictures(frame)) == 2, "two differences")
    until(lambda: pictures(frame)[0].std() > 0, "the difference is drawn")
    signed = pictures(frame)[0].astype(int)
    brighter = (side[1] - side[0]).sum(axis=2) > 30
    assert signed[..., 0][brighter].mean() > signed[..., 2][brighter].mean() + 5
    same = (side[1] == side[0]).all(axis=2)
    assert (signed[same] == 128).all()
    page.keyboard.press("2")
    until(lambda: len(pictures(frame)) == 1, "one wiped picture")
    wiped = pictures(frame)[0].astype(int)
    assert (wiped[:, :63] == side[0][:, :63]).all() and (wiped[:, 65:] == side[1][:, 65:]).all()
    page.keyboard.press("5")
    until(lambda: len(pictures(frame)) == 3, "changes of three lanes")
    still, noisy = (pictures(frame)[lane][10:80].mean() for lane in (0, 1))
    assert noisy > still + 5


def test_excess_is_of_the_size_of_changes_not_of_their_direction(live) -> None:
    _, frame = live
    heat = frame.evaluate("""async () => {
      const { excess } = await import("./inspect/web/pixels.js");
      const grey = (v) => new ImageData(new Uint8ClampedArray([v, v, v, 255]), 1, 1);
      return [[120, 100, 100, 120], [120, 100, 110, 110]].map((levels) =>
        [...excess(...levels.map(grey), 4).data.slice(0, 3)]);
    }""")
    assert heat[0] == [0, 0, 0] and heat[1][0] > 50


def test_blinking_is_off_until_asked_and_slow(live) -> None:
    page, frame = live
    frame.focus(".panes")
    page.keyboard.press("3")
    label = ".panes small"
    first = frame.inner_text(label)
    time.sleep(0.8)
    assert frame.inner_text(label) == first
    frame.select_option('[data-in="rate"]', "3")
    frame.check('[data-in="blink"]')
    seconds = frame.evaluate(BLINKS, label) / 1000
    assert seconds > 2.6, "nine blinks at 3 a second take 3 s, but for a first that was drawn late"


def test_pixels_zoom_and_slices_by_pointer(live) -> None:
    page, frame = live
    wait_frame(frame, 0)
    drawn(frame)
    canvas = frame.locator(".panes canvas").nth(1)
    canvas.hover(position={"x": 40, "y": 40})
    reads(frame, '[data-out="loupe"]', "R ")
    place = frame.inner_text('[data-out="at"]')
    frame.focus(".panes")
    page.keyboard.press("ArrowRight")
    assert frame.inner_text('[data-out="at"]') != place
    page.keyboard.press("+")
    until(lambda: numbers(frame) != [0] * 3, "the bar code is outside the zoomed picture")
    frame.click('[data-do="fit"]')
    wait_frame(frame, 0)
    frame.click('label:has(input[value="slice"])')
    before = frame.get_attribute(".slices canvas", "aria-label")
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 10, box["y"] + 10)
    page.mouse.down()
    page.mouse.move(box["x"] + 60, box["y"] + 30)
    page.mouse.up()
    until(lambda: frame.get_attribute(".slices canvas", "aria-label") != before, "a new slice")


def test_the_border_is_dragged_and_keys_move_what_is_zoomed(live) -> None:
    page, frame = live
    wait_frame(frame, 0)
    frame.focus(".panes")
    page.keyboard.press("2")
    until(lambda: len(pictures(frame)) == 1, "one wiped picture")
    canvas = frame.locator(".panes canvas")
    canvas.scroll_into_view_if_needed()  # and until nothing moves it any more
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 20, steps=3)
    page.mouse.up()
    assert frame.input_value('[data-in="wipe"]') in ("24", "25", "26")
    page.keyboard.press("1")
    for _ in range(5):
        page.keyboard.press("+")
    corner = pictures(frame)[0].copy()
    for _ in range(12):
        page.keyboard.press("Shift+ArrowRight")
    assert frame.inner_text('[data-out="at"]').startswith("127,")
    assert (pictures(frame)[0] != corner).any(), "the zoomed picture follows the pixel"
    assert "BF16" in frame.inner_text('[data-out="status"]')


def test_ends_and_lines_by_keyboard_and_escape_goes_back(live) -> None:
    page, frame = live
    wait_frame(frame, 0)
    page.keyboard.press("End")
    last = int(frame.get_attribute('[data-in="frame"]', "max"))
    wait_frame(frame, last)
    page.keyboard.press("Home")
    wait_frame(frame, 0)
    frame.check('input[value="slice"]', force=True)
    frame.focus(".panes")
    page.keyboard.press("Enter")
    page.keyboard.press("Shift+ArrowRight")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    label = "along (64,48) to (74,49)"
    until(lambda: label in frame.get_attribute(".slices canvas", "aria-label"), "a slice by keys")
    page.keyboard.press("Escape")
    until(lambda: page.is_hidden(".qwm-inspector"), "the inspector closed")
    assert page.evaluate("document.activeElement.dataset.do") == "inspect"


def test_every_control_has_a_name_and_the_page_fits_a_phone(
    open_page: Callable[..., object],  # noqa: F811
    server,  # noqa: F811
    tmp_path: Path,
) -> None:
    frames = random_frames(4)
    files = [write_video(tmp_path / f"{n}.mkv", frames) for n in ("a", "b")]
    phone = {"width": 390, "height": 844}
    page = open_page(server.url + "inspect", '[data-do="files"]', viewport=phone)
    page.set_input_files('[data-in="files"]', [str(path) for path in files])
    ready(page, "a.mkv | b.mkv")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    wanted = {"button", "checkbox", "combobox", "slider", "radio", "spinbutton", "link", "image"}
    found = [node for node in tree if node.get("role", {}).get("value") in wanted]
    assert len(found) > 25
    for node in found:
        assert node.get("name", {}).get("value", "").strip(), node
    assert not page.is_visible('label:has(input[value="patch"])'), "no live run, no queries"


def test_a_patch_without_a_model_is_refused_in_words(live) -> None:
    _, frame = live
    frame.click('label:has(input[value="patch"])')
    frame.locator(".panes canvas").first.click(position={"x": 20, "y": 20})
    reads(frame, '[data-out="tokens-text"]', "does not show which tokens")


def test_videos_of_any_origin_are_exact_on_the_screen(
    open_page: Callable[..., object],  # noqa: F811
    server,  # noqa: F811
    tmp_path: Path,
) -> None:
    a, b = random_frames(5), random_frames(5, seed=1)
    files = [write_video(tmp_path / "a.mkv", a), write_video(tmp_path / "b.mkv", b)]
    page = open_page(server.url + "inspect", '[data-do="files"]')
    page.set_input_files('[data-in="files"]', [str(path) for path in files])
    ready(page, "a.mkv | b.mkv")
    for number in range(3):
        until(
            lambda n=number: all(
                (shown == lane[n]).all()
                for shown, lane in zip(pictures(page, (16, 12)), (a, b), strict=True)
            ),
            f"the very bytes of frame {number}",
        )
        page.keyboard.press(".")
    page.set_input_files('[data-in="files"]', [str(files[0])])
    reads(page, ".message", "two to 4 videos")
    ready(page, "a.mkv | b.mkv")
    page.hover(".panes canvas", position={"x": 40, "y": 40})
    reads(page, '[data-out="at"]', "in frame 3")
    page.mouse.move(5, 5)
    page.set_input_files('[data-in="files"]', [str(path) for path in reversed(files)])
    ready(page, "b.mkv | a.mkv")
    assert page.inner_text('[data-out="at"]') == page.inner_text('[data-out="loupe"]') == ""
    page.evaluate("""() => document.body.dispatchEvent(new KeyboardEvent("keydown",
        {key: "]", altKey: true, ctrlKey: true, bubbles: true}))""")
    assert "loop 0 to 0" in page.inner_text('[data-out="frame"]'), "AltGr types the bracket"
    page.evaluate("""() => document.body.dispatchEvent(new KeyboardEvent("keydown",
        {key: ".", ctrlKey: true, bubbles: true}))""")
    assert page.input_value('[data-in="frame"]') == "0", "Ctrl belongs to the browser"
    page.set_input_files('[data-in="files"]', [str(files[0]), str(files[0])])
    ready(page, "a.mkv (2)")
    plot = page.locator('[data-plot="curve"]')
    until(lambda: "(2) identical" in (plot.get_attribute("aria-valuetext") or ""), "called equal")

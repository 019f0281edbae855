"""Single presses and the mouse in headless Chromium: one chunk a press, none lost; drags look."""

from __future__ import annotations

import time

import pytest
from browser_page import (  # three are fixtures
    browser,
    drive,
    engine_of,
    equal,
    keys_now,
    made,
    open_page,
    server,
    stands,
)

pytestmark = pytest.mark.browser
__all__ = ["browser", "open_page", "server"]


def test_one_chunk_a_press(open_page, server) -> None:
    page = open_page(reduced_motion="reduce")
    assert page.is_checked('[data-in="stepmode"]'), "reduced motion starts in step mode"
    drive(page)
    assert stands(server) == 0
    time.sleep(0.4)
    for count, key in enumerate(("KeyW", "ArrowLeft")):
        assert made(server) == count
        page.keyboard.press(key, delay=20)
        equal(lambda: made(server), count + 1, "one chunk")
    assert [action.frames[0] for action in engine_of(server).actions] == [{"w"}, {"left"}]


def test_taps_are_not_lost_on_a_slow_line(open_page, server) -> None:
    page = open_page(reduced_motion="reduce")
    drive(page)
    page.evaluate(
        """const real = window.fetch;
        window.sent = [];
        const line = new Promise((free) => { window.freeLine = free; });
        window.fetch = async (...all) => {
          const body = String(all[1]?.body);
          window.sent.push(body);
          if (body.includes('"w"')) await line;
          return real(...all);
        }"""
    )
    page.keyboard.press("KeyW", delay=20)
    page.wait_for_function("""window.sent.some((body) => body.includes('"w"'))""")
    page.keyboard.press("ArrowLeft", delay=20)  # over before its snapshot can leave
    page.evaluate("freeLine()")
    equal(lambda: made(server), 2, "two chunks")
    assert [action.frames[0] for action in engine_of(server).actions] == [{"w"}, {"left"}]


def test_the_mouse_looks_around_while_its_button_is_down(open_page, server) -> None:
    page = open_page()
    drive(page)
    box = page.locator(".qwm-lane >> nth=0").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 15, y)
    page.keyboard.down("KeyW")
    equal(lambda: keys_now(server), {"w"}, "a click alone looks nowhere")
    page.mouse.move(x + 60, y)
    equal(lambda: keys_now(server), {"w", "right"}, "right held")
    assert page.locator('.qwm-key.qwm-lit[data-key="right"]').count() == 1
    page.mouse.move(x - 60, y + 60)
    equal(lambda: keys_now(server), {"w", "left", "s"}, "left instead, and back")
    page.mouse.up()
    equal(lambda: keys_now(server), {"w"}, "the button is up")
    page.mouse.move(x + 90, y)
    page.keyboard.up("KeyW")
    equal(lambda: keys_now(server), frozenset(), "moving alone looks nowhere")


def test_the_page_says_that_dragging_looks_around_where_it_does(open_page) -> None:
    words = '[data-out="veil-text"]'
    assert "or drag to look around" in open_page().inner_text(words)
    phone = open_page(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    assert "arrow keys. Every cache" in phone.inner_text(words)


def test_a_drag_ends_with_its_own_button_and_with_the_focus(open_page, server) -> None:
    page = open_page()
    drive(page)
    box = page.locator(".qwm-lane >> nth=0").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    def drag() -> None:
        page.mouse.move(x, y)
        page.mouse.down()
        page.mouse.move(x + 60, y)
        equal(lambda: keys_now(server), {"right"}, "right held")

    drag()
    page.mouse.down(button="right")
    page.mouse.up()
    equal(lambda: keys_now(server), frozenset(), "only another button is down")
    page.mouse.up(button="right")
    drag()
    page.keyboard.press("Escape")
    page.locator('[data-run="no"]').first.wait_for()
    page.mouse.move(x - 60, y)
    time.sleep(0.3)
    assert page.locator(".qwm-key.qwm-lit").count() == 0, "it must not drive on without the focus"
    assert page.locator('[data-run="no"]').count() == 1
    page.mouse.up()

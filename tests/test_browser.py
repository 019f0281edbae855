"""Driving in headless Chromium: real key and touch events, a deterministic engine."""

from __future__ import annotations

import json
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
from browser_page import (  # the first three are fixtures
    BAR_CODES,
    SYNC,
    browser,
    controls,
    drive,
    engine_of,
    equal,
    in_phase,
    keys_now,
    made,
    missing,
    open_page,
    serve,
    server,
    stands,
    until,
)

pytestmark = pytest.mark.browser
__all__ = ["browser", "open_page", "server"]


def test_keys_down_and_up_reach_the_engine(open_page, server) -> None:
    page = open_page()
    drive(page)
    until(lambda: engine_of(server).actions, "the world runs by itself while the stage has focus")
    assert keys_now(server) == frozenset()
    page.keyboard.down("KeyW")
    equal(lambda: keys_now(server), {"w"}, "W held")
    assert page.locator(".qwm-key.qwm-lit").count() == 2  # W and the arrow that means the same
    page.keyboard.down("ArrowRight")
    equal(lambda: keys_now(server), {"w", "right"}, "two keys held")
    page.keyboard.up("KeyW")
    equal(lambda: keys_now(server), {"right"}, "W released")
    page.keyboard.up("ArrowRight")
    equal(lambda: keys_now(server), frozenset(), "all released")
    assert page.locator(".qwm-key.qwm-lit").count() == 0
    assert page.evaluate("scrollY") == 0, "arrow keys must not scroll the page"


def test_a_tap_shorter_than_a_chunk_still_moves(open_page, server) -> None:
    page = open_page()
    drive(page)
    until(lambda: engine_of(server).actions, "running")
    engine = engine_of(server)
    before = made(server)
    engine.go.clear()  # a chunk that lasts until the tap is over
    try:
        page.keyboard.press("KeyA", delay=15)
        over = lambda: "a" in controls(server).pressed and not controls(server).keys  # noqa: E731
        until(over, "the server knows that the tap is over", seen=lambda: controls(server))
    finally:
        engine.go.set()

    def tapped() -> list[int]:
        return [n for n, a in enumerate(engine.actions) if n >= before and a.frames[0] == {"a"}]

    until(tapped, "a chunk that moves", seen=lambda: engine.actions[before:])
    until(lambda: made(server) >= tapped()[0] + 3, "two more chunks")
    assert len(tapped()) == 1


def test_leaving_the_stage_releases_and_pauses(open_page, server) -> None:
    page = open_page()
    drive(page)
    for leave in (
        lambda: page.keyboard.press("Escape"),
        lambda: page.focus('[data-in="seed"]'),
        lambda: page.evaluate("document.activeElement.blur()"),
    ):
        page.click(".qwm-lane >> nth=0")
        equal(lambda: keys_now(server), frozenset(), "it runs, nothing held")
        page.keyboard.down("KeyW")
        equal(lambda: keys_now(server), {"w"}, "W held")
        leave()
        page.wait_for_selector('.qwm[data-run="no"]')
        assert page.locator(".qwm-key.qwm-lit").count() == 0
        assert page.locator(".qwm-hint").is_visible()
        assert not page.evaluate("document.activeElement.matches('.qwm-stage')")
        page.keyboard.up("KeyW")
        count = stands(server)
        time.sleep(0.4)
        assert made(server) == count, "a paused world must stand still"


def test_window_blur_releases_the_keys(open_page, server) -> None:
    page = open_page()
    drive(page)
    page.keyboard.down("KeyD")
    equal(lambda: keys_now(server), {"d"}, "D held")
    page.evaluate("window.dispatchEvent(new Event('blur'))")
    equal(lambda: keys_now(server), frozenset(), "released")


def test_dead_man_a_silent_page_holds_no_keys(open_page, server) -> None:
    page = open_page()
    drive(page)
    page.keyboard.down("KeyW")
    equal(lambda: keys_now(server), {"w"}, "W held")
    page.context.set_offline(True)
    newest = controls(server)
    time.sleep(2.2)
    assert newest.keys == {"w"}
    assert newest.effective(time.monotonic(), newest.seq) == frozenset()
    page.context.set_offline(False)


def test_typing_in_a_field_does_not_drive(open_page, server) -> None:
    page = open_page()
    drive(page)
    until(lambda: made(server), "running")
    page.keyboard.press("Escape")
    page.focus('[data-in="seed"]')
    count = stands(server)
    page.keyboard.press("KeyW")
    page.keyboard.press("ArrowUp")
    time.sleep(0.4)
    assert made(server) == count and page.input_value('[data-in="seed"]') == "1"


def test_pause_step_reset(open_page, server) -> None:
    page = open_page()
    drive(page)
    until(lambda: len(engine_of(server).actions) >= 2, "running")
    page.click('[data-do="drive"]')
    page.wait_for_selector('.qwm[data-run="no"]')
    count = stands(server)
    page.click('[data-do="step"]')
    equal(lambda: made(server), count + 1, "one step")
    time.sleep(0.3)
    assert stands(server) == count + 1
    page.click('[data-do="drive"]')
    until(lambda: made(server) > count + 2, "drives on")
    first = engine_of(server)
    page.click('[data-do="reset"]')
    until(lambda: engine_of(server) is not first, "a new run")
    assert first.closed
    in_phase(page, "live")
    assert server.sessions.census()["holding"] == 1


def test_on_screen_keys_by_touch(open_page, server) -> None:
    page = open_page(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    drive(page)
    # the figures are there: nothing moves the keys from under the finger any more
    page.wait_for_selector('[data-lane="qvg"] [data-figure="psnr"]:text("dB")', state="attached")
    key = page.locator('[data-code="KeyW"]')
    key.scroll_into_view_if_needed()
    box = key.bounding_box()
    assert box["width"] >= 44 and box["height"] >= 44
    point = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
    touch = page.context.new_cdp_session(page)
    touch.send("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [point]})
    equal(lambda: keys_now(server), {"w"}, "finger down")
    touch.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    equal(lambda: keys_now(server), frozenset(), "finger up")


def test_lanes_show_the_same_frame_at_every_moment(open_page, server) -> None:
    page = open_page()
    drive(page)
    page.keyboard.down("KeyW")
    until(lambda: len(engine_of(server).actions) >= 2, "running")
    seen = page.evaluate(SYNC)
    assert all(len(set(numbers)) == 1 for numbers in seen)
    shown = [numbers[0] for numbers in seen]
    assert shown == sorted(shown)
    steps = set(np.diff(sorted(set(shown))).tolist())
    assert steps == {1}, f"every frame is shown, none skipped: {steps}"


def test_closing_the_page_frees_everything(open_page, server) -> None:
    page = open_page()
    drive(page)
    until(lambda: len(engine_of(server).actions) >= 2, "running")
    folder = next(iter(server.sessions._sessions.values())).folder.path
    assert any(folder.iterdir())
    page.close()
    until(lambda: engine_of(server).closed, "the engine is closed")
    until(lambda: server.sessions.census()["holding"] == 0, "the world is free")
    until(lambda: not folder.exists(), "the session's files are gone")


def test_second_visitor_waits_and_never_sees_the_first_world(open_page, server) -> None:
    first = open_page()
    drive(first)
    first.keyboard.down("KeyW")
    until(lambda: len(engine_of(server).actions) >= 2, "running")
    mine = engine_of(server)
    second = open_page()
    second.click('[data-do="veil"]')
    in_phase(second, "queued")
    second.wait_for_function("document.querySelector('.qwm-card').innerText.includes('number 1')")
    assert second.evaluate(BAR_CODES) == [0, 0, 0], "only the start scene's picture"
    first.close()
    in_phase(second, "live")
    assert mine.closed
    assert engine_of(server) is not mine


def test_leaving_the_line(open_page, server) -> None:
    first = open_page()
    drive(first)
    second = open_page()
    second.click('[data-do="veil"]')
    in_phase(second, "queued")
    second.click('[data-do="veil"]')
    in_phase(second, "idle")
    until(lambda: server.sessions.census()["waiting"] == 0, "nobody waits")
    engines = len(server.backend.engines)
    first.close()
    until(lambda: server.sessions.census()["holding"] == 0, "the world is free")
    time.sleep(0.5)
    assert len(server.backend.engines) == engines, "a ticket that left the line starts nothing"


def test_a_page_that_closes_in_the_line_leaves_it(open_page, server) -> None:
    first = open_page()
    drive(first)
    second = open_page()
    second.click('[data-do="veil"]')
    in_phase(second, "queued")
    engines = len(server.backend.engines)
    second.close()
    until(lambda: server.sessions.census()["waiting"] == 0, "nobody waits")
    first.close()
    until(lambda: server.sessions.census()["holding"] == 0, "the world is free")
    time.sleep(0.5)
    assert len(server.backend.engines) == engines


def test_download_holds_the_session(open_page, server, tmp_path: Path) -> None:
    page = open_page()
    assert page.is_disabled('[data-do="download"]')
    drive(page)
    page.keyboard.down("KeyW")
    until(lambda: len(engine_of(server).actions) >= 3, "running")
    with page.expect_download() as caught:
        page.click('[data-do="download"]')
    target = tmp_path / "session.zip"
    caught.value.save_as(target)
    with zipfile.ZipFile(target) as archive:
        names = {Path(name).name: name for name in archive.namelist()}
        assert {"session.json", "actions.ndjson", "metrics.csv", "preview.mp4"} <= set(names)
        assert {"bf16.mkv", "qvg.mkv", "quantwm.mkv"} <= set(names)
        session = json.loads(archive.read(names["session.json"]))
        lines = archive.read(names["actions.ndjson"]).decode().splitlines()
    assert session["complete"] is True
    assert session["seed"] == 0
    assert len(lines) == session["blocks"] >= 3
    in_phase(page, "live")


def test_mistakes_are_shown_and_nothing_is_lost(open_page, server) -> None:
    page = open_page()
    page.fill('[data-in="seed"]', "-3")
    page.click('[data-do="veil"]')
    page.wait_for_selector(".qwm-message:visible")
    assert "seed must be a whole number from 0" in page.inner_text(".qwm-message")
    assert page.input_value('[data-in="seed"]') == "-3"
    page.fill('[data-in="seed"]', "13")
    page.click('[data-do="veil"]')
    in_phase(page, "ended")
    assert "choose another" in page.inner_text(".qwm-message")
    page.fill('[data-in="seed"]', "5")
    drive(page)
    assert engine_of(server).settings.seed == 5
    page.fill('[data-in="steps"]', "0")
    page.click('[data-do="apply"]')
    page.wait_for_selector(".qwm-message:visible")
    assert "denoising steps must be" in page.inner_text(".qwm-message").lower()
    assert not engine_of(server).closed, "the world in use stays"


def test_an_unexpected_error_tells_no_secrets(open_page, server) -> None:
    page = open_page()
    server.backend.fail = RuntimeError("secret path /etc/x")
    page.click('[data-do="veil"]')
    in_phase(page, "ended")
    text = page.inner_text("body")
    assert "secret" not in text and "Traceback" not in text
    assert "something went wrong" in text.lower()


def test_loading_is_named_with_progress_over_the_picture(open_page, server) -> None:
    server.backend.gate.clear()
    page = open_page()
    page.click('[data-do="veil"]')
    page.wait_for_function("document.querySelector('.qwm-card').innerText.includes('Reading')")
    page.wait_for_function(
        "document.querySelector('.qwm-stages li:last-child .qwm-progress')"
        ".getAttribute('aria-valuenow') == 20"
    )
    done = page.locator(".qwm-stages li", has_text="Opening the world")
    assert "done" in done.inner_text(), "the stage before keeps its full bar"
    light = (
        "document.querySelector('canvas').getContext('2d').getImageData(0, 0, 128, 96).data"
        ".reduce((sum, value) => sum + value, 0)"
    )
    until(
        lambda: page.evaluate(light) > 128 * 96 * 255 * 1.2,
        "the start scene is shown while the world loads",
        seen=lambda: page.evaluate(light),
    )
    server.backend.gate.set()
    in_phase(page, "live")


def test_choices_reach_the_engine(open_page, server, tmp_path: Path) -> None:
    import imageio.v3 as iio

    page = open_page()
    page.click('[data-scene="gate"]')
    page.fill('[data-in="seed"]', "7")
    page.locator(".qwm-check", has_text="QVG").click()
    page.locator(".qwm-segments label", has_text="Teacher").click()
    assert page.locator(".qwm-screen").count() == 2
    drive(page)
    settings = engine_of(server).settings
    assert (settings.scene, settings.seed, settings.mode) == ("gate", 7, "teacher")
    assert settings.lanes == ("bf16", "quantwm")
    picture = tmp_path / "mine.png"
    iio.imwrite(picture, np.full((300, 400, 3), 90, np.uint8))
    before = engine_of(server)
    page.set_input_files('[data-in="file"]', picture)
    until(lambda: engine_of(server) is not before, "the own picture starts a new run")
    assert engine_of(server).settings.picture == 1
    note = tmp_path / "note.png"
    note.write_text("not a picture")
    page.set_input_files('[data-in="file"]', note)
    page.wait_for_selector(".qwm-message:visible")
    assert "could not be read" in page.inner_text(".qwm-message")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 768, 1440])
def test_layout_fits(open_page, server, scheme: str, width: int, tmp_path: Path) -> None:
    page = open_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
    drive(page)
    until(lambda: engine_of(server).actions, "running")
    page.wait_for_function("document.querySelector('[data-figure=kv]').innerText.includes('iB')")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    spilled = page.evaluate(
        "() => [...document.querySelectorAll('.qwm *')].filter((node) => {"
        "const box = node.getBoundingClientRect();"
        "return box.width > 1 && box.height > 1 && box.right > innerWidth + 1;"
        "}).map((node) => node.className)"
    )
    assert spilled == []
    bottoms = page.evaluate(
        "[...document.querySelectorAll('.qwm-screen')].map(n => n.getBoundingClientRect().bottom)"
    )
    assert max(bottoms) <= 844, "all lanes are in view at once"
    ink = page.evaluate("getComputedStyle(document.querySelector('.qwm')).color")
    bright = sum(map(int, ink[4:-1].split(","))) > 3 * 128
    assert bright == (scheme == "dark")
    page.screenshot(path=tmp_path / f"{scheme}-{width}.png")


def test_the_real_embedded_world(open_page, browser) -> None:
    import torch

    from app.library import LibraryBackend
    from quantwm.worlds.registry import world_presence

    presence = world_presence("embedded")
    if not presence.present:
        missing(presence.problem)
    backend = LibraryBackend("embedded", ["bf16", "qvg", "quantwm"], torch.device("cpu"), steps=1)
    served = serve(backend)
    try:
        page = open_page(served.url)
        page.set_default_timeout(120_000)  # 3 s on two idle cores; other jobs make it crawl
        drive(page, 120)
        tokens = "/^[1-9]/.test(document.querySelector('[data-out=tokens]').innerText)"
        page.wait_for_function(tokens)
        start = page.inner_text('[data-out="tokens"]')
        page.keyboard.down("KeyW")
        page.wait_for_function(
            "(start) => document.querySelector('[data-out=tokens]').innerText !== start",
            arg=start,
        )
        assert "MiB" in page.inner_text('[data-lane="quantwm"] [data-figure="kv"]')
        assert page.locator('.qwm-legend [data-lane="qvg"]').count() == 1
        page.close()
        until(lambda: served.sessions.census()["holding"] == 0, "the world is free", 120)
    finally:
        served.demo.close()

"""Worlds, prompts and downloads on the page, in headless Chromium with a deterministic engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser_page import (  # the first three are fixtures
    browser,
    drive,
    engine_of,
    in_phase,
    open_page,
    reads,
    server,
    until,
)

pytestmark = pytest.mark.browser
__all__ = ["browser", "open_page", "server"]

CHOSEN = '[data-world="{}"][aria-checked="true"]'


@pytest.fixture(autouse=True)
def as_new(server) -> None:
    backend = server.backend
    backend.load_fails, backend.beside = None, True
    backend.fetch_fails, backend.fetched = None, []
    backend.fetch_gate.set()
    backend.present["ruins"] = False


def pick(page, name: str) -> None:
    page.click(f'[data-world="{name}"]')
    page.wait_for_selector(CHOSEN.format(name))


def test_another_world_with_a_prompt_is_chosen_and_driven(open_page, server) -> None:
    page = open_page()
    pick(page, "caves")
    assert page.locator(".qwm-key").count() == 4, "two keys, each on a letter and an arrow"
    assert not page.locator(".qwm-scenes").is_visible()
    assert "prompt alone" in page.inner_text('[data-out="start-note"]')
    page.locator(".qwm-chip", has_text="of ice").click()
    drive(page)
    settings = engine_of(server).settings
    assert (settings.world, settings.prompt, settings.scene) == ("caves", "a cave of ice", None)
    page.keyboard.down("KeyW")
    until(lambda: any(a.frames[0] == {"w"} for a in engine_of(server).actions), "W reaches it")
    page.keyboard.up("KeyW")


def test_a_prompt_is_switched_in_a_run_and_a_bad_one_changes_nothing(open_page, server) -> None:
    page = open_page()
    pick(page, "caves")
    drive(page)
    engine = engine_of(server)
    page.fill('[data-in="prompt"]', "a cave with a lake")
    page.click('[data-do="prompt"]')
    until(lambda: engine.prompts[-1] == "a cave with a lake", "the engine has the prompt")
    page.wait_for_selector(".qwm-message.qwm-good")
    in_phase(page, "live")
    for text, says in (("refuse", "refused by the test engine"), ("", "prompt is empty"),
                       ("x" * 10_000, "at most 4,000 characters, got 10,000")):  # fmt: skip
        page.fill('[data-in="prompt"]', text)
        page.click('[data-do="prompt"]')
        reads(page, ".qwm-message", says)
        in_phase(page, "live")
    assert engine.prompts[-1] == "a cave with a lake" and not engine.closed
    made = len(engine.actions)
    page.click('[data-do="step"]')
    until(lambda: len(engine.actions) > made, "it still goes on")


@pytest.mark.parametrize("beside", [True, False])
def test_a_world_that_cannot_be_loaded_leaves_the_one_before(
    open_page, server, beside: bool
) -> None:
    page = open_page()
    drive(page)
    first = engine_of(server)
    until(lambda: len(first.actions) >= 2, "running")
    server.backend.load_fails, server.backend.beside = "half downloaded: shard 2 is missing", beside
    pick(page, "caves")
    page.click('[data-do="apply"]')
    page.wait_for_selector(".qwm-message:visible")
    assert "half downloaded" in page.inner_text(".qwm-message").lower()
    in_phase(page, "live")
    page.wait_for_selector(CHOSEN.format("rooms"))
    now = engine_of(server)
    assert (now is first) == beside and first.closed == (not beside)
    assert now.settings.world == "rooms"
    made = len(now.actions)
    page.click('[data-do="step"]')
    until(lambda: len(now.actions) > made, "the old world goes on")
    folder = next(iter(server.sessions._sessions.values())).folder.path
    assert len(list(folder.glob("quantwm-*"))) == (1 if beside else 2), "recordings are kept"


def test_a_restart_with_another_world_keeps_the_first_recording(open_page, server) -> None:
    page = open_page()
    drive(page)
    first = engine_of(server)
    until(lambda: len(first.actions) >= 2, "running")
    pick(page, "caves")
    assert page.locator(".qwm-key").count() == 8, "the keys of the world that is driven"
    page.click('[data-do="apply"]')
    until(lambda: engine_of(server) is not first, "a new run")
    in_phase(page, "live")
    assert first.closed and engine_of(server).settings.world == "caves"
    assert page.locator(".qwm-key").count() == 4
    assert "Test caves" in page.inner_text('[data-out="world"]')
    folder = next(iter(server.sessions._sessions.values())).folder.path
    kept = sorted(folder.glob("quantwm-*"), key=lambda path: path.stat().st_mtime_ns)
    assert len(kept) == 2 and '"complete": true' in (kept[0] / "session.json").read_text()


def test_a_restrictive_licence_is_agreed_to_before_the_download(open_page, server) -> None:
    page = open_page()
    server.backend.fetch_gate.clear()
    pick(page, "ruins")
    assert "Testers only" in page.inner_text(".qwm-fetch")
    assert "needs 9 GiB, this device has 8 GiB" in page.inner_text('[data-out="advice"]')
    assert "blocks wait on the CPU" in page.inner_text('[data-world="ruins"] .qwm-needs')
    assert "CPU" not in page.inner_text('[data-world="caves"] .qwm-needs')
    assert page.is_disabled('[data-do="fetch"]')
    page.check('[data-in="agree"]')
    page.click('[data-do="fetch"]')
    page.wait_for_function(
        "document.querySelector('.qwm-fetch .qwm-progress').getAttribute('aria-valuenow') == 40"
    )
    assert "from test/ruins" in page.inner_text('[data-out="fetch-stage"]')
    assert server.backend.fetched == [("ruins", True)]
    server.backend.fetch_gate.set()
    page.wait_for_selector('[data-world="ruins"] [data-state="here"]')
    # the files may be there a question before the download says that it is over
    page.wait_for_selector(".qwm-fetch", state="hidden")
    assert "is here now" in page.inner_text(".qwm-message")


def test_a_download_that_fails_says_so_and_can_be_tried_again(open_page, server) -> None:
    page = open_page()
    server.backend.fetch_fails = "test/ruins could not be downloaded (no network)"
    pick(page, "ruins")
    page.check('[data-in="agree"]')
    page.click('[data-do="fetch"]')
    page.wait_for_selector(".qwm-message:visible")
    assert "no network" in page.inner_text(".qwm-message")
    assert page.locator('[data-do="fetch"]').is_visible()
    pick(page, "rooms")
    drive(page)
    assert engine_of(server).settings.world == "rooms"


def test_a_script_plays_until_a_key_is_held(open_page, server) -> None:
    page = open_page()
    page.select_option('[data-in="script"]', "loop")
    drive(page)
    engine = engine_of(server)
    until(lambda: len(engine.actions) >= 4, "the script and more")
    assert engine.settings.scene == "gate", "a script starts where it was written for"
    held = [action.frames[0] for action in engine.actions[:4]]
    assert held == [{"w"}, {"w"}, {"right"}, frozenset()], "8 latent frames of w, 4 of right"


@pytest.mark.parametrize("width", [390, 1440])
def test_the_picker_fits_and_is_read_out(open_page, width: int, tmp_path: Path) -> None:
    page = open_page(viewport={"width": width, "height": 844}, color_scheme="dark")
    pick(page, "ruins")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    spilled = page.evaluate(
        "() => [...document.querySelectorAll('.qwm-worlds *, .qwm-prompt *')].filter((node) => {"
        "const box = node.getBoundingClientRect();"
        "return box.width > 1 && box.height > 1 && box.right > innerWidth + 1;"
        "}).map((node) => node.className)"
    )
    assert spilled == []
    group = page.get_by_role("radiogroup", name="World")
    assert group.get_by_role("radio", checked=True).count() == 1
    page.focus('[data-world="caves"]')
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("document.activeElement.dataset.world") == "rooms"
    page.keyboard.press("Enter")
    page.wait_for_selector(CHOSEN.format("rooms"))
    assert page.get_by_label("Prompt", exact=True).count() == 1
    page.screenshot(path=tmp_path / f"worlds-{width}.png", full_page=True)

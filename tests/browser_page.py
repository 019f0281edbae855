"""The page in headless Chromium for tests: fixtures that serve, open and wait.

Chromium is taken from QUANTWM_CHROMIUM or the usual places. Without it these tests are skipped,
except under CI=true, where that is a failure.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

WAIT = 30_000
PHASE = '.qwm[data-phase="{}"]'

BAR_CODES = """() => [...document.querySelectorAll('.qwm-screen canvas')].map((canvas) => {
  const row = canvas.getContext('2d').getImageData(0, canvas.height - 4, canvas.width, 1).data;
  let number = 0;
  for (let bit = 0; bit < 16; bit += 1) if (row[(bit * 8 + 4) * 4] > 127) number += 1 << bit;
  return number;
})"""

SYNC = """() => new Promise((done) => {
  const read = BAR_CODES;
  const seen = [];
  const look = () => {
    seen.push(read());
    if (seen.length < 90) requestAnimationFrame(look); else done(seen);
  };
  requestAnimationFrame(look);
})""".replace("BAR_CODES", BAR_CODES)


def missing(reason: str) -> None:
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason}; under CI=true the page must be driven")
    pytest.skip(reason)


def chromium() -> str:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = os.environ.get("QUANTWM_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if not found:
        missing("Chromium was not found (apt-get install chromium, or set QUANTWM_CHROMIUM)")
    return str(found)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def serve(backend: object) -> SimpleNamespace:
    from app.ui import build

    demo, options = build(backend)
    port = free_port()
    demo.launch(server_name="127.0.0.1", server_port=port, prevent_thread_lock=True, **options)
    return SimpleNamespace(
        url=f"http://127.0.0.1:{port}/",
        demo=demo,
        backend=backend,
        sessions=demo.quantwm.sessions,
    )


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    path = chromium()
    with playwright.sync_playwright() as engine:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = engine.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    pytest.importorskip("gradio", reason="pip install gradio")
    from fake_engine import FakeBackend

    served = serve(FakeBackend(tmp_path_factory.mktemp("scenes")))
    yield served
    served.demo.close()


@pytest.fixture
def open_page(browser, server) -> Iterator[Callable[..., object]]:
    """Opens a page in a context of its own; afterwards the server must be empty again."""
    contexts = []
    faults: list[str] = []

    def opened(url: str = server.url, shown: str = ".qwm-key", **options: object) -> object:
        options = {"viewport": {"width": 1280, "height": 860}, **options}
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(WAIT)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda request: faults.extend(outside(request.url)))
        page.goto(url)
        page.wait_for_selector(shown)
        return page

    server.backend.fail = None
    server.backend.gate.set()
    yield opened
    server.backend.gate.set()
    for context in contexts:
        context.close()
    assert faults == []
    until(lambda: server.sessions.census()["sessions"] == 0, "sessions closed")
    until(lambda: server.sessions.census()["holding"] == 0, "the world is free")
    assert server.sessions.census()["slots"] == 0


def outside(url: str) -> list[str]:
    local = url.startswith(("http://127.0.0.1", "data:", "blob:"))
    return [] if local else [f"request to {url}"]


def until(condition: Callable[[], object], what: str, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds:g} s: {what}")
        time.sleep(0.02)


def drive(page) -> None:
    page.click('[data-do="veil"]')
    page.wait_for_selector(PHASE.format("live"))


def engine_of(server):
    return server.backend.engines[-1]


def keys_now(server) -> frozenset[str]:
    """Keys of the newest chunk."""
    actions = engine_of(server).actions
    return actions[-1].frames[0] if actions else frozenset()

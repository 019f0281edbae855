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

from app.inspector import probe
from quantwm.errors import UserError

PATIENCE = 60.0
"""Seconds until a state that is waited for is missing: nothing takes 10 of them on two idle cores,
and a wait that succeeds is over at once."""
WAIT = 1000 * PATIENCE

BAR_CODES = """() => [...document.querySelectorAll('.qwm-screen canvas')].map((canvas) => {
  const row = canvas.getContext('2d').getImageData(0, canvas.height - 4, canvas.width, 1).data;
  let number = 0;
  for (let bit = 0; bit < 16; bit += 1) if (row[(bit * 8 + 4) * 4] > 127) number += 1 << bit;
  return number;
})"""

SYNC = """() => new Promise((done) => {
  const read = BAR_CODES;
  const seen = [];
  const different = () => new Set(seen.map((numbers) => numbers[0])).size;
  const look = () => {
    seen.push(read());
    if (seen.length < 90 || different() < 24) requestAnimationFrame(look); else done(seen);
  };
  requestAnimationFrame(look);
})""".replace("BAR_CODES", BAR_CODES)
"""What the lanes show at each of 90 moments, or of as many as it takes to see 24 frames."""


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

    for attempt in range(5):
        demo, options = build(backend)
        port = free_port()
        try:
            demo.launch(
                server_name="127.0.0.1", server_port=port, prevent_thread_lock=True, **options
            )
            break
        except OSError:  # another program was quicker to take the port
            if attempt == 4:
                raise
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
    empty = {"sessions": 0, "waiting": 0, "holding": 0, "slots": 0}
    try:
        for context in contexts:
            for page in context.pages:
                page.close()
        # before the contexts go: with them would go what a page sends last
        equal(server.sessions.census, empty, "nobody is left")
    finally:
        for context in contexts:
            context.close()
    assert faults == []


def outside(url: str) -> list[str]:
    local = url.startswith(("http://127.0.0.1", "data:", "blob:"))
    return [] if local else [f"request to {url}"]


def until(
    condition: Callable[[], object],
    what: str,
    seconds: float = PATIENCE,
    seen: Callable[[], object] | None = None,
) -> None:
    """Waits until a condition holds; a failure tells what `seen`, or the condition, said last."""
    deadline = time.monotonic() + seconds
    while not (last := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds:g} s: {what}; last seen: {seen() if seen else last}")
        time.sleep(0.02)


def equal(look: Callable[[], object], wanted: object, what: str) -> None:
    """Waits until what is looked at is as wanted."""
    until(lambda: look() == wanted, f"{what} ({wanted})", seen=look)


def reads(page, selector: str, text: str) -> None:
    """Waits until an element holds a text."""
    look = lambda: page.inner_text(selector)  # noqa: E731
    until(lambda: text in look(), f"{text!r} in {selector}", seen=look)


def in_phase(page, phase: str, seconds: float = PATIENCE) -> None:
    """Waits for a phase of the page, whose state and message are told where it does not come."""

    def state() -> tuple[str | None, ...]:
        names = ("data-phase", "data-run")
        told = page.text_content(".qwm-message"), page.text_content(".qwm-card")
        return (*(page.get_attribute(".qwm", name) for name in names), *map(str.strip, told))

    until(lambda: state()[0] == phase, f"the page is {phase}", seconds, state)


def drive(page, seconds: float = PATIENCE) -> None:
    page.click('[data-do="veil"]')
    in_phase(page, "live", seconds)


def engine_of(server):
    return server.backend.engines[-1]


def made(server) -> int:
    """Chunks of the newest run."""
    return len(engine_of(server).actions)


def controls(server):
    """Newest snapshot of the only page."""
    (session,) = server.sessions._sessions.values()
    return server.sessions.desk.newest(session.slot)


def stands(server) -> int:
    """Chunks once the only page, which ran or never did, has paused and the loop has seen it: it
    answers a question between two chunks, and the second answer comes after controls that are newer
    than the first."""
    until(lambda: not controls(server).run, "the server knows of the pause")
    (session,) = server.sessions._sessions.values()
    for _ in range(2):
        with pytest.raises(UserError, match="does not show which tokens"):
            probe.ask(
                server.sessions.probes, session.slot, session.folder.path, 0, 0, 0, lambda: True
            )
    return made(server)


def keys_now(server) -> frozenset[str]:
    """Keys of the newest chunk."""
    actions = engine_of(server).actions
    return actions[-1].frames[0] if actions else frozenset()

"""Answers of the server without a browser: validation, one turn, errors, downloads."""

from __future__ import annotations

import json
import math
import os
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import imageio.v3 as iio
import numpy as np
import pytest
from fake_engine import FakeBackend

from app import limits, runner
from app.files import SessionFiles
from app.handlers import Handlers, parse_settings
from app.sessions import SessionManager
from quantwm.errors import UserError


@pytest.fixture
def backend(tmp_path: Path) -> FakeBackend:
    return FakeBackend(tmp_path, delay=0.0)


@pytest.fixture
def handlers(backend: FakeBackend, tmp_path: Path) -> Handlers:
    uploads = tmp_path / "uploads"
    uploads.mkdir()
    return Handlers(backend, SessionManager(SessionFiles(tmp_path / "s")), uploads)


class Page:
    """What the page's script does, for one session."""

    def __init__(self, handlers: Handlers, name: str = "page") -> None:
        self.handlers = handlers
        self.token = json.loads(handlers.hello(name))["session"]
        self.seq = 0
        self.fields: dict[str, object] = {"run": True, "settings": {}}

    def send(self, **fields: object) -> dict[str, object]:
        self.seq += 1
        self.fields.update(fields)
        return self.handlers.control({"sess": self.token, "seq": self.seq, **self.fields})

    def drive(self, settings: dict[str, object] | None = None) -> Iterator[dict[str, object]]:
        settings = settings or {}
        joined = self.handlers.join({"sess": self.token, "settings": settings})
        assert joined["ok"], joined
        self.send(settings=settings)
        payload = {"sess": self.token, "ticket": 1, "settings": settings}
        for text in self.handlers.drive(payload):
            message = json.loads(text)
            if "n" in message:
                self.send(ack=message["n"])
            yield message


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"scene": "moon"}, "unknown scene"),
        ({"scene": ["hall"]}, "unknown scene"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**40}, "seed"),
        ({"seed": True}, "seed"),
        ({"seed": math.nan}, "seed"),
        ({"seed": "7"}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"steps": 0}, "steps"),
        ({"steps": 10**9}, "steps"),
        ({"speed": math.inf}, "speed"),
        ({"speed": -1}, "speed"),
        ({"lanes": []}, "caches"),
        ({"lanes": ["bf16", "bf16"]}, "different"),
        ({"lanes": ["rm -rf"]}, "different"),
        ({"lanes": "bf16"}, "caches"),
        ({"mode": "fast"}, "mode"),
        ({"mode": "teacher", "lanes": ["qvg"]}, "BF16"),
        ({"picture": 0}, "picture"),
        ({"picture": "../x"}, "picture"),
    ],
)
def test_settings_are_checked_on_the_server(backend, bad: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        parse_settings(bad, backend.catalogue())
    assert "\n" not in str(caught.value)


def test_settings_have_defaults_and_the_offered_order(backend) -> None:
    assert parse_settings({}, backend.catalogue()).lanes == ("bf16", "qvg", "quantwm")
    chosen = parse_settings({"lanes": ["quantwm", "bf16"], "seed": 4.0}, backend.catalogue())
    assert chosen.lanes == ("bf16", "quantwm")
    assert chosen.seed == 4


def test_one_turn_from_start_to_stop(handlers, backend) -> None:
    page = Page(handlers)
    kinds = []
    for message in page.drive({"speed": 0}):
        kinds.append(message["kind"])
        assert message["drive"] == 1
        if message["kind"] == "block" and message["i"] == 3:
            page.send(stop=True)
    assert kinds == ["block", "block", "block", "block", "ended"]
    assert backend.engines[-1].closed
    assert handlers.sessions.census()["holding"] == 0


def test_keys_steps_and_reset(handlers, backend) -> None:
    page = Page(handlers)
    turn = page.drive({"speed": 0})
    assert next(turn)["run"] == {"kernels": "test engine: no kernels", "seed": 0}
    page.send(run=False, keys=["w", "right"], steps=1)
    assert next(turn)["keys"][0] == ["right", "w"]
    page.send(steps=2, keys=[])
    assert next(turn)["keys"][0] == []
    first = backend.engines[-1]
    page.send(resets=1, settings={"seed": 3, "speed": 0})
    assert next(turn)["run"]["seed"] == 3
    assert first.closed
    assert backend.engines[-1].settings.seed == 3
    turn.close()
    assert backend.engines[-1].closed


def test_a_closed_generator_frees_the_world(handlers, backend) -> None:
    turn = Page(handlers).drive({"speed": 0})
    next(turn)
    assert handlers.sessions.census()["holding"] == 1
    turn.close()
    assert backend.engines[-1].closed
    assert handlers.sessions.census()["holding"] == 0


def test_unseen_blocks_hold_the_loop_back(handlers, backend, monkeypatch) -> None:
    monkeypatch.setattr(limits, "ACK_PATIENCE_SECONDS", 600.0)  # nor does a slow machine end it
    page = Page(handlers)
    handlers.join({"sess": page.token, "settings": {}})
    page.send(settings={"speed": 0}, ack=0)
    turn = handlers.drive({"sess": page.token, "ticket": 1, "settings": {"speed": 0}})
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.extend(turn))
    reader.start()
    for ack, blocks in ((0, limits.BLOCKS_IN_FLIGHT), (2, 2 * limits.BLOCKS_IN_FLIGHT)):
        page.send(ack=ack)
        deadline = time.monotonic() + 60
        while not (backend.engines and len(backend.engines[-1].actions) >= blocks):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.3)
        assert len(backend.engines[-1].actions) == blocks
    page.send(stop=True)
    reader.join(60)
    assert not reader.is_alive()


def test_turns_end_when_somebody_waits(handlers, monkeypatch) -> None:
    monkeypatch.setattr(limits, "TURN_SECONDS_WHEN_WANTED", 0.2)
    page, other = Page(handlers), Page(handlers, "other")
    turn = page.drive({"speed": 0})
    next(turn)
    handlers.join({"sess": other.token, "settings": {}})
    last = list(turn)[-1]
    assert last["kind"] == "ended"
    assert "next visitor" in last["message"]
    assert other.send()["place"] == 0


def test_an_idle_world_is_released(handlers, monkeypatch) -> None:
    monkeypatch.setattr(limits, "IDLE_SECONDS", 0.2)
    page = Page(handlers)
    turn = page.drive()
    next(turn)
    page.send(run=False)
    slot = handlers.sessions.get(page.token).slot
    newest = handlers.sessions.desk.newest(slot)
    talking = replace(newest, seq=newest.seq + 1, received=time.monotonic() + 600)
    handlers.sessions.desk.submit(slot, talking)  # or its silence would be as long
    assert "nobody drove it" in list(turn)[-1]["message"]


def test_a_silent_page_ends_its_turn(handlers, monkeypatch) -> None:
    monkeypatch.setattr(limits, "VANISHED_SECONDS", 0.2)
    turn, other = Page(handlers).drive(), Page(handlers, "other")
    next(turn)
    handlers.join({"sess": other.token, "settings": {}})
    time.sleep(0.3)
    assert "silent" in list(turn)[-1]["message"]


def test_user_errors_reach_the_page_and_others_do_not(handlers, backend, caplog) -> None:
    page = Page(handlers)
    assert "choose another" in list(page.drive({"seed": 13}))[-1]["message"]
    backend.fail = RuntimeError("/secret/path")
    last = list(page.drive())[-1]
    assert last["kind"] == "error"
    assert "secret" not in last["message"]
    assert "/secret/path" in caplog.text
    assert handlers.sessions.census()["holding"] == 0


def test_many_turns_leave_no_files_threads_or_slots(handlers, backend) -> None:
    if not Path("/proc/self/fd").exists():
        pytest.skip("counting open files needs /proc")

    def visit(name: str) -> None:
        page = Page(handlers, name)
        for message in page.drive({"speed": 0}):
            if message["kind"] == "block" and message["i"] == 1:
                page.send(stop=True)
        handlers.closed(name)
        backend.engines.clear()

    def held() -> set[object]:
        """Threads and open files; those of earlier tests may end meanwhile."""
        found: set[object] = {*threading.enumerate()}
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # closed since, as what listed them is
                found.add((number, os.readlink(f"/proc/self/fd/{number}")))
        return found

    visit("warm-up")
    before = held()
    for number in range(6):
        visit(f"page {number}")
    assert held() - before == set()
    assert handlers.sessions.census() == {"sessions": 0, "waiting": 0, "holding": 0, "slots": 0}
    assert list(handlers.sessions.files.root.iterdir()) == []


@pytest.mark.parametrize("payload", [None, 4, "x", {}, {"sess": "guess"}, {"sess": ["x"]}])
@pytest.mark.parametrize("name", ["control", "join", "leave", "check", "picture", "download"])
def test_strangers_get_one_line(handlers, name: str, payload: object) -> None:
    reply = getattr(handlers, name)(payload)
    assert reply["ok"] is False
    assert "\n" not in reply["error"]


def test_a_ticket_that_left_the_line_starts_nothing(handlers, backend) -> None:
    page = Page(handlers)
    handlers.join({"sess": page.token, "settings": {}})
    handlers.leave({"sess": page.token})
    assert list(handlers.drive({"sess": page.token, "ticket": 1, "settings": {}})) == []
    assert backend.engines == []


def test_download_packs_the_recording(handlers, backend) -> None:
    page = Page(handlers)
    assert "nothing has been recorded" in handlers.download({"sess": page.token})["error"]
    for message in page.drive({"speed": 0}):
        if message["kind"] == "block" and message["i"] == 2:
            page.send(stop=True)
    reply = handlers.download({"sess": page.token})
    token = reply["url"].removeprefix("session/").removesuffix(".zip")
    path, name = handlers.sessions.files.fetch(token)
    assert name == reply["name"]
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        names = {Path(item).name for item in archive.namelist()}
    assert {"session.json", "actions.ndjson", "metrics.csv", "bf16.mkv"} <= names
    handlers.closed("page")
    assert handlers.sessions.files.fetch(token) is None


def test_a_full_recording_ends_and_driving_goes_on(handlers, backend, monkeypatch) -> None:
    monkeypatch.setattr(limits, "MAX_RECORDING_BYTES", 4 * 3 * 4 * 128 * 96 * 3)
    page = Page(handlers)
    for message in page.drive({"speed": 0}):
        if message["kind"] == "block" and message["i"] == 6:
            page.send(stop=True)
    reply = page.send()
    assert reply["recording"] is False
    assert handlers.download({"sess": page.token})["ok"]


def test_an_own_picture_is_kept_for_the_session(handlers, backend) -> None:
    page = Page(handlers)
    file = handlers.uploads / "mine.png"
    iio.imwrite(file, np.full((30, 40, 3), 9, np.uint8))
    reply = handlers.picture({"sess": page.token, "path": str(file)})
    assert reply["picture"] == 1
    assert not file.exists()
    turn = page.drive({"picture": 1})
    assert next(turn)["kind"] == "block"
    turn.close()
    assert "gone" in list(page.drive({"picture": 2}))[-1]["message"]


def test_psnr_is_to_bf16_and_only_with_it(backend) -> None:
    for lanes, expected in ((["bf16", "qvg"], {"qvg"}), (["qvg"], set())):
        engine = backend.open(
            parse_settings({"lanes": lanes}, backend.catalogue()), None, lambda *_: None
        )
        engine.start()
        from quantwm.worlds.base import ChunkAction

        block = engine.step(ChunkAction.held(frozenset(), 4))
        assert set(runner._psnr_to_bf16(block)) == expected

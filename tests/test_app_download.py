"""Download during a run: a whole copy is packed, and the recording goes on to its end."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_engine import FakeBackend
from test_app_handlers import Page

from app.files import SessionFiles
from app.handlers import Handlers
from app.sessions import SessionManager
from quantwm.session_zip import open_session
from quantwm.video import read_video

pytest.importorskip("av")


def fetched(handlers: Handlers, reply: dict) -> Path:
    assert reply["ok"], reply
    token = reply["url"].removeprefix("session/").removesuffix(".zip")
    return handlers.sessions.files.fetch(token)[0]


def test_a_download_does_not_end_the_recording(tmp_path: Path) -> None:
    (tmp_path / "uploads").mkdir()
    backend = FakeBackend(tmp_path, delay=0.0)
    handlers = Handlers(backend, SessionManager(SessionFiles(tmp_path / "s")), tmp_path / "uploads")
    page = Page(handlers)
    copies = {}
    for message in page.drive({"speed": 0}):
        if message["kind"] != "block":
            continue
        block = message["i"]
        if block in (2, 5):
            page.send(flushes=block)
        if block in (3, 6):
            asked = {"sess": page.token, "flushes": block - 1}
            copies[block] = fetched(handlers, handlers.download(asked))
            assert page.send()["recording"] is True
        if block == 8:
            page.send(stop=True)
    whole = fetched(handlers, handlers.download({"sess": page.token}))
    for path, blocks in ((copies[3], 2), (copies[6], 5), (whole, 8)):
        with open_session(path) as session:
            assert (session.complete, len(session.actions)) == (True, blocks), path
            frames = blocks * session.info.frames_per_chunk
            for lane in session.info.lanes:
                assert len(read_video(session.video(lane.name), 999)) == frames

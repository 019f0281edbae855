"""The sessions that ship for machines without a GPU, and the command that records them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import app.inspector.demo as page
import quantwm.cli.demo as command
from quantwm.cli import main
from quantwm.errors import UserError
from quantwm.session_reader import load_session
from quantwm.video import read_video
from quantwm.worlds.embedded.adapter import EmbeddedWorld

pytest.importorskip("av")
SHIPPED = Path(__file__).resolve().parent.parent / "assets" / "demo"
MOST_BYTES = 1_200_000


def test_three_sessions_are_recorded_and_replace_older_ones(tmp_path, capsys, monkeypatch):
    world = EmbeddedWorld.random("tiny")
    monkeypatch.setattr(command, "load_world", lambda name, device: world)
    arguments = ["demo", "--out", str(tmp_path), "--chunks", "2", "--device", "cpu"]
    for _ in range(2):
        assert main(arguments) == 0
    told = capsys.readouterr()
    document = json.loads(told.out.splitlines()[-1])
    assert f"{document['bytes']:,}" in told.err
    assert list(document["sessions"]) == [demo.name for demo in command.DEMOS]
    for demo in command.DEMOS:
        session = load_session(tmp_path / demo.name)
        assert session.complete and session.info.title == demo.title
        assert [lane.name for lane in session.info.lanes] == list(demo.lanes)
        assert len(read_video(session.video("qvg"), 99)) == 8
        assert not (tmp_path / demo.name / "preview.mp4").exists()
    monkeypatch.setattr(page, "DEMO", tmp_path)
    assert list(page.demos().values()) == [demo.title for demo in command.DEMOS]
    assert page.demo_page() == "/inspect#open=" + next(iter(page.demos()))


def test_longer_sessions_hold_the_same_keys_longer():
    still, turn, _ = command.DEMOS
    assert (still.actions(None), turn.actions(None)) == ("none-8", "right-4, left-4")
    assert (still.actions(24), turn.actions(24)) == ("none-24", "right-12, left-12")


def test_every_demo_starts_from_a_scene_that_ships():
    scenes = {path.parent.name for path in (SHIPPED.parent / "scenes").glob("*/scene.json")}
    assert {demo.scene for demo in command.DEMOS} <= scenes


def test_without_sessions_the_demo_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "DEMO", tmp_path)
    with pytest.raises(UserError, match="holds no session"):
        page.demo_page()


def test_the_shipped_sessions_are_small_and_whole():
    folders = sorted(SHIPPED.glob("*/session.json"))
    assert len(folders) == 3, "record them: python -m quantwm demo"
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*") if path.is_file()) <= MOST_BYTES
    for folder in (path.parent for path in folders):
        session = load_session(folder)
        assert session.complete and session.info.title and not session.notes
        frames = len(session.actions) * session.info.frames_per_chunk
        for lane in session.info.lanes:
            assert len(read_video(session.video(lane.name), 1000)) == frames

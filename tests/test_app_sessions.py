"""One world at a time, a fair line, and nothing left when a page closes."""

from __future__ import annotations

from pathlib import Path

import pytest

from app import limits
from app.files import SessionFiles
from app.sessions import SessionManager
from quantwm.errors import UserError


@pytest.fixture
def manager(tmp_path: Path) -> SessionManager:
    return SessionManager(SessionFiles(tmp_path), capacity=20)


def test_a_page_keeps_its_session_and_tokens_are_random(manager: SessionManager) -> None:
    first = manager.open("a")
    assert manager.open("a") is first
    assert manager.open("b").token != first.token
    assert len(first.token) >= 24
    for wrong in ("", "a", None, 3, first.token + "x"):
        with pytest.raises(UserError, match="session has ended"):
            manager.get(wrong)


def test_the_line_is_fair_and_the_world_has_one_holder(manager: SessionManager) -> None:
    a, b, c = (manager.open(name).token for name in "abc")
    assert [manager.join(token) for token in (a, b, c)] == [0, 1, 2]
    with manager.hold(a):
        assert [manager.place(token) for token in (a, b, c)] == [0, 1, 2]
        assert manager.wanted()
        with pytest.raises(UserError, match="in use"), manager.hold(b):
            pass
        manager.leave(b)
        assert manager.place(b) is None
        assert manager.place(c) == 1
    assert manager.place(c) == 0
    manager.leave(c)
    assert not manager.wanted()


def test_a_full_line_turns_people_away(manager: SessionManager) -> None:
    tokens = [manager.open(str(i)).token for i in range(limits.MAX_QUEUE + 2)]
    with_world, *others = tokens
    manager.join(with_world)
    with manager.hold(with_world):
        for token in others[: limits.MAX_QUEUE]:
            manager.join(token)
        with pytest.raises(UserError, match="waiting already"):
            manager.join(others[limits.MAX_QUEUE])


def test_closing_while_driving_frees_all(manager: SessionManager) -> None:
    session = manager.open("a")
    manager.join(session.token)
    session.folder.recording()
    with manager.hold(session.token):
        manager.close_hash("a")
        assert not manager.alive(session.token)
        assert session.folder.path.exists(), "the loop may still be writing"
    assert not session.folder.path.exists()
    assert manager.census() == {"sessions": 0, "waiting": 0, "holding": 0, "slots": 0}


def test_an_error_while_driving_frees_the_world(manager: SessionManager) -> None:
    token = manager.open("a").token
    manager.join(token)
    with pytest.raises(RuntimeError), manager.hold(token):
        raise RuntimeError
    assert manager.census()["holding"] == 0


def test_many_pages_leave_nothing_behind(manager: SessionManager) -> None:
    for number in range(300):
        session = manager.open(f"page {number}")
        manager.join(session.token)
        with manager.hold(session.token):
            session.folder.recording()
        manager.close_hash(f"page {number}")
    assert manager.census() == {"sessions": 0, "waiting": 0, "holding": 0, "slots": 0}
    assert list(manager.files.root.iterdir()) == []


def test_a_page_that_closes_before_it_is_opened_leaves_nothing(manager: SessionManager) -> None:
    manager.close_hash("quick")
    with pytest.raises(UserError, match="closed before it had begun"):
        manager.open("quick")
    assert manager.census()["slots"] == 0
    for number in range(100):
        manager.close_hash(f"gone {number}")
    manager.open("gone 0")  # so many are not remembered
    assert manager.census()["sessions"] == 1


def test_silent_pages_make_room_and_busy_ones_do_not(manager: SessionManager, caplog) -> None:
    pages = [manager.open(str(number)) for number in range(20)]
    with pytest.raises(UserError, match="too many pages"):
        manager.open("one more")
    assert "'sessions': 20" in caplog.text, "the log says what the server held"
    pages[3].last_seen -= limits.VANISHED_SECONDS + 1
    manager.open("one more")
    assert not manager.alive(pages[3].token)

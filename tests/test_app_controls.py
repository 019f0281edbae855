"""Control snapshots: what is refused, what is dropped, what a tap and silence mean."""

from __future__ import annotations

import math
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app import limits
from app.controls import Board, ControlDesk, ControlSnapshot, bind_keys, parse_snapshot
from quantwm.errors import UserError

KEYS = {"w": "walk", "s": "back", "left": "turn left", "right": "turn right"}


def message(**fields: object) -> dict[str, object]:
    return {"seq": 1, "keys": [], "run": False, "steps": 0, "resets": 0, "ack": -1, **fields}


def test_a_good_message_is_read() -> None:
    snapshot = parse_snapshot(message(keys=["w", "left"], run=True, steps=3, t=12.5), KEYS)
    assert snapshot.keys == {"w", "left"}
    assert (snapshot.run, snapshot.steps, snapshot.sent_ms) == (True, 3, 12.5)


@pytest.mark.parametrize(
    "bad",
    [
        {"keys": ["q"]},
        {"keys": "w"},
        {"keys": [1]},
        {"keys": ["w"] * (limits.MAX_KEYS_HELD + 1)},
        {"seq": -1},
        {"seq": True},
        {"seq": 1.5},
        {"seq": None},
        {"seq": 10**30},
        {"run": 1},
        {"run": "yes"},
        {"stop": None},
        {"steps": -1},
        {"ack": -2},
        {"t": math.nan},
        {"t": math.inf},
        {"t": "now"},
        {"settings": [1]},
    ],
)
def test_bad_fields_are_refused_in_one_line(bad: dict[str, object]) -> None:
    with pytest.raises(UserError) as caught:
        parse_snapshot(message(**bad), KEYS)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("payload", [None, 3, "x", [], True])
def test_a_message_must_be_an_object(payload: object) -> None:
    with pytest.raises(UserError, match="object"):
        parse_snapshot(payload, KEYS)


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text() | st.integers(), st.lists))
def test_nothing_but_user_errors_comes_out(value: object) -> None:
    for field in message():
        try:
            parse_snapshot(message(**{field: value}), KEYS)
        except UserError:
            continue


def test_older_messages_are_dropped() -> None:
    desk = ControlDesk(2)
    assert desk.submit(0, ControlSnapshot(seq=5, keys=frozenset({"w"})))
    assert not desk.submit(0, ControlSnapshot(seq=4))
    assert not desk.submit(0, ControlSnapshot(seq=5))
    assert desk.newest(0).keys == {"w"}
    assert desk.newest(1) == ControlSnapshot()
    desk.forget(0)
    assert desk.newest(0) == ControlSnapshot()


def test_a_tap_counts_once_and_silence_releases() -> None:
    desk = ControlDesk(1)
    now = time.monotonic()
    desk.submit(0, ControlSnapshot(seq=1, keys=frozenset({"w"}), received=now))
    desk.submit(0, ControlSnapshot(seq=2, keys=frozenset(), received=now))
    tapped = desk.newest(0)
    assert tapped.effective(now, consumed=0) == {"w"}
    assert tapped.effective(now, consumed=2) == frozenset()
    desk.submit(0, ControlSnapshot(seq=3, keys=frozenset({"s"}), received=now))
    held = desk.newest(0)
    assert held.effective(now, consumed=3) == {"s"}
    assert held.effective(now + limits.DEAD_MAN_SECONDS + 0.1, consumed=3) == frozenset()


def test_taps_that_came_together_are_a_chunk_each() -> None:
    desk, now = ControlDesk(1), time.monotonic()
    for seq, keys in enumerate(({"w"}, {"w", "left"}, {"w"}, {"s"}), start=1):
        desk.submit(0, ControlSnapshot(seq=seq, keys=frozenset(keys), received=now))
    newest, consumed, made = desk.newest(0), 0, []
    for _ in range(4):
        until = newest.next_tap(consumed)
        made.append(newest.effective(now, consumed, until))
        consumed = until
    assert made == [{"w"}, {"left"}, {"s"}, {"s"}]  # the last is still down


def test_arrows_fall_back_to_letters() -> None:
    bound = bind_keys(KEYS)
    assert bound["ArrowUp"] == "w" and bound["KeyW"] == "w"
    assert bound["ArrowLeft"] == "left" and bound["KeyA"] == "left"
    assert bind_keys({"up": "", "w": ""})["ArrowUp"] == "up"
    assert "Space" not in bound


def test_a_forked_process_sees_new_controls() -> None:
    board = Board(3)
    ready, go = os.pipe()
    answer, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(ready, 1)
        os.write(write, str(board.read(1).get("seq")).encode())
        os._exit(0)
    board.write(1, {"seq": 41})
    board.write(1, {"seq": 42})
    os.write(go, b"x")
    assert os.read(answer, 8) == b"42"
    os.waitpid(child, 0)


def test_the_board_refuses_what_does_not_fit() -> None:
    board = Board(1)
    with pytest.raises(UserError):
        board.write(0, {"x": "y" * 50_000})
    with pytest.raises(IndexError):
        board.read(1)
    assert board.read(0) == {}

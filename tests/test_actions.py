"""Action strings: what parses, what is refused with which words, and round trips."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantwm.actions import (
    MAX_FRAMES,
    action_from_json,
    action_to_json,
    check_action,
    format_actions,
    pack_frames,
    parse_actions,
)
from quantwm.errors import UserError
from quantwm.worlds.base import ChunkAction

KEYS = ("w", "a", "s", "d", "left", "right")

frames_strategy = st.lists(
    st.frozensets(st.sampled_from(KEYS), max_size=3), min_size=1, max_size=60
)


def flat(actions):
    return [frame for action in actions for frame in action.frames]


def test_durations_are_frames_packed_over_chunk_borders():
    actions = parse_actions("w-6, right-3, w+right-2", KEYS, 4)
    want = [{"w"}] * 6 + [{"right"}] * 3 + [{"w", "right"}] * 2 + [set()]
    assert flat(actions) == want
    assert all(len(action.frames) == 4 for action in actions)


def test_item_without_number_lasts_one_chunk():
    assert flat(parse_actions("w,none", KEYS, 3)) == [{"w"}] * 3 + [set()] * 3


def test_spaces_and_capitals_do_not_matter():
    assert parse_actions("  W-4 ,RIGHT+w-4 ", KEYS, 4) == parse_actions("w-4,w+right-4", KEYS, 4)


@given(frames_strategy, st.integers(1, 5))
def test_format_and_parse_are_inverse(frames, size):
    actions = pack_frames(frames, size)
    assert flat(actions)[: len(frames)] == frames
    assert not any(flat(actions)[len(frames) :])
    assert parse_actions(format_actions(actions), KEYS, size) == actions


@given(frames_strategy, st.integers(1, 5))
def test_json_round_trip(frames, size):
    for action in pack_frames(frames, size):
        line = json.loads(json.dumps(action_to_json(action)))
        assert action_from_json(line, KEYS, size) == action


@given(st.text(max_size=30))
def test_any_text_parses_or_is_refused_in_one_line(text):
    try:
        actions = parse_actions(text, KEYS, 4)
    except UserError as error:
        assert "\n" not in str(error)
    else:
        assert 1 <= len(flat(actions)) <= MAX_FRAMES + 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("  ", "empty"),
        ("w-8,", "nothing between commas at character 5"),
        ("w-8,,w", "nothing between commas at character 5"),
        ("w-8, x-3", "unknown key 'x' at character 6; this world knows w, a, s, d, left, right"),
        ("w-0", "whole number from 1 to 10,000"),
        ("w--3", "whole number"),
        ("w-", "whole number"),
        ("w-3.5", "whole number"),
        ("w-\u0663", "whole number"),
        ("w 8", "cannot read 'w 8' at character 1"),
        ("w+", "unknown key ''"),
        ("w+w-2", "named twice"),
        ("none+w-2", "stands alone"),
        ("w-9999, w-2", "more than 10,000 latent frames at character 9"),
        ("w-10001", "more than 10,000"),
        ("w" * 300_000, "at most 200,000"),
    ],
)
def test_bad_strings_say_where_and_what(text, words):
    with pytest.raises(UserError) as caught:
        parse_actions(text, KEYS, 4)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "value", [None, {}, [], [["w"]], [["w"], ["q"]], [["w"], "w"], [["w"], [1]], [["w"], [["w"]]]]
)
def test_bad_json_is_refused(value):
    with pytest.raises(UserError, match="list of"):
        action_from_json(value, KEYS, 2)


def test_check_action_names_the_world_keys():
    legend = dict.fromkeys(KEYS, "")
    check_action(ChunkAction.held(frozenset({"w"}), 4), legend, 4)
    with pytest.raises(UserError, match=r"unknown key 'up'.*w, a, s"):
        check_action(ChunkAction.held(frozenset({"up"}), 4), legend, 4)
    with pytest.raises(UserError, match="has 4 frames, got 3"):
        check_action(ChunkAction.held(frozenset(), 3), legend, 4)

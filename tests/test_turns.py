"""Heads take turns through the scratch: all of them once, in places that do not overlap."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from quantwm.cache.turns import _turns, first_turn


def test_ten_heads_of_4680_queries_go_as_seven_and_three() -> None:
    assert first_turn(10, 37, 132) == 7  # two waves and one, as three of all ten
    assert first_turn(1, 37, 132) == 1
    assert first_turn(2, 132, 132) == 1


@given(st.integers(1, 64), st.integers(1, 300), st.integers(1, 200))
def test_two_turns_take_no_more_waves_than_one(
    together: int, programs: int, processors: int
) -> None:
    first = first_turn(together, programs, processors)
    assert 1 <= first <= together
    if first < together:
        waves = [-(-n * programs // processors) for n in (first, together - first, together)]
        assert waves[0] + waves[1] <= waves[2]


@given(st.integers(1, 64), st.data())
def test_every_head_has_one_turn_and_neighbours_other_places(
    heads: int, data: st.DataObject
) -> None:
    together = data.draw(st.integers(1, heads))
    first = data.draw(st.integers(1, together))
    turns = _turns(heads, together, first)
    assert [h for some, _ in turns for h in range(some.start, some.stop)] == list(range(heads))
    for some, places in turns:
        assert some.stop - some.start == places.stop - places.start
        assert 0 <= places.start < places.stop <= together
    for (_, one), (_, other) in pairwise(turns):
        if first < together:
            assert one.stop <= other.start or other.stop <= one.start

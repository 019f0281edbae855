"""Work in processes of its own: one that dies is told, and costs no other."""

from __future__ import annotations

import os

from benchmarks.apart import OneByOne, all_at_once


def work(name: str, added: int = 0) -> tuple[int, int]:
    """The process it ran in, and a number; or the process's end, or an error."""
    if name == "dies":
        os._exit(134)
    if name == "fails":
        raise ValueError("two\nlines")
    return os.getpid(), len(name) + added


def test_one_that_dies_takes_no_other_with_it() -> None:
    found = dict(all_at_once(work, ["dies", "well", "fails", "too"], 1))
    assert str(found["dies"]) == "its process died"
    assert str(found["fails"]) == "ValueError: two"
    assert (found["well"][1], found["too"][1]) == (5, 4)
    assert found["well"][0] != found["too"][0]


def test_one_by_one_goes_on_in_the_same_process_while_all_goes_well() -> None:
    with OneByOne() as process:
        first, second = process(work, "a"), process(work, "bc")
        assert (first[0], second[1]) == (second[0], 2)
        for name, says in (("dies", "its process died"), ("fails", "ValueError: two")):
            assert str(process(work, name)) == says
        assert process(work, "a")[0] != first[0]

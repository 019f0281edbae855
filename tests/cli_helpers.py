"""The command line called in this process, over the small world."""

from __future__ import annotations

import json

import pytest

from quantwm.cli import main
from quantwm.worlds import registry

ACTIONS = "w-4, w+right-2, none-2"


@pytest.fixture(autouse=True)
def worlds(monkeypatch):
    """The small world is known by name."""
    monkeypatch.setitem(registry.WORLDS, "small", "small_world")


def call(capsys, *arguments):
    """Exit status, the JSON last line (or None) and what went to standard error."""
    status = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    lines = out.splitlines()
    document = None
    if lines:
        document = json.loads(lines[-1], parse_constant=lambda name: pytest.fail(name))
    return status, document, err


def play(capsys, out, *more, lanes="bf16,qvg,quantwm", actions=ACTIONS):
    return call(
        capsys,
        *("play", "--world", "small", "--device", "cpu", "--actions", actions),
        *("--lanes", lanes, "--seed", 5, "--out", out, *more),
    )

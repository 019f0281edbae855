"""A turn on a lent GPU: picklable arguments, texts back, and nothing of it on other machines."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_engine import FakeBackend

from app import limits, zero
from app.files import SessionFiles
from app.handlers import Handlers
from app.sessions import SessionManager


class Spaces:
    """What the package `spaces` promises: arguments and results cross a process border."""

    def __init__(self, lends: bool) -> None:
        self.config = SimpleNamespace(Config=SimpleNamespace(zero_gpu=lends))
        self.durations: list[int] = []
        self.turns = 0

    def GPU(self, duration: int):  # the package's own name
        self.durations.append(duration)

        def decorate(turn):
            def call(*args: object) -> Iterator[str]:
                self.turns += 1
                for text in turn(*pickle.loads(pickle.dumps(args))):
                    yield pickle.loads(pickle.dumps(text))

            return call

        return decorate


def drive(tmp_path: Path, spaces: Spaces | None, seed: int = 0) -> list[dict[str, object]]:
    backend = FakeBackend(tmp_path, delay=0.0)
    sessions = SessionManager(SessionFiles(tmp_path / "s"))
    handlers = Handlers(backend, sessions, tmp_path, spaces)
    token = json.loads(handlers.hello("page"))["session"]
    settings = {"seed": seed, "speed": 0}
    handlers.join({"sess": token, "settings": settings})
    handlers.control({"sess": token, "seq": 1, "run": True, "settings": settings})
    out = []
    for text in handlers.drive({"sess": token, "ticket": 1, "settings": settings}):
        out.append(json.loads(text))
        handlers.control({"sess": token, "seq": len(out) + 1, "run": True, "ack": len(out),
                          "stop": len(out) >= 3, "settings": settings})  # fmt: skip
    assert sessions.census()["holding"] == 0
    return out


def test_a_turn_on_a_lent_gpu(tmp_path: Path) -> None:
    spaces = Spaces(lends=True)
    kinds = [message["kind"] for message in drive(tmp_path, spaces)]
    assert kinds == ["block", "block", "block", "ended"]
    assert spaces.turns == 1 and spaces.durations == [limits.ZERO_GPU_SECONDS]


def test_mistakes_are_messages_before_they_cross_back(tmp_path: Path) -> None:
    messages = drive(tmp_path, Spaces(lends=True), seed=13)
    assert [message["kind"] for message in messages] == ["error"]
    assert "refused by the test engine" in messages[0]["message"]


@pytest.mark.parametrize("spaces", [None, Spaces(lends=False)])
def test_elsewhere_nothing_is_wrapped(tmp_path: Path, spaces: Spaces | None) -> None:
    assert [message["kind"] for message in drive(tmp_path, spaces)][-1] == "ended"
    assert spaces is None or spaces.turns == 0
    turn = object()
    assert zero.lent(turn, spaces) is turn


def test_the_package_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str):
        raise ImportError(name)

    monkeypatch.setattr(zero.importlib, "import_module", absent)
    assert zero.load_spaces() is None and not zero.is_zero_gpu(None)

"""Worlds, downloads and prompts: the server's answers, and the backend that loads worlds."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from fake_engine import PROMPTS, FakeBackend

from app import library, limits
from app.backend import methods
from app.downloads import Downloads
from app.files import SessionFiles
from app.handlers import Handlers, parse_settings
from app.library import LibraryBackend
from app.offers import WorldOffers
from app.sessions import SessionManager
from quantwm.errors import UserError
from quantwm.worlds import room
from quantwm.worlds.embedded.adapter import EmbeddedWorld
from quantwm.worlds.registry import Placement
from quantwm.worlds.room import fit

CPU = torch.device("cpu")


@pytest.fixture
def backend(tmp_path: Path) -> FakeBackend:
    return FakeBackend(tmp_path, delay=0.0)


@pytest.fixture
def ask(backend: FakeBackend, tmp_path: Path):
    """Calls an answer of the server with a session's token."""
    handlers = Handlers(backend, SessionManager(SessionFiles(tmp_path / "s")), tmp_path)
    token = json.loads(handlers.hello("page"))["session"]

    def call(name: str, **fields: object) -> dict[str, object]:
        return getattr(handlers, name)({"sess": token, **fields})

    call.handlers = handlers
    return call


def test_the_picker_says_what_each_world_needs(ask) -> None:
    reply = ask("worlds")
    cards = {card["name"]: card for card in reply["worlds"]}
    assert set(cards) == {"rooms", "caves", "ruins"} and reply["download"] == {}
    ruins = cards["ruins"]
    assert not ruins["present"] and "missing" in ruins["problem"] and "Testers" in ruins["terms"]
    assert ruins["weight_bytes"] and ruins["needed"] <= ruins["capacity"] and ruins["advice"]
    json.dumps(reply)


def test_one_world_offers_its_own_choices(ask) -> None:
    caves = ask("world", world="caves")["hello"]
    assert caves["world"]["name"] == "caves" and caves["prompts"] == list(PROMPTS)
    assert caves["scenes"] == [] and not caves["upload"] and set(caves["legend"]) == {"w", "s"}
    for wrong, says in (("atlantis", "unknown world"), (7, "name the world"), ("", "name the")):
        reply = ask("world", world=wrong)
        assert not reply["ok"] and says in reply["error"]


def test_a_download_needs_agreement_and_runs_once(ask, backend) -> None:
    for agreed in (False, "yes", 1, None):
        reply = ask("fetch", world="ruins", agreed=agreed)
        assert not reply["ok"] and "only after its licence is agreed to" in reply["error"]
    assert "unknown world" in ask("fetch", world="atlantis", agreed=True)["error"]
    assert backend.fetched == []
    backend.fetch_gate.clear()
    assert ask("fetch", world="ruins", agreed=True)["download"]["running"]
    assert ask("fetch", world="ruins", agreed=True)["ok"], "asking again is no mistake"
    reply = ask("fetch", world="caves", agreed=True)
    assert not reply["ok"] and "ruins is being downloaded" in reply["error"]
    backend.fetch_gate.set()
    ask.handlers.downloads.wait(60)
    state = ask("worlds")["download"]
    assert state["error"] is None and not state["running"] and state["progress"] == 1.0
    assert backend.fetched == [("ruins", True)]


def test_a_download_that_breaks_is_one_line_and_tells_no_secrets() -> None:
    def fetch(world: str, agreed: bool, progress) -> None:
        raise RuntimeError("secret path /etc/x") if world == "odd" else UserError("no network")

    downloads = Downloads(fetch)
    for world, says in (("gone", "no network"), ("odd", "the server's log says why")):
        downloads.start(world, True)
        downloads.wait(60)
        assert says in downloads.state()["error"] and "secret" not in downloads.state()["error"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompt": "x" * 4_001}, "at most 4,000 characters, got 4,001"),
        ({"prompt": "a\0b"}, "control or half characters"),
        ({"prompt": "a \ud800 b"}, "control or half characters"),
        ({"prompt": 7}, "must be text"),
        ({"script": "dance"}, "unknown script 'dance'"),
        ({"scene": "hall"}, "unknown scene 'hall'; choose one of none here"),
    ],
)
def test_settings_of_a_prompted_world_are_checked(backend, fields, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        parse_settings(fields, backend.catalogue("caves"))
    assert "\n" not in str(caught.value)


def test_prompts_are_for_worlds_that_take_them(backend) -> None:
    settings = parse_settings({"prompt": "  a cave\nof ice "}, backend.catalogue("caves"))
    assert (settings.world, settings.prompt, settings.scene) == ("caves", "a cave\nof ice", None)
    assert parse_settings({}, backend.catalogue("caves")).prompt == ""
    with pytest.raises(UserError, match="rooms takes no prompt"):
        parse_settings({"prompt": "a cave"}, backend.catalogue("rooms"))
    assert parse_settings({"script": "loop"}, backend.catalogue()).script == "loop"
    assert limits.MAX_PROMPT_CHARACTERS == 4_000


class Loads:
    """Stands for the library's loading: a tiny world of any name, or a failure."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Placement | None]] = []
        self.fails = False

    def __call__(self, name, device, progress, placement=None):
        self.asked.append((name, placement))
        progress("Loading the transformer", 0.5)
        if self.fails:
            raise UserError("half downloaded: shard 2 is missing")
        world = EmbeddedWorld.random("tiny")
        world.spec = library.WorldSpec(**{**vars(world.spec), "name": name})
        return world


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Loads:
    made = Loads()
    monkeypatch.setattr(library, "load_world", made)
    return made


def quiet(stage: str, share: float) -> None:
    pass


@pytest.mark.parametrize("beside", [True, False])
def test_a_failed_load_keeps_or_restores_the_world_before(loads, monkeypatch, beside: bool) -> None:
    backend = LibraryBackend("embedded", ["bf16"], CPU, placement=Placement("vae"))
    monkeypatch.setattr(backend, "fits_beside", lambda world: beside)
    backend.load("embedded", quiet)
    before = backend._world
    loads.fails = True
    with pytest.raises(UserError, match="half downloaded"):
        backend.load("lingbot_v2_1p3b", quiet)
    assert (backend._world is before) == beside
    loads.fails = False
    backend.load("embedded", quiet)
    assert backend._world.spec.name == "embedded"
    assert len(loads.asked) == (2 if beside else 3), "loaded again only where it made room"
    backend.load("matrix_game2_universal", quiet)
    assert loads.asked[0][1] is None and loads.asked[-1][1] == Placement("vae")


def test_room_beside_is_what_is_free(monkeypatch) -> None:
    backend = LibraryBackend("embedded", ["bf16", "qvg"], CPU)
    for free, fits in ((2**40, True), (2**20, False), (None, True)):
        monkeypatch.setattr(library, "free_bytes", lambda device, free=free: free)
        assert backend.fits_beside("embedded") == fits


def test_a_public_page_fetches_nothing_for_visitors(monkeypatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        library, "download_world", lambda name, agreed, progress: asked.append(name)
    )
    closed = LibraryBackend("embedded", ["bf16"], CPU, downloads=False)
    with pytest.raises(UserError, match="--downloads"):
        closed.download("lingbot_v2_1p3b", True, quiet)
    assert asked == []
    before = set(threading.enumerate())  # other tests leave some that wait
    LibraryBackend("embedded", ["bf16"], CPU).download("lingbot_v2_1p3b", True, quiet)
    assert asked == ["lingbot_v2_1p3b"] and set(threading.enumerate()) <= before


def test_a_card_says_what_a_small_gpu_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = ("bf16", "qvg", "quantwm")
    for gib, fitting, offloads in ((141, lanes, False), (24, ("qvg",), True), (8, (), False)):
        monkeypatch.setattr(room, "capacity_of", lambda device, gib=gib: gib * 2**30)
        offers = WorldOffers(
            "embedded", lanes, torch.device("cuda"), scene=None, seed=0, steps=None
        )
        card = next(card for card in offers.cards() if card.name == "lingbot_v2_14b")
        assert (card.lanes, card.offloads, card.capacity) == (fitting, offloads, gib * 2**30)
        assert (card.advice is None) == (gib == 141), card.advice
        assert offers.catalogue("lingbot_v2_14b").chosen == (fitting or lanes)


@pytest.mark.parametrize("world", ["embedded", "causal_forcing"])
def test_lanes_with_settings_are_proposed_and_fit(world: str) -> None:
    lanes = ("bf16", "bf16:floor", "quantwm:rank=4")
    assert fit(world, lanes, CPU, 2**50).lanes == lanes
    backend = LibraryBackend("embedded", lanes, CPU)
    chosen = backend.catalogue().chosen
    assert chosen == ("bf16", "bf16-floor", "quantwm:rank=4")
    assert methods(chosen) == list(lanes) and backend.fits_beside("embedded")
    assert set(chosen) <= {choice.name for choice in backend.catalogue().lanes}

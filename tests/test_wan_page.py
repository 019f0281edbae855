"""Every Wan family from a download folder to the page: a tiny random checkpoint of each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import imageio.v3 as iio
import numpy as np
import pytest
import torch
from browser_page import browser, in_phase, serve, until
from safetensors.torch import save_file
from wan_helpers import make_model, upstream_weights
from wan_tiny import WORLDS, actions_of, tiny

from app.files import SessionFiles
from app.handlers import Handlers
from app.library import LibraryBackend
from app.sessions import SessionManager
from quantwm.actions import parse_actions
from quantwm.worlds import registry
from quantwm.worlds.registry import world_spec
from quantwm.worlds.wan import catalog, files

__all__ = ["browser", "tiny"]

CPU = torch.device("cpu")


@pytest.fixture
def backend(tiny: str, monkeypatch: pytest.MonkeyPatch) -> LibraryBackend:
    """A page on the tiny world alone; counting the large ones on the meta device takes seconds."""
    monkeypatch.setattr("app.offers.WORLDS", {"tiny": registry.WORLDS["tiny"]})
    return LibraryBackend("tiny", ["bf16", "rtn"], CPU)


class Page:
    """What the page's script does, at the level of the server's answers."""

    def __init__(self, backend: LibraryBackend, folder: Path) -> None:
        uploads = folder / "uploads"
        uploads.mkdir()
        self.uploads = uploads
        self.handlers = Handlers(backend, SessionManager(SessionFiles(folder / "s")), uploads)
        hello = json.loads(self.handlers.hello("page"))
        self.hello, self.token, self.seq = hello, hello["session"], 0
        self.settings: dict[str, object] = {"world": "tiny", "speed": 0, "lanes": ["bf16", "rtn"]}

    def send(self, **fields: object) -> dict[str, object]:
        self.seq += 1
        snapshot = {"sess": self.token, "seq": self.seq, "settings": self.settings, **fields}
        return self.handlers.control(snapshot)

    def drive(self) -> Iterator[dict[str, object]]:
        assert self.handlers.join({"sess": self.token, "settings": self.settings})["ok"]
        payload = {"sess": self.token, "settings": self.settings, "ticket": 1}
        for text in self.handlers.drive(payload):
            yield json.loads(text)


@pytest.mark.parametrize("tiny", sorted(WORLDS), indirect=True)
def test_every_family_is_found_loaded_and_driven(
    tiny: str, backend: LibraryBackend, tmp_path: Path
) -> None:
    page, spec = Page(backend, tmp_path), world_spec("tiny")
    card = page.handlers.worlds({"sess": page.token})["worlds"][0]
    assert card["present"] and card["weight_bytes"] > 0 and card["problem"] is None
    entry = catalog.ENTRIES["tiny"]
    assert bool(page.hello["prompts"]) == entry.prompted
    assert bool(page.hello["scenes"]) == page.hello["upload"] == entry.pictured
    page.settings["prompt"] = "a walk" if entry.prompted else ""
    held = parse_actions(actions_of(tiny), spec.keys, 4)[-1].frames[0] if spec.keys else ()
    keys = sorted(held)
    page.send(run=True, keys=keys, t=0)
    kinds, blocks = [], []
    for message in page.drive():
        kinds.append(message["kind"])
        if message["kind"] != "block":
            continue
        blocks.append(message)
        page.send(run=True, keys=keys, ack=message["n"], stop=len(blocks) == 3)
    assert kinds == ["block", "block", "block", "ended"], message
    assert [block["frames"] for block in blocks] == [
        1, 4 * spec.cache.frames_per_chunk - 3, 4 * spec.cache.frames_per_chunk,
    ]  # fmt: skip
    assert blocks[-1]["keys"][0] == keys
    assert all(lane["kv"] > 0 for lane in blocks[-1]["lanes"])
    stages = [name for name, _ in page.send()["stages"]]
    assert "Loading the transformer" in stages and "Loading the autoencoder" in stages
    assert ("Loading the text encoder" in stages) == entry.prompted


class _Code:
    def __reduce__(self):
        return (print, ("code ran",))


def other_transformer(change) -> dict[str, torch.Tensor]:
    weights = upstream_weights(make_model(catalog.ENTRIES["tiny"].config))
    change(weights)
    return weights


def broken_transformers() -> Iterator[tuple[str, Callable[[Path], None], str]]:
    """What may lie in the transformer's folder instead of the model: name, writer, message."""
    first = "model.blocks.0.self_attn.q.bias"

    def saved(make) -> Callable[[Path], None]:
        return lambda folder: save_file(make(), folder / "weights.safetensors")

    def with_code(folder: Path) -> None:
        torch.save({"generator": {"x": _Code()}}, folder / "model.pt")

    def half(folder: Path) -> None:
        file = folder / "m-00001-of-00002.safetensors"
        save_file(other_transformer(lambda w: None), file)

    yield "another model", saved(lambda: upstream_weights(make_model())), "causal_forcing, not"
    yield "no model", saved(lambda: {"x": torch.ones(1)}), "not the weights of a known"
    yield "half", half, "half downloaded: 1 of 2 shards"
    yield (
        "another version",
        saved(lambda: upstream_weights(make_model(WORLDS["matrix_game2_templerun"]))),
        "matrix_game2_templerun, not matrix_game2_universal",
    )
    yield (
        "another size",
        saved(
            lambda: upstream_weights(make_model(replace(catalog.ENTRIES["tiny"].config, layers=3)))
        ),
        "choose the other size",
    )
    yield (
        "extra",
        saved(lambda: other_transformer(lambda w: w.update({"model.more": torch.ones(2)}))),
        "more is not expected",
    )
    yield "missing", saved(lambda: other_transformer(lambda w: w.pop(first))), "is missing"
    yield (
        "misshapen",
        saved(lambda: other_transformer(lambda w: w.update({first: torch.ones(7)}))),
        "has shape [7], expected",
    )
    yield "code", with_code, "holds more than tensors; such a pickle is not run"


@pytest.mark.parametrize("tiny", ["matrix_game2_universal"], indirect=True)
def test_wrong_files_are_one_line_and_the_page_goes_on(
    tiny: str, backend: LibraryBackend, tmp_path: Path, capsys
) -> None:
    page = Page(backend, tmp_path)
    folder = files.part_path(catalog.ENTRIES["tiny"].parts["transformer"])
    kept = {file.name: file.read_bytes() for file in folder.iterdir()}
    for what, write, says in broken_transformers():
        for file in folder.iterdir():
            file.unlink()
        write(folder)
        page.send(run=True)
        messages = list(page.drive())
        assert [m["kind"] for m in messages] == ["error"], (what, messages)
        assert says in messages[0]["message"] and "\n" not in messages[0]["message"], what
    assert "code ran" not in capsys.readouterr().out
    for file in folder.iterdir():
        file.unlink()
    for name, data in kept.items():
        (folder / name).write_bytes(data)
    page.send(run=True)
    driven = page.drive()
    assert next(driven)["kind"] == "block", "mended, it is driven"
    page.send(stop=True)
    assert [m["kind"] for m in driven][-1] == "ended"


@pytest.mark.browser
@pytest.mark.parametrize("tiny", ["lingbot_v2_1p3b"], indirect=True)
def test_the_real_page_drives_a_real_tiny_world(
    tiny: str, backend: LibraryBackend, browser, tmp_path: Path
) -> None:
    """Real key events, an own picture and a prompt, in headless Chromium."""
    served = serve(backend)
    context = browser.new_context(viewport={"width": 1280, "height": 860})
    try:
        page = context.new_page()
        page.set_default_timeout(120_000)
        page.goto(served.url)
        page.wait_for_selector('[data-world="tiny"][aria-checked="true"]')
        assert "here" in page.inner_text('[data-world="tiny"]')
        picture = tmp_path / "mine.png"
        iio.imwrite(picture, np.random.default_rng(0).integers(0, 255, (90, 120, 3), np.uint8))
        page.set_input_files('[data-in="file"]', picture)
        page.wait_for_selector('.qwm-own[aria-checked="true"]')
        page.fill('[data-in="prompt"]', "a walk through")
        page.click('[data-do="veil"]')
        in_phase(page, "live", 120)
        page.keyboard.down("KeyW")
        page.keyboard.down("ArrowRight")
        page.wait_for_function("+document.querySelector('[data-out=frames]').innerText >= 29")
        folder = next(iter(served.sessions._sessions.values())).folder.path
        actions = next(folder.glob("quantwm-*/actions.ndjson"))

        def recorded() -> list[list[str]]:
            lines = actions.read_text().split("\n")[:-1]
            return [json.loads(line)["frames"][-1] for line in lines]

        until(lambda: ["right", "w"] in recorded(), "both keys are recorded", 120, recorded)
        page.keyboard.up("KeyW")
        page.keyboard.up("ArrowRight")
        page.keyboard.press("Escape")
        context.close()
        until(lambda: served.sessions.census()["holding"] == 0, "the world is free", 120)
    finally:
        served.demo.close()

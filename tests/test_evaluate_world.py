"""`evaluate-world` as a command: the shipped weights on a few maps, its exit status, mistakes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from quantwm.cli import main
from quantwm.evaluation import sources
from quantwm.evaluation.episodes import save_episode
from quantwm.evaluation.statistics import STATISTICS
from quantwm.evaluation.table import ROWS
from quantwm.worlds.embedded.adapter import ASSETS, EmbeddedWorld
from quantwm.worlds.embedded.autoencoder import Autoencoder
from quantwm.worlds.embedded.config import PRESETS
from quantwm.worlds.embedded.transformer import Transformer
from quantwm.worlds.embedded.weights import read_manifest, save_models
from tests.box_room import episode, held

KEYS = {row.key for row in ROWS}


@pytest.fixture
def tiny(tmp_path):
    """A folder of random weights of the smallest size."""
    config = PRESETS["tiny"]
    models = Transformer(config.transformer), Autoencoder(config.autoencoder)
    save_models(tmp_path / "weights", config, *models, training={})
    return tmp_path / "weights"


def small_truth(folder):
    """An episode of every kind but a long walk, at the tiny world's size."""
    width, height = EmbeddedWorld.random("tiny").spec.video_size
    walks = {
        "turn": held("left", 111),
        "back": [*held("w", 20), *held("s", 19)],
        "keys": [*held("", 15), *held("w", 4), *held("left", 4)],
        "still": held("", 23),
        "walk": held("right", 31),
    }
    for kind, keys in walks.items():
        whole = episode(kind, keys, context=16)
        frames = whole.frames[:, :height, :width].copy()
        cut = whole.__class__(**{**vars(whole), "frames": frames})
        save_episode(folder / kind, cut, packed=False)
    return folder


def last_line(capsys):
    out = capsys.readouterr()
    return json.loads(out.out.splitlines()[-1]), out.err


def test_the_shipped_weights_on_a_small_subset(monkeypatch, tmp_path, capsys):
    """The first turn and one scene: 15 generated chunks, on one core 12 s."""
    chosen = sources.small_episodes

    def fewer(*arguments):
        episodes = chosen(*arguments)
        return [next(e for e in episodes if e.kind == kind) for kind in ("turn", "walk")]

    monkeypatch.setattr(sources, "small_episodes", fewer)
    arguments = ["--device", "cpu", "--no-speed", "--out", str(tmp_path)]
    assert main(["evaluate-world", *arguments]) == 0
    document, said = last_line(capsys)
    rows = {row["row"]: row["reached"] for row in document["rows"]}
    assert document["weights_sha256"] == read_manifest(ASSETS / "embedded").sha256
    assert document["maps"] == 2 and "the table asks for 32 or more" in said
    assert rows["autoencoder"] > 28 and rows["next_chunk"] > 20 and rows["turn_first"] > 12
    assert rows["weights_mb"] <= 44 and 0 <= rows["keys"] <= 100 <= rows["keys_truth"]
    assert json.loads((tmp_path / "acceptance.json").read_text()) == document
    assert document["weights_sha256"][:12] in (tmp_path / "acceptance.md").read_text()
    assert (tmp_path / "contact-sheet.png").stat().st_size > 10_000


def test_every_row_is_measured_on_truth_of_every_kind(tiny, tmp_path, capsys):
    small_truth(tmp_path / "truth")
    (tmp_path / "truth" / "long").mkdir()
    for name in ("episode.json", "frames.npy"):
        (tmp_path / "truth" / "long" / name).write_bytes(
            (tmp_path / "truth" / "back" / name).read_bytes().replace(b'"back"', b'"long"')
        )
    command = ["evaluate-world", "--weights", str(tiny), "--truth", str(tmp_path / "truth")]
    command += ["--subset", "full", "--device", "cpu", "--steps", "1"]
    assert main([*command, "--strict"]) == 1
    document, said = last_line(capsys)
    assert {row["row"] for row in document["rows"]} == KEYS
    assert document["steps"] == 1 and "rows are as wanted" in said
    assert "next_chunk" in document["missed"]  # random weights know nothing
    assert main([*command, "--statistics"]) == 0
    document, _ = last_line(capsys)
    assert set(document["statistics"]) == {spec.key for spec in STATISTICS}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--subset", "full"], "--subset full needs --truth DIR"),
        (["--subset", "some"], "invalid choice"),
        (["--weights", "nowhere"], "weights of the embedded world not found"),
        (["--world", "mars"], "invalid choice"),
        (["--out", __file__], "--out must be a folder to write into"),
        (["--truth", str(ASSETS / "truth")], "of its 112 frames: part of a small subset?"),
    ],
)
def test_mistakes_get_one_line(arguments, message, capsys):
    assert main(["evaluate-world", "--device", "cpu", *arguments]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert message in said[-1]


@pytest.mark.parametrize(
    ("kind", "keys", "context", "message"),
    [
        ("turn", held("left", 51), 16, "has 36 frames after its context, 48 or more"),
        ("walk", held("left", 31), 15, "a context of 15 frames, these weights make 4 at a time"),
    ],
)
def test_truth_that_does_not_fit_is_refused(tiny, tmp_path, capsys, kind, keys, context, message):
    width, height = EmbeddedWorld.random("tiny").spec.video_size
    whole = episode(kind, keys, context=context)
    frames = whole.frames[:, :height, :width].copy()
    save_episode(tmp_path / kind, replace(whole, frames=frames), packed=False)
    arguments = ["--weights", str(tiny), "--truth", str(tmp_path), "--device", "cpu"]
    assert main(["evaluate-world", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_truth_of_another_size_is_refused(tiny, tmp_path, capsys):
    save_episode(tmp_path / "walk", episode("walk", held("w", 7)), packed=False)
    arguments = ["--weights", str(tiny), "--truth", str(tmp_path), "--device", "cpu"]
    assert main(["evaluate-world", *arguments]) == 2
    assert "has frames of 128 x 96, these weights make 48 x 32" in capsys.readouterr().err

"""The command line refuses in one line: bad input, altered files, an interrupt, no memory."""

from __future__ import annotations

import json

import pytest
import small_world
import torch
from cli_helpers import call, play, worlds  # noqa: F401  (the last is a fixture)

import quantwm.cli.play as play_module
import quantwm.video as video
from quantwm.cli import main


def test_play_without_pyav(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(video, "has_pyav", lambda: False)
    monkeypatch.setattr(play_module, "has_pyav", lambda: False)
    status, _, err = play(capsys, tmp_path / "s")
    assert status == 2
    assert "pip install av" in err and "--no-video" in err
    assert not (tmp_path / "s").exists()
    assert play(capsys, tmp_path / "s", "--no-video")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name a command: play, replay"),
        (["fly"], "unknown command 'fly'; there are play"),
        (["play"], "--actions"),
        (["play", "--actions", "w-4", "--world", "mars"], "unknown world 'mars'; there are"),
        (["play", "--actions", "w-4", "--lanes", "bf16,x"], "unknown lane 'x'; there are bf16"),
        (["play", "--actions", "x-4"], "unknown key 'x' at character 1; this world knows w"),
        (["play", "--actions", "w-"], "whole number from 1"),
        (["play", "--actions", "w-4", "--seed", "-1"], "--seed"),
        (["play", "--actions", "w-4", "--mode", "x"], "--mode"),
        (["play", "--actions", "w-4", "--device", "tpu"], "unknown device 'tpu'"),
        (["play", "--actions", "w-4", "--device", "cuda:99"], "does not exist"),
        (["play", "--actions", "w-4", "--scene", "x", "--no-video"], "there are room, hall"),
        (["play", "--actions", "w-4", "--image", "none.png"], "no such file"),
        (["play", "--actions", "w-4", "--nonsense"], "--nonsense"),
        (["play", "--actions", "w-4", "--lanes", "qvg", "--mode", "teacher"], "needs a bf16 lane"),
        (["play", "--actions", "w-4", "--max-tokens", "7"], "too short"),
        (["replay", "none"], "no such session folder"),
        (["compare", "none.mkv", "none.mkv"], "no such file"),
        (["study", "none.safetensors"], "no such file"),
        (["study", __file__], "not a readable safetensors file"),
        (["plan"], "--layers N"),
        (["plan", "--world", "small"], "--frames N"),
        (["worlds", "x"], "unrecognized arguments: x"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if arguments[:1] == ["play"] and "--world" not in arguments:
        arguments = [*arguments, "--world", "small"]
    status, document, err = call(capsys, *arguments)
    assert (status, document) == (2, None)
    last = err.splitlines()[-1]
    assert last.startswith("quantwm: ")
    assert words in last
    assert "Traceback" not in err


def test_interrupt_is_clean(tmp_path, capsys, monkeypatch):
    world = small_world.SmallWorld()
    world.fail["generate"] = ("qvg", KeyboardInterrupt())
    monkeypatch.setattr(small_world, "load_world", lambda device, progress: world)
    status, document, err = play(capsys, tmp_path / "s", "--no-video")
    assert (status, document) == (130, None)
    assert err.splitlines()[-1] == "quantwm: stopped"
    assert json.loads((tmp_path / "s" / "session.json").read_text())["complete"] is False


@pytest.fixture
def embedded_assets(tmp_path, monkeypatch):
    """Weight files of the embedded world with tiny random weights, and no scenes."""
    from quantwm.worlds.embedded import adapter
    from quantwm.worlds.embedded.config import PRESETS
    from quantwm.worlds.embedded.weights import save_models

    world = adapter.EmbeddedWorld.random("tiny", seed=0)
    folder = tmp_path / "assets" / "embedded"
    save_models(folder, PRESETS["tiny"], world._transformer, world._autoencoder, {})
    monkeypatch.setattr(adapter, "ASSETS", tmp_path / "assets")
    return folder


def test_embedded_world_from_its_files(tmp_path, capsys, embedded_assets):
    arguments = ("play", "--world", "embedded", "--device", "cpu", "--actions", "w-4")
    out = tmp_path / "s"
    status, document, _ = call(capsys, *arguments, "--steps", 1, "--no-video", "--out", out)
    assert (status, document["frames"]) == (0, 4)
    status, document, _ = call(capsys, "worlds")
    found = next(world for world in document["worlds"] if world["world"] == "embedded")
    assert found["present"] is True
    (shard,) = embedded_assets.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    status, document, err = call(capsys, *arguments, "--no-video", "--out", tmp_path / "t")
    assert (status, document) == (2, None)
    assert "was altered" in err.splitlines()[-1]
    shard.write_bytes(data[:-5])
    status, document, err = call(capsys, *arguments, "--no-video", "--out", tmp_path / "t")
    assert status == 2
    assert "fetch it again" in err.splitlines()[-1]
    assert not (tmp_path / "t").exists()
    status, document, err = call(capsys, "worlds")
    assert (status, document["worlds"][0]["present"]) == (0, False)
    shard.unlink()
    (embedded_assets / "manifest.json").unlink()
    status, document, err = call(capsys, *arguments, "--no-video", "--out", tmp_path / "t")
    assert status == 2
    assert "weights of the embedded world not found" in err


@pytest.mark.parametrize(
    ("more", "says"),
    [(("--scene", "attic"), "unknown scene"), (("--max-tokens", "10"), "too short")],
)
def test_a_mistake_is_found_before_anything_is_made(tmp_path, capsys, more, says):
    status, _, err = play(capsys, tmp_path / "s", "--no-video", *more)
    assert status == 2 and says in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "s").exists()


def test_a_recording_that_was_cut_off_is_not_called_identical(tmp_path, capsys):
    play(capsys, tmp_path / "s", "--no-video", lanes="bf16")
    metrics = tmp_path / "s" / "metrics.csv"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    status, document, err = call(capsys, "replay", tmp_path / "s")
    assert (status, document) == (2, None)
    assert "hashes of lane bf16 end in chunk 4" in err.splitlines()[-1]
    path = tmp_path / "s" / "session.json"
    path.write_text(path.read_text().replace('"complete": true', '"complete": false'))
    status, document, _ = call(capsys, "replay", tmp_path / "s")
    assert (status, document["bit_identical"], document["blocks"]) == (0, True, 3)
    (tmp_path / "s" / "actions.ndjson").write_text("")
    status, _, err = call(capsys, "replay", tmp_path / "s")
    assert status == 2 and "nothing to replay" in err


def test_running_out_of_memory_gets_one_line(capsys, monkeypatch):
    import quantwm.cli.worlds as worlds_module

    def exhausted(arguments):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 9 GiB")

    monkeypatch.setattr(worlds_module, "run", exhausted)
    status, document, err = call(capsys, "worlds")
    assert (status, document) == (2, None)
    assert err.startswith("quantwm: out of memory") and len(err.splitlines()) == 1
    monkeypatch.setattr(worlds_module, "run", lambda arguments: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError):
        main(["worlds"])

"""The command line: the JSON last line of every command, exit statuses, one line on bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import small_world
import torch
from PIL import Image

import quantwm.cli.play as play_module
import quantwm.video as video
from quantwm.cli import main
from quantwm.worlds import registry

ROOT = Path(__file__).resolve().parent.parent
ACTIONS = "w-4, w+right-2, none-2"


@pytest.fixture(autouse=True)
def worlds(monkeypatch):
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


def test_play_last_line(tmp_path, capsys):
    status, document, err = play(capsys, tmp_path / "s", "--no-video")
    assert status == 0
    assert list(document) == [
        "frames",
        "lanes",
        "fps",
        "device",
        "kernels",
        "session",
        "weights_sha256",
    ]
    assert document["frames"] == 8
    assert document["weights_sha256"] == "5" * 64
    assert document["device"] == "cpu"
    assert document["fps"] > 0
    assert document["session"] == str(tmp_path / "s")
    assert [lane["lane"] for lane in document["lanes"]] == ["bf16", "qvg", "quantwm"]
    for lane in document["lanes"]:
        assert list(lane) == [
            "lane",
            "psnr_to_bf16",
            "kv_bytes",
            "ratio",
            "resident_ratio",
            "ms_per_chunk",
        ]
    assert document["lanes"][0]["psnr_to_bf16"] is None  # identical to itself
    assert 5 < document["lanes"][1]["psnr_to_bf16"] < 99
    assert "identical" in err


def test_play_writes_videos_and_replay_confirms_them(tmp_path, capsys):
    pytest.importorskip("av")
    status, document, _ = play(capsys, tmp_path / "s")
    assert status == 0
    frames = video.read_video(tmp_path / "s" / "qvg.mkv", 100)
    assert len(frames) == document["frames"] == 8
    status, document, _ = call(capsys, "replay", tmp_path / "s")
    assert status == 0
    assert document["bit_identical"] is True
    assert document["frames"] == 8
    assert {lane["compared_with"] for lane in document["lanes"]} == {"video"}


def test_replay_without_video_compares_hashes(tmp_path, capsys):
    play(capsys, tmp_path / "s", "--no-video", "--mode", "teacher", "--scene", "hall")
    status, document, _ = call(capsys, "replay", tmp_path / "s")
    assert (status, document["bit_identical"]) == (0, True)
    assert {lane["compared_with"] for lane in document["lanes"]} == {"hashes"}


def test_replay_names_the_first_difference(tmp_path, capsys):
    pytest.importorskip("av")
    play(capsys, tmp_path / "s")
    frames = video.read_video(tmp_path / "s" / "qvg.mkv", 100)
    frames[5, 0, 0, 0] ^= 1
    with video.LosslessWriter(tmp_path / "s" / "qvg.mkv", 8) as writer:
        writer.write(frames)
    status, document, err = call(capsys, "replay", tmp_path / "s")
    assert status == 1
    assert document["bit_identical"] is False
    bf16, qvg, quantwm = document["lanes"]
    assert (bf16["bit_identical"], quantwm["bit_identical"]) == (True, True)
    first = qvg["first_difference"]
    assert (first["block"], first["frame"], first["pixel"]) == (3, 5, [0, 0])
    assert first["recorded"] == frames[5, 0, 0].tolist() != first["now"]
    assert "lane qvg: first differs in frame 5 at pixel (0, 0)" in err


def test_replay_with_other_weights_says_so_and_plays(tmp_path, capsys):
    play(capsys, tmp_path / "s", "--no-video")
    path = tmp_path / "s" / "session.json"
    path.write_text(path.read_text().replace("5" * 64, "6" * 64))
    status, document, err = call(capsys, "replay", tmp_path / "s")
    assert (status, document["bit_identical"]) == (0, True)  # the same weights by another name
    assert document["weights_sha256"] != document["weights_now"]
    assert "weights 666666666666" in err and "its frames will differ" in err


@pytest.mark.parametrize("name", ["start.png", "start.mkv"])
def test_play_from_a_picture_or_video_is_replayed(tmp_path, capsys, name):
    frames = np.random.default_rng(0).integers(0, 256, (6, 30, 30, 3), dtype=np.uint8)
    if name.endswith("png"):
        Image.fromarray(frames[0]).save(tmp_path / name)
    else:
        pytest.importorskip("av")
        with video.LosslessWriter(tmp_path / name, 8) as writer:
            writer.write(frames)
    play(capsys, tmp_path / "s", "--no-video", "--image", tmp_path / name)
    assert (tmp_path / "s" / "start.png").is_file()
    status, document, _ = call(capsys, "replay", tmp_path / "s")
    assert (status, document["bit_identical"]) == (0, True)


def test_compare_videos_and_sessions(tmp_path, capsys):
    pytest.importorskip("av")
    _, played, _ = play(capsys, tmp_path / "s")
    a, b = tmp_path / "s" / "qvg.mkv", tmp_path / "s" / "bf16.mkv"
    status, document, _ = call(capsys, "compare", a, b)
    assert status == 0
    (pair,) = document["videos"]
    assert pair["frames"] == len(pair["psnr_per_frame"]) == 8
    assert pair["psnr_pooled"] == pytest.approx(played["lanes"][1]["psnr_to_bf16"])
    assert pair["temporal_excess"] > 0
    status, document, _ = call(capsys, "compare", tmp_path / "s", tmp_path / "s")
    assert status == 0
    assert [pair["name"] for pair in document["videos"]] == ["bf16", "qvg", "quantwm"]
    assert all(pair["identical"] and pair["psnr_pooled"] is None for pair in document["videos"])
    status, _, err = call(capsys, "compare", a, tmp_path / "s")
    assert status == 2
    assert "not one of each" in err


def test_play_without_pyav(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(video, "has_pyav", lambda: False)
    monkeypatch.setattr(play_module, "has_pyav", lambda: False)
    status, _, err = play(capsys, tmp_path / "s")
    assert status == 2
    assert "pip install av" in err and "--no-video" in err
    assert not (tmp_path / "s").exists()
    assert play(capsys, tmp_path / "s", "--no-video")[0] == 0


def test_recorded_tensors_can_be_studied(tmp_path, capsys):
    file = tmp_path / "qkv.safetensors"
    play(capsys, tmp_path / "s", "--no-video", "--record-tensors", file, "--record-layers", "1")
    status, document, _ = call(capsys, "study", file, "--span", 48, "--centroids", 8)
    assert status == 0
    assert document["layers"] == [1]
    assert (document["tokens"], document["chunk"]) == ((4 + 8) * 6, 12)
    assert [found["method"] for found in document["methods"]] == ["bf16", "qvg", "quantwm"]
    assert {
        "method",
        "bits_per_element",
        "ratio",
        "k_rel_mse",
        "v_rel_mse",
        "logit_mse",
        "token_shift",
        "attention_output_rel_mse",
    } <= set(document["methods"][0])
    assert document["methods"][0]["k_rel_mse"] == 0


def test_plan_of_numbers(capsys):
    status, document, _ = call(
        capsys,
        *("plan", "--layers", 48, "--heads", 32, "--head-dim", 128),
        *("--tokens", 29640, "--span", 29640, "--methods", "qvg,quantwm"),
    )
    assert status == 0
    qvg, quantwm = document["methods"]
    assert qvg["ratio"] == pytest.approx(6.88, abs=0.005)
    assert quantwm["ratio"] == pytest.approx(5.99, abs=0.005)
    wanted = {"method", "ratio", "resident_ratio", "bytes", "bytes_total", "bytes_bf16"}
    for method in document["methods"]:
        assert wanted | {"scratch_bytes", "peak_bytes"} <= set(method)
        assert method["bytes_total"] == sum(method["bytes"].values())
        assert method["peak_bytes"] == method["bytes_total"] + method["scratch_bytes"]


def test_plan_of_a_world(capsys):
    arguments = ("plan", "--world", "small", "--frames", 8)
    status, document, _ = call(capsys, *arguments, "--resolution", "12x8")
    assert status == 0
    assert document["tokens"] == 48
    assert document["methods"][0]["bytes_total"] == 48 * small_world.SPEC.cache.bf16_bytes_per_token
    status, _, err = call(capsys, *arguments, "--resolution", "640x480")
    assert status == 2
    assert "runs at 12x8" in err


def test_worlds(capsys):
    status, document, err = call(capsys, "worlds")
    assert status == 0
    small = next(world for world in document["worlds"] if world["world"] == "small")
    assert small["present"] is True
    assert small["licence"] == "Apache-2.0"
    assert [scene["name"] for scene in small["scenes"]] == ["room", "hall"]
    assert small["memory_bytes"] > small["weight_bytes"]
    assert "forward" in err


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


def test_help_of_every_command(capsys):
    from quantwm.cli import COMMANDS

    for command in COMMANDS:
        with pytest.raises(SystemExit) as left:
            main([command, "--help"])
        assert left.value.code == 0
        assert command in capsys.readouterr().out


def test_as_a_program():
    done = subprocess.run(
        [
            *(sys.executable, "-m", "quantwm", "plan", "--layers", "1", "--heads", "1"),
            *("--head-dim", "128", "--tokens", "512", "--span", "256", "--centroids", "16"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["tokens"] == 512
    done = subprocess.run(
        [sys.executable, "-m", "quantwm", "play", "--world", "mars", "--actions", "w"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "unknown world 'mars'" in done.stderr


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


def test_replay_computes_in_the_dtype_of_the_session(tmp_path, capsys, monkeypatch):
    play(capsys, tmp_path / "s", "--no-video", lanes="bf16")
    asked = []

    def load_world_as(device, dtype, progress):
        asked.append(dtype)
        return small_world.SmallWorld()

    monkeypatch.setattr(small_world, "load_world_as", load_world_as, raising=False)
    status, document, _ = call(capsys, "replay", tmp_path / "s")
    assert (status, document["bit_identical"]) == (0, True)
    assert asked == [torch.float32]
    path = tmp_path / "s" / "session.json"
    path.write_text(path.read_text().replace('"float32"', '"bfloat16"'))
    status, _, err = call(capsys, "replay", tmp_path / "s")
    assert status == 2 and "computes in torch.float32" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("more", "says"),
    [(("--scene", "attic"), "unknown scene"), (("--max-tokens", "10"), "too short")],
)
def test_a_mistake_is_found_before_anything_is_made(tmp_path, capsys, more, says):
    status, _, err = play(capsys, tmp_path / "s", "--no-video", *more)
    assert status == 2 and says in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "s").exists()


def test_a_named_preset_keeps_its_own_centroids(capsys):
    numbers = ("--layers", 1, "--heads", 1, "--head-dim", 128, "--tokens", 3072, "--span", 3072)
    methods = "qvg,qvg:embedded,qvg:published"
    found = [
        call(capsys, "plan", *numbers, "--methods", methods, *more)[1]["methods"]
        for more in ((), ("--centroids", 16))
    ]
    books = [[method["bytes"]["codebooks"] // (2 * 128 * 2) for method in run] for run in found]
    assert books == [[256, 64, 256], [16, 16, 16]]


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

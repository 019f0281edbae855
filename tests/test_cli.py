"""The command line: what every command does, and the JSON of its last line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import small_world
import torch
from cli_helpers import call, play, worlds  # noqa: F401  (the last is a fixture)
from PIL import Image

import quantwm.video as video
from quantwm.cli import main

ROOT = Path(__file__).resolve().parent.parent


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


def test_play_writes_videos_and_replay_confirms_them(tmp_path, capsys, two_threads):
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


def test_plan_says_what_a_large_world_needs_and_what_would_fit(capsys):
    asked = ("plan", "--world", "lingbot_v2_1p3b", "--methods", "bf16,quantwm")
    status, document, err = call(capsys, *asked, "--memory", 12)
    assert status == 0 and document["tokens"] == 14 * 1560 and document["sink_tokens"] == 0
    needs, (bf16, quantwm) = document["needs"], document["methods"]
    assert bf16["resident_ratio"] == 1.0 and quantwm["resident_ratio"] > 4.5
    assert needs["weight_bytes"] < needs["total_bytes"] and needs["capacity_bytes"] == 12 * 2**30
    assert needs["fitting_lanes"] == ["quantwm"] and needs["advice"] in err
    assert "12.0 GiB: " in needs["advice"] and "would do with lanes quantwm" in needs["advice"]
    assert needs["text_encoder_bytes"] > 10 * 2**30 and "text encoder" in err
    status, document, err = call(capsys, *asked, "--memory", 80)
    assert document["needs"]["advice"] is None and "it fits into 80.00 GiB" in err
    large = call(capsys, *asked[:2], "lingbot_v2_14b", "--resolution", "1280x720", "--memory", 1)
    assert large[1]["tokens"] == 14 * 3600 and large[1]["needs"]["fitting_lanes"] == []
    assert "take a smaller world or a larger device" in large[2]


def test_worlds(capsys):
    status, document, err = call(capsys, "worlds")
    assert status == 0
    small = next(world for world in document["worlds"] if world["world"] == "small")
    assert small["present"] is True
    assert small["licence"] == "Apache-2.0"
    assert [scene["name"] for scene in small["scenes"]] == ["room", "hall"]
    assert small["memory_bytes"] > small["weight_bytes"]
    assert "forward" in err


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


def test_a_named_preset_keeps_its_own_centroids(capsys):
    numbers = ("--layers", 1, "--heads", 1, "--head-dim", 128, "--tokens", 3072, "--span", 3072)
    methods = "qvg,qvg:embedded,qvg:published"
    found = [
        call(capsys, "plan", *numbers, "--methods", methods, *more)[1]["methods"]
        for more in ((), ("--centroids", 16))
    ]
    books = [[method["bytes"]["codebooks"] // (2 * 128 * 2) for method in run] for run in found]
    assert books == [[256, 64, 256], [16, 16, 16]]

"""The training pipeline at a minuscule size: maps, walker, optimiser, schedule, a whole run."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from quantwm.errors import UserError
from quantwm.worlds.embedded.config import KEYS
from quantwm.worlds.embedded.weights import load_models, read_manifest
from training.data import FramePool, load_folder
from training.frame_source import wait_for_files
from training.frames import Recorder, episode_path, load_episode, shrink
from training.inputs import without_folders
from training.losses import TransformerTraining
from training.maps import MapConfig, build_map, pack_wad
from training.muon import Muon, orthogonalise
from training.plans import PLANS, apply_switches
from training.report import one_run, several_runs, switches
from training.run_all import FOLDERS, parse
from training.train_autoencoder import learning_rate
from training.train_transformer import rate_factor
from training.walker import Pose, Walker

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def engine():
    pytest.importorskip("vizdoom", reason="frames are made with ViZDoom, which is not installed")


def test_map_is_a_function_of_its_seed_and_connected():
    for seed in range(20):
        built = build_map(seed)
        assert built.text == build_map(seed).text
        reached, waiting = {0}, [0]
        while waiting:
            for door in built.neighbours[waiting.pop()]:
                for room in (door.a, door.b):
                    if room not in reached:
                        reached.add(room)
                        waiting.append(room)
        assert len(reached) == MapConfig().grid ** 2
    assert build_map(0).text != build_map(1).text


def test_rooms_of_a_map_differ_and_keep_apart():
    for seed in range(20):
        rooms = build_map(seed).rooms
        assert len({room.wall for room in rooms}) == len(rooms)
        assert len({room.floor for room in rooms}) == len(rooms)
        half = MapConfig().pitch // 2
        assert all(room.x1 - room.centre[0] < half - 16 for room in rooms)


def test_wad_directory_points_at_its_lumps():
    wad = pack_wad([build_map(0), build_map(1)])
    kind, count, start = struct.unpack("<4sii", wad[:12])
    assert (kind, count) == (b"PWAD", 6)
    lumps = [struct.unpack("<ii8s", wad[i : i + 16]) for i in range(start, len(wad), 16)]
    assert [name.rstrip(b"\0") for *_, name in lumps[:3]] == [b"MAP01", b"TEXTMAP", b"ENDMAP"]
    offset, size, _ = lumps[4]
    assert wad[offset : offset + size].decode() == build_map(1).text


def test_walker_frees_itself_and_is_a_function_of_its_seed():
    built = build_map(0)
    pose = Pose(*built.rooms[built.start_room].centre, 0.0)
    walks = [
        [walker.keys(pose) for _ in range(60)] for walker in (Walker(built, 1), Walker(built, 1))
    ]
    assert walks[0] == walks[1]
    assert all(keys <= set(KEYS) for keys in walks[0])
    corner = Pose(built.rooms[0].x0 + 17.0, built.rooms[0].y0 + 17.0, 45.0)
    stuck = Walker(built, 2)
    keys = [stuck.keys(corner) for _ in range(80)]
    assert any("s" in held for held in keys), "80 frames against a wall and never a step back"


def test_shrink_is_the_mean_of_sixteen_pixels():
    screen = np.random.default_rng(0).integers(0, 256, (384, 512, 3)).astype(np.uint8)
    mean = screen.reshape(96, 4, 128, 4, 3).mean(axis=(1, 3))
    assert np.abs(shrink(screen) - mean).max() <= 0.5


def test_orthogonalise_brings_singular_values_near_one():
    generator = torch.Generator().manual_seed(0)
    for shape in ((3, 32, 32), (2, 64, 16), (2, 16, 64)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape, generator=generator)))
        assert values.min() > 0.4 and values.max() < 1.4


def test_muon_fits_a_matrix_and_refuses_vectors():
    target = torch.randn(12, 8, generator=torch.Generator().manual_seed(1))
    weight = torch.nn.Parameter(torch.zeros(12, 8))
    for lr in [0.3] * 30 + [0.03] * 30:
        muon = Muon([weight], lr=lr, momentum=0.5)
        (weight - target).square().sum().backward()
        muon.step()
        weight.grad = None
    assert (weight - target).abs().max() < 0.15
    with pytest.raises(ValueError, match="matrices"):
        Muon([torch.nn.Parameter(torch.zeros(3))])


def test_rates_rise_stay_and_fall():
    training = TransformerTraining(warmup_steps=10, flat_share=0.4, floor=0.03)
    assert rate_factor(0, 0.0, training) == pytest.approx(0.1)
    assert rate_factor(50, 0.4, training) == pytest.approx(1.0)
    assert rate_factor(50, 1.0, training) == pytest.approx(0.03)
    assert learning_rate(500, 1.0, 100) == pytest.approx(0.02)


def test_recorded_frames_repeat_and_follow_the_keys(engine, tmp_path):
    # Map 3 in company and alone; an engine's start is what this test costs.
    for run, seeds in (("a", [3, 4]), ("b", [3])):
        recorder = Recorder(seeds, 16, tmp_path / run, processes=1)
        recorder.wait(250)
        assert recorder.given_up == []
    episodes = [load_episode(episode_path(tmp_path / run, 3)) for run in ("a", "b")]
    assert np.array_equal(episodes[0].frames, episodes[1].frames)
    frames, keys = episodes[0].frames, episodes[0].keys
    assert frames.shape == (16, 96, 128, 3) and keys.shape == (16, 6) and frames.std() > 5
    turning = np.flatnonzero(keys[:, 4] ^ keys[:, 5])
    still = np.abs(frames[turning].astype(int) - frames[turning - 1]).mean()
    assert len(turning) and still > 1


def test_a_quick_run_leaves_weights_that_load(engine, tmp_path):
    """The command as the README has it, every stage of it, in the least minutes it takes."""
    out = tmp_path / "out"
    command = ["--quick", "--minutes", "0.2", "--out", str(out), "--work", str(tmp_path / "work")]
    command += ["--decoder-minutes", "0.05"]
    done = subprocess.run(
        [sys.executable, "-m", "training.run_all", *command, "--device", "cpu"],
        cwd=ROOT, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["steps"] >= 1 and facts["metrics"]["frames"] >= 2 * PLANS["quick"].length
    manifest = read_manifest(out)
    assert manifest.training == facts and facts["metrics"]["free_8_psnr"] > 0
    model, _ = load_models(manifest, torch.device("cpu"), torch.float32)
    assert model.config == PLANS["quick"].world.transformer
    assert (out / "grid-final.png").is_file()
    assert (tmp_path / "work" / "checkpoint-out.pt").is_file()
    table = "\n".join(one_run(manifest))
    assert f"| transformer | {facts['minutes']['transformer']} | {facts['steps']} steps |" in table
    assert f"free running, first 8 frames, dB | {facts['metrics']['free_8_psnr']}" in table
    rows = several_runs([manifest, manifest])
    assert len(rows) == 4 and rows[2].startswith("| out | ")
    stages = [json.loads(line) for line in (out / "training-log.jsonl").open()]
    assert stages[0]["stage"] == "start" and stages[-1]["stage"] == "done"
    assert all("eta_s" in row for row in stages if row["stage"] in ("autoencoder", "transformer"))
    assert {row["stage"] for row in stages} >= {"autoencoder done", "encoded", "measured"}
    assert "decoder done" in {row["stage"] for row in stages}, "the decoder's stage was left out"
    assert f"| decoder on rollouts | {facts['minutes']['decoder']} |" in table


def test_episodes_of_a_wrong_shape_are_named(tmp_path):
    frames = np.zeros((8, 96, 128, 3), np.uint8)
    np.savez(tmp_path / "episode-0000001.npz", frames=frames, keys=np.zeros((8, 6), np.uint8))
    np.savez(tmp_path / "episode-0000002.npz", frames=frames, keys=np.full((8, 6), 2, np.uint8))
    (tmp_path / "episode-0000003.npz").write_bytes(b"cut off")
    pool = FramePool(tmp_path, 4, 8, "cpu")
    assert pool.load_new() == 1
    with pytest.raises(UserError, match=r"1 of the 2.*episode-0000003\.npz cannot"):
        pool.wait_for(2, 0)
    with pytest.raises(UserError, match=r"episode-0000003\.npz cannot be read: .*; remove it"):
        load_folder(tmp_path, "cpu")
    (tmp_path / "episode-0000003.npz").unlink()
    with pytest.raises(UserError, match=r"episode-0000002\.npz: keys must be uint8"):
        load_folder(tmp_path, "cpu")


def test_a_second_run_waits_for_episodes_but_not_for_those_given_up(tmp_path):
    with pytest.raises(UserError, match="0 of 2 episodes"):
        wait_for_files(tmp_path, 2, 0.1)
    (tmp_path / "episode-0000001.npz").touch()
    wait_for_files(tmp_path, 2, 60, patience=0.1)
    wait_for_files(tmp_path, 1, 0)


def test_report_tells_switches_and_no_folders():
    command = "python -m training.run_all --out a --own 0 --weights w --no-pose --minutes 3"
    assert switches(command) == "`--own 0 --no-pose`"
    assert switches("python -m training.run_all --out a") == "none"
    told = without_folders(FOLDERS, ["--out", "/x/y", "--own", "0", "--work=/z", "--teach", "/t"])
    assert told == "--out OUT --own 0 --work=WORK --teach TEACHER"


def test_switches_take_one_ingredient_away(tmp_path):
    def plan(*switches):
        return apply_switches(PLANS["full"], parse(["--out", str(tmp_path), *switches]))

    assert any(stage.adversarial > 0 for stage in plan().transformer.stages)
    assert all(stage.adversarial == 0 for stage in plan("--adversarial", "0").transformer.stages)
    alone = plan("--own", "0", "--rolled", "0").transformer.stages
    assert all(stage.own == stage.rolled == stage.adversarial == 0 for stage in alone)
    before = plan("--own", "0.7", "--rolled", "0").transformer.stages[-1]
    assert before.own == 0.7 and before.rolled == 0 and before.adversarial > 0
    assert plan("--gaps", "0", "--invented", "1").transformer.gaps == 0
    asked = plan("--faded", "0.2", "--no-continuation", "--no-continuity").transformer
    assert asked.faded == 0.2 and not asked.continuation and not asked.continuity
    assert plan().transformer.continuation and plan().transformer.continuity
    assert plan("--pieces", "0").pieces == 0 and plan("--adversarial", "2").pieces > 0
    blind = plan("--no-pose")
    assert not blind.world.transformer.pose and not blind.transformer.pose
    assert plan("--frames", "64").world.train_frames == 64 and plan().world.train_frames == 256


def test_bad_arguments_get_one_line(tmp_path):
    with pytest.raises(UserError, match="minutes"):
        parse(["--out", str(tmp_path), "--minutes", "0"])
    with pytest.raises(UserError, match="--weights"):
        parse(["--out", str(tmp_path), "--resume", "x.pt"])
    with pytest.raises(UserError, match="--no-record needs"):
        parse(["--out", str(tmp_path), "--no-record"])
    with pytest.raises(UserError, match="--own must be 0 to 1, got 2"):
        apply_switches(PLANS["full"], parse(["--out", str(tmp_path), "--own", "2"]))
    with pytest.raises(UserError, match="leaves no stage"):
        apply_switches(PLANS["full"], parse(["--out", str(tmp_path), "--frames", "4"]))
    with pytest.raises(UserError, match="processes"):
        Recorder([0], 8, tmp_path, processes=0)

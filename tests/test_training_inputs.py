"""What commands of training/ refuse before they spend time, and a schedule that goes on."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from quantwm.errors import UserError
from quantwm.worlds.embedded.adapter import ASSETS
from quantwm.worlds.embedded.config import PRESETS
from training.data import LatentPool
from training.inputs import check_episodes, check_frames_fit, in_one_line, need_between, open_folder
from training.losses import Stage
from training.plans import PLANS, apply_switches
from training.progress import Budget, Log, Tally
from training.run_all import check_inputs, parse
from training.state import TrainState
from training.train_transformer import train_transformer

ROOT = Path(__file__).resolve().parent.parent


def test_a_mistake_is_one_line_and_a_stop_is_no_traceback(capsys):
    def wrong():
        raise UserError("--maps must be 1 or more, got 0")

    def stopped():
        raise KeyboardInterrupt

    assert in_one_line(lambda: None) == 0
    assert in_one_line(wrong) == 2
    assert in_one_line(stopped) == 130
    assert capsys.readouterr().err == "error: --maps must be 1 or more, got 0\nstopped\n"


def test_numbers_folders_and_memory(tmp_path):
    need_between("--maps", 1, 1)
    with pytest.raises(UserError, match="--steps must be 1 to 64, got 65"):
        need_between("--steps", 65, 1, 64)
    with pytest.raises(UserError, match="--minutes must be 1 to 2, got nan"):
        need_between("--minutes", float("nan"), 1, 2)
    assert open_folder(tmp_path / "a" / "b", "--out").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="--out must be a folder to write into"):
        open_folder(tmp_path / "file", "--out")
    check_frames_fit(4, 100, 1000)
    check_frames_fit(4, 100, None)
    with pytest.raises(UserError, match=r"--episodes 9 would fit"):
        check_frames_fit(40, 100, 1000)


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        (["--seed", "100"], "--seed must be 0 to 99"),
        (["--seed", "-1"], "--seed must be 0 to 99"),
        (["--processes", "0"], "--processes must be at least 1"),
        (["--maps", "MAP01"], "give --wad FILE too"),
        (["--muon-lr", "-1"], "--muon-lr must be above 0"),
        (["--episodes", "1"], "--episodes must be 2 to"),
        (["--device", "toaster"], "unknown device"),
        (["--wad", "nowhere.wad"], "--wad must be a WAD file"),
        (["--teacher", "nowhere"], "not found"),
        (["--weights", str(ASSETS / "embedded")], "has other sizes than the plan"),
    ],
)
def test_run_all_refuses_before_it_records(switches, message, tmp_path):
    with pytest.raises(UserError, match=message):
        args = parse(["--quick", "--out", str(tmp_path / "out"), *switches])
        check_inputs(apply_switches(PLANS["quick"], args), args)
    assert not (tmp_path / "out").exists()


def test_episodes_of_another_run_s_size_are_named_at_once(tmp_path):
    def episode(name, frames):
        (tmp_path / "frames").mkdir(exist_ok=True)
        held = np.zeros((frames, 6), np.uint8)
        pixels = np.zeros((frames, 96, 128, 3), np.uint8)
        np.savez(tmp_path / "frames" / f"episode-{name}.npz", frames=pixels, keys=held)

    wanted = (64, 96, 128, 3)
    check_episodes(tmp_path / "frames", wanted, all_must_fit=True)
    episode("0010000", 8)
    (tmp_path / "frames" / "episode-0010001.npz").write_bytes(b"cut off")
    args = parse(["--quick", "--out", str(tmp_path / "out"), "--work", str(tmp_path)])
    with pytest.raises(UserError, match=r"0000\.npz has frames of \[8, 96, 128, 3\].* 1 more like"):
        check_inputs(PLANS["quick"], args)
    episode("0010000", 64)
    check_inputs(PLANS["quick"], args)
    with pytest.raises(UserError, match=r"0001\.npz cannot be read"):
        check_episodes(tmp_path / "frames", wanted, all_must_fit=True)


def test_a_checkpoint_that_is_not_there_is_said_at_once(tmp_path):
    weights = str(ASSETS / "embedded")
    arguments = ["--out", str(tmp_path), "--weights", weights, "--resume", str(tmp_path / "x.pt")]
    args = parse([*arguments, "--plan", "smoke", "--episodes", "14"])
    with pytest.raises(UserError, match=r"x\.pt does not exist"):
        check_inputs(apply_switches(PLANS["smoke"], args), args)


@pytest.mark.parametrize(
    "command",
    [
        ["training.truth", "--out", "{0}", "--maps", "0"],
        ["training.evaluate", "--weights", "nowhere", "--episodes", "{0}"],
    ],
)
def test_commands_end_with_one_line(command, tmp_path):
    if command[0] == "training.truth":
        pytest.importorskip("vizdoom", reason="ViZDoom is not installed")
    command = [sys.executable, "-m", *(word.format(tmp_path) for word in command)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 2 and done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_tally_says_what_is_left(capsys):
    tally = Tally("maps", 32, there=8, every=0.0)
    assert tally.is_due() and not Tally("maps", 32).is_due()
    tally.say(8)
    tally._start -= 60  # eight more in a minute
    tally.say(16)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "maps 8/32, 0 s, eta_s unknown"
    assert second == "maps 16/32, 60 s, eta_s 120"


def test_a_budget_that_goes_on_has_the_rest_ahead():
    budget = Budget(1.0, done=0.75)
    assert 0.75 <= budget.fraction < 0.76
    assert 59 < budget.seconds_to(1.0) <= 60
    assert 23 < budget.seconds_to(0.85) <= 24 and budget.seconds_to(0.5) < 0
    assert 29 < Budget(1.0).seconds_to(0.5) <= 30 and Budget(0.0).fraction == 1.0


def test_a_stopped_run_goes_on_with_the_stage_it_was_in(tmp_path):
    config = PRESETS["tiny"].transformer
    stages = (Stage(8, 1, 0.5), Stage(16, 1, 0.5))
    training = replace(
        PLANS["quick"].transformer, stages=stages, max_steps=1, log_every=1, gaps=0.0, faded=0.0
    )
    state = TrainState.fresh(config, training, 0, torch.device("cpu"))
    state.progress, state.step = 0.6, 30
    state.save(tmp_path / "x.pt")
    again = TrainState.fresh(config, training, 1, torch.device("cpu"))
    again.load(tmp_path / "x.pt")
    shape = (2, 24, config.latent_channels, config.latent_height, config.latent_width)
    pool = LatentPool(torch.randn(shape), torch.zeros(2, 24, 6), torch.zeros(2, 24, 3))
    seen: list[int] = []
    original = pool.random_clips
    pool.random_clips = lambda count, frames, *rest: (
        seen.append(frames) or original(count, frames, *rest)
    )
    train_transformer(
        again, pool, training, 0.05, 0, Log(), "sdpa", False, lambda state: None, lambda: None
    )
    assert set(seen) == {16}, "the stage of 8 frames was behind it"
    assert again.step == 31 and again.progress > 0.6


def test_a_damaged_checkpoint_is_one_line(tmp_path):
    state = TrainState.fresh(
        PRESETS["tiny"].transformer, PLANS["quick"].transformer, 0, torch.device("cpu")
    )
    (tmp_path / "x.pt").write_bytes(b"cut off")
    with pytest.raises(UserError, match="is damaged; leave out --resume"):
        state.load(tmp_path / "x.pt")

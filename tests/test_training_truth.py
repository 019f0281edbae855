"""Scripted walks in the engine, and that what ships in assets is what its command makes."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from quantwm.evaluation.episodes import Episode, load_folder
from quantwm.evaluation.measures import mean_psnr, true_direction
from quantwm.sheets import read_sheet
from quantwm.worlds.embedded.adapter import ASSETS, SPEC
from quantwm.worlds.embedded.scripts import list_scripts
from training.truth import FIRST_SEED

pytest.importorskip("vizdoom", reason="ViZDoom is not installed")
ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: str) -> str:
    """A command of training/; its exit status does not count, the engine may crash as it closes."""
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def walks(tmp_path_factory) -> dict[str, Episode]:
    folder = tmp_path_factory.mktemp("truth")
    seed = str(FIRST_SEED)
    said = run("training.truth", "--out", str(folder), "--seeds", seed, "--first", seed)
    found = {episode.kind: episode for episode in load_folder(folder)}
    assert set(found) == {"turn", "back", "long", "keys", "still", "walk"}, said
    return found


def test_a_full_turn_ends_where_it_began(walks):
    turn = walks["turn"]
    assert turn.length == 16 + 2 * 48 and turn.context == 16
    first = turn.frame(15)
    assert mean_psnr(turn.frame(63)[None], first[None]) > 30
    assert mean_psnr(turn.frame(39)[None], first[None]) < 25  # half-way round, a room of one colour
    assert all(len(turn.held(frame)) == 1 for frame in range(16, 112))


def test_there_and_back_goes_through_a_door_and_returns(walks):
    back = walks["back"]
    away = [math.dist(pose[:2], back.poses[15, :2]) for pose in back.poses]
    assert max(away) > 250 and away[-1] < 100
    turned = (back.poses[-1, 2] - back.poses[15, 2] + 180) % 360 - 180
    assert abs(turned) <= 3.8
    assert back.length % 4 == 0 and 64 <= back.length - 8 - 16 <= 104


def test_each_key_moves_as_it_says(walks):
    keys = walks["keys"]
    ways = [true_direction(keys, first, 4) for first in range(16, keys.length, 4)]
    assert [way.turn for way in ways[-4:]] == [7.5, -7.5, -7.5, 7.5]
    assert ways[2].step == "back" and ways[6].step == "right"


def test_walks_are_as_long_as_the_table_needs(walks):
    assert walks["walk"].length == 16 + 256
    assert walks["still"].length == 64
    assert np.abs(np.diff(walks["still"].poses[20:, :2], axis=0)).max() < 0.5
    assert all(episode.frames.shape[1:] == (96, 128, 3) for episode in walks.values())


def test_scenes_scripts_and_truth_in_assets_are_what_their_command_makes(tmp_path):
    said = run("training.scenes", "--out", str(tmp_path))
    shipped = sorted(path.relative_to(ASSETS) for path in ASSETS.glob("scenes/*/scene.json"))
    made = sorted(path.relative_to(tmp_path) for path in tmp_path.glob("scenes/*/scene.json"))
    assert made == shipped, said
    for path in shipped:
        assert (tmp_path / path).read_text() == (ASSETS / path).read_text()
        pair = [
            read_sheet((root / path).with_name("frames.webp"), 16, SPEC.video_size)
            for root in (tmp_path, ASSETS)
        ]
        assert np.array_equal(*pair)
    assert list_scripts(tmp_path / "scripts") == list_scripts(ASSETS / "scripts")
    pairs = zip(load_folder(tmp_path / "truth"), load_folder(ASSETS / "truth"), strict=True)
    for new, old in pairs:
        assert np.array_equal(new.frames, old.frames) and np.array_equal(new.keys, old.keys)

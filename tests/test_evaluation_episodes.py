"""Truth episodes on disk: what is kept, what is rounded, what is refused; what ships in assets."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantwm.actions import pack_frames, parse_actions
from quantwm.cli import main
from quantwm.errors import UserError
from quantwm.evaluation.episodes import load_episode, load_folder, save_episode
from quantwm.evaluation.sources import small_episodes
from quantwm.sheets import from_sheet, read_sheet, to_sheet, write_sheet
from quantwm.worlds.embedded.adapter import ASSETS, SPEC
from quantwm.worlds.embedded.scenes import load_scene
from quantwm.worlds.registry import world_scenes, world_scripts
from tests.box_room import episode, held

CHUNK = SPEC.cache.frames_per_chunk


@given(st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_a_sheet_gives_its_frames_back(count, seed):
    frames = np.random.default_rng(seed).integers(0, 256, (count, 4, 6, 3), dtype=np.uint8)
    assert np.array_equal(from_sheet(to_sheet(frames), count, (6, 4)), frames)


def test_a_sheet_file_is_within_two_grey_levels_and_is_checked(tmp_path):
    frames = np.random.default_rng(0).integers(0, 256, (19, 8, 12, 3), dtype=np.uint8)
    write_sheet(tmp_path / "a.webp", frames)
    read = read_sheet(tmp_path / "a.webp", 19, (12, 8))
    assert np.abs(read.astype(int) - frames).max() == 2
    assert read.max() == 255 and read.min() == 0
    with pytest.raises(ValueError, match="not 33 frames"):
        read_sheet(tmp_path / "a.webp", 33, (12, 8))
    (tmp_path / "b.webp").write_bytes(b"no picture")
    with pytest.raises(OSError, match="identify"):
        read_sheet(tmp_path / "b.webp", 1, (12, 8))


@pytest.mark.parametrize("packed", [True, False])
def test_an_episode_comes_back_as_it_was(tmp_path, packed):
    whole = episode("back", [*held("w+left", 3), *held("", 4)], context=4)
    kept = whole.only([0, 3, 7, 3])
    save_episode(tmp_path / "x", kept, packed)
    read = load_episode(tmp_path / "x")
    assert (read.kind, read.context, read.length) == ("back", 4, 8)
    assert read.held(1) == {"w", "left"} and read.held(4) == frozenset()
    assert read.index.tolist() == [0, 3, 7] and read.has(3) and not read.has(4)
    assert np.abs(read.frame(7).astype(int) - whole.frame(7)).max() <= 2 * int(packed)
    assert np.allclose(read.poses, whole.poses, atol=0.01)
    assert read.origin == {"map_seed": 7}
    with pytest.raises(UserError, match="no frame 4"):
        read.clip(3, 5)
    assert len(load_folder(tmp_path)) == 1


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"kind": "dance"}, "parts do not fit"),
        ({"context": 99}, "parts do not fit"),
        ({"keys": ["000000"]}, "parts do not fit"),
        ({"keys": "abc"}, "damaged"),
        ({"index": [0, 1]}, "damaged"),
        ({"poses": []}, "parts do not fit"),
        ({"poses": [[float("nan")] * 3] * 6}, "parts do not fit"),
        ({"origin": {}}, "parts do not fit"),
    ],
)
def test_a_damaged_episode_is_refused(tmp_path, change, match):
    save_episode(tmp_path, episode("walk", held("w", 5)))
    path = tmp_path / "episode.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=match):
        load_episode(tmp_path)


def test_missing_truth_names_the_command(tmp_path):
    with pytest.raises(UserError, match=r"python -m training\.truth --out"):
        load_folder(tmp_path)
    with pytest.raises(UserError, match=r"episode\.json is missing"):
        load_episode(tmp_path)


def test_twelve_scenes_and_four_scripts_ship_and_fit_each_other():
    scenes = {scene.name: scene for scene in world_scenes("embedded")}
    assert len(scenes) == 12
    scripts = {script.name: script for script in world_scripts("embedded")}
    assert set(scripts) == {"full-turn", "long-walk", "standing-still", "there-and-back"}
    for script in scripts.values():
        assert script.title and script.scene in scenes
        truth = load_episode(ASSETS / "truth" / script.name)
        keys = [truth.held(frame) for frame in range(truth.length)]
        context = load_scene(ASSETS / "scenes", script.scene, SPEC.video_size)
        assert tuple(keys[: truth.context]) == context.keys
        actions = parse_actions(script.actions, SPEC.keys, CHUNK)
        assert actions == pack_frames(keys[truth.context :], CHUNK)
        assert truth.origin["scene"] == script.scene


def test_the_small_subset_joins_scenes_and_scripts():
    episodes = small_episodes(ASSETS, SPEC.video_size, CHUNK)
    assert [each.kind for each in episodes] == ["turn", "back", "walk", "walk", "walk"]
    turn, back = episodes[:2]
    assert turn.clip(0, turn.length - 48).shape[0] == 64
    assert all(turn.has(turn.length - 48 + 12 * i - 1) for i in range(5))
    assert back.clip(back.length - 8, back.length).shape == (8, 96, 128, 3)
    first, last = turn.frame(15).astype(float), turn.frame(63).astype(float)
    assert np.square(first - last).mean() < 20  # the truth of a full turn is where it began


def test_play_takes_a_script_and_names_those_there_are(capsys):
    assert main(["play", "--script", "dance"]) == 2
    assert "there are full-turn, long-walk, standing-still, there-and-back" in (
        capsys.readouterr().err
    )
    assert main(["play", "--script", "full-turn", "--actions", "w-4"]) == 2
    assert "not allowed with" in capsys.readouterr().err
    assert main(["play", "--script", "full-turn", "--scene", "nowhere", "--no-video"]) == 2
    assert "unknown scene 'nowhere'" in capsys.readouterr().err

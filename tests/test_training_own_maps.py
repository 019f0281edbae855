"""Training on somebody's maps: what a WAD holds, which are kept unseen, and who walks them."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
import time

import numpy as np
import pytest

from quantwm.errors import UserError
from quantwm.worlds.embedded.config import KEYS
from quantwm.worlds.embedded.pose import advance
from quantwm.worlds.embedded.scenes import list_scenes, load_scene
from training import frames
from training.explorer import Explorer
from training.frames import Recorder, episode_path, load_episode, record
from training.maps import build_map, is_open, pack_wad
from training.own_maps import choose_maps, is_whole_game, map_names
from training.scenes import check_episodes_for_scenes, cut_scenes
from training.walker import FULL_TURN, Pose

MAPS = ["MAP01", "MAP02", "MAP03"]


@pytest.fixture(scope="module")
def wad(tmp_path_factory):
    """Somebody's file of three maps, in the format with text."""
    path = tmp_path_factory.mktemp("own") / "mine.wad"
    path.write_bytes(pack_wad([build_map(seed) for seed in (7, 8, 9)]))
    return path


def walk(seed: int, pieces: bool, frames: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys [frames, 6] and poses [frames, 3] of an explorer whom walls of map 7 stop dead."""
    built = build_map(7)
    at = (0, *(float(c) for c in built.rooms[built.start_room].centre), 0.0, 0.0)
    explorer, keys, poses = Explorer(seed, pieces), [], []
    for _ in range(frames):
        pose = Pose(at[1], at[2], at[0] * 360 / 65536)
        held = explorer.keys(pose)
        keys.append([int(name in held) for name in KEYS])
        poses.append((pose.x, pose.y, pose.angle))
        ahead = advance(at, keys[-1])
        at = ahead if is_open(built, ahead[1], ahead[2]) else (ahead[0], *at[1:3], 0.0, 0.0)
    return np.asarray(keys), np.asarray(poses)


def test_maps_of_a_wad_in_both_formats(wad, tmp_path):
    assert map_names(wad) == MAPS and not is_whole_game(wad)
    old = tmp_path / "doom.wad"
    names = (b"E1M1", b"THINGS", b"LINEDEFS", b"DEMO1", b"E1M2", b"THINGS", b"--\nX", b"THINGS")
    lumps = b"".join(struct.pack("<ii8s", 12, 0, name) for name in names)
    old.write_bytes(struct.pack("<4sii", b"IWAD", len(names), 12) + lumps)
    assert map_names(old) == ["E1M1", "E1M2"] and is_whole_game(old)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"", "is neither"),
        (b"PK\3\4 a zip, not a WAD", "is neither"),
        (struct.pack("<4sii", b"PWAD", 50, 12), "is cut off"),
        (struct.pack("<4sii", b"PWAD", -1, 12), "is neither"),
        (struct.pack("<4sii8s", b"PWAD", 1, 12, b"") + b"\0" * 8, "holds no map"),
    ],
)
def test_what_is_no_wad_of_maps_is_named(content, message, tmp_path):
    path = tmp_path / "mine.wad"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        map_names(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_some_maps_are_kept_unseen(wad):
    own, apart = choose_maps(wad, None, None)
    assert own.names == ("MAP01", "MAP02") and apart.names == ("MAP03",)
    own, apart = choose_maps(wad, None, ["map01"])
    assert own.names == ("MAP02", "MAP03") and apart.names == ("MAP01",)
    own, apart = choose_maps(wad, ["map02"], None)
    assert own.names == apart.names == ("MAP02",)
    assert [choose_maps(wad, None, ["map03"])[0].of_seed(seed) for seed in (4, 5)] == MAPS[:2]
    with pytest.raises(UserError, match="holds no map MAP09; it holds MAP01, MAP02, MAP03"):
        choose_maps(wad, ["MAP09"], None)
    with pytest.raises(UserError, match="leaves no map to train on"):
        choose_maps(wad, ["MAP01"], ["MAP01"])


def test_an_explorer_gets_about_turns_and_comes_back():
    keys, poses = walk(3, False, 600)
    again, _ = walk(3, False, 600)
    assert np.array_equal(keys, again) and not np.array_equal(keys, walk(4, False, 600)[0])
    far = max(math.dist(pose[:2], poses[0, :2]) for pose in poses)
    stuck = np.hypot(*np.diff(poses[:, :2], axis=0).T)[keys[:-1, 0] == 1] < 1
    assert far > 200 and stuck.mean() < 0.35
    turning = np.abs(keys[:, 4].astype(int) - keys[:, 5])
    assert 0.1 < turning.mean() < 0.9


def test_an_episode_of_pieces_turns_all_the_way_round():
    keys, _ = walk(5, True, 600)
    runs = [
        len(part) for way in (4, 5) for part in "".join(map(str, keys[:, way])).split("0") if part
    ]
    assert max(runs) >= FULL_TURN


def test_scenes_are_cut_out_of_recorded_episodes(tmp_path):
    frames = np.full((40, 96, 128, 3), 90, np.uint8)
    frames[31] = np.random.default_rng(0).integers(0, 256, (96, 128, 3))  # the liveliest
    keys = np.zeros((40, 6), np.uint8)
    keys[31, [0, 5]] = 1
    np.savez(tmp_path / "episode-0000007.npz", frames=frames, keys=keys)
    check_episodes_for_scenes(tmp_path, 12)
    cut_scenes(tmp_path, tmp_path, 12)
    (scene,) = list_scenes(tmp_path / "scenes")
    clip = load_scene(tmp_path / "scenes", scene.name, (128, 96))
    assert scene.name == "start-0000007" and len(clip.frames) == 16
    assert clip.keys[-1] == {"w", "right"} and clip.frames[-1].std() > 50 > clip.frames[-2].std()
    np.savez(tmp_path / "episode-0000001.npz", frames=frames[:20], keys=keys[:20])
    with pytest.raises(UserError, match=r"0001\.npz has frames of \[20, 96, 128, 3\]"):
        check_episodes_for_scenes(tmp_path, 12)
    with pytest.raises(UserError, match="no episodes in"):
        check_episodes_for_scenes(tmp_path / "scenes", 12)


def test_an_episode_whose_walks_all_end_early_is_not_tried_again(wad, tmp_path, monkeypatch):
    """The walks of a second attempt would be the same; a crash costs one attempt, as ever."""
    own, _ = choose_maps(wad, None, ["MAP01"])
    walks: list[int] = []

    class Engine:
        def set_seed(self, seed: int) -> None: ...
        def close(self) -> None: ...

    def dies(game, name, walker, length):
        walks.append(length)

    monkeypatch.chdir(tmp_path)  # a worker changes its folder
    monkeypatch.setattr(frames, "require_engine", lambda: None)
    monkeypatch.setattr(frames, "open_own", lambda *_: Engine())
    monkeypatch.setattr(frames, "play_episode", dies)
    started: list[list[int]] = []

    def start(recorder, seeds, attempt):
        started.append(seeds)
        record([seed for seed in seeds if seed != 1], 12, str(tmp_path), 0.0, own)
        process = subprocess.Popen([sys.executable, "-c", ""])
        return frames._Worker(process, seeds, attempt, time.monotonic() + 250)

    monkeypatch.setattr(Recorder, "_start", start)
    recorder = Recorder([0, 1, 2], 12, tmp_path, processes=1, own=own)
    recorder.wait(250)
    assert started == [[0, 1, 2], [1], [1]] and len(walks) == 2 * frames.WALKS
    assert sorted(recorder.given_up) == [0, 1, 2] and not list(tmp_path.iterdir())


def test_episodes_are_recorded_on_the_maps_that_were_asked_for(wad, tmp_path):
    pytest.importorskip("vizdoom", reason="frames are made with ViZDoom, which is not installed")
    own, _ = choose_maps(wad, None, ["MAP03"])
    recorder = Recorder([0, 1], 12, tmp_path, processes=1, own=own)
    recorder.wait(250)
    assert recorder.given_up == []
    first, second = (load_episode(episode_path(tmp_path, seed)).frames for seed in (0, 1))
    assert first.shape == (12, 96, 128, 3) and first.std() > 5
    assert np.abs(first[0].astype(int) - second[0]).mean() > 5, "two maps, one picture"

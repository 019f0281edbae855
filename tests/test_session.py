"""Session folders: complete from the start, readable after a kill, and checked when read back."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import textwrap
import zipfile
from collections import namedtuple

import numpy as np
import pytest

import quantwm.session as session
from quantwm.actions import parse_actions
from quantwm.cache.spec import CachePolicy
from quantwm.engine_types import BlockResult, LaneConfig, LaneResult, MemoryReading
from quantwm.errors import UserError
from quantwm.session import SessionInfo, SessionWriter
from quantwm.session_reader import load_session
from quantwm.session_zip import zip_session
from quantwm.worlds.base import ChunkAction

KEYS = ("w", "a", "s", "d", "left", "right")
ACTIONS = parse_actions("w-4, w+right-4, none-4", KEYS, 4)


def make_info(**changes) -> SessionInfo:
    policy = CachePolicy(window_frames=85, span_tokens=3072)
    fields = {
        "world": "embedded",
        "weights_sha256": "ab" * 32,
        "seed": 3,
        "scene": None,
        "prompt": "",
        "start_picture": False,
        "mode": "free",
        "steps": 4,
        "max_tokens": 4096,
        "lanes": (
            LaneConfig("bf16", "bf16", {}, policy),
            LaneConfig("qvg", "qvg", {"centroids": 64}, policy),
        ),
        "keys": KEYS,
        "frames_per_chunk": 4,
        "fps": 8.75,
        "size": (32, 24),
        "device": "cpu",
        "hardware": {"cores": 2},
        "versions": {"python": "3.11"},
        "kernels": "PyTorch reference",
        "actions": None,
    }
    return SessionInfo(**(fields | changes))


def make_block(index: int, action: ChunkAction = ACTIONS[0]) -> BlockResult:
    rng = np.random.default_rng(index)
    bf16 = rng.integers(0, 250, (4, 24, 32, 3), dtype=np.uint8)
    lanes = (
        LaneResult("bf16", bf16, 10.0, 1000 * index, 1.0, 1.0, 192 * index),
        LaneResult("qvg", bf16 + np.uint8(index), 12.0, 200 * index, 6.35, 5.0, 192 * index),
    )
    reading = MemoryReading("test", {"free": 1}, 0, 1)
    return BlockResult(index, 4 * index, action, lanes, reading, 25.0, {})


def record(folder, video=True, **changes) -> SessionWriter:
    with SessionWriter(folder, make_info(**changes), video=video) as writer:
        writer.write(make_block(0))
        for index, action in enumerate(ACTIONS, 1):
            writer.write(make_block(index, action))
    return writer


def test_round_trip(tmp_path):
    pytest.importorskip("av")
    from quantwm.video import read_video

    record(tmp_path / "s")
    assert {path.name for path in (tmp_path / "s").iterdir()} == {
        "session.json",
        "actions.ndjson",
        "metrics.csv",
        "preview.mp4",
        "plots.png",
        "bf16.mkv",
        "qvg.mkv",
    }
    loaded = load_session(tmp_path / "s")
    assert loaded.complete
    assert loaded.actions == ACTIONS
    assert loaded.info.lanes == make_info().lanes
    assert loaded.info == make_info(actions="w-4, right+w-4, none-4")
    frames = read_video(loaded.video("qvg"), 100)
    want = np.concatenate([make_block(i).lanes[1].frames for i in (1, 2, 3)])
    np.testing.assert_array_equal(frames, want)
    want_hash = session.frames_sha256(make_block(2).lanes[1].frames)
    assert loaded.frame_hashes["qvg"][1] == want_hash


def test_metrics_rows(tmp_path):
    record(tmp_path / "s", video=False)
    rows = list(csv.DictReader((tmp_path / "s" / "metrics.csv").open()))
    assert [(row["block"], row["lane"]) for row in rows] == [
        (str(block), lane) for block in (1, 2, 3) for lane in ("bf16", "qvg")
    ]
    assert rows[0]["psnr_to_bf16"] == "inf"
    assert float(rows[3]["psnr_to_bf16"]) == pytest.approx(20 * np.log10(255 / 2), abs=1e-3)
    assert (rows[1]["kv_bytes"], rows[1]["tokens"]) == ("200", "192")


def test_totals_pool_over_frames(tmp_path):
    totals = record(tmp_path / "s", video=False).totals
    assert (totals.frames, totals.ms) == (12, 75.0)
    assert totals.fps == pytest.approx(160)
    bf16, qvg = (lane.to_json() for lane in totals.lanes.values())
    assert bf16["psnr_to_bf16"] is None  # infinite
    mse = (1 + 4 + 9) / 3
    assert qvg["psnr_to_bf16"] == pytest.approx(10 * np.log10(255**2 / mse))
    assert (qvg["ms_per_chunk"], qvg["kv_bytes"], qvg["ratio"]) == (12.0, 600, 6.35)
    json.dumps([bf16, qvg], allow_nan=False)


def test_killed_process_leaves_a_readable_session(tmp_path):
    program = textwrap.dedent(
        f"""
        import os, signal, sys
        from pathlib import Path
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        from test_session import ACTIONS, make_block, make_info
        from quantwm.session import SessionWriter
        writer = SessionWriter(Path({str(tmp_path / "s")!r}), make_info(), video=False)
        for index, action in enumerate(ACTIONS, 1):
            writer.write(make_block(index, action))
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == -signal.SIGKILL
    loaded = load_session(tmp_path / "s")
    assert not loaded.complete
    assert loaded.actions == ACTIONS
    assert len(loaded.frame_hashes["bf16"]) == 3


def test_half_written_last_line_is_ignored(tmp_path):
    record(tmp_path / "s", video=False)
    path = tmp_path / "s" / "actions.ndjson"
    path.write_text(path.read_text()[:-9])
    assert load_session(tmp_path / "s").actions == ACTIONS[:2]


def test_full_disk_ends_recording_in_one_line(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    with SessionWriter(tmp_path / "s", make_info(), video=False) as writer:
        writer.write(make_block(1))
        monkeypatch.setattr(session.shutil, "disk_usage", lambda path: usage(1, 1, 2**20))
        writer.write(make_block(2))
        writer.write(make_block(3))
    assert "recording ended at chunk 2" in writer.stopped
    assert "\n" not in writer.stopped
    assert len(load_session(tmp_path / "s").actions) == 1
    assert writer.totals.frames == 12


def test_write_error_ends_recording(tmp_path):
    with SessionWriter(tmp_path / "s", make_info(), video=False) as writer:
        writer.write(make_block(1))

        class Full:
            def write(self, frames):
                raise OSError(28, "No space left on device")

            def close(self):
                raise OSError(28, "No space left on device")

        writer._lossless["qvg"] = Full()
        writer.write(make_block(2))
        writer.write(make_block(3))
    assert "No space left on device" in writer.stopped


def test_error_in_the_run_leaves_it_incomplete(tmp_path):
    with (
        pytest.raises(KeyboardInterrupt),
        SessionWriter(tmp_path / "s", make_info(), video=False) as writer,
    ):
        writer.write(make_block(1))
        raise KeyboardInterrupt
    loaded = load_session(tmp_path / "s")
    assert not loaded.complete
    assert len(loaded.actions) == 1


def test_occupied_or_impossible_folder(tmp_path):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "x").write_text("")
    with pytest.raises(UserError, match="not empty"):
        SessionWriter(tmp_path / "s", make_info(), video=False)
    with pytest.raises(UserError, match="cannot use"):
        SessionWriter(tmp_path / "s" / "x" / "y", make_info(), video=False)


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".x", "A", "x" * 33, "a b", "a\n"])
def test_lane_names_cannot_be_paths(tmp_path, name):
    lane = LaneConfig(name, "bf16", {}, CachePolicy())
    with pytest.raises(UserError, match="not usable"):
        SessionWriter(tmp_path / "s", make_info(lanes=(lane,)), video=False)
    assert not (tmp_path / "s").exists()


def test_start_picture_round_trip(tmp_path):
    picture = np.random.default_rng(0).integers(0, 256, (3, 24, 32, 3), dtype=np.uint8)
    info = make_info(start_picture=True)
    SessionWriter(tmp_path / "s", info, video=False, start_picture=picture).close()
    np.testing.assert_array_equal(load_session(tmp_path / "s").start_picture(), picture)


def test_zip_holds_known_files_and_no_links(tmp_path):
    record(tmp_path / "s", video=False)
    secret = tmp_path / "secret.mkv"
    secret.write_text("secret")
    (tmp_path / "s" / "evil.mkv").symlink_to(secret)
    (tmp_path / "s" / "other.txt").write_text("x")
    target = zip_session(tmp_path / "s", tmp_path / "s.zip")
    with zipfile.ZipFile(target) as archive:
        assert sorted(archive.namelist()) == [
            "s/actions.ndjson",
            "s/metrics.csv",
            "s/plots.png",
            "s/session.json",
        ]


BREAK = {
    "not json": lambda d: "{",
    "list": lambda d: "[]",
    "deep": lambda d: "[" * 100_000,
    "nan": lambda d: json.dumps(d | {"fps": float("nan")}),
    "format": lambda d: json.dumps(d | {"format": "x"}),
    "version": lambda d: json.dumps(d | {"version": "2"}),
    "world": lambda d: json.dumps(d | {"world": "../embedded"}),
    "seed": lambda d: json.dumps(d | {"seed": True}),
    "negative seed": lambda d: json.dumps(d | {"seed": -1}),
    "steps": lambda d: json.dumps(d | {"steps": 10**9}),
    "mode": lambda d: json.dumps(d | {"mode": "other"}),
    "size": lambda d: json.dumps(d | {"size": [10**9, 1]}),
    "keys": lambda d: json.dumps(d | {"keys": [1]}),
    "lanes": lambda d: json.dumps(d | {"lanes": []}),
    "lane type": lambda d: json.dumps(d | {"lanes": [1]}),
    "many lanes": lambda d: json.dumps(d | {"lanes": d["lanes"] * 20}),
    "same lanes": lambda d: json.dumps(d | {"lanes": d["lanes"][:1] * 2}),
    "lane name": lambda d: json.dumps(d | {"lanes": [d["lanes"][0] | {"name": "../../x"}]}),
    "settings": lambda d: json.dumps(d | {"lanes": [d["lanes"][0] | {"settings": {"a": []}}]}),
    "policy": lambda d: json.dumps(d | {"lanes": [d["lanes"][0] | {"policy": {"sink_frames": 1}}]}),
    "missing": lambda d: json.dumps({k: v for k, v in d.items() if k != "weights_sha256"}),
    "huge": lambda d: json.dumps(d | {"prompt": "x" * 2**21}),
    "dtype": lambda d: json.dumps(d | {"dtype": "float8"}),
    "not utf8": lambda d: b"\xff\xfe{",
}


@pytest.mark.parametrize("name", BREAK)
def test_broken_session_json_is_refused(tmp_path, name):
    record(tmp_path / "s", video=False)
    path = tmp_path / "s" / "session.json"
    broken = BREAK[name](json.loads(path.read_text()))
    path.write_bytes(broken if isinstance(broken, bytes) else broken.encode())
    with pytest.raises(UserError) as caught:
        load_session(tmp_path / "s")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "line",
    ['{"block": 5, "frames": []}', '{"block": 1, "frames": [["q"], [], [], []]}', "nonsense", "7"],
)
def test_broken_action_lines_are_refused(tmp_path, line):
    record(tmp_path / "s", video=False)
    path = tmp_path / "s" / "actions.ndjson"
    path.write_text(line + "\n" + path.read_text())
    with pytest.raises(UserError):
        load_session(tmp_path / "s")


def test_missing_folder_and_files(tmp_path):
    with pytest.raises(UserError, match="no such session folder"):
        load_session(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="not a session folder"):
        load_session(tmp_path / "empty")


def test_a_huge_field_in_the_metrics_is_refused(tmp_path):
    record(tmp_path / "s", video=False)
    with (tmp_path / "s" / "metrics.csv").open("a") as file:
        file.write("3,8,bf16," + "9" * 200_000 + "\n")
    with pytest.raises(UserError, match=r"metrics\.csv line \d+ is not CSV"):
        load_session(tmp_path / "s")


def test_older_sessions_do_not_say_their_dtype(tmp_path):
    record(tmp_path / "new", video=False, dtype="float32")
    assert load_session(tmp_path / "new").info.dtype == "float32"
    path = tmp_path / "new" / "session.json"
    document = json.loads(path.read_text())
    del document["dtype"]
    path.write_text(json.dumps(document))
    assert load_session(tmp_path / "new").info.dtype is None

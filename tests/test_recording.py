"""Recordings under stress: a full disk, kill -9, copies while they go on, zips, other versions."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import numpy as np
import pytest

import quantwm.session_zip as session_zip
from quantwm.errors import UserError
from quantwm.session import SessionWriter
from quantwm.session_reader import load_session
from quantwm.session_zip import is_zip, open_session, unpack_session, zip_session
from quantwm.video import read_video
from tests.test_session import ACTIONS, make_block, make_info, record

pytest.importorskip("av")
ROOT = Path(__file__).resolve().parent.parent


def in_child(body: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, with the names of tests/test_session.py."""
    head = f"""
        import os, resource, signal, sys
        from pathlib import Path
        import numpy as np
        sys.path.insert(0, {str(ROOT)!r})
        from tests.test_session import ACTIONS, make_block, make_info
        from quantwm.session import SessionWriter
        folder = Path({str(tmp_path / "s")!r})
    """
    code = textwrap.dedent(head) + textwrap.dedent(body)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=500, check=False
    )


def whole_chunks(folder: Path, lane: str = "qvg") -> int:
    """Chunks of a lane that a reader gets back bit for bit."""
    frames = []
    try:
        from quantwm.video import iter_video

        frames = list(iter_video(folder / f"{lane}.mkv"))
    except UserError:
        pass
    for index in range(len(frames) // 4):
        want = make_block(index + 1).lanes[1].frames
        np.testing.assert_array_equal(np.stack(frames[4 * index : 4 * index + 4]), want)
    return len(frames) // 4


def test_kill_9_leaves_a_session_that_reads_to_the_last_frames(tmp_path):
    done = in_child(
        """
        writer = SessionWriter(folder, make_info())
        for index in range(1, 9):
            writer.write(make_block(index, ACTIONS[0]))
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        tmp_path,
    )
    assert done.returncode == -signal.SIGKILL
    session = load_session(tmp_path / "s")
    assert not session.complete and len(session.actions) == 8
    assert whole_chunks(tmp_path / "s") >= 7
    assert len(session.frame_hashes["qvg"]) == 8


def test_a_disk_that_fills_up_ends_the_recording_and_keeps_what_there_is(tmp_path):
    """The kernel itself refuses: no file of the child may grow beyond 150 kB."""
    done = in_child(
        """
        writer = SessionWriter(folder, make_info())
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))
        count = 0
        for index in range(1, 60):
            writer.write(make_block(index, ACTIONS[0]))
        writer.close()
        print(writer.stopped)
        print(writer.totals.frames)
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    stopped, frames = done.stdout.splitlines()
    assert "recording ended at chunk" in stopped and "File too large" in stopped
    assert frames == "236"  # what comes later is still counted
    chunk = int(stopped.split("chunk ")[1].split(":")[0])
    session = load_session(tmp_path / "s")
    assert len(session.actions) in (chunk - 1, chunk)
    assert 1 <= chunk - 2 <= whole_chunks(tmp_path / "s")


def test_memory_stays_bounded_over_a_long_recording(tmp_path):
    """140 more chunks are 41 MB of raw frames in two lanes."""
    done = in_child(
        """
        info = make_info(size=(128, 96))
        def block(index):
            found = make_block(1, ACTIONS[0])
            frames = np.full((4, 96, 128, 3), index % 250, np.uint8)
            lanes = tuple(
                type(l)(l.name, frames, l.ms, l.kv_bytes, l.ratio, l.resident_ratio, l.tokens)
                for l in found.lanes
            )
            return type(found)(index, 4 * index, found.action, lanes, found.memory, 1.0, {})
        writer = SessionWriter(folder, info)
        for index in range(1, 20):
            writer.write(block(index))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for index in range(20, 160):
            writer.write(block(index))
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        writer.close()
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 15_000  # KiB


def test_a_copy_while_recording_is_whole_and_the_recording_goes_on(tmp_path):
    writer = SessionWriter(tmp_path / "s", make_info())
    for index, action in enumerate(ACTIONS, 1):
        writer.write(make_block(index, action))
    writer.copy_to(tmp_path / "copy")
    writer.write(make_block(4, ACTIONS[0]))
    writer.close()
    copy, whole = load_session(tmp_path / "copy"), load_session(tmp_path / "s")
    assert copy.complete and len(copy.actions) == 3 and len(whole.actions) == 4
    for lane, place in (("bf16", 0), ("qvg", 1)):
        want = np.concatenate([make_block(i).lanes[place].frames for i in (1, 2, 3)])
        np.testing.assert_array_equal(read_video(copy.video(lane), 99), want)
        assert len(read_video(whole.video(lane), 99)) == 16
    assert (tmp_path / "copy" / "plots.png").is_file()
    with pytest.raises(UserError, match="closed"):
        writer.copy_to(tmp_path / "late")


def test_a_copy_of_the_first_chunk(tmp_path):
    with SessionWriter(tmp_path / "s", make_info()) as writer:
        writer.copy_to(tmp_path / "none")
        writer.write(make_block(1, ACTIONS[0]))
        writer.copy_to(tmp_path / "one")
    assert load_session(tmp_path / "none").actions == ()
    assert len(read_video(tmp_path / "one" / "bf16.mkv", 99)) == 4


def test_a_zip_opens_like_a_folder(tmp_path):
    record(tmp_path / "s")
    archive = zip_session(tmp_path / "s", tmp_path / "s.zip")
    assert is_zip(archive) and not is_zip(tmp_path / "s")
    with open_session(archive) as packed, open_session(tmp_path / "s") as plain:
        assert packed.info == plain.info and packed.actions == plain.actions
        folder = packed.folder
        np.testing.assert_array_equal(
            read_video(packed.video("qvg"), 99), read_video(plain.video("qvg"), 99)
        )
    assert not folder.exists()


def test_bad_zips_are_refused_in_one_line(tmp_path, monkeypatch):
    record(tmp_path / "s", video=False)
    archive = zip_session(tmp_path / "s", tmp_path / "s.zip")
    evil = tmp_path / "evil.zip"
    with zipfile.ZipFile(evil, "w") as packed:
        packed.writestr("../../session.json", (tmp_path / "s" / "session.json").read_text())
        packed.writestr("/etc/other.txt", "x")
    (tmp_path / "a").mkdir()
    folder = unpack_session(evil, tmp_path / "a")
    assert [path.name for path in folder.iterdir()] == ["session.json"]
    empty = tmp_path / "empty.zip"
    zipfile.ZipFile(empty, "w").close()
    cut = tmp_path / "cut.zip"
    cut.write_bytes(archive.read_bytes()[:-30])
    for path, words in ((empty, "no session.json"), (cut, "not a readable zip")):
        with pytest.raises(UserError, match=words), open_session(path):
            pass
    monkeypatch.setattr(session_zip, "MAX_UNPACKED_BYTES", 100)
    with pytest.raises(UserError, match="more than 100 bytes"), open_session(archive):
        pass


def test_a_session_of_another_version_says_so_and_still_opens(tmp_path):
    record(tmp_path / "s", video=False)
    path = tmp_path / "s" / "session.json"
    document = json.loads(path.read_text())
    document["version"] = 7
    document["colour"] = "green"
    for lane in document["lanes"]:
        del lane["policy"]["compress_sink"]
        lane["policy"]["new_idea"] = 3
    path.write_text(json.dumps(document))
    session = load_session(tmp_path / "s")
    assert len(session.notes) == 1 and "version 7" in session.notes[0]
    assert session.info.lanes == make_info().lanes and session.actions == ACTIONS
    document["lanes"] = 3
    path.write_text(json.dumps(document))
    with pytest.raises(UserError, match=r"lanes is a list .*version 7"):
        load_session(tmp_path / "s")


def test_plots_show_every_lane(tmp_path):
    from PIL import Image

    record(tmp_path / "s")
    picture = np.asarray(Image.open(tmp_path / "s" / "plots.png").convert("RGB"))
    assert picture.shape == (4 * 190, 760, 3)
    for colour in ((0, 114, 178), (213, 94, 0)):
        assert (picture == colour).all(axis=2).sum() > 50

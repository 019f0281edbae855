"""Videos from anybody: what differs is handled or refused in one line, before memory is spent."""

from __future__ import annotations

import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import quantwm.comparison as comparison
import quantwm.video_reader as video_reader
from quantwm.cli import main
from quantwm.comparison import Options, compare_files
from quantwm.errors import UserError
from quantwm.video_reader import VideoFacts, probe_video, read_video
from tests.test_metrics_agreement import smooth_clip

av = pytest.importorskip("av")


def write(path: Path, frames: np.ndarray, **options) -> Path:
    """A video; options: rate, codec, pix_fmt, times (presentation times in ms)."""
    codec = options.get("codec", "ffv1" if path.suffix == ".mkv" else "libx264")
    with av.open(path, "w") as file:
        stream = file.add_stream(codec, rate=options.get("rate", 10))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = options.get("pix_fmt", "bgr0" if codec == "ffv1" else "yuv420p")
        checked = {"level": "3", "slicecrc": "1"}
        stream.codec_context.options = checked if codec == "ffv1" else {"crf": "10"}
        if "times" in options:
            stream.codec_context.time_base = Fraction(1, 1000)
        for number, picture in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            if "times" in options:
                frame.pts, frame.time_base = options["times"][number], Fraction(1, 1000)
            for packet in stream.encode(frame):
                file.mux(packet)
        for packet in stream.encode(None):
            file.mux(packet)
    return path


def turned(path: Path) -> None:
    """Write a display matrix of a quarter turn into an mp4's track header, as phones do."""
    data = bytearray(path.read_bytes())
    place = data.index(b"tkhd") + 4 + 40
    matrix = (0, 0x10000, 0, -0x10000 & 0xFFFFFFFF, 0, 0, 0, 0, 0x40000000)
    data[place : place + 36] = b"".join(value.to_bytes(4, "big") for value in matrix)
    path.write_bytes(data)


def compare(tmp_path: Path, a: Path, b: Path, **options) -> dict:
    return compare_files("pair", a, b, Options(**options))


def refused(tmp_path: Path, a: Path, b: Path, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        compare(tmp_path, a, b)
    assert "\n" not in str(caught.value)


@pytest.fixture
def clip() -> np.ndarray:
    return smooth_clip(0, 12)


def test_every_figure_of_a_pair(tmp_path, clip):
    noisy = np.clip(clip + np.random.default_rng(0).normal(0, 5, clip.shape), 0, 255)
    a = write(tmp_path / "a.mkv", noisy.astype(np.uint8), rate=5)
    b = write(tmp_path / "b.mkv", clip, rate=5)
    found = compare(tmp_path, a, b)
    assert 33 < found["psnr_pooled"] < 35 and 0.5 < found["ssim"] < 1
    assert found["fps"] == pytest.approx(5, rel=0.01)
    assert [w["label"] for w in found["windows"]] == ["0-2 s", "2-5 s"]
    assert [w["frames"] for w in found["windows"]] == [[0, 10], [10, 12]]
    assert found["windows"][0]["psnr_pooled"] == pytest.approx(found["psnr_pooled"], abs=0.3)
    assert found["sharpness"] > found["sharpness_reference"]
    assert found["temporal_excess"] > 1 and found["divergence_frame"] is None
    assert found["temporal_flickering"] is None  # the clip moves
    json.dumps(found, allow_nan=False)


def test_late_psnr_is_marked_as_divergence(tmp_path, clip):
    other = clip.copy()
    other[4:] = 255 - other[4:]
    a, b = write(tmp_path / "a.mkv", other, rate=2), write(tmp_path / "b.mkv", clip, rate=2)
    found = compare(tmp_path, a, b)
    assert found["divergence_frame"] == 4
    assert [w["diverged"] for w in found["windows"]] == [False, True, True]


def test_pictures_that_end_before_the_announced_end_are_said(tmp_path, clip):
    whole, cut = (write(tmp_path / name, clip) for name in ("whole.mkv", "cut.mkv"))
    data = cut.read_bytes()
    cut.write_bytes(data[: len(data) * 2 // 3])
    assert probe_video(whole).short is None
    seconds, announced = probe_video(cut).short
    assert announced == pytest.approx(1.2) and 0.2 < seconds < 0.9
    notes = compare(tmp_path, cut, whole)["notes"]
    assert any("of the 1.2 seconds that it announces: it may be cut off" in n for n in notes)
    turned_off = compare(tmp_path, cut, whole, frames=2)["notes"]
    assert not any("announces" in note for note in turned_off)


@pytest.mark.parametrize(("first", "shown"), [(0, "0"), (5, "5"), (None, "-")])
def test_the_table_names_the_frame_at_which_lanes_part_even_the_first(
    tmp_path, clip, capsys, first, shown
):
    other = clip.copy()
    if first is not None:
        other[first:] = 255 - other[first:]
    write(tmp_path / "a.mkv", other), write(tmp_path / "b.mkv", clip)
    assert main(["compare", str(tmp_path / "a.mkv"), str(tmp_path / "b.mkv"), "--no-flow"]) == 0
    told = capsys.readouterr()
    lines = (told.err + told.out).splitlines()
    head = next(i for i, line in enumerate(lines) if line.endswith("parted at"))
    assert lines[head + 1].split()[-1] == shown
    assert json.loads(told.out.splitlines()[-1])["videos"][0]["divergence_frame"] == first


def test_different_length_compares_what_is_common(tmp_path, clip):
    a, b = write(tmp_path / "a.mkv", clip), write(tmp_path / "b.mkv", clip[:7])
    found = compare(tmp_path, a, b)
    assert found["frames"] == 7 and found["surplus_frames"] == {"a": 5, "b": 0}
    assert "the common ones are compared" in found["notes"][0]


def test_different_size_and_rate_are_refused(tmp_path, clip):
    a = write(tmp_path / "a.mkv", clip)
    refused(tmp_path, a, write(tmp_path / "b.mkv", clip[:, :, :60]), "72 x 48 .* 60 x 48")
    refused(tmp_path, a, write(tmp_path / "c.mkv", clip, rate=20), "10 frames/s .* at 20")


@pytest.mark.parametrize(
    ("codec", "pix_fmt"), [("libx264", "yuv444p"), ("ffv1", "gray"), ("ffv1", "yuv420p10le")]
)
def test_pixel_formats_become_rgb(tmp_path, clip, codec, pix_fmt):
    grey = np.repeat(clip.mean(axis=3, keepdims=True).astype(np.uint8), 3, axis=3)
    a = write(tmp_path / "a.mkv", grey, codec=codec, pix_fmt=pix_fmt)
    found = compare(tmp_path, a, write(tmp_path / "b.mkv", grey))
    assert found["psnr_pooled"] is None or found["psnr_pooled"] > 38
    assert any("both become RGB" in note for note in found["notes"])


def test_variable_rate_is_paired_by_number_and_said(tmp_path, clip):
    times = [0, 100, 200, 500, 600, 700, 900, 1000, 1100, 1600, 1700, 1800]
    a = write(tmp_path / "a.mkv", clip, times=times)
    assert probe_video(a).variable_rate
    found = compare(tmp_path, a, write(tmp_path / "b.mkv", clip))
    assert found["identical"] and "variable frame rate" in found["notes"][0]


def test_a_rotated_video_is_compared_upright(tmp_path, clip):
    a, b = write(tmp_path / "a.mp4", clip), write(tmp_path / "b.mp4", clip)
    plain = read_video(a, 1)[0]
    turned(a)
    assert probe_video(a).size == (48, 72) and probe_video(a).rotation in (90, 270)
    upright = read_video(a, 1)[0]
    assert upright.shape == (72, 48, 3)
    np.testing.assert_array_equal(upright, np.rot90(plain, -1))
    refused(tmp_path, a, b, "48 x 72 .* 72 x 48")


def test_one_frame_has_no_steps(tmp_path, clip):
    a, b = write(tmp_path / "a.mkv", clip[:1]), write(tmp_path / "b.mkv", clip[1:2])
    found = compare(tmp_path, a, b)
    assert found["frames"] == 1 and found["temporal_excess"] is None
    assert probe_video(a).rate is None


def test_damage_in_the_middle_names_the_frame(tmp_path, clip):
    a, b = write(tmp_path / "a.mkv", clip), write(tmp_path / "b.mkv", clip)
    data = bytearray(a.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 400] = b"\xaa" * 400
    a.write_bytes(data)
    refused(tmp_path, a, b, r"a\.mkv is damaged at frame [4-8]; the \d frames before it")
    count = int(str(_error(tmp_path, a, b)).split("frame ")[1].split(";")[0])
    assert compare(tmp_path, a, b, frames=count)["identical"]


def _error(tmp_path, a, b) -> UserError:
    with pytest.raises(UserError) as caught:
        compare(tmp_path, a, b)
    return caught.value


@pytest.mark.parametrize("name", ["text.mp4", "picture.mkv", "empty.avi", "sound.mkv"])
def test_files_that_are_no_videos(tmp_path, clip, name):
    path = tmp_path / name
    path.write_bytes({"text.mp4": b"#EXTM3U\nhttp://x", "empty.avi": b""}.get(name, b"\x89PNG"))
    if name == "sound.mkv":
        with av.open(path, "w") as file:
            stream = file.add_stream("pcm_s16le", rate=8000, layout="mono")
            sound = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), "s16", "mono")
            sound.sample_rate = 8000
            for packet in (*stream.encode(sound), *stream.encode(None)):
                file.mux(packet)
    refused(tmp_path, path, write(tmp_path / "b.mkv", clip), "not a video|no video stream")


def test_ten_minutes_of_4k_are_refused_before_a_frame_is_read(tmp_path, monkeypatch):
    facts = VideoFacts("big.mp4", (3840, 2160), 30.0, 18_000, False, "yuv420p", "hevc", 0)
    monkeypatch.setattr(comparison, "probe_video", lambda path: facts)
    monkeypatch.setattr(comparison, "iter_video", lambda *_: pytest.fail("a frame was read"))
    refused(tmp_path, Path("a"), Path("b"), "149 billion pixels, at most 24 .* --frames 2893")
    monkeypatch.undo()
    picture = np.zeros((1, 2162, 3840, 3), np.uint8)
    path = write(tmp_path / "a.mkv", picture)
    refused(tmp_path, path, path, "3840 x 2162, at most 8,294,400 pixels")


def test_a_long_video_takes_little_memory(tmp_path):
    """120 frames of 480 x 360 are 62 MB raw; comparing them must not hold them."""
    path = write(tmp_path / "a.mkv", np.zeros((1, 360, 480, 3), np.uint8).repeat(120, 0))
    code = f"""
import resource
from pathlib import Path
from quantwm.comparison import Options, compare_files
import torch, av, numpy
torch.set_num_threads(1)
path = Path({str(path)!r})
compare_files("warm", path, path, Options(frames=2, flow=False))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
compare_files("all", path, path, Options(frames=110, flow=False))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=500
    )
    assert int(done.stdout) < 25_000  # KiB


def test_two_folders_give_intervals_over_videos(tmp_path, clip, capsys):
    for side, offset in (("a", 3), ("b", 0)):
        (tmp_path / side).mkdir()
        for name in ("one.mkv", "two.mkv"):
            write(tmp_path / side / name, np.clip(clip, 0, 250) + np.uint8(offset))
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--no-flow"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["over_videos"]["videos"] == 2
    window = found["over_videos"]["windows"][0]
    assert window["psnr_pooled"]["mean"] == pytest.approx(20 * np.log10(255 / 3), abs=1e-3)
    assert window["psnr_pooled"]["low"] <= window["psnr_pooled"]["mean"]


def test_sizes_are_checked_again_while_reading(tmp_path, monkeypatch, clip):
    path = write(tmp_path / "a.mkv", clip)
    monkeypatch.setattr(video_reader, "MAX_PIXELS", 100)
    with pytest.raises(UserError, match="at most 100 pixels"):
        probe_video(path)

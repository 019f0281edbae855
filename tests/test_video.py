"""Lossless video is bit-exact, previews carry captions, and files from outside are bounded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import quantwm.video as video
import quantwm.video_reader as video_reader
from quantwm.errors import UserError

pytest.importorskip("av")


def noise(frames: int, height: int, width: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize(("frames", "height", "width"), [(1, 96, 128), (7, 95, 127), (12, 2, 2)])
def test_lossless_is_bit_exact(tmp_path, frames, height, width):
    want = noise(frames, height, width)
    with video.LosslessWriter(tmp_path / "a.mkv", 17.5) as writer:
        for part in np.array_split(want, min(3, frames)):
            writer.write(part)
    got = video.read_video(tmp_path / "a.mkv", 100)
    np.testing.assert_array_equal(got, want)


def test_dense_videos_are_bit_exact_too_and_smaller(tmp_path):
    y, x = np.mgrid[:48, :64]
    rng = np.random.default_rng(0)
    clip = np.stack([np.stack([x + n, y * 2, x * y // 9 + n], -1) for n in range(12)]) % 200
    clip = (clip + rng.integers(0, 9, clip.shape)).astype(np.uint8)
    sizes = []
    for dense in (False, True):
        path = tmp_path / f"{dense}.mkv"
        with video.LosslessWriter(path, 8, dense) as writer:
            writer.write(clip)
            if dense:
                with pytest.raises(UserError, match="when it has ended"):
                    writer.copy_to(tmp_path / "copy.mkv")
        np.testing.assert_array_equal(video.read_video(path, 99), clip)
        sizes.append(path.stat().st_size)
    assert sizes[1] < 0.97 * sizes[0]


def test_every_grey_level_and_extreme_colour_survives(tmp_path):
    levels = np.arange(256, dtype=np.uint8)
    picture = np.stack(np.broadcast_arrays(levels[:, None], levels[None], levels[::-1, None]), -1)
    with video.LosslessWriter(tmp_path / "a.mkv", 8) as writer:
        writer.write(picture[None])
    np.testing.assert_array_equal(video.read_video(tmp_path / "a.mkv", 1)[0], picture)


def test_killed_writer_leaves_a_readable_file(tmp_path):
    program = textwrap.dedent(
        f"""
        import os, signal
        import numpy as np
        from pathlib import Path
        from quantwm.video import LosslessWriter, PreviewWriter
        folder = Path({str(tmp_path)!r})
        frames = np.random.default_rng(0).integers(0, 256, (40, 24, 32, 3), dtype=np.uint8)
        lossless, preview = LosslessWriter(folder / "a.mkv", 8), PreviewWriter(folder / "p.mp4", 8)
        for chunk in frames.reshape(10, 4, 24, 32, 3):
            lossless.write(chunk)
            preview.write([chunk, chunk], [("bf16", ""), ("qvg", "")])
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, cwd=os.getcwd())
    assert done.returncode == -signal.SIGKILL
    got = video.read_video(tmp_path / "a.mkv", 100)
    assert len(got) >= 36
    np.testing.assert_array_equal(got, noise(40, 24, 32)[: len(got)])
    assert len(video.read_video(tmp_path / "p.mp4", 100)) >= 36


def test_preview_holds_all_lanes_and_captions(tmp_path):
    lanes = [np.full((5, 95, 127, 3), level, np.uint8) for level in (40, 120, 200)]
    with video.PreviewWriter(tmp_path / "p.mp4", 8) as writer:
        writer.write(lanes, [("bf16", "KV 3.1 MB"), ("qvg", "KV 0.5 MB"), ("quantwm", "")])
    got = video.read_video(tmp_path / "p.mp4", 100)
    zoom = 3  # 127 -> 381, the first multiple that reaches 256 pixels
    assert got.shape == (5, (95 * zoom + 40) // 2 * 2, (3 * 127 * zoom) // 2 * 2, 3)
    for index, level in enumerate((40, 120, 200)):
        pane = got[-1, 60:200, 127 * zoom * index + 20 : 127 * zoom * index + 300]
        assert abs(float(pane.mean()) - level) < 4
    assert got[0, :40, :300].max() > 200  # letters on the bar


def test_wrong_frames_are_refused(tmp_path):
    with video.LosslessWriter(tmp_path / "a.mkv", 8) as writer:
        writer.write(noise(1, 8, 8))
        with pytest.raises(UserError, match="holds frames of"):
            writer.write(noise(1, 8, 10))
        with pytest.raises(UserError, match="uint8"):
            writer.write(np.zeros((1, 8, 8, 3)))


def test_writer_without_frames_closes(tmp_path):
    video.LosslessWriter(tmp_path / "a.mkv", 8).close()
    video.PreviewWriter(tmp_path / "a.mp4", 8).close()


def test_missing_pyav_names_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(video_reader, "has_pyav", lambda: False)
    with pytest.raises(UserError, match="pip install av"):
        video.LosslessWriter(tmp_path / "a.mkv", 8)
    with pytest.raises(UserError, match="pip install av"):
        next(video.iter_video(tmp_path / "a.mkv"))


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.mkv", b"", "not a video"),
        ("a.mp4", b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "not a video"),
        ("a.mkv", b"ffconcat version 1.0\nfile /etc/passwd\n", "not a video"),
        ("a.mkv", b"\x1a\x45\xdf\xa3" + b"\0" * 400, "cannot be read"),
        ("a.mp4", b"\0\0\0\x18ftypisom" + b"\xff" * 400, "cannot be read"),
    ],
)
def test_broken_videos(tmp_path, name, data, words):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=words) as caught:
        video.read_video(tmp_path / name, 10)
    assert "\n" not in str(caught.value)


def test_names_in_a_video_that_are_no_text(tmp_path):
    with video.LosslessWriter(tmp_path / "a.mkv", 8) as writer:
        writer.write(noise(2, 20, 40))
    whole = (tmp_path / "a.mkv").read_bytes()
    (tmp_path / "a.mkv").write_bytes(whole.replace(b"Lavf", b"\xff" * 4))
    assert len(video.read_video(tmp_path / "a.mkv", 4)) == 2
    (tmp_path / "a.mkv").write_bytes(whole.replace(b"V_FFV1", b"V_QQQQ"))
    with pytest.raises(UserError, match="no decoder knows it"):
        video.read_video(tmp_path / "a.mkv", 4)


def test_missing_file(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        video.read_video(tmp_path / "none.mkv", 1)
    with pytest.raises(UserError, match="no such file"):
        video.read_start(tmp_path / "none.png", (8, 8), 1)


def test_caps_hold_before_decoding(tmp_path, monkeypatch):
    with video.LosslessWriter(tmp_path / "a.mkv", 8) as writer:
        writer.write(noise(6, 8, 8))
    assert len(video.read_video(tmp_path / "a.mkv", 4)) == 4
    monkeypatch.setattr(video_reader, "MAX_PIXELS", 63)
    with pytest.raises(UserError, match="at most 63 pixels"):
        video.read_video(tmp_path / "a.mkv", 4)
    monkeypatch.setattr(video_reader, "MAX_VIDEO_BYTES", 10)
    with pytest.raises(UserError, match="at most 10 are read"):
        video.read_video(tmp_path / "a.mkv", 4)


def test_start_picture_and_video(tmp_path):
    from PIL import Image

    picture = np.zeros((40, 100, 3), np.uint8)
    picture[:, 30:70] = 200  # what a crop of 40 x 40 around the centre keeps
    Image.fromarray(picture).save(tmp_path / "a.png")
    got = video.read_start(tmp_path / "a.png", (16, 16), 9)
    assert got.shape == (1, 16, 16, 3)
    assert (got == 200).all()
    with video.LosslessWriter(tmp_path / "a.mkv", 8) as writer:
        writer.write(noise(6, 20, 40))
    assert video.read_start(tmp_path / "a.mkv", (16, 8), 4).shape == (4, 8, 16, 3)
    assert len(video.read_start(tmp_path / "a.mkv", (16, 8), 0)) == 1, "a world without context"


@pytest.mark.parametrize("shape", [(4, 4), (8, 2000), (3000, 9), (1, 1)])
def test_a_start_of_an_absurd_shape_gets_a_line(tmp_path, shape):
    from PIL import Image

    Image.fromarray(np.zeros((*shape, 3), np.uint8)).save(tmp_path / "a.png")
    words = f"a.png is {shape[1]} x {shape[0]}; a start needs at least 8 pixels a side"
    with pytest.raises(UserError, match=words) as caught:
        video.read_start(tmp_path / "a.png", (16, 16), 1)
    assert "\n" not in str(caught.value)


def test_a_picture_that_would_fill_the_memory_gets_a_line(tmp_path, monkeypatch):
    from PIL import Image

    Image.fromarray(np.zeros((40, 40, 3), np.uint8)).save(tmp_path / "a.png")
    monkeypatch.setattr(video, "MAX_PICTURE_PIXELS", 1599)
    with pytest.raises(UserError, match="at most 1,599 pixels"):
        video.read_picture(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(UserError, match="far too many pixels"):
        video.read_picture(tmp_path / "a.png")


def test_a_start_picture_is_upright_and_on_white(tmp_path):
    from PIL import Image

    see_through = np.zeros((20, 40, 4), np.uint8)
    see_through[:, :20, 3] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held on its side
    Image.fromarray(see_through).save(tmp_path / "a.png", exif=exif)
    read = video.read_start(tmp_path / "a.png", (20, 40), 1)[0]
    assert (read[:20] == 0).all() and (read[20:] == 255).all()


def test_broken_pictures(tmp_path, monkeypatch):
    from PIL import Image

    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"\0" * 50)
    with pytest.raises(UserError, match="cannot be read as a picture"):
        video.read_start(tmp_path / "a.png", (8, 8), 1)
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\5IHDR" + b"\0" * 50)
    with pytest.raises(UserError, match="cannot be read as a picture"):
        video.read_start(tmp_path / "a.png", (8, 8), 1)
    # A turned picture whose resolution, a ratio, is text.
    exif = (
        b"Exif\0\0II*\0\x08\0\0\0\2\0\x12\1\3\0\1\0\0\0\6\0\0\0\x1a\1\2\0\2\0\0\0a\0\0\0"
        + b"\0" * 4
    )
    Image.fromarray(noise(1, 64, 64)[0]).save(tmp_path / "exif.jpg", exif=exif)
    with pytest.raises(UserError, match="damaged"):
        video.read_start(tmp_path / "exif.jpg", (8, 8), 1)
    Image.fromarray(noise(1, 64, 64)[0]).save(tmp_path / "b.png")
    whole = (tmp_path / "b.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="damaged"):
        video.read_start(tmp_path / "cut.png", (8, 8), 1)
    monkeypatch.setattr(video, "MAX_PICTURE_PIXELS", 100)
    with pytest.raises(UserError, match="at most 100 pixels"):
        video.read_start(tmp_path / "b.png", (8, 8), 1)

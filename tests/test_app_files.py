"""Uploads and archives: nothing outside the folders, nothing too large, nothing kept."""

from __future__ import annotations

from pathlib import Path

import imageio.v3 as iio
import numpy as np
import pytest
from PIL import Image

from app import limits
from app.files import SessionFiles, read_upload, reduce_picture
from quantwm.errors import UserError
from quantwm.video import LosslessWriter


@pytest.fixture
def uploads(tmp_path: Path) -> Path:
    folder = tmp_path / "uploads"
    folder.mkdir()
    return folder


def picture(path: Path, height: int = 20, width: int = 30, **options: object) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    iio.imwrite(path, pixels, **options)
    return path


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.webp"])
def test_pictures_are_read(uploads: Path, name: str) -> None:
    pixels = read_upload(str(picture(uploads / name)), uploads, 16)
    assert pixels.shape == (20, 30, 3)
    assert pixels.dtype == np.uint8


def test_see_through_parts_are_shown_on_white(uploads: Path) -> None:
    picture = np.zeros((20, 30, 4), np.uint8)
    picture[:, :10, 3] = 255  # black and solid; the rest is see-through red
    picture[:, 10:, 0] = 200
    picture[:, 20:, 3] = 128
    iio.imwrite(uploads / "alpha.png", picture)
    read = read_upload(str(uploads / "alpha.png"), uploads, 1)
    assert read[0, 0].tolist() == [0, 0, 0] and read[0, 15].tolist() == [255, 255, 255]
    assert np.allclose(read[0, 25], [227, 127, 127], atol=2)


def test_a_photo_is_turned_upright(uploads: Path) -> None:
    from PIL import Image

    picture = np.zeros((20, 40, 3), np.uint8)
    picture[:, :20] = 250
    image = Image.fromarray(picture)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held on its side
    image.save(uploads / "photo.jpg", quality=95, exif=exif)
    read = read_upload(str(uploads / "photo.jpg"), uploads, 1)
    assert read.shape == (40, 20, 3)
    assert read[:15].mean() > 200 and read[25:].mean() < 50


@pytest.mark.parametrize("shape", [(4, 4), (8, 2000), (3000, 9), (1, 1)])
def test_absurd_shapes_get_a_line(uploads: Path, shape: tuple[int, int]) -> None:
    iio.imwrite(uploads / "strip.png", np.zeros((*shape, 3), np.uint8))
    with pytest.raises(UserError, match="at least 8 a side and a long side of at most 8") as caught:
        read_upload(str(uploads / "strip.png"), uploads, 1)
    assert "\n" not in str(caught.value)


def test_grey_palette_and_alpha_become_rgb(uploads: Path) -> None:
    iio.imwrite(uploads / "grey.png", np.full((8, 8), 7, np.uint8))
    iio.imwrite(uploads / "alpha.png", np.full((8, 8, 4), 7, np.uint8))
    for name in ("grey.png", "alpha.png"):
        assert read_upload(str(uploads / name), uploads, 16).shape == (8, 8, 3)


def test_sixteen_bits_of_grey_keep_their_shades(uploads: Path) -> None:
    shades = np.linspace(0, 65535, 16 * 64).astype(np.uint16).reshape(16, 64)
    iio.imwrite(uploads / "deep.png", shades)
    read = read_upload(str(uploads / "deep.png"), uploads, 1)
    assert np.abs(read[..., 0] - shades / 257.0).max() <= 0.5 and read.shape == (16, 64, 3)


def test_the_first_frames_of_a_video_are_read(uploads: Path) -> None:
    frames = np.random.default_rng(1).integers(0, 256, (7, 24, 32, 3), dtype=np.uint8)
    with LosslessWriter(uploads / "clip.mkv", 8.0) as video:
        video.write(frames)
    np.testing.assert_array_equal(read_upload(str(uploads / "clip.mkv"), uploads, 5), frames[:5])
    (uploads / "cut.mp4").write_bytes(b"\0\0\0\x18ftypisom" + b"\0" * 40)
    with pytest.raises(UserError, match="cannot be read as a video"):
        read_upload(str(uploads / "cut.mp4"), uploads, 5)


def test_only_files_in_the_upload_folder(uploads: Path, tmp_path: Path) -> None:
    outside = picture(tmp_path / "outside.png")
    link = uploads / "link.png"
    link.symlink_to(outside)
    wrong = [outside, link, uploads, uploads / ".." / "outside.png", uploads / "none.png"]
    for path in [*map(str, wrong), "", None, 3, "\0", "x" * 9000]:
        with pytest.raises(UserError, match="not found"):
            read_upload(path, uploads, 16)


def test_damaged_and_foreign_files(uploads: Path) -> None:
    good = picture(uploads / "good.png").read_bytes()
    for name, data in {
        "cut.png": good[: len(good) // 2],
        "text.png": b"hello",
        "empty.png": b"",
        "html.png": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    }.items():
        (uploads / name).write_bytes(data)
        with pytest.raises(UserError, match="could not be read"):
            read_upload(str(uploads / name), uploads, 16)
    # A turned picture whose EXIF says its width in bytes: struct.error in Pillow.
    exif = b"Exif\0\0II*\0\x08\0\0\0\2\0\x12\1\3\0\1\0\0\0\6\0\0\0\0\1\1\0\1\0\0\0a" + b"\0" * 7
    Image.open(uploads / "good.png").save(uploads / "exif.jpg", exif=exif)
    with pytest.raises(UserError, match="could not be read"):
        read_upload(str(uploads / "exif.jpg"), uploads, 16)


def test_only_three_formats_are_opened(uploads: Path, monkeypatch) -> None:
    pixels = picture(uploads / "a.png")
    Image.open(pixels).save(uploads / "eps.png", format="EPS")
    Image.open(pixels).save(uploads / "tiff.png", format="TIFF")
    for name in ("eps.png", "tiff.png"):
        with pytest.raises(UserError, match="use PNG, JPEG, WebP"):
            read_upload(str(uploads / name), uploads, 16)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(UserError, match="too many pixels"):
        read_upload(str(pixels), uploads, 16)


def test_sizes_are_checked_before_decoding(uploads: Path, monkeypatch) -> None:
    file = picture(uploads / "big.png", 200, 300)
    monkeypatch.setattr(limits, "MAX_PICTURE_PIXELS", 200 * 300 - 1)
    with pytest.raises(UserError, match="pixels"):
        read_upload(str(file), uploads, 16)
    monkeypatch.setattr(limits, "MAX_UPLOAD_BYTES", 100)
    with pytest.raises(UserError, match="larger"):
        read_upload(str(file), uploads, 16)


def test_large_pictures_are_averaged_down() -> None:
    pixels = np.zeros((3000, 1500, 3), np.uint8)
    pixels[:, ::2] = 100
    small = reduce_picture(pixels)
    assert max(small.shape[:2]) <= limits.MAX_PICTURE_SIDE
    assert 30 < small.mean() < 70
    assert reduce_picture(small) is small


def test_archives_need_their_token_and_expire(tmp_path: Path, monkeypatch) -> None:
    files = SessionFiles(tmp_path)
    folder = files.folder()
    recording = folder.recording()
    with pytest.raises(UserError, match="nothing has been recorded"):
        files.archive(recording, folder)
    (recording / "session.json").write_text("{}")
    token = files.archive(recording, folder)
    path, name = files.fetch(token)
    assert name.endswith(".zip")
    for wrong in ("", "..", "../" + token, "%2e%2e", token[:-1]):
        assert files.fetch(wrong) is None
    monkeypatch.setattr(limits, "DOWNLOAD_SECONDS", -1.0)
    assert files.fetch(token) is None
    assert not path.exists()


def test_session_folders_are_private_and_deleted(tmp_path: Path) -> None:
    files = SessionFiles(tmp_path)
    folder = files.folder()
    assert not folder.path.exists(), "nothing is made before it is needed"
    recording = folder.recording()
    assert folder.path.stat().st_mode & 0o077 == 0
    assert folder.latest_recording() == recording
    number = folder.save_picture(np.zeros((4, 4, 3), np.uint8))
    assert folder.picture(number).shape == (4, 4, 3)
    with pytest.raises(UserError, match="gone"):
        folder.picture(number + 1)
    folder.delete()
    assert not folder.path.exists()

"""Session folders outside the repository, their archives, and pictures that visitors bring.

No text from outside ever becomes a path: folders and archives have random names, an archive is
found by a token in a table, and an uploaded picture must lie where Gradio puts uploads.
"""

from __future__ import annotations

import io
import os
import secrets
import shutil
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from app import limits
from quantwm.errors import UserError
from quantwm.session_zip import zip_session
from quantwm.video import is_video, iter_video, upright_rgb


@dataclass(frozen=True)
class SessionFolder:
    """One session's folder; `path` is made when it is first needed."""

    path: Path

    def recording(self) -> Path:
        """A fresh empty folder for one recording; its name is the archive's."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        stamp = time.strftime("%Y%m%d-%H%M%S")
        return Path(tempfile.mkdtemp(prefix=f"quantwm-{stamp}-", dir=self.path))

    def has_room(self) -> bool:
        """Whether the disk has what a recording may still need."""
        place = next(p for p in (self.path, *self.path.parents) if p.exists())
        return shutil.disk_usage(place).free >= limits.MIN_FREE_DISK_BYTES

    def save_picture(self, picture: np.ndarray) -> int:
        """Keep a start picture, uint8 [H, W, 3] or [T, H, W, 3], and return its number."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        number = len(list(self.path.glob("picture-*.npy"))) + 1
        if number > limits.MAX_PICTURES:
            raise UserError(f"{limits.MAX_PICTURES} pictures a visit are enough; reload the page")
        np.save(self.path / f"picture-{number}.npy", picture, allow_pickle=False)
        return number

    def picture(self, number: int) -> np.ndarray:
        """The start picture with this number.

        Raises:
            UserError: there is none.
        """
        file = self.path / f"picture-{int(number)}.npy"
        if not file.is_file():
            raise UserError("the uploaded picture is gone; choose it again")
        return np.load(file, allow_pickle=False)

    def latest_recording(self) -> Path | None:
        """The newest by its session.json, which is written at a recording's start and end: a copy
        made for a download is newer than its recording until that is closed."""
        runs = [p for p in self.path.glob("quantwm-*") if p.is_dir()]
        return max(runs, key=_written, default=None)

    def delete(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def _written(recording: Path) -> int:
    info = recording / "session.json"
    return (info if info.is_file() else recording).stat().st_mtime_ns


class SessionFiles:
    """The folder that holds all session folders, and the archives that may be fetched."""

    def __init__(self, root: Path | None = None) -> None:
        base = root if root is not None else Path(tempfile.gettempdir())
        self.root = base / f"quantwm-sessions-{os.getpid()}-{secrets.token_hex(4)}"
        self._lock = threading.Lock()
        self._archives: dict[str, tuple[Path, str, float]] = {}

    def folder(self) -> SessionFolder:
        return SessionFolder(self.root / secrets.token_hex(12))

    def archive(self, recording: Path, folder: SessionFolder) -> str:
        """Zip one recording and return the token under which it can be fetched.

        Raises:
            UserError: there is nothing to pack or no room to pack it.
        """
        if not any(recording.iterdir()):
            raise UserError("nothing has been recorded yet; press Drive first")
        if not folder.has_room():
            raise UserError("the server's disk is full; the session cannot be packed now")
        token = secrets.token_urlsafe(18)
        target = zip_session(recording, folder.path / f"{token}.zip")
        with self._lock:
            self._archives[token] = (target, f"{recording.name}.zip", time.monotonic())
        return token

    def fetch(self, token: str) -> tuple[Path, str] | None:
        """Path and download name of an archive; None when unknown, expired or deleted."""
        with self._lock:
            now = time.monotonic()
            for old in [t for t, (_, _, made) in self._archives.items() if _expired(made, now)]:
                self._archives.pop(old)[0].unlink(missing_ok=True)
            entry = self._archives.get(token)
        if entry is None or not entry[0].is_file():
            return None
        return entry[0], entry[1]

    def delete(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


def _expired(made: float, now: float) -> bool:
    return now - made > limits.DOWNLOAD_SECONDS


def read_upload(path: object, uploads: Path, frames: int) -> np.ndarray:
    """Read an uploaded start: a picture, or the first `frames` frames of a video.

    Returns uint8 [H, W, 3] or [T, H, W, 3], at most MAX_PICTURE_SIDE on a side. The file must lie
    inside `uploads`; its size and pixel count are checked before decoding.

    Raises:
        UserError: it cannot be used, and why.
    """
    file = _uploaded_file(path, uploads)
    if is_video(file):
        return np.stack([reduce_picture(frame) for frame in iter_video(file, frames)])
    return _read_picture(file)


def _uploaded_file(path: object, uploads: Path) -> Path:
    if not isinstance(path, str) or not path or len(path) > 4096 or "\0" in path:
        raise UserError("the uploaded file was not found; choose it again")
    file = Path(path)
    root = uploads.resolve()
    if file.is_symlink() or not file.is_file() or root not in file.resolve().parents:
        raise UserError("the uploaded file was not found; choose it again")
    if file.stat().st_size > limits.MAX_UPLOAD_BYTES:
        limit = limits.MAX_UPLOAD_BYTES // 2**20
        raise UserError(f"the file is larger than {limit} MB; choose a smaller one")
    return file


def _read_picture(file: Path) -> np.ndarray:
    from PIL import Image

    data = file.read_bytes()
    try:
        # Of Pillow's many formats three: EPS would start Ghostscript on a stranger's program.
        with Image.open(io.BytesIO(data), formats=("PNG", "JPEG", "WEBP")) as image:
            _check_shape(*image.size)
            picture = upright_rgb(image)
    except UserError:
        raise
    except Image.DecompressionBombError as error:
        raise UserError("the picture has far too many pixels; choose a smaller one") from error
    except Exception as error:  # decoders stumble in many ways
        raise UserError("the picture could not be read; use PNG, JPEG, WebP or a video") from error
    return reduce_picture(picture)


def _check_shape(width: int, height: int) -> None:
    """From the header, before anything is decoded."""
    if width * height > limits.MAX_PICTURE_PIXELS:
        raise UserError(
            f"the picture has {width} x {height} pixels; at most "
            f"{limits.MAX_PICTURE_PIXELS // 10**6} megapixels can be used"
        )
    short, long = sorted((width, height))
    if short < limits.MIN_PICTURE_SIDE or long > limits.MAX_PICTURE_ASPECT * short:
        raise UserError(
            f"the picture has {width} x {height} pixels; a start needs at least "
            f"{limits.MIN_PICTURE_SIDE} a side and a long side of at most "
            f"{limits.MAX_PICTURE_ASPECT} times the short one"
        )


def reduce_picture(picture: np.ndarray) -> np.ndarray:
    """Average whole pixel blocks until no side is longer than MAX_PICTURE_SIDE."""
    factor = -(-max(picture.shape[:2]) // limits.MAX_PICTURE_SIDE)
    if factor <= 1:
        return picture
    height, width = (side // factor * factor for side in picture.shape[:2])
    blocks = picture[:height, :width].reshape(height // factor, factor, width // factor, factor, 3)
    return blocks.mean(axis=(1, 3)).round().astype(np.uint8)

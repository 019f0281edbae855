"""A session as one zip file: packed for download, unpacked with checks when it comes back."""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from quantwm.errors import UserError
from quantwm.session import (
    ACTIONS_FILE,
    METRICS_FILE,
    NAME,
    PLOTS_FILE,
    PREVIEW_FILE,
    SESSION_FILE,
    START_FILE,
)
from quantwm.session_reader import Session, load_session
from quantwm.video_reader import MAX_VIDEO_BYTES

FILES = (SESSION_FILE, ACTIONS_FILE, METRICS_FILE, PREVIEW_FILE, PLOTS_FILE, START_FILE)
MAX_MEMBERS = 64
MAX_UNPACKED_BYTES = MAX_VIDEO_BYTES
PIECE = 2**20


def zip_session(folder: Path, target: Path) -> Path:
    """Pack the known files of a session folder into a zip for download; links are left out."""
    videos = sorted(path.name for path in folder.glob("*.mkv") if NAME.fullmatch(path.stem))
    partial = target.with_name(target.name + ".part")
    # videos are compressed already: stored, not deflated
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as archive:
        for name in (*FILES, *videos):
            path = folder / name
            if path.is_file() and not path.is_symlink():
                archive.write(path, f"{folder.name}/{name}")
    os.replace(partial, target)
    return target


def unpack_session(archive: Path, target: Path) -> Path:
    """The session in a zip, as a folder below target, which must exist. Returns that folder.

    Only the files that a session has are taken, by their last name: no path of the archive is
    used. What a member really unpacks to is counted, not what the archive says.

    Raises:
        UserError: not a zip, no session in it, or more than MAX_UNPACKED_BYTES unpacked.
    """
    folder = target / "session"
    try:
        with zipfile.ZipFile(archive) as packed:
            members = packed.infolist()
            if len(members) > MAX_MEMBERS:
                raise UserError(
                    f"{archive.name} holds {len(members):,} files; a session has at most "
                    f"{MAX_MEMBERS}"
                )
            folder.mkdir()
            left = MAX_UNPACKED_BYTES
            for member in members:
                name = PurePosixPath(member.filename).name
                if _wanted(name) and not member.is_dir():
                    left = _copy(packed, member, folder / name, left, archive.name)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise UserError(f"{archive.name} is not a readable zip file of a session") from error
    except OSError as error:
        raise UserError(f"{archive.name} cannot be unpacked: {error.strerror or error}") from error
    if not (folder / SESSION_FILE).is_file():
        raise UserError(f"{archive.name} holds no {SESSION_FILE}; it is not a session")
    return folder


@contextmanager
def open_session(path: Path) -> Iterator[Session]:
    """A session folder or zip, read and checked; a zip is unpacked for as long as it is open."""
    if path.is_file():
        with tempfile.TemporaryDirectory(prefix="quantwm-session-") as scratch:
            yield load_session(unpack_session(path, Path(scratch)))
    else:
        yield load_session(path)


def is_zip(path: Path) -> bool:
    """Whether a file begins as a zip does."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _wanted(name: str) -> bool:
    video = PurePosixPath(name)
    return name in FILES or (video.suffix == ".mkv" and bool(NAME.fullmatch(video.stem)))


def _copy(
    packed: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path, left: int, archive: str
) -> int:
    """Unpack one member; returns how many bytes may still come. A link is copied as its text."""
    with packed.open(member) as source, path.open("xb") as file:
        while piece := source.read(PIECE):
            left -= len(piece)
            if left < 0:
                shutil.rmtree(path.parent)
                raise UserError(
                    f"{archive} unpacks to more than {MAX_UNPACKED_BYTES:,} bytes, at most that "
                    "is read"
                )
            file.write(piece)
    return left

"""Clips: raw frames of a few lanes in one file, as every tool of the inspector reads them."""

from __future__ import annotations

import secrets
import shutil
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from quantwm.errors import UserError

MAX_CLIP_BYTES = 2 * 2**30
"""Raw bytes of one clip, on disk: a minute of three lanes at 640 x 352 and 16 frames a second."""
MAX_CLIPS = 3
"""Clips kept for one page; opening a fourth forgets the oldest."""
SHEET_PIXELS = 4_000_000
"""Pixels of one sheet of frames, which travels as one PNG: 0.1 s to pack and to unpack."""
MAX_SHEET_FRAMES = 16


@dataclass(frozen=True)
class ClipInfo:
    """What is known of a clip beside its pixels.

    Attributes:
        title: for people.
        lanes: names, the reference first where there is one ("bf16").
        size: (width, height).
        fps: frames a second at natural speed.
        frames: how many there are.
        first: number of the first frame in its run; 0 for files.
        borders: frames of the clip at which a chunk begins.
        keys: keys held at each frame; empty for files.
        mode: "free" or "teacher"; "" where nobody knows.
        notes: what a person has to know, a sentence each.
        live: whether it was taken from the run that still goes on.
    """

    title: str
    lanes: tuple[str, ...]
    size: tuple[int, int]
    fps: float
    frames: int
    first: int = 0
    borders: tuple[int, ...] = ()
    keys: tuple[tuple[str, ...], ...] = ()
    mode: str = ""
    notes: tuple[str, ...] = ()
    live: bool = False

    @property
    def frame_bytes(self) -> int:
        """Bytes of one frame of all lanes."""
        return len(self.lanes) * self.size[0] * self.size[1] * 3

    @property
    def sheet_frames(self) -> int:
        """Frames that travel together."""
        pixels = len(self.lanes) * self.size[0] * self.size[1]
        return max(1, min(MAX_SHEET_FRAMES, SHEET_PIXELS // pixels))


@dataclass(frozen=True)
class Clip:
    """A clip: its facts and the file of raw frames, uint8 [frames, lanes, H, W, 3]."""

    info: ClipInfo
    path: Path
    token: str = field(default_factory=lambda: secrets.token_urlsafe(12))

    def read(self, start: int, stop: int) -> np.ndarray:
        """Frames [start, stop), uint8 [frames, lanes, H, W, 3]; a view of the file."""
        width, height = self.info.size
        shape = (self.info.frames, len(self.info.lanes), height, width, 3)
        return np.memmap(self.path, np.uint8, "r", shape=shape)[start:stop]

    def delete(self) -> None:
        self.path.unlink(missing_ok=True)


def fitting_frames(lanes: int, size: tuple[int, int], wanted: int | None = None) -> int:
    """How many frames a clip may hold."""
    most = MAX_CLIP_BYTES // (lanes * size[0] * size[1] * 3)
    return most if wanted is None else min(most, wanted)


def write_clip(folder: Path, info: ClipInfo, frames: Iterable[Sequence[np.ndarray]]) -> Clip:
    """A clip from frames, each a sequence of uint8 [H, W, 3], one per lane.

    `info.frames` is the most that is taken; the clip's own info holds what came.

    Raises:
        UserError: no frame came, or the disk has no room for the clip.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    require_room(folder, info.frames * info.frame_bytes)
    path = folder / f"clip-{secrets.token_hex(8)}.raw"
    count = 0
    try:
        with path.open("wb") as file:
            for together in frames:
                if count == info.frames:
                    break
                for picture in together:
                    file.write(np.ascontiguousarray(picture, dtype=np.uint8).data)
                count += 1
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    if count == 0:
        path.unlink(missing_ok=True)
        raise UserError(f"{info.title} holds no frame")
    kept = replace(
        info,
        frames=count,
        borders=tuple(b for b in info.borders if b < count),
        keys=info.keys[:count],
    )
    return Clip(kept, path)


def require_room(folder: Path, size: int) -> None:
    """UserError when the disk would be left with less than a recording needs."""
    from app.limits import MIN_FREE_DISK_BYTES

    free = shutil.disk_usage(folder).free
    if free - size < MIN_FREE_DISK_BYTES:
        raise UserError(
            f"the server's disk has {free // 2**20:,} MB left and this needs {size // 2**20:,} MB; "
            "inspect a shorter piece"
        )


class ClipStore:
    """The clips of one page, newest last."""

    def __init__(self) -> None:
        self._clips: dict[str, Clip] = {}
        self._lock = threading.Lock()

    def keep(self, clip: Clip) -> Clip:
        with self._lock:
            self._clips[clip.token] = clip
            gone = list(self._clips.values())[:-MAX_CLIPS]
            for old in gone:
                del self._clips[old.token]
        for old in gone:
            old.delete()
        return clip

    def get(self, token: object) -> Clip:
        """UserError when there is no such clip any more."""
        with self._lock:
            clip = self._clips.get(token) if isinstance(token, str) else None
        if clip is None:
            raise UserError("this clip is gone; open it again")
        return clip

    def delete(self) -> None:
        with self._lock:
            clips, self._clips = list(self._clips.values()), {}
        for clip in clips:
            clip.delete()

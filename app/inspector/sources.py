"""Where clips come from beside the live run: session folders and archives, videos of any origin."""

from __future__ import annotations

import re
import secrets
import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from app.inspector.clips import Clip, ClipInfo, fitting_frames, write_clip
from quantwm.comparison import RATE_TOLERANCE
from quantwm.errors import UserError
from quantwm.session_reader import Session, load_session
from quantwm.video_reader import VideoFacts, is_video, iter_video, probe_video, short_of
from quantwm.worlds.embedded.adapter import ASSETS
from quantwm.worlds.embedded.adapter import SPEC as EMBEDDED
from quantwm.worlds.embedded.weights import read_manifest

MAX_UPLOAD_BYTES = 512 * 2**20
MAX_UNPACKED_BYTES = 2 * 2**30
MAX_MEMBERS = 64
MAX_LANES = 4
MAX_SIDE = 1920
"""Of a picture: larger ones do not fit a pane. Ten minutes of 4K are refused when one frame of each
file is decoded, which takes 25 MB; what has more pixels than that is refused by its header."""
_WANTED = (".json", ".ndjson", ".csv", ".mkv", ".png")


def from_session(folder: Path, clips: Path, title: str) -> Clip:
    """A recorded session: its lossless videos, as many frames from the start as a clip holds.

    Raises:
        UserError: not a session, or one without videos.
    """
    session = load_session(folder)
    lanes = tuple(lane.name for lane in session.info.lanes if session.video(lane.name))
    if not lanes:
        raise UserError(f"{title} holds no lossless video; record it where PyAV is installed")
    lanes = _reference_first(lanes)[:MAX_LANES]
    notes = _session_notes(session)
    videos: list[Path] = [session.video(lane) for lane in lanes]  # type: ignore[misc]
    return _clip_of_videos(videos, lanes, clips, title, notes, session.info.fps, session)


def from_archive(archive: Path, clips: Path, title: str) -> Clip:
    """A session as the page's Download packs it. Nothing is unpacked but files that a session has,
    by their last name only, and never more than MAX_UNPACKED_BYTES."""
    folder = clips / f"unpacked-{secrets.token_hex(8)}"
    folder.mkdir(parents=True, mode=0o700)
    try:
        _unpack(archive, folder, title)
        with _named([folder], [title]):
            return from_session(folder, clips, title)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def from_videos(files: Sequence[tuple[Path, str]], clips: Path) -> Clip:
    """Two to four video files, (path, name) each; the first is the reference.

    Raises:
        UserError: too few or many, not videos, or of different size.
    """
    if not 2 <= len(files) <= MAX_LANES:
        raise UserError(f"open two to {MAX_LANES} videos together, or one session archive")
    names = _distinct([name for _, name in files])
    paths = [path for path, _ in files]
    title = " | ".join(names)
    with _named(paths, names) as renamed:
        facts = [
            replace(probe_video(path), name=name) for path, name in zip(paths, names, strict=True)
        ]
        clip = _clip_of_videos(paths, names, clips, title, _video_notes(facts), facts[0].rate)
        notes = tuple(renamed(note) for note in clip.info.notes)
        return replace(clip, info=replace(clip.info, notes=notes))


def from_uploads(files: Sequence[tuple[Path, str]], clips: Path) -> Clip:
    """What a person chose: one session archive, or videos."""
    if len(files) == 1 and zipfile.is_zipfile(files[0][0]):
        return from_archive(files[0][0], clips, files[0][1])
    for path, name in files:
        if not is_video(path):
            raise UserError(
                f"{name} is neither a video (mkv, webm, mp4, mov, avi) nor a session archive (zip)"
            )
    return from_videos(files, clips)


def _clip_of_videos(
    paths: Sequence[Path],
    lanes: tuple[str, ...],
    clips: Path,
    title: str,
    notes: tuple[str, ...],
    rate: float | None,
    session: Session | None = None,
) -> Clip:
    streams = [iter_video(path) for path in paths]
    firsts = [_first(stream, lane) for stream, lane in zip(streams, lanes, strict=True)]
    shape = firsts[0].shape
    for lane, frame in zip(lanes, firsts, strict=True):
        if frame.shape != shape:
            raise UserError(
                f"{lane} is {frame.shape[1]} x {frame.shape[0]} and {lanes[0]} is "
                f"{shape[1]} x {shape[0]}; videos that are compared have one size"
            )
    size = (shape[1], shape[0])
    if max(size) > MAX_SIDE:
        raise UserError(f"{title} is {size[0]} x {size[1]}; sides of at most {MAX_SIDE} are shown")
    most = fitting_frames(len(lanes), size)
    together = _Together(streams, firsts, most)
    info = ClipInfo(
        title=title,
        lanes=lanes,
        size=size,
        fps=round(rate, 3) if rate and 0.1 <= rate <= 240 else 24.0,
        frames=most,
        mode=session.info.mode if session else "",
    )
    clip = write_clip(clips, info, together.frames())
    notes = (*notes, *together.notes(lanes))
    info = replace(clip.info, notes=notes, **_chunks(session, clip.info.frames, together.cut))
    return replace(clip, info=info)


class _Together:
    """Frames of several streams together, and what ended them."""

    def __init__(
        self, streams: Sequence[Iterator[np.ndarray]], firsts: Sequence[np.ndarray], most: int
    ) -> None:
        self._streams, self._firsts, self._most = streams, firsts, most
        self._ended: list[int] = []
        self._broken: str | None = None
        self.cut = False

    def frames(self) -> Iterator[Sequence[np.ndarray]]:
        yield self._firsts
        shape, count = self._firsts[0].shape, 1
        while True:
            together: list[np.ndarray] = []
            for index, stream in enumerate(self._streams):
                try:
                    frame = next(stream, None)
                except UserError as error:
                    self._broken, frame = str(error), None
                if frame is None:
                    self._ended.append(index)
                elif frame.shape != shape:
                    self._broken = f"the pictures change their size at frame {count}"
                    self._ended.append(index)
                else:
                    together.append(frame)
            if self._ended:
                return
            if count == self._most:
                self.cut = True
                return
            yield together
            count += 1

    def notes(self, lanes: Sequence[str]) -> tuple[str, ...]:
        if self._broken:
            return (f"What could be read ends early: {self._broken}.",)
        if self.cut:
            return (f"Only the first {self._most:,} frames are shown: more would not fit.",)
        if 0 < len(self._ended) < len(lanes):
            short = ", ".join(lanes[index] for index in self._ended)
            return (f"{short} ends first; the rest of the others is not shown.",)
        return ()


def _first(stream: Iterator[np.ndarray], name: str) -> np.ndarray:
    for frame in islice(stream, 1):
        return frame
    raise UserError(f"{name} holds no frame")


def _video_notes(facts: Sequence[VideoFacts]) -> tuple[str, ...]:
    """How the files differ, and what was done about it, a sentence each."""
    notes = [
        f"{one.name} has a variable frame rate: frames are paired by their number."
        for one in facts
        if one.variable_rate
    ]
    rates = [one.rate for one in facts if one.rate and not one.variable_rate]
    if rates and max(rates) / min(rates) - 1 > RATE_TOLERANCE:
        each = ", ".join(f"{one.name} {one.rate:.4g}" for one in facts if one.rate)
        notes.append(f"Frames a second differ ({each}): frames are paired by their number.")
    notes += [
        f"{one.name} asks to be turned by {one.rotation} degrees; it is shown upright."
        for one in facts
        if one.rotation
    ]
    notes += [f"{note}." for note in map(short_of, facts) if note]
    if len({one.pixel_format for one in facts}) > 1:
        formats = ", ".join(one.pixel_format for one in facts)
        notes.append(f"Pixel formats differ ({formats}): all are shown as RGB.")
    return tuple(notes)


@contextmanager
def _named(paths: Sequence[Path], names: Sequence[str]) -> Iterator[Callable[[str], str]]:
    """Mistakes name files as the person named them, not as they lie on the server; gives what
    does the same to any text."""

    known: dict[str, str] = {}
    for path, name in zip(paths, names, strict=True):
        known.setdefault(str(path), name)
        known.setdefault(path.name, name)
    longest = sorted(known, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest)))

    def renamed(text: str) -> str:
        return pattern.sub(lambda found: known[found.group()], text)

    try:
        yield renamed
    except UserError as error:
        raise UserError(renamed(str(error))) from error


def _chunks(session: Session | None, frames: int, cut: bool) -> dict[str, Any]:
    """Where a session's chunks begin and what was held; nothing where that cannot be told."""
    shown = _shown(session, 0 if cut else frames) if session else ()
    borders: list[int] = []
    keys: list[tuple[str, ...]] = []
    for count, action in zip(shown, session.actions if session else (), strict=False):
        if len(keys) >= frames:
            break
        borders.append(len(keys))
        held = [tuple(sorted(names)) for names in action.frames]
        keys += [held[frame * len(held) // count] for frame in range(count)]
    return {"borders": tuple(borders), "keys": tuple(keys[:frames])} if borders else {}


def _shown(session: Session, frames: int) -> tuple[int, ...]:
    """Video frames of every chunk; empty where that cannot be told.

    An older session does not say it: equal chunks are taken if the frames of the whole session
    make whole latent frames in each, as they do in worlds whose first chunk is like the others.
    """
    chunks = len(session.actions)
    if chunks and all(session.shown):
        return session.shown
    per, rest = divmod(frames, chunks) if chunks else (0, 0)
    return () if rest or not per or per % session.info.frames_per_chunk else (per,) * chunks


def _session_notes(session: Session) -> tuple[str, ...]:
    notes = [f"{note[0].upper()}{note[1:]}." for note in session.notes]
    if not session.complete:
        notes.append("The recording was cut off; what had been written is shown.")
    own, made = _own_weights(session.info.world), session.info.weights_sha256
    if own not in (None, made):
        notes.append(
            f"It was recorded with weights {made[:12]}, this program has {own[:12]}: what is shown "
            "is the recording, a replay would show other frames."
        )
    return tuple(notes)


def _own_weights(world: str) -> str | None:
    """Hash of the weights that this program has of a world, as far as its manifest says."""
    if world != EMBEDDED.name:
        return None
    try:
        return read_manifest(ASSETS / "embedded").sha256
    except UserError:
        return None  # a machine without weights cannot tell


def _reference_first(lanes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(lanes, key=lambda name: name != "bf16"))


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    out: list[str] = []
    for number, name in enumerate(names, 1):
        whole = Path(name).name
        short = (whole if len(whole) <= 40 else whole[:39] + "\u2026") or f"video {number}"
        out.append(short if short not in out else f"{short} ({number})")
    return tuple(out)


def _unpack(archive: Path, folder: Path, title: str) -> None:
    try:
        with zipfile.ZipFile(archive) as packed:
            members = [m for m in packed.infolist() if not m.is_dir()]
            if len(members) > MAX_MEMBERS:
                raise UserError(f"{title} holds {len(members):,} files; a session has a few")
            if sum(m.file_size for m in members) > MAX_UNPACKED_BYTES:
                limit = MAX_UNPACKED_BYTES // 2**30
                raise UserError(f"{title} unpacks to more than {limit} GiB")
            for member in members:
                name = Path(member.filename).name
                if Path(name).suffix in _WANTED:
                    with packed.open(member) as source, (folder / name).open("wb") as target:
                        _copy(source, target, member.file_size, title)
    except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError, EOFError) as error:
        raise UserError(f"{title} cannot be unpacked: {' '.join(str(error).split())}") from error


def _copy(source: IO[bytes], target: IO[bytes], size: int, title: str) -> None:
    """At most the announced bytes: a bomb announces little and holds much."""
    left = size
    while block := source.read(1 << 20):
        left -= len(block)
        if left < 0:
            raise UserError(f"{title} holds more than it announces")
        target.write(block)

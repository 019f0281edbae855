"""The last minute of a run in raw frames: a ring file that the loop writes and the inspector reads.

The loop may run in a forked process and must never wait for a reader, so the ring is a file of
fixed slots, one chunk each, and a slot's head says which chunk it holds; a reader that meets a head
that changed while it copied drops that slot.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from app.inspector.clips import MAX_CLIP_BYTES, Clip, ClipInfo, require_room, write_clip
from quantwm.engine_types import BlockResult
from quantwm.errors import UserError

SECONDS = 60.0
HEAD_BYTES = 1024
MARGIN = 4
"""Oldest pieces of a full ring that are left out: the loop goes on while the rest is copied."""
_HEAD = struct.Struct("<qqI")
"""Number of the slot's piece (-1: being written), its first frame, bytes of its JSON."""


@dataclass(frozen=True)
class RingShape:
    """What the slots hold: pieces of at most `piece` frames of these lanes."""

    lanes: tuple[str, ...]
    size: tuple[int, int]
    fps: float
    piece: int
    slots: int
    mode: str

    @property
    def slot_bytes(self) -> int:
        width, height = self.size
        return HEAD_BYTES + self.piece * len(self.lanes) * width * height * 3


def ring_shape(
    lanes: tuple[str, ...], size: tuple[int, int], fps: float, piece: int, mode: str
) -> RingShape:
    """A ring for a minute, or for what MAX_CLIP_BYTES hold of it."""
    one = RingShape(lanes, size, fps, piece, 1, mode)
    slots = min(int(SECONDS * fps) // piece, MAX_CLIP_BYTES // one.slot_bytes)
    return RingShape(lanes, size, fps, piece, max(slots + MARGIN, 2 * MARGIN), mode)


class RingWriter:
    """Writes a run's chunks; the oldest one makes room. One writer per ring."""

    def __init__(self, folder: Path, shape: RingShape) -> None:
        """Raises UserError when the disk has no room."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path, facts = _paths(folder)
        facts.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        size = shape.slots * shape.slot_bytes
        require_room(folder, size)
        self._shape = shape
        self._map = np.memmap(path, np.uint8, "w+", shape=(shape.slots, shape.slot_bytes))
        for slot in range(shape.slots):
            self._head(slot, -1, 0, b"")
        self._next = self._frames = 0
        partial = facts.with_suffix(".part")
        partial.write_text(json.dumps(vars(shape)))
        partial.replace(facts)

    def push(self, block: BlockResult) -> None:
        """A chunk, cut into pieces where it is longer than a slot."""
        frames = np.stack([lane.frames for lane in block.lanes], axis=1)
        keys = [sorted(held) for held in block.action.frames]
        for start in range(0, len(frames), self._shape.piece):
            piece = frames[start : start + self._shape.piece]
            note = {"frames": len(piece), "border": start == 0, "keys": keys}
            self._write(piece, json.dumps(note).encode())

    def _write(self, piece: np.ndarray, note: bytes) -> None:
        slot = self._next % self._shape.slots
        self._head(slot, -1, 0, b"")
        data = piece.reshape(-1)
        self._map[slot, HEAD_BYTES : HEAD_BYTES + data.size] = data
        self._head(slot, self._next, self._frames, note)
        self._next += 1
        self._frames += len(piece)

    def _head(self, slot: int, number: int, first: int, note: bytes) -> None:
        head = _HEAD.pack(number, first, len(note)) + note[: HEAD_BYTES - _HEAD.size]
        self._map[slot, : len(head)] = np.frombuffer(head, np.uint8)


def take_clip(folder: Path, clips: Path) -> Clip:
    """A copy of what the ring in `folder` holds now, as a clip in `clips`.

    Raises:
        UserError: nothing has been driven yet.
    """
    path, facts = _paths(folder)
    try:
        shape = json.loads(facts.read_text())
    except (OSError, ValueError) as error:
        raise UserError("nothing has been driven on this page yet; press Drive first") from error
    ring = RingShape(**{**shape, "lanes": tuple(shape["lanes"]), "size": tuple(shape["size"])})
    reader = _RingReader(ring, path)
    pieces = reader.newest_run()
    if len(pieces) == ring.slots:
        pieces = pieces[MARGIN:]
    if not pieces:
        raise UserError("nothing has been driven on this page yet; press Drive first")
    total = sum(piece.frames for piece in pieces)
    info = ClipInfo(
        title="Live run",
        lanes=ring.lanes,
        size=ring.size,
        fps=ring.fps,
        frames=total,
        first=pieces[0].first,
        mode=ring.mode,
        live=True,
        notes=_notes(ring, total),
    )
    clip = write_clip(clips, info, reader.frames(pieces))
    return reader.complete(clip, pieces)


def _notes(ring: RingShape, frames: int) -> tuple[str, ...]:
    if (ring.slots - MARGIN) * ring.piece >= int(SECONDS * ring.fps) - ring.piece:
        return ()
    return (f"Pictures of this size leave room for the last {frames / ring.fps:.0f} seconds.",)


@dataclass(frozen=True)
class _Piece:
    slot: int
    number: int
    first: int
    frames: int
    border: bool
    keys: tuple[tuple[str, ...], ...]


class _RingReader:
    def __init__(self, ring: RingShape, path: Path) -> None:
        self._ring = ring
        self._map = np.memmap(path, np.uint8, "r", shape=(ring.slots, ring.slot_bytes))
        self._taken: list[int] = []

    def newest_run(self) -> list[_Piece]:
        """The pieces that follow each other up to the newest."""
        found = {}
        for slot in range(self._ring.slots):
            piece = self._piece(slot)
            if piece is not None:
                found[piece.number] = piece
        run: list[_Piece] = []
        number = max(found, default=-1)
        while number in found:
            run.append(found[number])
            number -= 1
        return run[::-1]

    def frames(self, pieces: list[_Piece]) -> Iterator[np.ndarray]:
        """Frame by frame [lanes, H, W, 3]; `complete` refuses the clip when a piece was
        overwritten meanwhile."""
        width, height = self._ring.size
        shape = (-1, len(self._ring.lanes), height, width, 3)
        for piece in pieces:
            size = piece.frames * len(self._ring.lanes) * width * height * 3
            data = self._map[piece.slot, HEAD_BYTES : HEAD_BYTES + size].copy()
            if self._number(piece.slot) != piece.number:
                self._taken.append(piece.number)
            yield from data.reshape(shape)

    def complete(self, clip: Clip, pieces: list[_Piece]) -> Clip:
        """The clip with borders and keys.

        Raises:
            UserError: a piece was overwritten while it was read; the clip is deleted.
        """
        if self._taken:
            clip.delete()
            raise UserError("the run went on too fast to be copied; pause it and inspect again")
        borders, keys, at = [], [], 0
        for piece in pieces:
            if piece.border:
                borders.append(at)
            per = piece.keys or ((),)
            for frame in range(piece.frames):
                keys.append(per[min(frame * len(per) // piece.frames, len(per) - 1)])
            at += piece.frames
        info = replace(clip.info, borders=tuple(borders), keys=tuple(keys))
        return replace(clip, info=info)

    def _number(self, slot: int) -> int:
        return _HEAD.unpack(self._map[slot, : _HEAD.size].tobytes())[0]

    def _piece(self, slot: int) -> _Piece | None:
        head = self._map[slot, :HEAD_BYTES].tobytes()
        number, first, size = _HEAD.unpack_from(head)
        if number < 0 or size > HEAD_BYTES - _HEAD.size:
            return None
        try:
            note = json.loads(head[_HEAD.size : _HEAD.size + size])
        except ValueError:
            return None  # being written at this moment
        keys = tuple(tuple(held) for held in note["keys"])
        return _Piece(slot, number, first, note["frames"], note["border"], keys)


def _paths(folder: Path) -> tuple[Path, Path]:
    return folder / "ring.raw", folder / "ring.json"

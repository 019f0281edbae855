"""What a page may say to the loop that drives: one idempotent snapshot, checked and time-stamped.

A snapshot always carries everything (held keys, run flag, counters, settings), so that a lost or
repeated message does no harm. The board that holds the newest one per session is an anonymous
shared memory map: a process forked for the GPU sees what the web process writes.
"""

from __future__ import annotations

import json
import math
import mmap
import threading
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from struct import Struct

from app import limits
from quantwm.errors import UserError

_HEAD = Struct("<II")
SLOT_BYTES = 32_768
"""A snapshot with its settings is below 1,000 bytes, and a prompt of 4,000 characters may take
24,000 more as JSON."""

CODE_TO_KEY = {
    "KeyW": ("w", "up"),
    "KeyA": ("a", "left"),
    "KeyS": ("s", "down"),
    "KeyD": ("d", "right"),
    "ArrowUp": ("up", "w"),
    "ArrowDown": ("down", "s"),
    "ArrowLeft": ("left", "a"),
    "ArrowRight": ("right", "d"),
    "KeyQ": ("q",),
    "KeyE": ("e",),
    "Space": ("space",),
}
"""Physical key (KeyboardEvent.code) -> names to try, best first: a world without an "up" key
walks with the up arrow all the same."""


ALL_KEYS = {name: code for code, names in CODE_TO_KEY.items() for name in names[:1]}
"""Key names that some world may know."""


def bind_keys(world_keys: Mapping[str, str]) -> dict[str, str]:
    """Physical key codes -> key names of this world, for those that it knows."""
    bound = {}
    for code, names in CODE_TO_KEY.items():
        for name in names:
            if name in world_keys:
                bound[code] = name
                break
    return bound


@dataclass(frozen=True)
class ControlSnapshot:
    """One state of a page's controls.

    Attributes:
        seq: grows with every message; an older one is dropped.
        keys: names of the keys held.
        run: the world should advance by itself.
        steps, resets, flushes, prompts: how often Single step, Reset, Download and Use this prompt
            were pressed, ever.
        stop: the page gives the world back.
        ack: index of the newest block that was drawn, -1 before the first.
        sent_ms: the page's clock, echoed with the block that obeyed this snapshot.
        received: time.monotonic() of the server (one clock for all processes of a machine).
        pressed: seq at which each key last went down, kept by the desk, so that a tap shorter
            than a chunk is not lost.
        settings: what Reset should start with, as the page sent it (checked where it is used).
    """

    seq: int = -1
    keys: frozenset[str] = frozenset()
    run: bool = False
    steps: int = 0
    resets: int = 0
    flushes: int = 0
    prompts: int = 0
    stop: bool = False
    ack: int = -1
    sent_ms: float = 0.0
    received: float = 0.0
    settings: Mapping[str, object] | None = None
    pressed: Mapping[str, int] = field(default_factory=dict)

    def effective(self, now: float, consumed: int, until: int | None = None) -> frozenset[str]:
        """Keys of the next chunk: those held, and those tapped since snapshot `consumed`.

        Held keys count for nothing once the page has been silent for too long (dead man). until:
        what went down in a later snapshot is left for the next chunk.
        """
        until = self.seq if until is None else until
        tapped = {key for key, seq in self.pressed.items() if consumed < seq <= until}
        held = {key for key in self.keys if self.pressed.get(key, until) <= until}
        silent = now - self.received > limits.DEAD_MAN_SECONDS
        return frozenset(tapped) if silent else frozenset(held | tapped)

    def next_tap(self, consumed: int) -> int:
        """The snapshot after `consumed` in which a key first went down; this one without any."""
        return min((seq for seq in self.pressed.values() if seq > consumed), default=self.seq)


def parse_snapshot(payload: object, known_keys: Mapping[str, str]) -> ControlSnapshot:
    """Check one message of a page.

    Raises:
        UserError: names the field, what it was and what it should be.
    """
    if not isinstance(payload, Mapping):
        raise UserError(f"a control message must be an object, got {type(payload).__name__}")
    keys = payload.get("keys", [])
    if not isinstance(keys, list) or len(keys) > limits.MAX_KEYS_HELD:
        raise UserError(f"keys must be a list of at most {limits.MAX_KEYS_HELD} names")
    for key in keys:
        if not isinstance(key, str) or key not in known_keys:
            raise UserError(f"unknown key {_short(key)}; this world knows {', '.join(known_keys)}")
    settings = payload.get("settings")
    if settings is not None and not isinstance(settings, Mapping):
        raise UserError("settings must be an object")
    return ControlSnapshot(
        seq=whole(payload.get("seq"), "seq", 0, 2**53),
        keys=frozenset(keys),
        run=flag(payload.get("run", False), "run"),
        steps=whole(payload.get("steps", 0), "steps", 0, 2**31),
        resets=whole(payload.get("resets", 0), "resets", 0, 2**31),
        flushes=whole(payload.get("flushes", 0), "flushes", 0, 2**31),
        prompts=whole(payload.get("prompts", 0), "prompts", 0, 2**31),
        stop=flag(payload.get("stop", False), "stop"),
        ack=whole(payload.get("ack", -1), "ack", -1, 2**31),
        sent_ms=number(payload.get("t", 0.0), "t", 0.0, 2**53),
        received=time.monotonic(),
        settings=dict(settings) if settings is not None else None,
    )


def whole(value: object, name: str, low: int, high: int) -> int:
    """A whole number in [low, high]; bool and float-with-fraction are refused."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UserError(f"{name} must be a whole number from {low} to {high}, got {_short(value)}")
    return value


def number(value: object, name: str, low: float, high: float) -> float:
    """A finite number in [low, high]."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not low <= value <= high:
        raise UserError(f"{name} must be a number from {low:g} to {high:g}, got {_short(value)}")
    return float(value)


def flag(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise UserError(f"{name} must be true or false, got {_short(value)}")
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


class Board:
    """Newest JSON object per slot in memory that forked processes share.

    One writer process per board and slot; a reader that meets a half-written record sees the
    checksum fail and tries again.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._map = mmap.mmap(-1, slots * SLOT_BYTES)
        self._lock = threading.Lock()

    def write(self, slot: int, record: Mapping[str, object]) -> None:
        body = json.dumps(record, separators=(",", ":")).encode()
        room = SLOT_BYTES - _HEAD.size
        if len(body) > room:
            raise UserError(
                f"a control message has {len(body):,} bytes; at most {room:,} are taken"
            )
        start = self._start(slot)
        with self._lock:
            self._map[start + _HEAD.size : start + _HEAD.size + len(body)] = body
            self._map[start : start + _HEAD.size] = _HEAD.pack(len(body), zlib.crc32(body))

    def read(self, slot: int) -> dict[str, object]:
        """The newest record, {} before the first."""
        start = self._start(slot)
        for _ in range(50):
            size, checksum = _HEAD.unpack(self._map[start : start + _HEAD.size])
            if size == 0:
                return {}
            if size <= SLOT_BYTES - _HEAD.size:
                body = bytes(self._map[start + _HEAD.size : start + _HEAD.size + size])
                if zlib.crc32(body) == checksum:
                    return json.loads(body)
            time.sleep(0.0005)
        return {}

    def clear(self, slot: int) -> None:
        start = self._start(slot)
        with self._lock:
            self._map[start : start + _HEAD.size] = _HEAD.pack(0, 0)

    def _start(self, slot: int) -> int:
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} of {self.slots}")
        return slot * SLOT_BYTES


class ControlDesk:
    """Takes snapshots in the web process and hands the newest to the loop that drives."""

    def __init__(self, slots: int = limits.MAX_SESSIONS) -> None:
        self._board = Board(slots)
        self._lock = threading.Lock()

    def submit(self, slot: int, snapshot: ControlSnapshot) -> bool:
        """Store a snapshot; False when a newer one is already there."""
        with self._lock:
            before = self.newest(slot)
            if snapshot.seq <= before.seq:
                return False
            down = dict.fromkeys(snapshot.keys - before.keys, snapshot.seq)
            pressed = {**before.pressed, **down}
            record = {**vars(snapshot), "keys": sorted(snapshot.keys), "pressed": pressed}
            self._board.write(slot, record)
            return True

    def newest(self, slot: int) -> ControlSnapshot:
        record = self._board.read(slot)
        if not record:
            return ControlSnapshot()
        return ControlSnapshot(**{**record, "keys": frozenset(record["keys"])})

    def forget(self, slot: int) -> None:
        self._board.clear(slot)

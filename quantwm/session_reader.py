"""Reads a session folder that may come from anybody: sizes, types and names are checked."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from quantwm.actions import MAX_FRAMES, action_from_json
from quantwm.cache.spec import CachePolicy
from quantwm.engine_types import LaneConfig
from quantwm.errors import UserError
from quantwm.session import (
    ACTIONS_FILE,
    FORMAT,
    METRICS_FILE,
    SESSION_FILE,
    START_FILE,
    VERSION,
    SessionInfo,
    check_name,
)
from quantwm.video import read_picture
from quantwm.worlds.base import ChunkAction

MAX_INFO_BYTES = 2**20
MAX_LINES_BYTES = 64 * 2**20
MAX_LANES = 16
MAX_PROMPT = 4_000  # characters of a prompt that was switched to
MAX_SHOWN = 4_096  # video frames of one chunk
MAX_TITLE = 200
DTYPES = ("bfloat16", "float32")

T = TypeVar("T")


@dataclass(frozen=True)
class Session:
    """A session read back.

    Attributes:
        complete: whether its writer closed it; a killed run can still be replayed.
        actions: of each generated chunk, in order.
        shown: video frames of each chunk; 0 where an older session does not say.
        prompts: block -> the prompt that was switched to before it.
        notes: what a person should know, one line each: that another version made it.
        frame_hashes: per lane the sha256 of the raw frames of each chunk, in order.
    """

    folder: Path
    info: SessionInfo
    complete: bool
    actions: tuple[ChunkAction, ...]
    frame_hashes: Mapping[str, tuple[str, ...]]
    prompts: Mapping[int, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    shown: tuple[int, ...] = ()

    def video(self, lane: str) -> Path | None:
        """The lossless video of a lane, if the session has one."""
        path = self.folder / f"{lane}.mkv"
        return path if path.is_file() else None

    def start_picture(self) -> np.ndarray | None:
        """The person's start frames, uint8 [T, H, W, 3], or None for a scene."""
        if not self.info.start_picture:
            return None
        picture = read_picture(self.folder / START_FILE)
        width, height = self.info.size
        if picture.shape[1] != width or picture.shape[0] % height:
            raise UserError(
                f"{START_FILE} holds frames of {width} x {height} below one another, "
                f"got {picture.shape[1]} x {picture.shape[0]}"
            )
        return picture.reshape(-1, height, width, 3)


def load_session(folder: Path) -> Session:
    """Read and check a session folder. No path that a file names is followed.

    Raises:
        UserError: one line that names the file, the field and what would be right.
    """
    if not folder.is_dir():
        raise UserError(f"no such session folder: {folder}")
    document = _read_json(folder / SESSION_FILE)
    if document.get("format") != FORMAT:
        raise UserError(
            f"{SESSION_FILE} is not a {FORMAT}: format {_shown(document.get('format'))}"
        )
    version = _integer(document, "version", 1, 1000)
    notes = () if version == VERSION else (_other_version(version),)
    try:
        info = _read_info(document)
    except UserError as error:
        raise UserError(" ".join((str(error), *(f"({note})" for note in notes)))) from error
    actions, prompts, shown = _read_actions(folder / ACTIONS_FILE, info)
    hashes = _read_hashes(folder / METRICS_FILE, info, len(actions))
    complete = document.get("complete") is True
    return Session(folder, info, complete, actions, hashes, prompts, notes, shown)


def _other_version(version: int) -> str:
    return (
        f"this session was made in version {version} of its form, this program knows {VERSION}: "
        "what it does not know is left out"
    )


def _read_info(document: Mapping[str, Any]) -> SessionInfo:
    world = _field(document, "world", str)
    check_name(world, "world")
    scene = document.get("scene")
    if scene is not None:
        scene = _field(document, "scene", str)
    tokens = document.get("max_tokens")
    if tokens is not None:
        tokens = _integer(document, "max_tokens", 1, 2**40)
    size = document.get("size")
    if not _is_list(size, int, 2) or not all(1 <= side <= 8192 for side in size):
        raise UserError(f"{SESSION_FILE}: size is [width, height] in pixels, got {_shown(size)}")
    keys = document.get("keys")
    if not _is_list(keys, str) or len(keys) > 256:
        raise UserError(f"{SESSION_FILE}: keys is a list of key names")
    mode = _field(document, "mode", str)
    if mode not in ("free", "teacher"):
        raise UserError(f"{SESSION_FILE}: mode is free or teacher, got {_shown(mode)}")
    actions, dtype = document.get("actions"), document.get("dtype")
    if dtype not in (None, *DTYPES):
        raise UserError(f"{SESSION_FILE}: dtype is {' or '.join(DTYPES)}, got {_shown(dtype)}")
    return SessionInfo(
        world=world,
        weights_sha256=_field(document, "weights_sha256", str),
        seed=_integer(document, "seed", 0, 2**63 - 1),
        scene=scene,
        prompt=_field(document, "prompt", str),
        start_picture=_field(document, "start_picture", bool),
        mode=mode,
        steps=_integer(document, "steps", 1, 1000),
        max_tokens=tokens,
        lanes=_read_lanes(document.get("lanes"), document.get("version") == VERSION),
        keys=tuple(keys),
        frames_per_chunk=_integer(document, "frames_per_chunk", 1, 1024),
        fps=_number(document, "fps", 0.01, 1000),
        size=(size[0], size[1]),
        device=_field(document, "device", str),
        hardware=_field(document, "hardware", dict),
        versions={str(k): str(v) for k, v in _field(document, "versions", dict).items()},
        kernels=_field(document, "kernels", str),
        actions=actions if isinstance(actions, str) else None,
        dtype=dtype,
        title=_field(document, "title", str)[:MAX_TITLE] if "title" in document else "",
    )


def _read_lanes(value: object, exact: bool) -> tuple[LaneConfig, ...]:
    if not _is_list(value, dict) or not 1 <= len(value) <= MAX_LANES:
        raise UserError(f"{SESSION_FILE}: lanes is a list of 1 to {MAX_LANES} lanes")
    lanes = []
    for entry in value:
        name = _field(entry, "name", str)
        check_name(name, "lane")
        settings = _field(entry, "settings", dict)
        if not all(isinstance(v, int | float | str | bool | None) for v in settings.values()):
            raise UserError(f"{SESSION_FILE}: settings of lane {name} are plain values")
        lanes.append(
            LaneConfig(
                name=name,
                method=_field(entry, "method", str),
                settings=settings,
                policy=_read_policy(_field(entry, "policy", dict), name, exact),
            )
        )
    if len({lane.name for lane in lanes}) != len(lanes):
        raise UserError(f"{SESSION_FILE}: two lanes have one name; names are distinct")
    return tuple(lanes)


def _read_policy(value: Mapping[str, Any], lane: str, exact: bool) -> CachePolicy:
    known = CachePolicy.__dataclass_fields__
    if exact and set(value) != set(known):
        raise UserError(f"{SESSION_FILE}: policy of lane {lane} has the fields {', '.join(known)}")
    value = {name: value[name] for name in known if name in value}
    for name, number in value.items():
        if number is None and name == "window_frames":
            continue
        if name == "compress_sink" and isinstance(number, bool):
            continue
        _integer(value, name, 0, 2**40)
    return CachePolicy(**value)


def _read_actions(
    path: Path, info: SessionInfo
) -> tuple[tuple[ChunkAction, ...], dict[int, str], tuple[int, ...]]:
    """Actions, prompts and video frames, as `Session` has them."""
    actions: list[ChunkAction] = []
    prompts: dict[int, str] = {}
    shown: list[int] = []
    lines = _read_text(path, MAX_LINES_BYTES).split("\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            entry = json.loads(line, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break  # a killed writer may leave its last line unfinished
            raise UserError(f"{path.name} line {number} is not JSON") from error
        if not isinstance(entry, dict) or entry.get("block") != len(actions) + 1:
            raise UserError(
                f"{path.name} line {number} is not the action of block {len(actions) + 1}"
            )
        actions.append(action_from_json(entry.get("frames"), info.keys, info.frames_per_chunk))
        frames = entry.get("shown", 0)
        if not _is_list([frames], int) or not 0 <= frames <= MAX_SHOWN:
            raise UserError(
                f"{path.name} line {number}: shown is a number of frames to {MAX_SHOWN}"
            )
        shown.append(frames)
        if "prompt" in entry:
            if not isinstance(entry["prompt"], str) or len(entry["prompt"]) > MAX_PROMPT:
                raise UserError(
                    f"{path.name} line {number}: a prompt has at most {MAX_PROMPT:,} characters"
                )
            prompts[len(actions)] = entry["prompt"]
        if len(actions) * info.frames_per_chunk > MAX_FRAMES + info.frames_per_chunk:
            raise UserError(f"{path.name} holds more than {MAX_FRAMES:,} latent frames")
    return tuple(actions), prompts, tuple(shown)


def _read_hashes(path: Path, info: SessionInfo, blocks: int) -> dict[str, tuple[str, ...]]:
    hashes: dict[str, list[str]] = {lane.name: [] for lane in info.lanes}
    rows = csv.DictReader(_read_text(path, MAX_LINES_BYTES).splitlines())
    try:
        for row in rows:
            lane, digest = row.get("lane"), row.get("frames_sha256") or ""
            whole = len(digest) == 64 and all(c in "0123456789abcdef" for c in digest)
            if lane not in hashes or not whole or row.get("block") != str(len(hashes[lane]) + 1):
                break  # the last row of a killed writer, or not ours: what follows is not compared
            hashes[lane].append(digest)
    except csv.Error as error:  # a field of more than 128 KiB is none of ours
        raise UserError(f"{path.name} line {rows.line_num} is not CSV: {error}") from error
    return {name: tuple(found[:blocks]) for name, found in hashes.items()}


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        document = json.loads(_read_text(path, MAX_INFO_BYTES), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path.name} is not JSON") from error
    if not isinstance(document, dict):
        raise UserError(f"{path.name} holds no JSON object")
    return document


def _read_text(path: Path, limit: int) -> str:
    if not path.is_file():
        raise UserError(f"{path.parent} holds no {path.name}; it is not a session folder")
    size = path.stat().st_size
    if size > limit:
        raise UserError(f"{path.name} has {size:,} bytes, at most {limit:,} are read")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path.name} cannot be read as UTF-8 text") from error


def _field(document: Mapping[str, Any], name: str, kind: type[T]) -> T:
    value = document.get(name)
    if not isinstance(value, kind) or (isinstance(value, str) and len(value) > 300_000):
        raise UserError(f"{SESSION_FILE}: {name} is of type {kind.__name__}, got {_shown(value)}")
    return value


def _integer(document: Mapping[str, Any], name: str, low: int, high: int) -> int:
    value = document.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UserError(f"{SESSION_FILE}: {name} is a whole number, {low} to {high}")
    return value


def _number(document: Mapping[str, Any], name: str, low: float, high: float) -> float:
    value = document.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise UserError(f"{SESSION_FILE}: {name} is a number from {low} to {high}")
    return float(value)


def _is_list(value: object, kind: type, length: int | None = None) -> bool:
    return (
        isinstance(value, list)
        and (length is None or len(value) == length)
        and all(isinstance(item, kind) and not (kind is int and item is True) for item in value)
    )


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

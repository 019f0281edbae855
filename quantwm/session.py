"""The session folder: what was run, the keys of every chunk, lossless video and metrics."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import numpy as np

from quantwm.actions import action_to_json, format_actions
from quantwm.engine_types import BlockResult, LaneConfig, LaneResult
from quantwm.errors import UserError
from quantwm.metrics import psnr_of_mse
from quantwm.session_plots import PlotLines
from quantwm.totals import ChangeWatch, RunTotals, errors_to_bf16
from quantwm.video import LosslessWriter, PreviewWriter, require_pyav
from quantwm.worlds.base import ChunkAction

FORMAT = "quantwm-session"
VERSION = 1

MIN_FREE_BYTES = 64 * 2**20
"""Recording ends when the disk has less left: the machine must stay usable."""

SESSION_FILE = "session.json"
ACTIONS_FILE = "actions.ndjson"
METRICS_FILE = "metrics.csv"
PREVIEW_FILE = "preview.mp4"
START_FILE = "start.png"
PLOTS_FILE = "plots.png"

NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,31}")
"""Names of lanes and worlds; a lane's name is also its video's, so it can hold no separator."""

METRICS_COLUMNS = (
    "block",
    "first_frame",
    "lane",
    "tokens",
    "kv_bytes",
    "ratio",
    "resident_ratio",
    "ms",
    "psnr_to_bf16",
    "temporal",
    "excess",
    "frames_sha256",
)


@dataclass(frozen=True)
class SessionInfo:
    """Everything that a run needs to be repeated, and on what it ran; session.json holds it.

    Attributes:
        start_picture: whether the start is a person's picture, kept in start.png, and no scene.
        keys: names of the world's keys. size: (width, height) of a frame.
        frames_per_chunk: latent frames. kernels: which kernels ran and why, one line.
        actions: the action string when the run had one.
        dtype: "bfloat16" or "float32", what the world computed in; None in older sessions.
        title: for people; empty unless somebody gave one.
    """

    world: str
    weights_sha256: str
    seed: int
    scene: str | None
    prompt: str
    start_picture: bool
    mode: str
    steps: int
    max_tokens: int | None
    lanes: tuple[LaneConfig, ...]
    keys: tuple[str, ...]
    frames_per_chunk: int
    fps: float
    size: tuple[int, int]
    device: str
    hardware: Mapping[str, object]
    versions: Mapping[str, str]
    kernels: str
    actions: str | None = None
    dtype: str | None = None
    title: str = ""


class SessionWriter:
    """Streams a session to a folder; a killed process leaves readable files.

    The command line and the page use it alike. `stopped` is None while it records; when the disk
    fills up it holds one line saying so, and further blocks are only counted.

    Raises:
        UserError: the folder is not empty or cannot be made, or PyAV is missing with video on.
    """

    def __init__(
        self,
        folder: Path,
        info: SessionInfo,
        *,
        video: bool = True,
        extras: bool = True,
        dense: bool = False,
        start_picture: np.ndarray | None = None,
    ) -> None:
        """video: of every lane, lossless. extras: the preview and the plots, for people. dense:
        smaller videos, of which a cut-off end is lost."""
        if video:
            require_pyav()
        for lane in info.lanes:
            check_name(lane.name, "lane")
        self.folder, self.info, self.totals = folder, info, RunTotals()
        self.stopped: str | None = None
        self._video, self._extras, self._dense = video, extras, dense
        self._picture = start_picture
        self._played: list[ChunkAction] = []
        self._lossless: dict[str, LosslessWriter] = {}
        self._preview: PreviewWriter | None = None
        self._actions: TextIO | None = None
        self._metrics: TextIO | None = None
        self._plots, self._changes = PlotLines(), ChangeWatch()
        _make_empty(folder)
        try:
            self._open()
        except OSError as error:
            self._stop(f"recording could not start in {folder}: {error.strerror or error}")

    def _open(self) -> None:
        self._write_info(complete=False)
        if self._picture is not None:
            _save_picture(self.folder / START_FILE, self._picture)
        self._actions = (self.folder / ACTIONS_FILE).open("w", encoding="utf-8")
        self._metrics = (self.folder / METRICS_FILE).open("w", encoding="utf-8", newline="")
        csv.writer(self._metrics).writerow(METRICS_COLUMNS)
        self._metrics.flush()
        if self._video:
            for lane in self.info.lanes:
                self._lossless[lane.name] = LosslessWriter(
                    self.folder / f"{lane.name}.mkv", self.info.fps, self._dense
                )
            if self._extras:
                self._preview = PreviewWriter(self.folder / PREVIEW_FILE, self.info.fps)

    def write(self, block: BlockResult) -> None:
        """Record one block. The start block is only counted: its frames ship with the world."""
        mse = errors_to_bf16(block, self.info.lanes)
        self.totals.add(block, mse)
        if self.stopped is not None or block.index == 0:
            return
        try:
            free = shutil.disk_usage(self.folder).free
            if free < MIN_FREE_BYTES:
                raise OSError(f"{free // 2**20} MiB are free on its disk")
            self._write_block(block, mse)
        except OSError as error:
            self._stop(f"recording ended at chunk {block.index}: {error.strerror or error}")

    def _write_block(self, block: BlockResult, mse: Mapping[str, np.ndarray]) -> None:
        if self._actions is None or self._metrics is None:
            raise UserError("this session is closed; open a new folder to record")
        self._played.append(block.action)
        line = {
            "block": block.index,
            "first_frame": block.first_frame,
            "frames": action_to_json(block.action),
            "shown": len(block.lanes[0].frames),
        }
        if block.prompt is not None:
            line["prompt"] = block.prompt
        self._actions.write(json.dumps(line) + "\n")
        rows = csv.writer(self._metrics)
        changes = self._changes.add(block, self.info.lanes)
        for lane in block.lanes:
            rows.writerow(_metrics_row(block, lane, mse.get(lane.name), changes[lane.name]))
            self._plot(lane, mse.get(lane.name), changes[lane.name][1])
            if lane.name in self._lossless:
                self._lossless[lane.name].write(lane.frames)
        if self._preview is not None:
            captions = [(lane.name, caption(lane)) for lane in block.lanes]
            self._preview.write([lane.frames for lane in block.lanes], captions)
        self._actions.flush()
        self._metrics.flush()

    def copy_to(self, folder: Path) -> None:
        """A whole session of what was recorded so far, in a new folder, while this one goes on.

        Videos are finished files with every frame in them; the preview may lack the last one.

        Raises:
            UserError: this session is closed or has stopped, or the folder cannot be written.
        """
        if self._actions is None or self._metrics is None:
            raise UserError("this session is closed: its folder is whole, copy that")
        _make_empty(folder)
        try:
            for name in (ACTIONS_FILE, METRICS_FILE, PREVIEW_FILE, START_FILE):
                if (self.folder / name).is_file():
                    shutil.copyfile(self.folder / name, folder / name)
            for name, writer in self._lossless.items():
                writer.copy_to(folder / f"{name}.mkv")
            self._plots.save(folder / PLOTS_FILE)
            self._write_info(complete=True, folder=folder)
        except OSError as error:
            raise UserError(
                f"the recording cannot be copied to {folder}: {error.strerror or error}"
            ) from error

    def close(self, complete: bool = True) -> None:
        """Finish all files; a second call does nothing. complete: whether the run went well."""
        if self._actions is None:
            return
        try:
            self._close_files()
            self._write_info(complete)
            if self._extras:
                self._plots.save(self.folder / PLOTS_FILE)
        except OSError as error:
            self.stopped = f"recording ended: {error.strerror or error}"

    def _stop(self, reason: str) -> None:
        self.stopped = f"{reason}; what was written before stays in {self.folder}"
        try:
            self._close_files()
        except OSError:
            # the disk is full: closing cannot write either, and `stopped` says so already
            self._actions = self._metrics = self._preview = None
            self._lossless = {}

    def _close_files(self) -> None:
        files = [*self._lossless.values(), self._preview, self._actions, self._metrics]
        self._lossless, self._preview = {}, None
        self._actions = self._metrics = None
        failure: OSError | None = None
        for file in files:
            try:
                if file is not None:
                    file.close()
            except OSError as error:
                failure = error
        if failure is not None:
            raise failure

    def _plot(self, lane: LaneResult, mse: np.ndarray | None, excess: float | None) -> None:
        psnr = None if mse is None else psnr_of_mse(float(mse.mean()))
        mib = lane.kv_bytes / 2**20
        self._plots.add(lane.name, psnr=psnr, excess=excess, mib=mib, ms=lane.ms)

    def _write_info(self, complete: bool, folder: Path | None = None) -> None:
        document = {
            "format": FORMAT,
            "version": VERSION,
            "complete": complete,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            **info_to_json(self.info),
        }
        if self._played:
            document["actions"] = document["actions"] or format_actions(self._played)
            document["frames"] = self.totals.frames
            document["blocks"] = len(self._played)
        write_atomically(
            (folder or self.folder) / SESSION_FILE, json.dumps(document, indent=2) + "\n"
        )

    def __enter__(self) -> SessionWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close(complete=kind is None)


def info_to_json(info: SessionInfo) -> dict[str, Any]:
    """SessionInfo as JSON types; `load_session` reads it back."""
    document = {name: getattr(info, name) for name in info.__dataclass_fields__}
    document["lanes"] = [
        {
            "name": lane.name,
            "method": lane.method,
            "settings": dict(lane.settings),
            "policy": asdict(lane.policy),
        }
        for lane in info.lanes
    ]
    return json.loads(json.dumps(document))


def frames_sha256(frames: np.ndarray) -> str:
    """Hash of the raw RGB bytes of some frames; lets a replay be checked without video."""
    return hashlib.sha256(np.ascontiguousarray(frames).tobytes()).hexdigest()


def caption(lane: LaneResult) -> str:
    """The second caption line of a lane in the preview."""
    ratio = "" if lane.ratio is None else f"  {lane.ratio:.2f}x"
    return f"KV {lane.kv_bytes / 2**20:.2f} MiB{ratio}  resident {lane.resident_ratio:.2f}x"


def check_name(name: str, what: str) -> None:
    """UserError unless a name is safe as a file name."""
    if not NAME.fullmatch(name):
        raise UserError(
            f"{what} name {name[:40]!r} is not usable: 1 to 32 lower-case letters, digits, _ . -"
        )


def write_atomically(path: Path, text: str) -> None:
    """Write a small text file so that readers see the old or the new one, never a part."""
    partial = path.with_name(path.name + ".part")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _metrics_row(
    block: BlockResult,
    lane: LaneResult,
    mse: np.ndarray | None,
    changes: tuple[float | None, float | None],
) -> tuple[object, ...]:
    psnr = "" if mse is None else f"{psnr_of_mse(float(mse.mean())):.4f}"
    ratio = "" if lane.ratio is None else f"{lane.ratio:.6f}"
    return (
        block.index,
        block.first_frame,
        lane.name,
        lane.tokens,
        lane.kv_bytes,
        ratio,
        f"{lane.resident_ratio:.6f}",
        f"{lane.ms:.3f}",
        psnr,
        *("" if value is None else f"{value:.4f}" for value in changes),
        frames_sha256(lane.frames),
    )


def check_folder(folder: Path) -> None:
    """UserError where a session cannot be written; nothing is made, and the disk may still say no
    later."""
    if os.path.exists(folder):
        _make_empty(folder)
        return
    place = next(parent for parent in folder.absolute().parents if os.path.exists(parent))
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise UserError(
            f"cannot use {folder} as a session folder: {place} cannot be written; "
            "name a folder that can be written"
        )


def _make_empty(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        occupied = any(folder.iterdir())
    except OSError as error:
        raise UserError(
            f"cannot use {folder} as a session folder: {error.strerror or error}; "
            "name a folder that can be written"
        ) from error
    if occupied:
        raise UserError(f"session folder {folder} is not empty; name a new one")


def _save_picture(path: Path, pictures: np.ndarray) -> None:
    """Start frames [H, W, 3] or [T, H, W, 3] below one another in one PNG, which is lossless."""
    from PIL import Image

    Image.fromarray(pictures.reshape(-1, *pictures.shape[-2:])).save(path)

"""What the page needs of the library, as one protocol; tests put a small engine behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from quantwm.engine_types import BlockResult, EngineLike
from quantwm.worlds.base import Scene, WorldSpec

Progress = Callable[[str, float], None]
"""Called with the name of a loading stage and how far it is, 0 to 1."""

MODES = {
    "free": "Free-running: every cache lives with its own past",
    "teacher": "Teacher-forced: every cache is given the BF16 lane's past, so what differs is the "
    "quantization of the history alone",
}


@dataclass(frozen=True)
class LaneChoice:
    """A lane that the page offers: its name, the cache method, and words for a visitor."""

    name: str
    method: str
    title: str
    note: str


@dataclass(frozen=True)
class Catalogue:
    """Everything the page shows before a world is loaded."""

    world: WorldSpec
    scenes: Sequence[Scene]
    lanes: Sequence[LaneChoice]
    chosen: tuple[str, ...]
    steps: int
    seed: int
    scene: str
    device: str
    accepts_picture: bool = True


@dataclass(frozen=True)
class Settings:
    """Checked choices of a visitor. `picture` numbers an uploaded start picture of the session."""

    scene: str
    seed: int
    lanes: tuple[str, ...]
    mode: str
    steps: int
    speed: float
    picture: int | None = None


class Recording(Protocol):
    """One session folder being written (quantwm.session.SessionWriter). `stopped` says why it
    ended by itself, None while it records."""

    stopped: str | None

    def write(self, block: BlockResult) -> None: ...

    def close(self) -> None: ...


class Backend(Protocol):
    """The one place behind the page that knows worlds, devices and kernels."""

    def catalogue(self) -> Catalogue:
        """Cheap: nothing is loaded."""
        ...

    def open(
        self, settings: Settings, picture: np.ndarray | None, progress: Progress
    ) -> EngineLike:
        """An engine that is ready to start; UserError when it cannot be had."""
        ...

    def record(
        self, folder: Path, settings: Settings, picture: np.ndarray | None, engine: EngineLike
    ) -> Recording:
        """Start recording a run into an empty folder."""
        ...


LANES: Mapping[str, LaneChoice] = {
    choice.name: choice
    for choice in (
        LaneChoice("bf16", "bf16", "BF16", "uncompressed reference"),
        LaneChoice("qvg", "qvg", "QVG", "2-bit, ternary residual"),
        LaneChoice("quantwm", "quantwm", "QuantWM", "2-bit, query-aware"),
        LaneChoice("qtc", "qtc", "QTC", "2.4-bit, transform code"),
    )
}
"""Words for the lanes that the library may offer."""

"""What the page needs of the library, as one protocol; tests put a small engine behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from quantwm.engine_types import BlockResult, EngineLike
from quantwm.worlds.base import Scene, Script, WorldSpec

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
class WorldCard:
    """One world in the picker.

    Attributes:
        name, title, note: for people. licence, source: of its weights.
        terms: what a person agrees to before a download, "" where the licence is free.
        weight_bytes: of the files. needed, capacity: bytes on the device with the proposed lanes,
            and the device's own, None when unknown.
        present: whether the files are here; problem: one line that says what is missing.
        advice: what would fit, one line, None where everything does.
        lanes: those that fit.
        offloads: whether that takes the transformer's blocks on the CPU, from where they visit the
            GPU one after the other; it is then done.
    """

    name: str
    title: str
    note: str
    licence: str
    source: str
    terms: str
    weight_bytes: int
    needed: int
    capacity: int | None
    present: bool
    problem: str | None
    advice: str | None
    lanes: tuple[str, ...]
    offloads: bool = False


@dataclass(frozen=True)
class Catalogue:
    """Everything the page shows before a world is loaded.

    scene: None for a world without start scenes. prompts: to begin with, the world's own first;
    empty where it takes none. scripts: actions that can be played.
    """

    world: WorldSpec
    scenes: Sequence[Scene]
    lanes: Sequence[LaneChoice]
    chosen: tuple[str, ...]
    steps: int
    seed: int
    scene: str | None
    device: str
    accepts_picture: bool = True
    prompts: tuple[str, ...] = ()
    scripts: Sequence[Script] = ()


@dataclass(frozen=True)
class Settings:
    """Checked choices of a visitor. `picture` numbers an uploaded start picture of the session;
    `script` names actions that are played while no key is held."""

    scene: str | None
    seed: int
    lanes: tuple[str, ...]
    mode: str
    steps: int
    speed: float
    picture: int | None = None
    world: str = ""
    prompt: str = ""
    script: str | None = None


class Recording(Protocol):
    """One session folder being written (quantwm.session.SessionWriter). `stopped` says why it
    ended by itself, None while it records."""

    stopped: str | None

    def write(self, block: BlockResult) -> None: ...

    def copy_to(self, folder: Path) -> None:
        """A whole recording of what there is so far, in an empty folder; UserError without room."""
        ...

    def close(self) -> None: ...


class Backend(Protocol):
    """The one place behind the page that knows worlds, devices and kernels."""

    def worlds(self) -> Sequence[WorldCard]:
        """All worlds, the proposed one first. Cheap: nothing is loaded."""
        ...

    def catalogue(self, world: str = "") -> Catalogue:
        """Of a world, "" for the proposed one. Cheap. UserError on an unknown name."""
        ...

    def fits_beside(self, world: str) -> bool:
        """Whether a world may be loaded while the one in memory is driven."""
        ...

    def load(self, world: str, progress: Progress) -> None:
        """Put a world in the place of the one in memory; UserError leaves that one usable."""
        ...

    def download(self, world: str, agreed: bool, progress: Progress) -> None:
        """Fetch a world's files; returns when they are here."""
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
        LaneChoice("kivi", "kivi", "KIVI", "2-bit, by channel and token"),
        LaneChoice("rtn", "rtn", "RTN", "2-bit, nearest level"),
        LaneChoice("qvg-pro", "qvg-pro", "QVG Pro", "four residual stages"),
        LaneChoice("bf16-floor", "bf16:floor", "Noise floor", "BF16, another kernel"),
    )
}
"""Words for the lanes that the library may offer."""


def methods(lanes: Sequence[str]) -> list[str]:
    """The cache methods behind the page's names of lanes."""
    return [LANES[name].method if name in LANES else name for name in lanes]


def page_name(method: str) -> str:
    """The page's name of a cache method; a method that it has no words for is its own name."""
    return next((choice.name for choice in LANES.values() if choice.method == method), method)

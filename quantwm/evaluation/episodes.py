"""Truth episodes: what really happened under known keys, all frames or only those that count."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quantwm.errors import UserError
from quantwm.sheets import read_sheet, write_sheet
from quantwm.worlds.embedded.config import KEYS

JSON_LIMIT = 1_000_000  # bytes
MAX_FRAMES = 10_000
KINDS = ("turn", "back", "long", "keys", "still", "walk")


@dataclass(frozen=True)
class Episode:
    """Context, then what the keys led to.

    Attributes:
        kind: one of KINDS. context: frames at the start that a world is given.
        frames: uint8 [N, H, W, 3], the true frames that are stored.
        index: int [N], where in the episode each of them stands, ascending.
        keys: uint8 [T, 6] in the order of KEYS, held during the step that led to a frame.
        poses: float32 [T, 3], x and y in map units and heading in degrees after each step.
        origin: how to make it again.
    """

    kind: str
    context: int
    frames: np.ndarray
    index: np.ndarray
    keys: np.ndarray
    poses: np.ndarray
    origin: Mapping[str, Any]

    @property
    def length(self) -> int:
        """Frames of the whole episode, T."""
        return len(self.keys)

    def held(self, frame: int) -> frozenset[str]:
        """The keys of one frame."""
        return frozenset(name for name, on in zip(KEYS, self.keys[frame], strict=True) if on)

    def frame(self, index: int) -> np.ndarray:
        """A stored true frame uint8 [H, W, 3]. UserError where it is not stored."""
        place = int(np.searchsorted(self.index, index))
        if place == len(self.index) or self.index[place] != index:
            raise UserError(f"the truth of this {self.kind} episode has no frame {index}")
        return self.frames[place]

    def has(self, index: int) -> bool:
        """Whether a true frame is stored."""
        return bool((self.index == index).any())

    def clip(self, start: int, stop: int) -> np.ndarray:
        """Stored true frames start ... stop - 1, uint8 [n, H, W, 3]."""
        return np.stack([self.frame(i) for i in range(start, stop)])

    def only(self, index: list[int]) -> Episode:
        """The episode with only these of its frames stored."""
        chosen = sorted(set(index))
        frames = np.stack([self.frame(i) for i in chosen])
        return Episode(
            self.kind, self.context, frames, np.asarray(chosen), self.keys, self.poses, self.origin
        )


def save_episode(folder: Path, episode: Episode, packed: bool = True) -> None:
    """Writes episode.json and the frames: packed by `write_sheet`, or plain as frames.npy."""
    folder.mkdir(parents=True, exist_ok=True)
    if packed:
        write_sheet(folder / "frames.webp", episode.frames)
    else:
        np.save(folder / "frames.npy", episode.frames)
    data = {
        "kind": episode.kind,
        "context": episode.context,
        "index": episode.index.tolist(),
        "keys": ["".join(str(int(on)) for on in row) for row in episode.keys],
        "poses": [[round(float(value), 2) for value in pose] for pose in episode.poses],
        "origin": dict(episode.origin),
        "size": [episode.frames.shape[2], episode.frames.shape[1]],
    }
    # last, so that a folder with this file is whole
    (folder / "episode.json").write_text(json.dumps(data, separators=(",", ":")) + "\n", "utf-8")


def load_episode(folder: Path) -> Episode:
    """Reads an episode's folder. UserError says what is wrong with it."""
    path = folder / "episode.json"
    if not path.is_file():
        raise UserError(f"no truth episode in {folder}: episode.json is missing")
    if path.stat().st_size > JSON_LIMIT:
        raise UserError(f"{path} is larger than {JSON_LIMIT:,} bytes: not a truth episode")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        keys = np.asarray([[int(c) for c in row] for row in data["keys"]], np.uint8)
        episode = Episode(
            kind=str(data["kind"]),
            context=int(data["context"]),
            frames=_read_frames(folder, len(data["index"]), tuple(data["size"])),
            index=np.asarray(data["index"], np.int64),
            keys=keys,
            poses=np.asarray(data["poses"], np.float32),
            origin=dict(data["origin"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"the truth in {folder} is damaged ({error!r}); make it again") from error
    _check(path, episode)
    return episode


def load_folder(folder: Path) -> list[Episode]:
    """Every episode below a folder, in the order of their paths. UserError when there is none."""
    paths = sorted(folder.glob("**/episode.json"))
    if not paths:
        raise UserError(
            f"no truth episodes in {folder}; make them with python -m training.truth --out {folder}"
        )
    return [load_episode(path.parent) for path in paths]


def _read_frames(folder: Path, count: int, size: tuple[int, int]) -> np.ndarray:
    plain = folder / "frames.npy"
    if not plain.is_file():
        return read_sheet(folder / "frames.webp", count, size)
    frames = np.load(plain, mmap_mode="r", allow_pickle=False)
    if frames.dtype != np.uint8 or frames.shape != (count, size[1], size[0], 3):
        raise ValueError(f"frames.npy is {frames.dtype} {frames.shape}")
    return frames


def _check(path: Path, episode: Episode) -> None:
    length = episode.length
    fits = (
        episode.kind in KINDS
        and 0 < episode.context < length <= MAX_FRAMES
        and episode.keys.shape == (length, len(KEYS))
        and int(episode.keys.max(initial=0)) <= 1
        and episode.poses.shape == (length, 3)
        and bool((np.diff(episode.index) > 0).all())
        and episode.index[0] >= 0
        and episode.index[-1] < length
        and bool(np.isfinite(episode.poses).all())
        and type(episode.origin.get("map_seed")) is int
    )
    if not fits:
        raise UserError(f"{path} is no truth episode: its parts do not fit; make the truth again")

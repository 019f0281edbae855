"""Start scenes from maps never trained on: python -m training.scenes --out assets/scenes.

Records a few candidates per scene and keeps, of each, the 16 frames whose view is liveliest.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quantwm.errors import UserError
from quantwm.worlds.embedded.config import KEYS, PRESETS
from quantwm.worlds.embedded.scenes import SceneClip, save_scene
from training.frames import UNSEEN_SEED, Episode, Recorder, episode_path, load_episode

FIRST_SEED = UNSEEN_SEED + 500_000
"""Beyond the maps that runs are measured on (UNSEEN_SEED onwards)."""


@dataclass(frozen=True)
class Choice:
    """One scene of the shipped set: name, title, map seed, first frame of the clip."""

    name: str
    title: str
    seed: int
    first_frame: int


CHOICES = (
    Choice("blue-carpet", "Into the green marble room", FIRST_SEED, 160),
    Choice("bare-tree", "The bare tree in the grey hall", FIRST_SEED + 5, 68),
    Choice("green-column", "Past the green column", FIRST_SEED + 6, 8),
    Choice("lamps", "Four lamps, orange brick", FIRST_SEED + 7, 8),
    Choice("red-carpet", "The timber room with the red carpet", FIRST_SEED + 12, 168),
    Choice("white-stones", "White stones, blue pillar", FIRST_SEED + 17, 168),
    Choice("two-pillars", "Two red pillars", FIRST_SEED + 18, 60),
    Choice("timber-hall", "Across the timber hall", FIRST_SEED + 21, 180),
)
"""Picked by eye from the contact sheet that --candidates draws."""


def liveliness(episode: Episode, first: int, frames: int) -> float:
    """Colour and depth of the last view, for picking: spread of colours plus detail."""
    view = episode.frames[first + frames - 1].astype(np.float32)
    chroma = np.abs(view - view.mean(axis=2, keepdims=True)).mean()
    detail = np.abs(np.diff(view, axis=1)).mean()
    quarters = view.reshape(4, 24, 4, 32, 3).mean(axis=(1, 3))
    return float(quarters.std(axis=(0, 1)).mean() + chroma + detail)


def best_start(episode: Episode, frames: int) -> int:
    """First frame of the liveliest clip that walks forward in most of its frames."""
    walks = episode.keys[:, KEYS.index("w")]
    starts = [
        first
        for first in range(8, len(episode.frames) - frames, 4)
        if walks[first + 1 : first + frames].mean() > 0.6
    ]
    return max(starts or [8], key=lambda first: liveliness(episode, first, frames))


def record_maps(seeds: list[int], length: int, folder: Path, processes: int) -> list[Episode]:
    recorder = Recorder(seeds, length, folder, processes)
    recorder.wait(600)
    if recorder.given_up:
        raise UserError(f"the engine gave no frames for map {recorder.given_up[0]}; run again")
    return [load_episode(episode_path(folder, seed)) for seed in seeds]


def draw_candidates(path: Path, count: int, length: int, folder: Path, processes: int) -> None:
    """A contact sheet of the liveliest clip of many maps; rows are seeds in order."""
    import imageio.v3 as imageio

    frames = PRESETS["shipped"].context_frames
    seeds = [FIRST_SEED + i for i in range(count)]
    rows = []
    for seed, episode in zip(seeds, record_maps(seeds, length, folder, processes), strict=True):
        first = best_start(episode, frames)
        print(f"row {len(rows)}: seed {seed} first_frame {first}")
        clip = episode.frames[first : first + frames]
        rows.append(np.concatenate([clip[i] for i in (0, 5, 10, 15)], axis=1))
    half = (len(rows) + 1) // 2
    columns = [np.concatenate(rows[:half]), np.concatenate(rows[half:])]
    pad = columns[0].shape[0] - columns[1].shape[0]
    columns[1] = np.pad(columns[1], ((0, pad), (0, 0), (0, 0)))
    imageio.imwrite(path, np.concatenate(columns, axis=1))


def write_scenes(out: Path, length: int, folder: Path, processes: int) -> None:
    frames = PRESETS["shipped"].context_frames
    episodes = record_maps([c.seed for c in CHOICES], length, folder, processes)
    for choice, episode in zip(CHOICES, episodes, strict=True):
        span = slice(choice.first_frame, choice.first_frame + frames)
        keys = tuple(
            frozenset(name for name, held in zip(KEYS, row, strict=True) if held)
            for row in episode.keys[span]
        )
        origin = {"map_seed": choice.seed, "first_frame": choice.first_frame}
        save_scene(out, choice.name, choice.title, SceneClip(episode.frames[span], keys), origin)
        print(f"{out / choice.name}: {choice.title}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("assets/scenes"))
    parser.add_argument("--length", type=int, default=200, help="frames recorded per map")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--candidates", type=int, help="draw so many candidates to OUT, a PNG")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quantwm-scenes-") as scratch:
        folder = Path(scratch)
        if args.candidates:
            draw_candidates(args.out, args.candidates, args.length, folder, args.processes)
        else:
            write_scenes(args.out, args.length, folder, args.processes)


if __name__ == "__main__":
    main()

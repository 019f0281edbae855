"""Start scenes, action scripts and their truth from maps never trained on, all into one folder.

python -m training.scenes --out assets makes what ships: the scenes of CHOICES, the scripts of
SHOWS and the true frames that the small acceptance table needs.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from quantwm.actions import format_actions, pack_frames
from quantwm.errors import UserError
from quantwm.evaluation.episodes import Episode, save_episode
from quantwm.worlds.base import Script
from quantwm.worlds.embedded.config import KEYS
from quantwm.worlds.embedded.scenes import SceneClip, save_scene
from quantwm.worlds.embedded.scripts import save_script
from training.choreography import CONTEXT, PARTS, Part, perform, scout
from training.frames import HEIGHT, UNSEEN_SEED, WIDTH, open_engine, require_engine
from training.frames import load_episode as load_recorded
from training.inputs import in_one_line, need_between, open_folder, stored_shape
from training.maps import MAX_MAPS, GameMap, build_map, is_open
from training.moves import CHUNK, StuckError, stand
from training.walker import FULL_TURN

if TYPE_CHECKING:
    from vizdoom import DoomGame

FIRST_SEED = UNSEEN_SEED + 500_000
"""Beyond the maps that runs are measured on (UNSEEN_SEED onwards)."""


@dataclass(frozen=True)
class Choice:
    """One scene of the shipped set: name, title, map (from FIRST_SEED), first frame of the clip.

    script: the scripted walk that starts here; its scene ends standing still.
    """

    name: str
    title: str
    seed: int
    first_frame: int
    script: str = ""


CHOICES = (
    Choice("bare-trees", "Two bare trees and a door", 33, 42),
    Choice("blue-pillar", "The blue pillar in the orange room", 1, 30, "long-walk"),
    Choice("carpet-pillars", "Blue pillars on the red carpet", 5, 126, "full-turn"),
    Choice("dead-stump", "The dead stump in the blue room", 7, 106),
    Choice("green-column", "The green column in the green hall", 18, 142),
    Choice("green-tree", "The green tree in the red room", 4, 56, "standing-still"),
    Choice("hedge-door", "Hedges and a door of light", 6, 52),
    Choice("lamp-hall", "Lamps in the timber hall", 43, 8),
    Choice("marble-pillars", "Red pillars, white marble", 15, 104),
    Choice("red-columns", "Red columns in the orange room", 22, 18, "there-and-back"),
    Choice("sand-brick", "A young tree between walls of sand", 24, 48),
    Choice("stone-columns", "Red columns in the stone room", 0, 100),
)
"""Picked by eye from the contact sheet that --candidates draws."""
ROOM_AHEAD = 300.0
"""Map units to walk straight on at a start that is proposed: nine frames of walking."""


@dataclass(frozen=True)
class Show:
    """One shipped action script: its walk and which of its true frames are kept."""

    title: str
    part: Part
    keep: Callable[[int], list[int]]


def _ends(every: int) -> Callable[[int], list[int]]:
    """The first and last two chunks after the context, and every n-th frame between."""
    ends = 2 * CHUNK

    def keep(length: int) -> list[int]:
        first = range(CONTEXT, CONTEXT + ends)
        return [*first, *range(CONTEXT, length, every), *range(length - ends, length)]

    return keep


def _turn_frames(length: int) -> list[int]:
    """All of the first turn, the quarters of the second."""
    quarters = range(length - 1, length - FULL_TURN, -FULL_TURN // 4)
    return [*range(CONTEXT, length - FULL_TURN), *quarters]


SHOWS = {
    "full-turn": Show(
        "A full turn, and a second one that must find the same room",
        PARTS["turn"],
        _turn_frames,
    ),
    "there-and-back": Show(
        "Through a door, round, and back to where it began",
        PARTS["back"],
        _ends(8),
    ),
    "long-walk": Show(
        "A long walk through several rooms and all the way back",
        PARTS["long"],
        _ends(16),
    ),
    "standing-still": Show(
        "Standing still: what moves now should not",
        PARTS["still"],
        _ends(24),
    ),
}


def liveliness(view: np.ndarray) -> float:
    """Colour and depth of a view uint8 [H, W, 3], for picking: spread of colours plus detail."""
    view = view.astype(np.float32)
    chroma = np.abs(view - view.mean(axis=2, keepdims=True)).mean()
    detail = np.abs(np.diff(view, axis=1)).mean()
    quarters = view.reshape(4, 24, 4, 32, 3).mean(axis=(1, 3))
    return float(quarters.std(axis=(0, 1)).mean() + chroma + detail)


def room_ahead(game_map: GameMap, pose: Sequence[float]) -> float:
    """Map units from x, y (degrees: pose[2]) straight on until a wall or a thing stops the walk."""
    x, y, angle = (float(value) for value in pose)
    along, across = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    distance = 0.0
    while is_open(game_map, x + along * distance, y + across * distance):
        distance += 8.0
    return distance


def best_start(episode: Episode, game_map: GameMap) -> int:
    """First frame of the liveliest clip that ends with room ahead; else of the most room."""
    ahead = {
        first: min(room_ahead(game_map, episode.poses[first + CONTEXT - 1]), ROOM_AHEAD)
        for first in range(8, episode.length - CONTEXT, 2)
    }
    widest = max(ahead.values())
    starts = [first for first, room in ahead.items() if room == widest]
    return max(starts, key=lambda first: liveliness(episode.frames[first + CONTEXT - 1]))


@contextlib.contextmanager
def engine(seeds: Sequence[int]) -> Iterator[tuple[DoomGame, list[GameMap]]]:
    """The engine with the maps of some seeds, in a temporary folder that it may litter."""
    home = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="quantwm-scenes-") as scratch:
        os.chdir(scratch)
        try:
            maps = [build_map(seed) for seed in seeds]
            game = open_engine(Path(scratch), maps)
            yield game, maps
            with contextlib.suppress(Exception):
                game.close()  # it may crash then; what it gave is kept
        finally:
            os.chdir(home)


def draw_candidates(path: Path, count: int, length: int) -> None:
    """A contact sheet of the liveliest clip of many maps; rows are seeds in order."""
    import imageio.v3 as imageio

    path = path.resolve()
    seeds = [FIRST_SEED + i for i in range(count)]
    rows = []
    with engine(seeds) as (game, maps):
        for number, (seed, game_map) in enumerate(zip(seeds, maps, strict=True), start=1):
            episode = scout(game, number, game_map, seed, length)
            first = best_start(episode, game_map)
            ahead = room_ahead(game_map, episode.poses[first + CONTEXT - 1])
            print(
                f"row {len(rows)}: seed {seed - FIRST_SEED}, first_frame {first}, "
                f"{ahead:.0f} units ahead"
            )
            clip = episode.frames[first : first + CONTEXT]
            rows.append(np.concatenate([clip[i] for i in (0, 5, 10, 15)], axis=1))
    half = (len(rows) + 1) // 2
    columns = [np.concatenate(rows[:half]), np.concatenate(rows[half:])]
    pad = columns[0].shape[0] - columns[1].shape[0]
    columns[1] = np.pad(columns[1], ((0, pad), (0, 0), (0, 0)))
    imageio.imwrite(path, np.concatenate(columns, axis=1))


def check_episodes_for_scenes(folder: Path, count: int) -> None:
    """UserError when no scene can be cut out of the folder's first episodes."""
    need_between("--count", count, 1)
    paths = sorted(folder.glob("episode-*.npz"))
    if not paths:
        raise UserError(f"no episodes in {folder}; make them with python -m training.frames")
    for path in paths[:count]:
        shape = stored_shape(path)
        if shape[1:] != (HEIGHT, WIDTH, 3) or shape[0] < CONTEXT + 8:
            raise UserError(
                f"{path} has frames of {list(shape)}; a scene is cut out of [{CONTEXT + 8} or "
                f"more, {HEIGHT}, {WIDTH}, 3]"
            )


def cut_scenes(folder: Path, out: Path, count: int) -> None:
    """Writes OUT/scenes from recorded episodes, of whatever maps: the liveliest clip of each."""
    for path in sorted(folder.glob("episode-*.npz"))[:count]:
        episode, name = load_recorded(path), path.stem.replace("episode", "start")
        last = range(8 + CONTEXT - 1, len(episode.frames), 2)
        end = max(last, key=lambda frame: liveliness(episode.frames[frame])) + 1
        held = [
            frozenset(name for name, on in zip(KEYS, row, strict=True) if on)
            for row in episode.keys[end - CONTEXT : end]
        ]
        clip = SceneClip(episode.frames[end - CONTEXT : end], tuple(held))
        origin = {"episode": path.stem, "first_frame": end - CONTEXT}
        save_scene(out / "scenes", name, name.replace("start-", "Start "), clip, origin)
        print(f"scene {name}: frames {end - CONTEXT} to {end - 1} of {path}")


def write_all(out: Path) -> None:
    """Writes OUT/scenes, OUT/scripts and OUT/truth."""
    seeds = [FIRST_SEED + choice.seed for choice in CHOICES]
    out = out.resolve()
    with engine(seeds) as (game, maps):
        for number, (choice, game_map) in enumerate(zip(CHOICES, maps, strict=True), start=1):
            show = SHOWS.get(choice.script)
            part = show.part if show else Part("still", False, stand, CHUNK)
            seed = FIRST_SEED + choice.seed
            try:
                episode = perform(game, number, game_map, seed, part, choice.first_frame)
            except StuckError as error:
                raise UserError(
                    f"the walk {choice.script} cannot be walked from {choice.name}; choose "
                    f"another seed or first_frame in training/scenes.py"
                ) from error
            held = [episode.held(frame) for frame in range(episode.length)]
            clip = SceneClip(episode.frames[:CONTEXT], tuple(held[:CONTEXT]))
            save_scene(out / "scenes", choice.name, choice.title, clip, dict(episode.origin))
            ahead = room_ahead(game_map, episode.poses[CONTEXT - 1])
            print(f"scene {choice.name}: {choice.title}, {ahead:.0f} units ahead")
            if show:
                actions = format_actions(pack_frames(held[CONTEXT:], CHUNK))
                written = Script(choice.script, show.title, actions, choice.name)
                save_script(out / "scripts", written)
                origin = {**episode.origin, "scene": choice.name}
                kept = replace(episode, origin=origin).only(show.keep(episode.length))
                save_episode(out / "truth" / choice.script, kept)
                print(f"script {choice.script}: {episode.length - CONTEXT} frames")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("assets"))
    parser.add_argument("--candidates", type=int, help="draw so many candidates to OUT, a PNG")
    parser.add_argument("--length", type=int, default=160, help="frames of a candidate's walk")
    parser.add_argument("--episodes", type=Path, help="cut scenes out of recorded episodes instead")
    parser.add_argument("--count", type=int, default=12, help="scenes from --episodes")
    args = parser.parse_args()
    if args.episodes is not None:
        check_episodes_for_scenes(args.episodes, args.count)
        cut_scenes(args.episodes, open_folder(args.out, "--out"), args.count)
        return
    require_engine()
    if args.candidates is not None:
        need_between("--candidates", args.candidates, 1, MAX_MAPS)
        need_between("--length", args.length, CONTEXT + 16, 10_000)
        if args.out.suffix.lower() != ".png":
            raise UserError(f"--out must be a PNG for candidates, got {args.out}")
        open_folder(args.out.resolve().parent, "--out")
        draw_candidates(args.out, args.candidates, args.length)
    else:
        write_all(open_folder(args.out, "--out"))


if __name__ == "__main__":
    raise SystemExit(in_one_line(main))

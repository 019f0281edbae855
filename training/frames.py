"""Frames and keys from the engine: worker processes that walk generated maps and save episodes."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from quantwm.errors import UserError
from quantwm.worlds.embedded.config import KEYS
from training.explorer import Explorer
from training.inputs import in_one_line, need_between, open_folder
from training.maps import GameMap, build_map, pack_wad
from training.own_maps import OwnMaps, choose_names, is_whole_game
from training.progress import Tally
from training.walker import Pose, Walker
from training.walks import PieceWalker, is_of_pieces

if TYPE_CHECKING:
    from vizdoom import DoomGame

HEIGHT, WIDTH = 96, 128
TICS_PER_FRAME = 4  # of 35 a second: 8.75 frames a second
SPAWN_TICS = 12  # input has no effect during the first 7 tics of an episode
MAPS_PER_PROCESS = 32
ATTEMPTS = 3
WALKS = 4  # on somebody's map, of which some may end in a pit
UNSEEN_SEED = 1_000_000
"""Seeds from here on make maps that no training run sees."""


AnyWalker = Walker | PieceWalker | Explorer


@dataclass(frozen=True)
class Episode:
    """frames uint8 [T, 96, 128, 3]; keys uint8 [T, 6], held during the step that led to a frame."""

    frames: np.ndarray
    keys: np.ndarray


def require_engine() -> None:
    """UserError when the engine's package is missing."""
    try:
        import vizdoom  # noqa: F401
    except ImportError as error:
        raise UserError(
            "frames are made with ViZDoom, which is not installed: pip install vizdoom==1.3.2"
        ) from error


def episode_path(folder: Path, seed: int) -> Path:
    return folder / f"episode-{seed:07d}.npz"


def hopeless_path(folder: Path, seed: int) -> Path:
    """There when every walk of an episode ended early: a second attempt would walk the same."""
    return folder / f".{seed}.hopeless"


def load_episode(path: Path) -> Episode:
    with np.load(path) as data:
        return Episode(data["frames"], data["keys"])


def open_engine(folder: Path, maps: Sequence[GameMap]) -> DoomGame:
    """Starts the engine on a PWAD with the maps. It litters `folder`, which should be temporary."""
    wad = folder / "maps.wad"
    wad.write_bytes(pack_wad(list(maps)))
    return start_engine(folder, wad, "freedoom2.wad")


def open_own(folder: Path, own: OwnMaps) -> DoomGame:
    """Starts the engine on somebody's WAD, with Freedoom's art where it brings none."""
    if is_whole_game(own.wad):
        return start_engine(folder, None, str(own.wad))
    first = own.names[0].startswith("E") and own.names[0][2:3] == "M"  # E1M1, as the first game
    return start_engine(folder, own.wad, "freedoom1.wad" if first else "freedoom2.wad")


def start_engine(folder: Path, wad: Path | None, art: str) -> DoomGame:
    """art: a whole game's WAD, a file of the engine's package or a path; wad: maps on top of it."""
    import vizdoom

    game = vizdoom.DoomGame()
    game.set_doom_game_path(str(Path(vizdoom.__file__).parent / art))
    if wad is not None:
        game.set_doom_scenario_path(str(wad))
    game.set_doom_config_path(str(folder / "_vizdoom.ini"))
    game.set_screen_resolution(vizdoom.ScreenResolution.RES_512X384)
    game.set_screen_format(vizdoom.ScreenFormat.RGB24)
    for what in (
        "hud", "weapon", "crosshair", "decals", "particles", "effects_sprites", "messages",
        "corpses", "screen_flashes",
    ):  # fmt: skip
        getattr(game, f"set_render_{what}")(False)
    button = vizdoom.Button
    game.set_available_buttons(
        [
            button.MOVE_FORWARD, button.MOVE_BACKWARD, button.MOVE_LEFT, button.MOVE_RIGHT,
            button.TURN_LEFT_RIGHT_DELTA,
        ]
    )  # fmt: skip
    variable = vizdoom.GameVariable
    game.set_available_game_variables([variable.POSITION_X, variable.POSITION_Y, variable.ANGLE])
    game.set_window_visible(False)
    game.set_sound_enabled(False)
    game.set_mode(vizdoom.Mode.PLAYER)
    game.set_episode_timeout(0)
    game.add_game_args("+movebob 0 +stillbob 0 +sv_nomonsters 1")
    game.init()
    return game


def step(game: DoomGame, keys: frozenset[str]) -> None:
    """Holds the keys for one frame.

    The engine keeps headings in 1/65536 of a turn and rounds each tic. Three tics of 341 units and
    one of 342 make 7.498 degrees, so that 48 frames turn 359.91 degrees (0.1 pixels short);
    7.5 / 4 degrees a tic would be rounded to 7.515 and 48 frames would overshoot by a pixel.
    """
    moves = [float(name in keys) for name in ("w", "s", "a", "d")]
    way = ("right" in keys) - ("left" in keys)
    unit = 360.0 / 65536
    game.set_action([*moves, way * 341 * unit])
    game.advance_action(TICS_PER_FRAME - 1, False)  # nothing is drawn that nobody sees
    game.make_action([*moves, way * 342 * unit], 1)


def shrink(screen: np.ndarray) -> np.ndarray:
    """uint8 [384, 512, 3] -> [96, 128, 3]: mean of 4 x 4 pixels, rounded.

    From 2 x 2 pixels, far textures flicker: the same autoencoder reconstructs frames made from
    4 x 4 by 1.0 to 2.3 dB better. Added up slice by slice, because sum() over two inner axes took
    6.8 ms a frame, four times as long as the engine.
    """
    rows = screen[0::4].astype(np.uint16)
    for i in (1, 2, 3):
        rows += screen[i::4]
    quads = rows.reshape(HEIGHT, WIDTH, 4, 3)
    total = quads[:, :, 0] + quads[:, :, 1] + quads[:, :, 2] + quads[:, :, 3]
    return ((total + 8) // 16).astype(np.uint8)


def play_episode(game: DoomGame, name: str, walker: AnyWalker, length: int) -> Episode | None:
    """Walks a map of the loaded WAD for `length` frames; None when the player leaves it or dies."""
    game.set_doom_map(name)
    game.new_episode()
    game.make_action([0.0] * 5, SPAWN_TICS)
    frames = np.empty((length, HEIGHT, WIDTH, 3), np.uint8)
    keys = np.zeros((length, len(KEYS)), np.uint8)
    for t in range(length):
        state = game.get_state()
        if t:
            held = walker.keys(Pose(*(float(v) for v in state.game_variables)))
            keys[t] = [name in held for name in KEYS]
            step(game, held)
            state = game.get_state()
        if state is None:
            return None
        frames[t] = shrink(state.screen_buffer)
    return Episode(frames, keys)


def record(
    seeds: Sequence[int], length: int, folder: str, pieces: float = 0.0, own: OwnMaps | None = None
) -> None:
    """One worker's work: an episode file per seed, each whole as soon as it has its final name.

    pieces: share of the episodes that are made of scripted walks (training/walks.py); own: maps
    that are walked instead of generated ones.
    """
    target = Path(folder)
    with tempfile.TemporaryDirectory(prefix="quantwm-frames-") as scratch:
        os.chdir(scratch)
        maps = [] if own else [build_map(seed) for seed in seeds]
        game = open_own(Path(scratch), own) if own else open_engine(Path(scratch), maps)
        for number, seed in enumerate(seeds):
            game.set_seed(seed)
            if own:
                episode = explore(game, own, seed, length, is_of_pieces(seed, pieces))
            else:
                walker = PieceWalker if is_of_pieces(seed, pieces) else Walker
                name = f"map{number + 1:02d}"
                episode = play_episode(game, name, walker(maps[number], seed), length)
            if episode is None:
                hopeless_path(target, seed).touch()
                continue
            partial = Path(scratch) / "episode.npz"
            np.savez(partial, frames=episode.frames, keys=episode.keys)
            hidden = target / f".{seed}.part"
            hidden.write_bytes(partial.read_bytes())
            hidden.replace(episode_path(target, seed))
        # The engine may crash while it closes; every episode is on disk by now.
        with contextlib.suppress(Exception):
            game.close()
        os.chdir(target)


def explore(game: DoomGame, own: OwnMaps, seed: int, length: int, pieces: bool) -> Episode | None:
    """An episode on somebody's map; another walk where one dies or leaves, None after some."""
    for walk in range(WALKS):
        walker = Explorer(seed + 10_000_000 * walk, pieces)
        episode = play_episode(game, own.of_seed(seed), walker, length)
        if episode is not None:
            return episode
    return None


@dataclass
class _Worker:
    """One process, the seeds it was given, which attempt this is, and when it is given up."""

    process: subprocess.Popen[bytes]
    seeds: list[int]
    attempt: int
    deadline: float


class Recorder:
    """Keeps a number of worker processes busy until every seed has its episode or was given up.

    A crashed or hung engine costs its unfinished episodes one attempt; they go to a new process.
    """

    def __init__(
        self, seeds: Sequence[int], length: int, folder: Path, processes: int,
        patience: float = 60, pieces: float = 0.0, own: OwnMaps | None = None,
    ) -> None:  # fmt: skip
        """patience: seconds for a process to start, and again for each of its episodes; pieces:
        share of the episodes that are made of scripted walks; own: maps to walk in."""
        require_engine()
        need_between("--length", length, 2)
        need_between("--processes", processes, 1)
        if len(seeds):
            need_between("the first map", min(seeds), 0)
        self._folder = folder.resolve()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._length, self._processes, self._patience = length, processes, patience
        self._pieces, self._own = pieces, own
        self._seeds = list(seeds)
        missing = self._missing(self._seeds)
        size = max(1, min(MAPS_PER_PROCESS, -(-len(missing) // processes)))
        self._queue = [(missing[i : i + size], 1) for i in range(0, len(missing), size)]
        self._running: list[_Worker] = []
        self._closed = threading.Event()
        self.given_up: list[int] = []

    def _missing(self, seeds: list[int]) -> list[int]:
        return [seed for seed in seeds if not episode_path(self._folder, seed).exists()]

    def _without_hopeless(self, seeds: list[int]) -> list[int]:
        """Those that another attempt may bring; the others are given up."""
        hopeless = [seed for seed in seeds if hopeless_path(self._folder, seed).exists()]
        self._forget(hopeless)
        self.given_up += hopeless
        return [seed for seed in seeds if seed not in hopeless]

    def _forget(self, seeds: list[int]) -> None:
        for seed in seeds:
            hopeless_path(self._folder, seed).unlink(missing_ok=True)

    def poll(self) -> bool:
        """Starts and collects workers without waiting; True while anything is left to do."""
        still = []
        for worker in self._running:
            if worker.process.poll() is None:
                if time.monotonic() < worker.deadline:
                    still.append(worker)
                    continue
                worker.process.kill()
                worker.process.wait()
            missing = self._without_hopeless(self._missing(worker.seeds))
            if missing and worker.attempt < ATTEMPTS:
                self._queue.append((missing, worker.attempt + 1))
            else:
                self.given_up += missing
        self._running = still
        while self._queue and len(self._running) < self._processes:
            seeds, attempt = self._queue.pop(0)
            self._running.append(self._start(seeds, attempt))
        return bool(self._running or self._queue)

    def _start(self, seeds: list[int], attempt: int) -> _Worker:
        self._forget(seeds)
        root = Path(__file__).resolve().parent.parent
        command = [
            sys.executable, "-m", "training.frames", "--length", str(self._length),
            "--out", str(self._folder), "--pieces", str(self._pieces),
            *(self._own.arguments if self._own else ()), "--seeds", *map(str, seeds),
        ]  # fmt: skip
        process = subprocess.Popen(
            command, cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        patience = self._patience * (1 + len(seeds))
        return _Worker(process, seeds, attempt, time.monotonic() + patience)

    @property
    def there(self) -> int:
        """How many of the episodes are recorded."""
        return len(self._seeds) - len(self._missing(self._seeds))

    def wait(self, seconds: float = float("inf"), tally: Tally | None = None) -> None:
        """Polls until done, closed, or the time is over, then stops what still runs; tally: is told
        how many are there."""
        end = time.monotonic() + seconds
        while not self._closed.is_set() and self.poll() and time.monotonic() < end:
            if tally is not None and tally.is_due():
                tally.say(self.there)
            time.sleep(0.1)
        for worker in self._running:
            worker.process.kill()
            worker.process.wait()
        self._running, self._queue = [], []

    def close(self) -> None:
        """Makes a `wait` in another thread come to its end."""
        self._closed.set()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the episode files")
    parser.add_argument("--length", type=int, default=512, help="frames of an episode")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seeds", type=int, nargs="+", help="record these maps in this process")
    which.add_argument("--count", type=int, help="record maps first ... first + count - 1")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--pieces", type=float, default=0.0, help="share made of scripted walks")
    parser.add_argument("--wad", type=Path, help="walk the maps of this WAD, not generated ones")
    parser.add_argument("--maps", nargs="+", help="only these of its maps")
    args = parser.parse_args()
    require_engine()
    if args.maps and args.wad is None:
        raise UserError("--maps names maps of a WAD; give --wad FILE too")
    own = OwnMaps(args.wad.resolve(), choose_names(args.wad, args.maps)) if args.wad else None
    open_folder(args.out, "--out")
    need_between("--pieces", args.pieces, 0, 1)
    if args.seeds:
        need_between("--seeds", min(args.seeds), 0)
        os.nice(10)  # the process that trains meanwhile, and its compiler, come first
        record(args.seeds, args.length, str(args.out.resolve()), args.pieces, own)
        return
    need_between("--count", args.count, 1)
    seeds = range(args.first, args.first + args.count)
    start = time.monotonic()
    recorder = Recorder(seeds, args.length, args.out, args.processes, pieces=args.pieces, own=own)
    recorder.wait(tally=Tally("episodes", len(seeds), recorder.there))
    seconds = time.monotonic() - start
    done = len(seeds) - len(recorder.given_up)
    if not done:
        raise UserError(
            f"no episode of {args.count} came about: the engine crashed, or the player died or "
            f"left the map in every walk; see what it says with --seeds {args.first}"
        )
    report = {"episodes": done, "frames": done * args.length, "seconds": round(seconds, 1)}
    print(json.dumps({**report, "given_up": recorder.given_up}))


if __name__ == "__main__":
    raise SystemExit(in_one_line(main))

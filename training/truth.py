"""Truth of unseen maps for the acceptance table: python -m training.truth --out DIR --maps 32."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from quantwm.errors import UserError
from quantwm.evaluation.episodes import save_episode
from training.choreography import PARTS, perform
from training.frames import UNSEEN_SEED, open_engine, require_engine
from training.inputs import in_one_line, need_between, open_folder
from training.maps import build_map
from training.moves import StuckError
from training.progress import Tally

FIRST_SEED = UNSEEN_SEED + 600_000
"""Maps of the acceptance table: none is trained on, measured during training or a start scene."""
FIRST_FRAMES = (24, 60, 100, 140, 180)
"""Where a walk may begin; the next one is tried where its door cannot be reached."""
LONG_EVERY = 4
"""The long walk, as long as all the rest together, is walked on every fourth map."""
MAPS_PER_PROCESS = 8
ATTEMPTS = 3
PATIENCE = 180.0  # seconds for one process's maps


def record(seeds: Sequence[int], out: Path, first: int) -> None:
    """One process: every part of every map into OUT/SEED/KIND, what exists already left alone."""
    with tempfile.TemporaryDirectory(prefix="quantwm-truth-") as scratch:
        out = out.resolve()
        home = Path.cwd()
        os.chdir(scratch)  # the engine litters its working directory
        maps = [build_map(seed) for seed in seeds]
        game = open_engine(Path(scratch), maps)
        for number, (seed, game_map) in enumerate(zip(seeds, maps, strict=True), start=1):
            for part in PARTS.values():
                target = out / str(seed) / part.kind
                wanted = part.kind != "long" or (seed - first) % LONG_EVERY == 0
                if not wanted or (target / "episode.json").exists():
                    continue
                for first_frame in FIRST_FRAMES:
                    with contextlib.suppress(StuckError):
                        episode = perform(game, number, game_map, seed, part, first_frame)
                        save_episode(target, episode, packed=False)
                        break
        os.chdir(home)
        # The engine may crash while it closes; every episode is on disk by now.
        with contextlib.suppress(Exception):
            game.close()


def record_all(seeds: Sequence[int], out: Path, processes: int) -> None:
    """Several processes at once; what a crashed or hung one left out is tried again."""
    size = max(1, min(MAPS_PER_PROCESS, -(-len(seeds) // processes)))
    tally = Tally("maps", len(seeds), len(seeds) - len(missing(seeds, out)))
    for _ in range(ATTEMPTS):
        unmade = missing(seeds, out)
        if not unmade:
            return
        waiting = [unmade[i : i + size] for i in range(0, len(unmade), size)]
        running: list[tuple[subprocess.Popen[bytes], float]] = []
        while waiting or running:
            while waiting and len(running) < processes:
                running.append((_start(waiting.pop(), seeds[0], out), time.monotonic() + PATIENCE))
            time.sleep(0.05)
            if tally.is_due():
                tally.say(len(seeds) - len(missing(seeds, out)))
            for process, deadline in running:
                if time.monotonic() > deadline:
                    process.kill()
            running = [each for each in running if each[0].poll() is None]
    if missing(seeds, out):
        raise UserError(
            f"the engine gave no truth for map {missing(seeds, out)[0]}; run again, or see what it "
            f"says: python -m training.truth --out {out} --seeds {missing(seeds, out)[0]}"
        )


def _start(seeds: Sequence[int], first: int, out: Path) -> subprocess.Popen[bytes]:
    command = [
        sys.executable, "-m", "training.truth", "--out", str(out.resolve()),
        "--first", str(first), "--seeds", *map(str, seeds),
    ]  # fmt: skip
    root = Path(__file__).resolve().parent.parent
    return subprocess.Popen(command, cwd=root, stdout=subprocess.DEVNULL)


def missing(seeds: Sequence[int], out: Path) -> list[int]:
    """Maps without a walk: the last part, so the map's process did not come to its end."""
    last = list(PARTS)[-1]
    return [seed for seed in seeds if not (out / str(seed) / last / "episode.json").exists()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the episodes")
    parser.add_argument("--maps", type=int, default=32)
    parser.add_argument("--first", type=int, default=FIRST_SEED, help="seed of the first map")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seeds", type=int, nargs="+", help="these maps, in this process")
    args = parser.parse_args()
    require_engine()
    open_folder(args.out, "--out")
    need_between("--first", args.first, 0)
    if args.seeds:
        need_between("--seeds", min(args.seeds), 0)
        record(args.seeds, args.out, args.first)
        return
    need_between("--maps", args.maps, 1)
    need_between("--processes", args.processes, 1)
    began = time.monotonic()
    record_all(range(args.first, args.first + args.maps), args.out, args.processes)
    episodes = {kind: len(list(args.out.glob(f"*/{kind}/episode.json"))) for kind in PARTS}
    seconds = round(time.monotonic() - began, 1)
    print(json.dumps({"maps": args.maps, "episodes": episodes, "seconds": seconds}))


if __name__ == "__main__":
    raise SystemExit(in_one_line(main))

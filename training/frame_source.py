"""The episodes of a run, while they are being recorded by it or by another in the same folder."""

from __future__ import annotations

import argparse
import threading
import time
from pathlib import Path

import torch

from quantwm.errors import UserError
from training.data import FramePool, load_folder
from training.frames import UNSEEN_SEED, Recorder
from training.own_maps import OwnMaps, choose_maps
from training.plans import RunPlan
from training.progress import Log


class FrameSource:
    """Starts the recorders and hands out what they have made so far.

    Unseen and training maps are recorded side by side, and training goes on with more of them as
    they come: waiting for all would leave the GPU idle for minutes.
    """

    def __init__(
        self, plan: RunPlan, args: argparse.Namespace, work: Path, device: torch.device, log: Log
    ) -> None:
        self._unseen = {
            work / "unseen": plan.unseen_episodes, work / "returns": plan.return_episodes,
        }  # fmt: skip
        self._device, self._log = device, log
        self._recorders: list[Recorder] = []
        self._threads: list[threading.Thread] = []
        own, apart = own_maps(args, log)
        self.pool = FramePool(work / "frames", plan.episodes, plan.length, device)
        if not args.no_record:
            first, some = 10_000 * args.seed, max(1, args.processes // 4)
            unseen = UNSEEN_SEED
            for pieces, (folder, count) in enumerate(self._unseen.items()):
                seeds = range(unseen, unseen + count)
                processes, share = max(1, some // 2), float(pieces)
                self._record(seeds, plan.unseen_length, folder, processes, share, apart)
                unseen += 1000
            rest = max(1, args.processes - some)
            seeds = range(first, first + plan.episodes)
            self._record(seeds, plan.length, work / "frames", rest, plan.pieces, own)
        self.pool.follow()

    def _record(
        self, seeds: range, length: int, folder: Path, processes: int, pieces: float,
        own: OwnMaps | None,
    ) -> None:  # fmt: skip
        recorder = Recorder(seeds, length, folder, processes, pieces=pieces, own=own)
        thread = threading.Thread(target=recorder.wait, args=(1800,), name="recorder", daemon=True)
        thread.start()
        self._recorders.append(recorder)
        self._threads.append(thread)

    def unseen(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Frames and keys of the unseen maps, waited for: ordinary walks, and scripted ones."""
        for thread in self._threads[: len(self._unseen)]:
            thread.join(timeout=300)
        if not self._threads:
            for folder, count in self._unseen.items():
                wait_for_files(folder, count, 300)
        return [load_folder(folder, self._device) for folder in self._unseen]

    def close(self) -> None:
        """Stops what still records; a second call does nothing."""
        for recorder in self._recorders:
            recorder.close()
        for thread in self._threads:
            thread.join(timeout=30)
        self.pool.stop()
        if self._recorders:
            lost = sum(len(recorder.given_up) for recorder in self._recorders)
            self._log.event("recorded", episodes=self.pool.count, given_up=lost)
        self._recorders, self._threads = [], []


def wait_for_files(folder: Path, count: int, seconds: float, patience: float = 40) -> None:
    """Until so many episodes are there, or some are and no more come for `patience` seconds: a few
    may have been given up. UserError when there are none in time."""
    end, found, last = time.monotonic() + seconds, 0, time.monotonic()
    while (now := len(list(folder.glob("episode-*.npz")))) < count:
        if now > found:
            found, last = now, time.monotonic()
        if found and time.monotonic() - last > patience:
            return
        if time.monotonic() > end:
            raise UserError(f"{folder} has {now} of {count} episodes; leave out --no-record")
        time.sleep(0.2)


def own_maps(
    args: argparse.Namespace, log: Log | None = None
) -> tuple[OwnMaps | None, OwnMaps | None]:
    """Somebody's maps to train on and those to measure on, where any were given."""
    if args.wad is None:
        return None, None
    own, apart = choose_maps(args.wad, args.maps, args.unseen_maps)
    if log is not None:
        log.event("maps", trained=" ".join(own.names), unseen=" ".join(apart.names))
        if set(own.names) & set(apart.names):
            log.event("MEASURED ON TRAINED MAPS", reason="fewer than three: other walks, same maps")
    return own, apart

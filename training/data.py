"""Pools of episodes on the training device: frames as they arrive from disk, then their latents."""

from __future__ import annotations

import threading
import time
import zipfile
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch

from quantwm.errors import UserError
from quantwm.worlds.embedded.autoencoder import Autoencoder, to_signed
from quantwm.worlds.embedded.config import KEYS
from quantwm.worlds.embedded.pose import START, as_array, follow
from training.frames import HEIGHT, WIDTH, Episode, load_episode
from training.revisits import find_revisits, fitting_revisits, starts_with_revisit

UNREADABLE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)
"""What reading a damaged episode may raise."""


@dataclass(frozen=True)
class ClipBatch:
    """latents [B, T, C, h, w]; keys float32 [B, T, 6]; poses [B, T, 3]; marks int64 [B, 2]: frames
    of a revisit and of what it revisits, from the clip's start, -1 where none was chosen."""

    latents: torch.Tensor
    keys: torch.Tensor
    poses: torch.Tensor
    marks: torch.Tensor

    def with_more(self, more: ClipBatch) -> ClipBatch:
        """These clips, then those."""
        pairs = [(getattr(self, f.name), getattr(more, f.name)) for f in fields(self)]
        return ClipBatch(*(torch.cat(pair) for pair in pairs))

    def chosen(self, index: torch.Tensor) -> ClipBatch:
        """Clips by number."""
        return ClipBatch(*(getattr(self, f.name)[index] for f in fields(self)))


class FramePool:
    """Episodes as uint8 [capacity, length, H, W, 3], keys [capacity, length, 6] and the poses that
    follow from them, float32 [capacity, length, 3], on a device.

    A thread copies episode files in as workers finish them; `count` of them are usable.
    """

    def __init__(
        self, folder: Path, capacity: int, length: int, device: torch.device | str
    ) -> None:
        shape = (capacity, length, HEIGHT, WIDTH, 3)
        self.frames = torch.empty(shape, dtype=torch.uint8, device=device)
        self.keys = torch.zeros(capacity, length, len(KEYS), dtype=torch.uint8, device=device)
        self.poses = torch.zeros(capacity, length, 3, device=device)
        self.count = 0
        self.problem = ""
        self._folder, self._length = folder, length
        self._seen: set[Path] = set()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def load_new(self) -> int:
        """Copies episodes that appeared since the last call; returns how many are usable."""
        for path in sorted(self._folder.glob("episode-*.npz")):
            if path in self._seen or self.count >= len(self.frames) or self._stop.is_set():
                continue
            self._seen.add(path)
            try:
                episode = load_episode(path)
            except UNREADABLE as error:
                # one damaged file among hundreds must not end an unattended run
                self.problem = f"; {path.name} cannot be read: {error}"
                continue
            problem = episode_problem(episode, tuple(self.frames.shape[1:]))
            if problem:
                self.problem = f"; {path.name} was left out: {problem}"
                continue
            self.frames[self.count].copy_(torch.from_numpy(episode.frames))
            self.keys[self.count].copy_(torch.from_numpy(episode.keys))
            self.poses[self.count].copy_(reckoned_poses(episode.keys))
            self.count += 1
        return self.count

    def follow(self) -> None:
        """Starts the thread."""
        self._thread = threading.Thread(target=self._follow, name="frame-pool", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while not self._stop.is_set():
            self.load_new()
            self._stop.wait(0.2)

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._stop.clear()

    def wait_for(self, episodes: int, seconds: float) -> None:
        """Waits until so many episodes are usable. UserError when they do not come in time."""
        end = time.monotonic() + seconds
        while self.count < episodes:
            if time.monotonic() > end:
                raise UserError(
                    f"only {self.count} of the {episodes} episodes needed to start came in "
                    f"{seconds:.0f} s{self.problem}; check that ViZDoom runs: "
                    f"python -m training.frames --count 1 --out DIR"
                )
            time.sleep(0.1)

    def wait_up_to(self, episodes: int, seconds: float) -> None:
        """Waits until so many episodes are usable, or the time is over."""
        end = time.monotonic() + seconds
        while self.count < episodes and time.monotonic() < end:
            time.sleep(0.1)

    def random_frames(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """uint8 [count, H, W, 3], uniformly from what is usable now."""
        device = self.frames.device
        e = torch.randint(self.count, (count,), generator=generator, device=device)
        t = torch.randint(self._length, (count,), generator=generator, device=device)
        return self.frames[e, t]


def episode_problem(episode: Episode, shape: tuple[int, ...]) -> str:
    """What is wrong with an episode's arrays, or nothing. shape: that its frames must have."""
    frames, keys = episode.frames, episode.keys
    if frames.shape != shape or frames.dtype != np.uint8:
        return f"frames must be uint8 {list(shape)}, got {frames.dtype} {list(frames.shape)}"
    if keys.shape != (shape[0], len(KEYS)) or keys.dtype != np.uint8 or keys.max() > 1:
        return (
            f"keys must be uint8 {[shape[0], len(KEYS)]} of 0 and 1, "
            f"got {keys.dtype} {list(keys.shape)}"
        )
    return ""


def reckoned_poses(keys: np.ndarray) -> torch.Tensor:
    """keys [T, 6] -> heading in radians, x and y, float32 [T, 3]; the first row moves nothing."""
    walks, _ = follow(START, keys[1:].tolist())
    return torch.from_numpy(as_array([START, *walks]))


class LatentPool:
    """Latents [episodes, length, C, h, w], BF16 (float32 on a CPU); keys [episodes, length, 6];
    poses [episodes, length, 3], float32."""

    def __init__(self, latents: torch.Tensor, keys: torch.Tensor, poses: torch.Tensor) -> None:
        self.latents, self.keys, self.poses = latents, keys, poses
        self.revisits = find_revisits(poses)
        self._fits: dict[tuple[int, int | None, int], torch.Tensor] = {}

    @classmethod
    @torch.no_grad()
    def encode(
        cls,
        autoencoder: Autoencoder,
        frames: torch.Tensor,
        keys: torch.Tensor,
        poses: torch.Tensor,
        batch: int = 512,
    ) -> LatentPool:
        """Encodes frames uint8 [E, L, H, W, 3] in the autoencoder's dtype."""
        episodes, length = frames.shape[:2]
        flat = frames.flatten(0, 1)
        dtype = next(autoencoder.parameters()).dtype
        store = torch.bfloat16 if frames.is_cuda else torch.float32
        parts = [
            autoencoder.encode(to_signed(flat[i : i + batch], dtype)).to(store)
            for i in range(0, len(flat), batch)
        ]
        # keys and poses are copied: the frames' pool goes on filling
        latents = torch.cat(parts).unflatten(0, (episodes, length))
        return cls(latents, keys.clone(), poses.clone())

    def append(self, more: LatentPool) -> None:
        """Adds the episodes of another pool behind these."""
        later = more.revisits.clone()
        later[:, 0] += len(self.latents)
        self.revisits = torch.cat((self.revisits, later))
        self.latents = torch.cat((self.latents, more.latents))
        self.keys = torch.cat((self.keys, more.keys))
        self.poses = torch.cat((self.poses, more.poses))

    def random_clips(
        self, count: int, frames: int, generator: torch.Generator, revisits: float = 0.0,
        shown_within: int | None = None,
    ) -> ClipBatch:  # fmt: skip
        """Clips of so many frames.

        revisits: share of the clips that are chosen to hold one, where any fits; with
        shown_within, what is revisited lies in that many first frames.
        """
        episodes, length = self.latents.shape[:2]
        if frames > length:
            raise UserError(f"clips of {frames} frames need episodes at least as long: {length}")
        device = self.latents.device
        e = torch.randint(episodes, (count, 1), generator=generator, device=device)
        t = torch.randint(length - frames + 1, (count, 1), generator=generator, device=device)
        marks = torch.full((count, 2), -1, dtype=torch.int64, device=device)
        picked = round(revisits * count)
        if picked and len(fits := self._fitting(frames, length, shown_within)):
            found = starts_with_revisit(fits, picked, frames, length, generator, shown_within)
            e[:picked, 0], t[:picked, 0], marks[:picked] = found
        t = t + torch.arange(frames, device=device)
        return ClipBatch(self.latents[e, t], self.keys[e, t].float(), self.poses[e, t], marks)

    def _fitting(self, frames: int, length: int, shown_within: int | None) -> torch.Tensor:
        """The revisits that fit into a clip; looked for once, because it waits for the device."""
        key = (frames, shown_within, len(self.revisits))
        if key not in self._fits:
            self._fits = {k: v for k, v in self._fits.items() if k[2] == len(self.revisits)}
            self._fits[key] = fitting_revisits(self.revisits, frames, length, shown_within)
        return self._fits[key]


def load_folder(folder: Path, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """All episodes of a folder: frames uint8 [E, L, H, W, 3], keys uint8 [E, L, 6]."""
    paths = sorted(folder.glob("episode-*.npz"))
    if not paths:
        raise UserError(f"no episodes in {folder}; make them with python -m training.frames")
    episodes = []
    for path in paths:
        try:
            episodes.append(load_episode(path))
        except UNREADABLE as error:
            raise UserError(f"{path} cannot be read: {error}; remove it") from error
    shape = (len(episodes[0].frames), HEIGHT, WIDTH, 3)
    for path, episode in zip(paths, episodes, strict=True):
        problem = episode_problem(episode, shape)
        if problem:
            raise UserError(f"{path}: {problem}")
    frames = torch.from_numpy(np.stack([e.frames for e in episodes])).to(device)
    return frames, torch.from_numpy(np.stack([e.keys for e in episodes])).to(device)

"""Where episodes of an evaluation come from: a folder of truth, or what the repository holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from quantwm.errors import UserError
from quantwm.evaluation.episodes import Episode, load_folder
from quantwm.worlds.embedded.config import KEYS
from quantwm.worlds.embedded.scenes import SceneClip, list_scenes, load_scene

SHORTEST = {"turn": 48, "back": 8, "long": 8, "keys": 4, "still": 4, "walk": 4}
"""Frames after the context that a kind is measured on (quantwm/evaluation/acceptance.py)."""
SMALL_SCENES = 3
"""Start scenes whose chunks are predicted in the small subset; all twelve would take a minute."""


def full_episodes(folder: Path, size: tuple[int, int], chunk: int) -> list[Episode]:
    """Episodes that training.truth made, of frames of size (width, height), with a context of whole
    chunks of `chunk` frames. UserError otherwise."""
    episodes = load_folder(folder)
    for episode in episodes:
        height, width = episode.frames.shape[1:3]
        if (width, height) != size:
            raise UserError(
                f"the truth in {folder} has frames of {width} x {height}, these weights make "
                f"{size[0]} x {size[1]}; make truth of that size"
            )
        _need_whole(folder, episode, chunk)
    return episodes


def _need_whole(folder: Path, episode: Episode, chunk: int) -> None:
    """UserError for an episode that lacks frames, is too short for what its kind measures or does
    not begin with whole chunks."""
    said = f"the {episode.kind} episode of map {episode.origin['map_seed']} in {folder}"
    if len(episode.index) < episode.length:
        raise UserError(
            f"{said} holds {len(episode.index)} of its {episode.length} frames: part of a small "
            "subset? Leave out --truth, or make whole truth with python -m training.truth --out DIR"
        )
    if episode.context % chunk:
        raise UserError(
            f"{said} has a context of {episode.context} frames, these weights make {chunk} at a "
            "time; make truth with a context of whole chunks"
        )
    least = SHORTEST[episode.kind]
    if episode.length - episode.context < least:
        raise UserError(
            f"{said} has {episode.length - episode.context} frames after its context, {least} or "
            "more are measured; make the truth again"
        )


def small_episodes(assets: Path, size: tuple[int, int], chunk: int) -> list[Episode]:
    """The action scripts on their start scenes, and some scenes as short walks.

    size: (width, height) of frames; chunk: frames of a chunk, the context of a short walk.
    """
    scripts = load_folder(assets / "truth")
    episodes = [_with_context(episode, assets / "scenes", size) for episode in scripts]
    short = {"turn", "back"}  # a long walk takes 30 s on one core, standing still 7
    episodes = [episode for episode in episodes if episode.kind in short]
    names = [scene.name for scene in list_scenes(assets / "scenes")]
    used = {episode.origin.get("scene") for episode in episodes}
    for number, name in enumerate(n for n in names if n not in used):
        if number == SMALL_SCENES:
            break
        episodes.append(_short_walk(name, load_scene(assets / "scenes", name, size), chunk))
    return episodes


def _with_context(episode: Episode, scenes: Path, size: tuple[int, int]) -> Episode:
    """The scene's frames in front of the script's."""
    name = str(episode.origin.get("scene", ""))
    clip = load_scene(scenes, name, size)
    if len(clip.frames) != episode.context or episode.has(0):
        raise UserError(f"the truth of scene {name!r} does not follow its frames; fetch it again")
    return replace(
        episode,
        frames=np.concatenate((clip.frames, episode.frames)),
        index=np.concatenate((np.arange(episode.context), episode.index)),
    )


def _short_walk(name: str, clip: SceneClip, chunk: int) -> Episode:
    """A scene as an episode whose context is its first chunk."""
    keys = np.asarray([[key in held for key in KEYS] for held in clip.keys], np.uint8)
    count = len(clip.frames)
    return Episode(
        kind="walk",
        context=chunk,
        frames=clip.frames,
        index=np.arange(count),
        keys=keys,
        poses=np.zeros((count, 3), np.float32),
        origin={"scene": name, "map_seed": _number(name)},
    )


def _number(name: str) -> int:
    """A number of its own for every scene, the same on every machine."""
    return int.from_bytes(name.encode()[:6].ljust(6, b"\0"), "big")


def maps_of(episodes: Sequence[Episode]) -> int:
    """How many maps there are."""
    return len({episode.origin["map_seed"] for episode in episodes})

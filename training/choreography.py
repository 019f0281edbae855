"""Scripted walks for truth: a full turn, there and back through a door, a long walk, stillness."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quantwm.evaluation.episodes import Episode
from quantwm.worlds.embedded.config import KEYS, PRESETS
from training.frames import SPAWN_TICS, shrink, step
from training.maps import GameMap
from training.moves import (
    CHUNK,
    Moves,
    StuckError,
    every_key,
    full_turn,
    long_walk,
    stand,
    there_and_back,
    wander,
)
from training.walker import FULL_TURN, KeyNames, Pose, Walker

if TYPE_CHECKING:
    from vizdoom import DoomGame

CONTEXT = PRESETS["shipped"].context_frames
STILL = 10
"""Idle frames at the end of a context: what momentum is left moves the player 2 map units."""
SHORTEST_BACK, LONGEST_BACK = 72, 104
"""Frames there and back may take: 64 before the 8 that are compared, and few enough for the start
to be within a memory of 128 frames at the end."""


@dataclass(frozen=True)
class Part:
    """One scripted walk: the frames it may last and where its end returns to.

    moves: (map, pose at the end of the context, generator) -> keys. length: frames after the
    context, None when the moves end by themselves (then rounded up to whole chunks, idle) after
    between `shortest` and `longest` frames.
    """

    kind: str
    still: bool
    moves: Callable[[GameMap, Pose, np.random.Generator], Moves]
    length: int | None = None
    shortest: int = 0
    longest: int = 400


PARTS = {
    part.kind: part
    for part in (
        Part("turn", True, full_turn, 2 * FULL_TURN),
        Part("back", True, there_and_back, shortest=SHORTEST_BACK, longest=LONGEST_BACK),
        Part("long", True, long_walk),
        Part("keys", True, every_key, 12 * CHUNK),
        Part("still", True, stand, 48),
        Part("walk", False, wander, 256),
    )
}


class _Recording:
    """Steps the engine and keeps frames, keys and poses from `first_frame` on."""

    def __init__(self, game: DoomGame, number: int, seed: int, first_frame: int) -> None:
        game.set_seed(seed)
        game.set_doom_map(f"map{number:02d}")
        game.new_episode()
        game.make_action([0.0] * 5, SPAWN_TICS)
        self._game, self._first = game, first_frame
        self.count = 0  # frames seen, the first one without a step
        self.frames: list[np.ndarray] = []
        self.keys: list[list[bool]] = []
        self.poses: list[tuple[float, float, float]] = []

    def advance(self, held: KeyNames) -> Pose:
        """Holds the keys for a frame (not before the first one) and returns where that led."""
        if self.count:
            step(self._game, held)
        state = self._game.get_state()
        pose = tuple(float(value) for value in state.game_variables)
        if self.count >= self._first:
            self.frames.append(shrink(state.screen_buffer))
            self.keys.append([name in held for name in KEYS])
            self.poses.append(pose)
        self.count += 1
        return Pose(*pose)

    def episode(self, kind: str, origin: dict[str, int]) -> Episode:
        """All that was kept."""
        return Episode(
            kind=kind,
            context=CONTEXT,
            frames=np.stack(self.frames),
            index=np.arange(len(self.frames)),
            keys=np.asarray(self.keys, np.uint8),
            poses=np.asarray(self.poses, np.float32),
            origin=origin,
        )


def perform(
    game: DoomGame, number: int, game_map: GameMap, seed: int, part: Part, first_frame: int
) -> Episode:
    """Walks map `number` of the loaded PWAD: `first_frame` frames unseen, the context, the part.

    The walk before the part is the training walker's; its last STILL frames idle where the part
    starts from rest. StuckError when the part cannot be walked from where the context ends.
    """
    recording = _Recording(game, number, seed, first_frame)
    start = first_frame + CONTEXT
    walking = start - STILL if part.still else start
    walker, pose = Walker(game_map, seed), recording.advance(frozenset())
    while recording.count < start:
        held = walker.keys(pose) if recording.count < walking else frozenset()
        pose = recording.advance(held)
    moves = part.moves(game_map, pose, np.random.default_rng((seed, first_frame)))
    try:
        held = next(moves)
        while part.length is None or recording.count < start + part.length:
            held = moves.send(recording.advance(held))
            if part.length is None and recording.count - start > part.longest:
                raise StuckError
    except StopIteration:
        if recording.count - start < part.shortest:
            raise StuckError from None
        while (recording.count - start) % CHUNK or recording.count - start < (part.length or 0):
            recording.advance(frozenset())
    return recording.episode(part.kind, {"map_seed": seed, "first_frame": first_frame})


def scout(game: DoomGame, number: int, game_map: GameMap, seed: int, length: int) -> Episode:
    """What the training walker sees in its first `length` frames; contexts are cut out of it."""
    recording = _Recording(game, number, seed, first_frame=0)
    walker, pose = Walker(game_map, seed), recording.advance(frozenset())
    while recording.count < length:
        pose = recording.advance(walker.keys(pose))
    return recording.episode("walk", {"map_seed": seed, "first_frame": 0})

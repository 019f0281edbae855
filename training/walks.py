"""Episodes made of scripted walks: turns, ways through a door and back, one after the other.

The walker of training/walker.py seldom turns all the way round and seldom returns to a place with
the heading that it had there. Here that is all that happens, so that what was seen long before
decides what is seen now.
"""

from __future__ import annotations

import numpy as np

from training.maps import GameMap
from training.moves import Mover, Moves, full_turn, hold, long_walk, there_and_back
from training.walker import Pose, Walker

KINDS = (full_turn, there_and_back, long_walk)
SHARES = (0.3, 0.5, 0.2)


def is_of_pieces(seed: int, share: float) -> bool:
    """Whether the episode of a map's seed is one of the `share` that are made of pieces."""
    return bool(np.random.default_rng((seed, 5)).random() < share)


class PieceWalker(Mover):
    """Chooses the keys of the next frame: a little ordinary walking, rest, a piece, and again."""

    def __init__(self, game_map: GameMap, seed: int) -> None:
        self._map = game_map
        self._rng = np.random.default_rng((seed, 6))
        self._walker = Walker(game_map, seed)

    def _unstuck(self, pose: Pose) -> Moves:
        """A piece of furniture is in the way: walk on, and try another piece."""
        return self._walk(pose, 16)

    def _next(self, pose: Pose) -> Moves:
        pose = yield from self._walk(pose, int(self._rng.integers(4, 33)))
        pose = yield from hold(pose, frozenset(), int(self._rng.integers(4, 13)))
        kind = KINDS[int(self._rng.choice(len(KINDS), p=SHARES))]
        return (yield from kind(self._map, pose, self._rng))

    def _walk(self, pose: Pose, frames: int) -> Moves:
        for _ in range(frames):
            pose = yield self._walker.keys(pose)
        return pose

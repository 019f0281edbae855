"""A walker for maps that it does not know: it feels its way, and finds back where it has been."""

from __future__ import annotations

import math

import numpy as np

from training.moves import Mover, Moves, face, go_to, hold
from training.walker import FULL_TURN, KeyNames, Pose

STEP = 33.0  # map units walked in a frame
CRUMB = 64.0
"""Map units between two remembered places. What was walked in one go can be walked back."""
MOST_CRUMBS = 24
SHARES = {False: (0.56, 0.08, 0.14, 0.12, 0.10), True: (0.25, 0.25, 0.05, 0.40, 0.05)}
"""Of strolls, full turns, looks round, ways back and rests; True: in an episode of pieces."""


class Explorer(Mover):
    """Chooses the keys of the next frame from the pose alone."""

    def __init__(self, seed: int, pieces: bool = False) -> None:
        """pieces: mostly full turns and ways back, as training/walks.py has them."""
        self._rng = np.random.default_rng((seed, 7))
        self._shares = SHARES[pieces]
        self._crumbs: list[tuple[float, float]] = []

    def keys(self, pose: Pose) -> KeyNames:
        """Keys to hold during the next frame."""
        self._remember(pose)
        return super().keys(pose)

    def _unstuck(self, pose: Pose) -> Moves:
        """The way back is barred, by a step up or a door that closed."""
        self._crumbs = [(pose.x, pose.y)]
        return self._away(pose)

    def _remember(self, pose: Pose) -> None:
        here = (pose.x, pose.y)
        if not self._crumbs or math.dist(self._crumbs[-1], here) >= CRUMB:
            self._crumbs = [*self._crumbs[-MOST_CRUMBS:], here]

    def _next(self, pose: Pose) -> Moves:
        parts = (self._stroll, self._turn, self._look, self._back, self._rest)
        part = parts[int(self._rng.choice(len(parts), p=self._shares))]
        return part(pose)

    def _stroll(self, pose: Pose) -> Moves:
        """Straight on with some bends until something bars the way or it has walked enough."""
        for _ in range(int(self._rng.integers(2, 5))):
            bend = self._side()
            for frame in range(int(self._rng.integers(6, 20))):
                before = pose
                held = {"w", bend} if frame < 3 and self._rng.random() < 0.5 else {"w"}
                pose = yield frozenset(held)
                if frame > 2 and math.dist((before.x, before.y), (pose.x, pose.y)) < STEP / 4:
                    return (yield from self._away(pose))
        return pose

    def _away(self, pose: Pose) -> Moves:
        """A step back and a turn towards somewhere else."""
        pose = yield from hold(pose, frozenset({"s"}), int(self._rng.integers(1, 4)))
        frames = int(self._rng.integers(8, FULL_TURN // 2))
        return (yield from hold(pose, frozenset({self._side()}), frames))

    def _turn(self, pose: Pose) -> Moves:
        """All the way round, once or twice."""
        times = int(self._rng.integers(1, 3))
        return (yield from hold(pose, frozenset({self._side()}), times * FULL_TURN))

    def _look(self, pose: Pose) -> Moves:
        """Aside and exactly back."""
        side, frames = self._side(), int(self._rng.integers(4, 25))
        other = "left" if side == "right" else "right"
        pose = yield from hold(pose, frozenset({side}), frames)
        return (yield from hold(pose, frozenset({other}), frames))

    def _back(self, pose: Pose) -> Moves:
        """Where it came from, crumb by crumb, and forth again to this place and heading."""
        first, crumbs = pose, self._crumbs[:-1]
        way = crumbs[-int(self._rng.integers(3, 10)) :]
        for point in (*reversed(way), *way[1:], (first.x, first.y)):
            pose = yield from go_to(pose, point)
        return (yield from face(pose, first.angle))

    def _rest(self, pose: Pose) -> Moves:
        return (yield from hold(pose, frozenset(), int(self._rng.integers(2, 9))))

    def _side(self) -> str:
        return "left" if self._rng.random() < 0.5 else "right"

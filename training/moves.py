"""Moves that scripted walks are made of: a full turn, there and back through a door, standing."""

from __future__ import annotations

import math
from collections.abc import Generator

import numpy as np

from quantwm.worlds.embedded.config import PRESETS
from training.maps import Door, GameMap
from training.walker import FULL_TURN, TURN_DEGREES, KeyNames, Pose, Walker

CHUNK = PRESETS["shipped"].transformer.frames_per_chunk
PASS = 36.0
"""Map units; a point on the way counts as reached."""
COAST = 85.0
"""How far momentum carries a walker who lets go: 8.3 units a tic, of which a tenth is lost."""
PATIENCE = 48  # frames to reach one point; stuck beyond

Moves = Generator[KeyNames, Pose, Pose]
"""Yields the keys of the next frame and is sent the pose after it; returns the last pose."""


class StuckError(Exception):
    """A walk did not reach its point; the caller takes another door or another map."""


class Mover:
    """Chooses the keys of the next frame by making one move after the other."""

    _moves: Moves | None = None

    def keys(self, pose: Pose) -> KeyNames:
        """Keys to hold during the next frame."""
        while True:
            started = self._moves is not None
            if self._moves is None:
                self._moves = self._next(pose)
            try:
                return self._moves.send(pose) if started else next(self._moves)
            except StopIteration:
                self._moves = None
            except StuckError:
                self._moves = self._unstuck(pose)
                return next(self._moves)

    def _next(self, pose: Pose) -> Moves:
        """The move after the last one."""
        raise NotImplementedError

    def _unstuck(self, pose: Pose) -> Moves:
        """The move after one that did not reach its point; of one frame at least."""
        raise NotImplementedError


def hold(pose: Pose, keys: KeyNames, frames: int) -> Moves:
    """The same keys for some frames."""
    for _ in range(frames):
        pose = yield keys
    return pose


def face(pose: Pose, angle: float) -> Moves:
    """Turns until the heading is within half a step of the angle."""
    while abs(error := _difference(angle, pose.angle)) > TURN_DEGREES / 2:
        pose = yield frozenset({"left" if error > 0 else "right"})
    return pose


def go_to(pose: Pose, point: tuple[float, float], near: float = PASS) -> Moves:
    """Walks to a point, turning towards it first and on the way; over when within `near` units.

    StuckError when it takes long.
    """
    for _ in range(PATIENCE):
        dx, dy = point[0] - pose.x, point[1] - pose.y
        if math.hypot(dx, dy) < near:
            return pose
        error = _difference(math.degrees(math.atan2(dy, dx)), pose.angle)
        keys = set()
        if abs(error) > 0.8 * TURN_DEGREES:
            keys.add("left" if error > 0 else "right")
        if abs(error) < 40.0:
            keys.add("w")
        pose = yield frozenset(keys)
    raise StuckError


def full_turn(_: GameMap, pose: Pose, rng: np.random.Generator) -> Moves:
    """360 degrees one way, and once more: the first turn shows what the second must find again."""
    way = str(rng.choice(("left", "right")))
    return (yield from hold(pose, frozenset({way}), 2 * FULL_TURN))


def there_and_back(game_map: GameMap, pose: Pose, rng: np.random.Generator) -> Moves:
    """Through a door, turns round, back to the same place and the same heading; then stands."""
    first = pose
    _, near, far = _door_from(game_map, pose)
    pose = yield from go_to(pose, near)
    pose = yield from go_to(pose, far)
    pose = yield from face(pose, pose.angle + 180.0 if rng.random() < 0.5 else pose.angle - 180.0)
    pose = yield from go_to(pose, near)
    pose = yield from go_to(pose, (first.x, first.y), COAST)
    pose = yield from face(pose, first.angle)
    return (yield from hold(pose, frozenset(), CHUNK))


def long_walk(game_map: GameMap, pose: Pose, rng: np.random.Generator) -> Moves:
    """Looks round, through a door and on through another, and all the way back to the start."""
    first = pose
    way = [(pose.x, pose.y)]
    pose = yield from hold(pose, frozenset({"left"}), 6)
    pose = yield from hold(pose, frozenset({"right"}), 12)
    last: Door | None = None
    for _ in range(2):
        last, near, far = _door_from(game_map, pose, last)
        pose = yield from go_to(pose, near)
        pose = yield from go_to(pose, far)
        centre = game_map.rooms[_room_of(game_map, pose)].centre
        pose = yield from go_to(pose, centre, COAST)
        pose = yield from hold(pose, frozenset({"left"}), 4)
        way += [near, far, centre]
    for point in reversed(way[1:-1]):
        pose = yield from go_to(pose, point)
    pose = yield from go_to(pose, way[0], COAST)
    pose = yield from face(pose, first.angle)
    return (yield from hold(pose, frozenset(), CHUNK))


def every_key(_: GameMap, pose: Pose, __: np.random.Generator) -> Moves:
    """Each key for a chunk, its opposite for two, and back: within 70 map units of the start."""
    for key, opposite in (("w", "s"), ("a", "d"), ("left", "right")):
        for held, chunks in ((key, 1), (opposite, 2), (key, 1)):
            pose = yield from hold(pose, frozenset({held}), chunks * CHUNK)
    return pose


def stand(_: GameMap, pose: Pose, __: np.random.Generator) -> Moves:
    """Does nothing."""
    return (yield from hold(pose, frozenset(), 10**9))


def wander(game_map: GameMap, pose: Pose, rng: np.random.Generator) -> Moves:
    """The walker that makes the training data."""
    walker = Walker(game_map, int(rng.integers(2**31)))
    while True:
        pose = yield walker.keys(pose)


def _door_from(
    game_map: GameMap, pose: Pose, last: Door | None = None
) -> tuple[Door, tuple[float, float], tuple[float, float]]:
    """The door of the pose's room (not the last one where there is a choice) that needs the least
    turning, its near and its far point."""
    room = _room_of(game_map, pose)
    doors = [door for door in game_map.neighbours[room] if door is not last]
    options = []
    for door in doors or game_map.neighbours[room]:
        near, far = door.points if door.a == room else door.points[::-1]
        heading = math.degrees(math.atan2(near[1] - pose.y, near[0] - pose.x))
        options.append((abs(_difference(heading, pose.angle)), door, near, far))
    return min(options, key=lambda option: option[0])[1:]


def _room_of(game_map: GameMap, pose: Pose) -> int:
    return min(
        range(len(game_map.rooms)),
        key=lambda i: math.dist(game_map.rooms[i].centre, (pose.x, pose.y)),
    )


def _difference(a: float, b: float) -> float:
    """Degrees from heading b to heading a, -180 to 180; positive is to the left."""
    return (a - b + 180.0) % 360.0 - 180.0

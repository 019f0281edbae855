"""The player that makes the training walks: visits rooms, looks round, turns back, idles."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from training.maps import Door, GameMap, Room

KeyNames = frozenset[str]
TURN_DEGREES = 7.5  # a frame; 11.25 degrees would be exactly one token column


@dataclass(frozen=True)
class Pose:
    """Position in map units and heading in degrees, counter-clockwise from east."""

    x: float
    y: float
    angle: float


class Walker:
    """Chooses the keys of the next frame from the pose; knows the map, so it rarely gets stuck.

    It travels along doors and room centres, and between legs it looks round, wanders with random
    keys, idles, or goes back the way it came, so that clips hold true revisits.
    """

    def __init__(self, game_map: GameMap, seed: int) -> None:
        self._map = game_map
        self._rng = np.random.default_rng(seed)
        self._waypoints: list[tuple[float, float]] = []
        self._visited: list[tuple[float, float]] = [game_map.rooms[game_map.start_room].centre]
        self._last_door: Door | None = None
        self._script: list[KeyNames] = []
        self._history: list[Pose] = []
        self._walked: list[bool] = []
        self._side: KeyNames = frozenset()
        self._side_left = 0

    def keys(self, pose: Pose) -> KeyNames:
        """Keys to hold during the next frame."""
        self._history = [*self._history[-3:], pose]
        if not self._script and self._stuck():
            self._free_itself()
        keys = self._script.pop(0) if self._script else self._travel(pose)
        self._walked = [*self._walked[-2:], "w" in keys]
        return keys

    def _stuck(self) -> bool:
        if len(self._history) < 4 or len(self._walked) < 3 or not all(self._walked):
            return False
        first, last = self._history[0], self._history[-1]
        return math.hypot(last.x - first.x, last.y - first.y) < 12.0

    def _free_itself(self) -> None:
        side = str(self._rng.choice(("a", "d")))
        self._script = [frozenset({"s", side})] * int(self._rng.integers(4, 9))
        self._waypoints = []
        self._walked = []

    def _travel(self, pose: Pose) -> KeyNames:
        if not self._waypoints:
            self._plan(pose)
        x, y = self._waypoints[0]
        if math.hypot(x - pose.x, y - pose.y) < 28.0:
            self._visited = [*self._visited[-11:], self._waypoints.pop(0)]
            self._interlude()
            if self._script:
                return self._script.pop(0)
            return self._travel(pose)
        error = _turn_to(pose, x, y)
        keys = set()
        if abs(error) > 0.8 * TURN_DEGREES:
            keys.add("left" if error > 0 else "right")
        if abs(error) < 50.0:
            keys.add("w")
            keys |= self._sidestep()
        return frozenset(keys)

    def _sidestep(self) -> KeyNames:
        """Now and then a few frames of walking and strafing together."""
        if self._side_left == 0 and self._rng.random() < 0.02:
            self._side_left = int(self._rng.integers(2, 5))
            self._side = frozenset({str(self._rng.choice(("a", "d")))})
        if self._side_left == 0:
            return frozenset()
        self._side_left -= 1
        return self._side

    def _interlude(self) -> None:
        """What happens when a waypoint is reached."""
        choices: tuple[tuple[float, Callable[[], None]], ...] = (
            (0.08, self._look_round),
            (0.05, self._idle),
            (0.13, self._wander),
            (0.10, self._go_back),
        )
        draw = self._rng.random()
        for chance, act in choices:
            if draw < chance:
                act()
                return
            draw -= chance

    def _look_round(self) -> None:
        """Turns one way; half of the time exactly back again, which is a revisit by itself."""
        way = [str(self._rng.choice(("left", "right")))]
        frames = int(self._rng.integers(5, 33))
        self._script = [frozenset(way)] * frames
        if self._rng.random() < 0.5:
            back = "right" if way == ["left"] else "left"
            self._script += [frozenset({back})] * frames

    def _idle(self) -> None:
        self._script = [frozenset()] * int(self._rng.integers(2, 7))

    def _wander(self) -> None:
        for _ in range(int(self._rng.integers(1, 5))):
            keys = {str(self._rng.choice(("w", "w", "s", "a", "d", "")))}
            if self._rng.random() < 0.5:
                keys.add(str(self._rng.choice(("left", "right"))))
            if self._rng.random() < 0.15:
                keys.add(str(self._rng.choice(("a", "d"))))
            keys.discard("")
            if {"a", "d"} <= keys:
                keys.discard("d")
            self._script += [frozenset(keys)] * int(self._rng.integers(2, 8))
        self._waypoints = []

    def _go_back(self) -> None:
        """The last waypoints in reverse: through the same door, to where it came from."""
        count = int(self._rng.integers(2, 5))
        self._waypoints = list(reversed(self._visited[:-1]))[:count]
        self._last_door = None

    def _plan(self, pose: Pose) -> None:
        index = min(range(len(self._map.rooms)), key=lambda i: _distance(self._map.rooms[i], pose))
        room = self._map.rooms[index]
        doors = self._map.neighbours[index]
        fresh = [d for d in doors if d is not self._last_door] or doors
        if self._rng.random() < 0.2:
            fresh = doors
        door = fresh[int(self._rng.integers(len(fresh)))]
        self._last_door = door
        near, far = door.points if door.a == index else reversed(door.points)
        target = self._map.rooms[door.b if door.a == index else door.a]
        jitter = self._rng.normal(0, 24, size=2)
        centre = (target.centre[0] + float(jitter[0]), target.centre[1] + float(jitter[1]))
        # through the centre first when the door is not in plain sight along a clear line
        first = [] if _close(room.centre, pose, 70.0) else [room.centre]
        self._waypoints = [*first, near, far, centre]


def _close(point: tuple[float, float], pose: Pose, reach: float) -> bool:
    return math.hypot(point[0] - pose.x, point[1] - pose.y) < reach


def _distance(room: Room, pose: Pose) -> float:
    dx = max(room.x0 - pose.x, 0.0, pose.x - room.x1)
    dy = max(room.y0 - pose.y, 0.0, pose.y - room.y1)
    return math.hypot(dx, dy)


def _turn_to(pose: Pose, x: float, y: float) -> float:
    """Degrees to turn left (positive) until the heading meets the point."""
    wanted = math.degrees(math.atan2(y - pose.y, x - pose.x))
    return (wanted - pose.angle + 180.0) % 360.0 - 180.0

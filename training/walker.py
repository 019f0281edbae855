"""The player that makes the training walks: visits rooms, looks round, turns back, idles."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quantwm.worlds.embedded.config import KEYS
from quantwm.worlds.embedded.pose import FRICTION, TICS, Walk, advance
from training.maps import Door, GameMap, Room

KeyNames = frozenset[str]
TURN_DEGREES = 7.5  # a frame; 11.25 degrees would be exactly one token column
FULL_TURN = 48  # frames
CLEARANCE = 22.0  # map units; the player's half width is 16
SLIDE = FRICTION / (1 - FRICTION)  # what is walked after the last thrust, in tics of that speed
ARRIVED = 20.0


@dataclass(frozen=True)
class Pose:
    """Position in map units and heading in degrees, counter-clockwise from east."""

    x: float
    y: float
    angle: float


class Walker:
    """Chooses the keys of the next frame from the pose; knows the map, so it rarely gets stuck.

    It travels along doors and room centres, and between legs it turns all the way round, looks
    round, wanders with random keys, backs off, idles, or goes back the way it came, so that clips
    hold true revisits. It seldom walks into things, because a pose reckoned from the keys alone
    (quantwm/worlds/embedded/pose.py) does not know that it was stopped.
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
        self._speed = (0.0, 0.0)
        self._held: KeyNames = frozenset()
        self._side: KeyNames = frozenset()
        self._side_left = 0

    def keys(self, pose: Pose) -> KeyNames:
        """Keys to hold during the next frame."""
        self._follow_speed(pose)
        self._history = [*self._history[-3:], pose]
        if not self._script and self._stuck():
            self._free_itself()
        keys = self._script.pop(0) if self._script else self._travel(pose)
        self._walked = [*self._walked[-2:], "w" in keys]
        self._held = keys
        return keys

    def _follow_speed(self, pose: Pose) -> None:
        """Map units a tic along x and y: what the engine keeps to itself."""
        if not self._history:
            return
        last = self._history[-1]
        expected = advance(_as_walk(last, self._speed), _vector(self._held))
        self._speed = expected[3:]
        if math.hypot(expected[1] - pose.x, expected[2] - pose.y) > 2.0:  # something was hit
            self._speed = ((pose.x - last.x) / TICS, (pose.y - last.y) / TICS)

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
        distance = math.hypot(x - pose.x, y - pose.y)
        slide = SLIDE * math.hypot(*self._speed)
        if distance < ARRIVED + slide:
            self._visited = [*self._visited[-11:], self._waypoints.pop(0)]
            self._interlude(pose)
            if self._script:
                return self._script.pop(0)
            return self._travel(pose)
        error = _turn_to(pose, x, y)
        keys = set()
        if abs(error) > 0.6 * TURN_DEGREES:
            keys.add("left" if error > 0 else "right")
        # a circle walked with a turn key held is 500 units wide: aim first, when it is near
        if abs(error) < (35.0 if distance > 250.0 else 12.0):
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

    def _interlude(self, pose: Pose) -> None:
        """What happens when a waypoint is reached."""
        choices: tuple[tuple[float, Callable[[Pose], None]], ...] = (
            (0.03, self._full_turn),
            (0.05, self._look_round),
            (0.05, self._idle),
            (0.24, self._wander),
            (0.20, self._back_off),
            (0.12, self._go_back),
        )
        draw = self._rng.random()
        for chance, act in choices:
            if draw < chance:
                act(pose)
                return
            draw -= chance

    def _full_turn(self, pose: Pose) -> None:
        """360 degrees; the last frame shows what the first did."""
        way = str(self._rng.choice(("left", "right")))
        self._script = [frozenset({way})] * FULL_TURN

    def _look_round(self, pose: Pose) -> None:
        """Turns one way; half of the time exactly back again, which is a revisit by itself."""
        way = str(self._rng.choice(("left", "right")))
        frames = int(self._rng.integers(5, 33))
        self._script = [frozenset({way})] * frames
        if self._rng.random() < 0.5:
            back = "right" if way == "left" else "left"
            self._script += [frozenset({back})] * frames

    def _idle(self, pose: Pose) -> None:
        self._script = [frozenset()] * int(self._rng.integers(2, 9))

    def _back_off(self, pose: Pose) -> None:
        """Some steps back (or aside) with the eyes ahead, then the same steps forward again."""
        frames = int(self._rng.integers(3, 9))
        for way in self._rng.permutation(4):
            there, back = (("s", "w"), ("s", "w"), ("a", "d"), ("d", "a"))[way]
            if self._is_free(pose, frozenset({there}), frames):
                self._script = [frozenset({there})] * frames + [frozenset({back})] * frames
                return

    def _wander(self, pose: Pose) -> None:
        """Random keys; three quarters of the time only steps that run into nothing."""
        careless = self._rng.random() < 0.25
        for _ in range(6):
            keys = {str(self._rng.choice(("w", "s", "s", "a", "d", "")))}
            if self._rng.random() < 0.5:
                keys.add(str(self._rng.choice(("left", "right"))))
            if self._rng.random() < 0.15:
                keys.add(str(self._rng.choice(("a", "d"))))
            keys.discard("")
            if {"a", "d"} <= keys:
                keys.discard("d")
            frames, held = int(self._rng.integers(2, 8)), frozenset(keys)
            if careless or self._is_free(pose, held, frames):
                self._script += [held] * frames
                break
        self._waypoints = []

    def _is_free(self, pose: Pose, keys: KeyNames, frames: int) -> bool:
        """Whether so many frames of these keys stay inside the room and clear of its things."""
        rooms = self._map.rooms
        room = rooms[min(range(len(rooms)), key=lambda i: _distance(rooms[i], pose))]
        walk = _as_walk(pose, self._speed)
        for held in [_vector(keys)] * frames + [_vector(frozenset())] * 4:
            walk = advance(walk, held)
            at = Pose(walk[1], walk[2], 0.0)
            inside_x = room.x0 + CLEARANCE < at.x < room.x1 - CLEARANCE
            inside_y = room.y0 + CLEARANCE < at.y < room.y1 - CLEARANCE
            clear = all(not _close(thing, at, 28 + CLEARANCE) for thing in self._map.obstacles)
            if not (inside_x and inside_y and clear):
                return False
        return True

    def _go_back(self, pose: Pose) -> None:
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


def _as_walk(pose: Pose, speed: tuple[float, float]) -> Walk:
    return round(pose.angle * 65536 / 360) % 65536, pose.x, pose.y, *speed


def _vector(keys: KeyNames) -> list[int]:
    return [int(name in keys) for name in KEYS]


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

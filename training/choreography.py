"""Scripted walks for truth: a full turn, there and back through a door, a long walk, stillness."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quantwm.evaluation.episodes import Episode
from quantwm.worlds.embedded.config import KEYS, PRESETS
from training.frames import SPAWN_TICS, shrink, step
from training.maps import Door, GameMap
from training.walker import TURN_DEGREES, KeyNames, Pose, Walker

if TYPE_CHECKING:
    from vizdoom import DoomGame

CONTEXT = PRESETS["shipped"].context_frames
CHUNK = PRESETS["shipped"].transformer.frames_per_chunk
FULL_TURN = 48  # frames of 7.5 degrees
STILL = 10
"""Idle frames at the end of a context: what momentum is left moves the player 2 map units."""
PASS = 36.0
"""Map units; a point on the way counts as reached."""
COAST = 85.0
"""How far momentum carries a walker who lets go: 8.3 units a tic, of which a tenth is lost."""
SHORTEST_BACK, LONGEST_BACK = 72, 104
"""Frames there and back may take: 64 before the 8 that are compared, and few enough for the start
to be within a memory of 128 frames at the end."""
PATIENCE = 48  # frames to reach one point; stuck beyond

Moves = Generator[KeyNames, Pose, Pose]
"""Yields the keys of the next frame and is sent the pose after it; returns the last pose."""


class StuckError(Exception):
    """A walk did not reach its point; the caller takes another door or another map."""


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

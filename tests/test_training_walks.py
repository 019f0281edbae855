"""Episodes made of scripted walks: a function of the seed, full of turns and of ways back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantwm.worlds.embedded.config import KEYS
from quantwm.worlds.embedded.pose import advance
from training.data import reckoned_poses
from training.maps import build_map, is_open
from training.revisits import find_revisits
from training.scenes import CHOICES, FIRST_SEED, room_ahead
from training.walker import FULL_TURN, Pose
from training.walks import PieceWalker, is_of_pieces

LENGTH = 512


def walk(seed: int) -> np.ndarray:
    """Keys [LENGTH, 6] of a walk in which nothing is ever run into."""
    built = build_map(seed)
    walker = PieceWalker(built, seed)
    at = (0, *(float(c) for c in built.rooms[built.start_room].centre), 0.0, 0.0)
    keys = np.zeros((LENGTH, len(KEYS)), np.uint8)
    for frame in range(1, LENGTH):
        held = walker.keys(Pose(at[1], at[2], at[0] * 360 / 65536))
        keys[frame] = [name in held for name in KEYS]
        at = advance(at, keys[frame].tolist())
    return keys


@pytest.fixture(scope="module")
def walks():
    return [walk(seed) for seed in range(4)]


def test_a_walk_is_a_function_of_its_seed(walks):
    assert np.array_equal(walk(2), walks[2]) and not np.array_equal(walks[2], walks[3])


def test_pieces_turn_all_the_way_and_come_back_from_far(walks):
    longest = 0
    for keys in walks:
        left = (keys == [0, 0, 0, 0, 1, 0]).all(axis=1)
        right = (keys == [0, 0, 0, 0, 0, 1]).all(axis=1)
        for way in (left, right):
            runs = np.diff(np.flatnonzero(np.concatenate(([True], ~way, [True])))) - 1
            longest = max(longest, int(runs.max()))
    assert longest >= 2 * FULL_TURN
    revisits = find_revisits(torch.stack([reckoned_poses(keys) for keys in walks]))
    apart = revisits[:, 1] - revisits[:, 2]
    assert len(revisits) > 0.1 * LENGTH * len(walks)
    assert int(((apart >= 64) & (apart <= 112)).sum()) > 50


def test_share_of_episodes_is_what_was_asked_for():
    chosen = [is_of_pieces(seed, 0.3) for seed in range(10_000, 11_000)]
    assert 0.25 < np.mean(chosen) < 0.35
    assert not any(is_of_pieces(seed, 0.0) for seed in range(100))
    assert all(is_of_pieces(seed, 1.0) for seed in range(100))


def test_room_ahead_ends_at_walls_and_things_and_goes_on_through_doors():
    built = build_map(FIRST_SEED + CHOICES[0].seed)
    room = built.rooms[built.start_room]
    x, y = room.centre
    assert is_open(built, x, y) and not is_open(built, room.x1 + 1000.0, y + 5000.0)
    assert room_ahead(built, (room.x0 + 20.0, room.y0 + 20.0, 225.0)) < 16
    thing = built.obstacles[0]
    assert not is_open(built, *thing)
    assert room_ahead(built, (thing[0] - 60.0, thing[1], 0.0)) <= 24
    (ax, ay), (bx, by) = built.doors[0].points
    angle = float(np.degrees(np.arctan2(by - ay, bx - ax)))
    assert room_ahead(built, (ax, ay, angle)) > np.hypot(bx - ax, by - ay)

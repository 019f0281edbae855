"""The pose reckoned from keys: turns, steps, features, and its way through the adapter."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from quantwm.cache import KVCache, make_format
from quantwm.worlds.base import ChunkAction, LaneState
from quantwm.worlds.embedded.adapter import POSE, EmbeddedWorld
from quantwm.worlds.embedded.pose import START, advance, as_array, follow, pose_features

W, S, A, D, LEFT, RIGHT = np.eye(6).tolist()
STILL = [0.0] * 6


def test_a_full_turn_comes_back_to_a_tenth_of_a_degree():
    _, end = follow(START, [LEFT] * 48)
    degrees = end[0] * 360 / 65536
    assert degrees == pytest.approx(359.91, abs=0.01)
    assert follow(end, [RIGHT] * 48)[1][0] == 0


def test_steps_speed_up_to_33_units_and_slide_to_a_stop():
    walks, end = follow(START, [W] * 40)
    assert walks[-1][1] - walks[-2][1] == pytest.approx(4 * 0.78125 / (1 - 0.90625), rel=1e-3)
    walks, stopped = follow(end, [STILL] * 30)
    assert stopped[3:] == (0.0, 0.0)
    assert stopped[1] - end[1] == pytest.approx(80, abs=2)
    # to the right of a heading east lies south
    assert follow(START, [D] * 5)[1][2] < -30 and follow(START, [A] * 5)[1][2] > 30
    assert follow(START, [S] * 5)[1][1] < -30
    assert advance(START, STILL) == START


def test_walk_follows_the_engine(tmp_path):
    """Twenty frames of every key on the real engine, in the middle of a room."""
    pytest.importorskip("vizdoom", reason="the engine is not installed")
    import os

    from training.frames import KEYS, open_engine, step
    from training.maps import MapConfig, build_map

    game_map = build_map(3, MapConfig(pillar_chance=0, decoration_chance=0))
    here = os.getcwd()
    os.chdir(tmp_path)
    try:
        game = open_engine(tmp_path, [game_map])
        game.set_doom_map("map01")
        game.new_episode()
        game.make_action([0.0] * 5, 12)
        first = [float(v) for v in game.get_state().game_variables]
        rows = [LEFT] * 3 + [W] * 2 + [S] * 4 + [STILL] * 2 + [A] * 2 + [D] * 3 + [RIGHT] * 4
        for row in rows:
            step(game, frozenset(n for n, held in zip(KEYS, row, strict=True) if held))
        last = [float(v) for v in game.get_state().game_variables]
    finally:
        os.chdir(here)
    heading, x, y, *_ = follow(START, rows)[1]
    angle = math.radians(first[2])
    moved = (x * math.cos(angle) - y * math.sin(angle), x * math.sin(angle) + y * math.cos(angle))
    assert last[2] - first[2] == pytest.approx(heading * 360 / 65536, abs=0.01)
    assert last[0] - first[0] == pytest.approx(moved[0], abs=1.0)
    assert last[1] - first[1] == pytest.approx(moved[1], abs=1.0)


def test_columns_of_two_views_that_look_the_same_way_share_their_heading():
    """A turn by the angle between two columns moves one's features to the other."""
    step = float(torch.atan(torch.tensor(0.625)) - torch.atan(torch.tensor(0.375)))
    features = pose_features(torch.tensor([[0.0, 5.0, 6.0], [step, 5.0, 6.0]]), 8)
    # column 5 looks atan(0.375) to the right, column 6 atan(0.625)
    torch.testing.assert_close(features[0, 5], features[1, 6], rtol=0, atol=1e-4)
    assert not torch.allclose(features[0, 5], features[1, 5], atol=1e-2)
    assert features.abs().max() <= 1


def lane_of(world):
    cache = KVCache(world.spec.cache, make_format("bf16"), world.spec.policy, dtype=world.dtype)
    return LaneState("a", cache)


def noise_of(world, seed):
    return torch.randn(4, *world.spec.latent_shape, generator=torch.Generator().manual_seed(seed))


def test_lane_keeps_its_walk_from_commit_to_commit():
    world = EmbeddedWorld.random("tiny", seed=1)
    torch.nn.init.normal_(world._transformer.pose_in.weight)
    lane = lane_of(world)
    action = ChunkAction.held(frozenset({"w", "left"}), 4)
    first = world.generate_chunk(lane, action, noise_of(world, 0), 2)
    assert POSE not in lane.extra, "a chunk that is not committed moves nobody"
    for count in (1, 2):
        world.commit_chunk(lane, first.latents, action)
        row = [1.0, 0, 0, 0, 1.0, 0]
        assert lane.extra[POSE] == follow(START, [row] * 4 * count)[1]
    here = world.generate_chunk(lane, action, noise_of(world, 1), 2).latents
    lane.extra[POSE] = START
    elsewhere = world.generate_chunk(lane, action, noise_of(world, 1), 2).latents
    assert not torch.equal(here, elsewhere)


def test_pose_array_is_radians_and_units():
    row = as_array(follow(START, [LEFT])[0])
    assert row.shape == (1, 3) and row.dtype == np.float32
    assert row[0, 0] == pytest.approx(math.radians(7.498), abs=1e-4)

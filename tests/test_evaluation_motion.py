"""The judge of motion on pictures whose motion is known, and on swapped keys."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantwm.errors import UserError
from quantwm.evaluation.measures import (
    EVIDENCE,
    directions_right,
    judge_motion,
    true_direction,
)
from quantwm.evaluation.motion import STEPS, motion_costs, step_evidence, turn_of
from tests.box_room import episode, held


@pytest.mark.parametrize(("key", "degrees"), [("left", 7.5), ("right", -7.5), ("", 0.0)])
def test_a_turned_picture_is_seen_as_turned(key, degrees):
    turned = episode("turn", held(key, 4))
    assert turn_of(motion_costs(turned.frames)) == degrees


@pytest.mark.parametrize(
    ("key", "way"), [("w", "forward"), ("s", "back"), ("a", "left"), ("d", "right")]
)
def test_a_step_is_seen_the_way_it_went(key, way):
    costs = motion_costs(episode("walk", held(key, 4)).frames)
    opposite = {"forward": "back", "back": "forward", "left": "right", "right": "left"}[way]
    assert step_evidence(costs, 0.0, way) > 10 * EVIDENCE
    assert step_evidence(costs, 0.0, opposite) < 0


def test_a_step_while_turning_is_seen():
    costs = motion_costs(episode("walk", held("w+left", 4)).frames)
    assert turn_of(costs) == 7.5
    assert step_evidence(costs, 7.5, "forward") > EVIDENCE > step_evidence(costs, 7.5, "back")


def test_a_still_picture_has_not_moved():
    still = np.repeat(episode("still", held("", 1)).frames[:1], 5, axis=0)
    costs = motion_costs(still)
    assert costs.shape == (4, 5, len(STEPS)) and float(costs[:, 2, 0].max()) == 0.0
    assert turn_of(costs) == 0.0
    assert all(step_evidence(costs, 0.0, way) <= EVIDENCE for way in STEPS[1:])


def test_costs_do_not_depend_on_the_batch():
    frames = episode("walk", held("w", 5)).frames
    assert torch.allclose(motion_costs(frames), motion_costs(frames, batch=2), atol=1e-6)
    with pytest.raises(UserError, match="2 or more frames"):
        motion_costs(frames[:1])


def test_truth_says_what_moved_and_walls_do_not():
    walk = episode("walk", [*held("w+left", 4), *held("left", 4), *held("d", 4)])
    assert true_direction(walk, 1, 4).turn == 7.5
    assert true_direction(walk, 1, 4).step == "forward"
    turning = true_direction(walk, 5, 4)
    assert turning.turn == 7.5 and turning.step is None and turning.judged
    assert true_direction(walk, 9, 4).step == "right"
    mixed = true_direction(walk, 7, 4)
    assert mixed.turn is None and not mixed.judged
    walk.poses[1:5, :2] = walk.poses[0, :2]  # keys held against a wall
    assert true_direction(walk, 1, 4).step is None


def test_right_keys_are_right_and_swapped_keys_are_wrong():
    keys = [*held("left", 4), *held("right", 4), *held("w", 4), *held("s", 4)]
    truth = episode("keys", [frozenset()] * 3 + keys)
    swap = {"left": "right", "right": "left", "w": "s", "s": "w"}
    other = episode("keys", [frozenset()] * 3 + [frozenset(swap[k] for k in held) for held in keys])
    assert judge_motion(truth.frames[3:], truth, 4, 4) == [True] * 4
    assert judge_motion(other.frames[3:], truth, 4, 4) == [False] * 4
    frozen = np.repeat(truth.frames[3:4], 17, axis=0)
    assert judge_motion(frozen, truth, 4, 4) == [False] * 4


def test_a_turn_alone_needs_no_step():
    truth = episode("turn", held("left", 4))
    costs = motion_costs(truth.frames)
    assert directions_right(costs, true_direction(truth, 1, 4))

"""The acceptance table on worlds whose answer is known: one that knows the truth, one that forgets,
one that takes the wrong keys, one that fades."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from quantwm.evaluation import acceptance
from quantwm.evaluation.acceptance import Amount, Evaluation
from quantwm.evaluation.episodes import Episode
from quantwm.evaluation.rollout import Run
from quantwm.evaluation.sheet import draw_sheet, save_sheet
from quantwm.evaluation.table import make_rows
from quantwm.worlds.base import ChunkOutput
from quantwm.worlds.embedded.adapter import EmbeddedWorld, world_spec
from quantwm.worlds.embedded.config import PRESETS
from tests import box_room
from tests.box_room import episode, held

AMOUNT = Amount(forced_chunks=2, free_frames=16, sheet_maps=1)


class Oracle:
    """Answers with an episode's true frames; `spoil` changes them, given the frames a lane sees."""

    def __init__(self, truth: Episode, spoil=lambda frames, window: frames) -> None:
        self.spec = replace(world_spec(PRESETS["shipped"]), context_frames=4)
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.committed: list[np.ndarray] = []
        self._truth, self._spoil = truth, spoil

    def encode(self, frames):
        return torch.from_numpy(frames.copy())

    def generate_chunk(self, lane, action, noise, steps):
        first = lane.next_frame
        frames = self._truth.clip(first, first + 4)
        window = lane.cache.policy.window_frames
        return ChunkOutput(torch.from_numpy(self._spoil(frames, window).copy()), ())

    def commit_chunk(self, lane, latents, action):
        self.committed.append(latents.numpy())
        lane.next_frame += len(latents)

    def decode(self, latents):
        return latents.numpy()


def table(
    truth: Episode, spoil=lambda frames, window: frames, amount: Amount = AMOUNT
) -> dict[str, float]:
    evaluation = Evaluation(Oracle(truth, spoil), amount, steps=1)
    found = evaluation.run([truth])
    return {row.spec.key: row.reached for row in make_rows(found.estimates(), {})}


def there_and_back() -> Episode:
    keys = [*held("w", 4), *held("left", 4), *held("right", 4), *held("s", 4)]
    return episode("back", [frozenset()] * 3 + keys)


def walk() -> Episode:
    return episode("walk", [*held("", 3), *held("w", 4), *held("left", 4), *held("s", 4)])


def test_a_world_that_knows_the_truth_gets_everything():
    rows = table(there_and_back())
    assert rows["back"] == rows["back_window"] == 60.0 and "first_8" not in rows
    assert rows["ablation"] == 0.0
    assert rows["sharpness"] == rows["colour"] == rows["contrast"] == rows["brightness"] == 1.0
    assert rows["keys"] == rows["keys_truth"] == 100.0
    rows = table(walk())
    assert rows["next_chunk"] == rows["autoencoder"] == rows["first_8"] == 60.0
    assert rows["keys"] == 100.0 and rows["sharpness_late"] == rows["colour_late"] == 1.0


def test_a_turn_is_compared_with_its_first_frame_and_its_quarters(monkeypatch):
    monkeypatch.setattr(acceptance, "TURN", 8)
    monkeypatch.setattr(box_room, "TURN", 45.0)  # a circle of eight frames
    truth = episode("turn", [*held("", 3), *held("left", 16)])
    rows = table(truth)
    assert rows["turn_quarters"] == 60.0
    assert rows["turn_first"] > 40 and rows["turn_unseen"] > 40
    half = table(episode("turn", [*held("", 3), *held("left", 12), *held("", 4)]))
    assert half["turn_first"] < 20 < half["turn_quarters"]  # ends with its back to the start


def test_a_world_that_forgets_behind_its_window_loses_the_ablation():
    def forgets(frames, window):
        return np.full_like(frames, 128) if window == 20 else frames

    rows = table(there_and_back(), forgets)
    assert rows["back"] == 60.0 and rows["back_window"] < 20
    assert rows["ablation"] == pytest.approx(rows["back"] - rows["back_window"])


def test_a_world_that_forgets_loses_the_ablation_of_the_turn_too(monkeypatch):
    monkeypatch.setattr(acceptance, "TURN", 8)
    monkeypatch.setattr(box_room, "TURN", 45.0)
    truth = episode("turn", [*held("", 3), *held("left", 16)])
    rows = table(truth, lambda frames, window: frames // 2 if window == 20 else frames)
    assert rows["turn_quarters"] == 60.0 and rows["ablation_turn"] > 40


def test_a_world_that_fades_or_turns_the_wrong_way_is_seen():
    def fades(frames, window):
        return ((frames.astype(np.float32) - 128) / 2 + 128).astype(np.uint8)

    rows = table(walk(), fades)
    assert rows["sharpness"] == pytest.approx(0.25, abs=0.02)  # half the steps, a quarter of energy
    assert rows["contrast"] == pytest.approx(0.5, abs=0.02)
    assert rows["colour"] == pytest.approx(0.5, abs=0.02)

    def mirrored(frames, window):
        return frames[:, :, ::-1]  # left is right

    assert table(walk(), mirrored)["keys"] < 100.0 == table(walk())["keys"]


def test_still_frames_do_not_change():
    truth = episode("still", held("", 11))
    assert table(truth)["still"] == 0.0
    noisy = table(truth, lambda frames, window: frames + np.uint8([[[[0]]], [[[9]]]] * 2))
    assert noisy["still"] > 5


def test_forced_chunks_leave_truth_in_the_history_and_free_ones_their_own():
    truth = walk()
    world = Oracle(truth, lambda frames, window: frames // 2)
    run = Run(world, truth, steps=1)
    run.follow(range(1))
    forced = list(run.forced(range(1, 3)))
    assert np.array_equal(forced[0], truth.clip(4, 8) // 2)
    assert np.array_equal(world.committed[1], truth.clip(4, 8))
    free = run.free(range(3, 4))
    assert np.array_equal(world.committed[3], free)


def test_the_noise_of_a_chunk_is_the_same_for_every_window():
    world = EmbeddedWorld.random("tiny")
    size = world.spec.video_size
    truth = walk()
    small = replace(truth, frames=truth.frames[:, : size[1], : size[0]].copy())
    runs = []
    for window in (None, 4):
        run = Run(world, small, 1, window)
        run.follow(range(1))
        runs.append(run.free(range(1, 4)))
    assert np.array_equal(runs[0][:4], runs[1][:4])  # both see all of four frames
    assert not np.array_equal(runs[0][8:], runs[1][8:])


def test_the_sheet_shows_truth_above_the_model(tmp_path):
    evaluation = Evaluation(Oracle(walk()), AMOUNT, steps=1)
    strips = evaluation.run([walk()]).strips
    picture = draw_sheet(strips)
    assert picture.shape[0] == 16 + 2 * 96 and picture.dtype == np.uint8
    assert np.array_equal(picture[16:112], picture[112:208])
    path = save_sheet(tmp_path, strips)
    assert path.stat().st_size > path.with_suffix(".webp").stat().st_size > 0

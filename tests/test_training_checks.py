"""What a training's check says of motion and looks of free frames; which teacher it takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from quantwm.errors import UserError
from quantwm.evaluation.episodes import load_episode
from quantwm.evaluation.measures import true_direction
from quantwm.worlds.embedded.adapter import ASSETS
from quantwm.worlds.embedded.autoencoder import Autoencoder
from quantwm.worlds.embedded.config import PRESETS
from quantwm.worlds.embedded.transformer import Transformer
from quantwm.worlds.embedded.weights import save_models
from training.data import reckoned_poses
from training.evaluate import EvaluationConfig, evaluate
from training.losses import TransformerTraining
from training.motion_check import _episode, keys_followed
from training.state import TrainState, load_teacher

START, CHUNK = 4, 4
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def walk():
    """20 true frames that turn: frames, keys and reckoned poses, the last two [1, ...]."""
    episode = load_episode(ASSETS / "truth" / "full-turn")
    keys = episode.keys[16:36]
    return episode.clip(16, 36), torch.from_numpy(keys)[None], reckoned_poses(keys)[None]


def test_truth_follows_its_keys_and_a_still_picture_does_not(walk):
    frames, keys, poses = walk
    said = keys_followed([frames], [frames], keys, poses, START, CHUNK, "cpu")
    assert said["follows_keys"] == 1 and said["judged"] >= 2
    still = np.repeat(frames[START - 1 : START], len(frames), axis=0)
    assert keys_followed([still], [frames], keys, poses, START, CHUNK, "cpu")["follows_keys"] == 0
    idle = torch.zeros_like(keys), torch.zeros_like(poses)
    assert keys_followed([still], [frames], *idle, START, CHUNK, "cpu") == {}


def test_directions_from_reckoned_poses_are_those_of_the_engine():
    episode = load_episode(ASSETS / "truth" / "there-and-back")
    poses = reckoned_poses(episode.keys)
    reckoned = _episode(np.zeros((episode.length, 1, 1, 3), np.uint8), torch.tensor(episode.keys),
                        poses, episode.context)  # fmt: skip
    firsts = range(episode.context, episode.length, CHUNK)
    pairs = [
        (true_direction(episode, i, CHUNK), true_direction(reckoned, i, CHUNK)) for i in firsts
    ]
    assert sum(a.judged for a, _ in pairs) > 8
    same = [a == b for a, b in pairs]
    assert np.mean(same) > 0.85  # the reckoned walk knows no walls


def test_a_check_measures_energy_contrast_and_keys(walk):
    frames, keys, _ = walk
    torch.manual_seed(1)
    wide = replace(PRESETS["tiny"].transformer, latent_height=12, latent_width=16)
    config = EvaluationConfig(context_chunks=1, rollout_frames=12, episodes=1, steps=1)
    metrics, _ = evaluate(
        Transformer(wide).eval(), Autoencoder(PRESETS["tiny"].autoencoder).eval(),
        torch.from_numpy(frames.copy())[None], keys, PRESETS["tiny"].sampler, config,
    )  # fmt: skip
    assert 0 <= metrics["follows_keys"] <= 1 and metrics["judged"] >= 2
    assert metrics["free_energy"] >= 0 and 0 <= metrics["free_contrast"] < 1


def test_a_teacher_stays_as_it_was_and_must_share_the_latents(tmp_path):
    torch.manual_seed(1)
    preset = PRESETS["tiny"]
    autoencoder = Autoencoder(preset.autoencoder)
    state = TrainState.fresh(preset.transformer, TransformerTraining(), 0, CPU)
    teacher = state.need_teacher()
    before = [parameter.clone() for parameter in teacher.parameters()]
    with torch.no_grad():
        for parameter in state.average.parameters():
            parameter.add_(1)
    assert state.need_teacher() is teacher
    assert all(torch.equal(a, b) for a, b in zip(before, teacher.parameters(), strict=True))
    saved = save_models(tmp_path, preset, state.average, autoencoder, {}).folder
    given = load_teacher(saved, autoencoder, CPU)
    assert not any(parameter.requires_grad for parameter in given.parameters())
    with pytest.raises(UserError, match="another autoencoder"):
        load_teacher(saved, Autoencoder(preset.autoencoder), CPU)

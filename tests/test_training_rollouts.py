"""Gaps, the pool of rollouts, and the measurement of returns."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from quantwm.errors import UserError
from quantwm.worlds.embedded.autoencoder import Autoencoder
from quantwm.worlds.embedded.config import PRESETS
from quantwm.worlds.embedded.transformer import Transformer
from quantwm.worlds.embedded.weights import load_models, read_manifest, save_models
from training.average import average_runs
from training.data import LatentPool
from training.evaluate import EvaluationConfig, choose_returns, measure_returns
from training.gaps import draw_gaps
from training.losses import RolloutConfig, Stage, TransformerTraining
from training.progress import Log
from training.revisits import find_revisits
from training.rollout import roll_out
from training.rollout_pool import RolloutPool, column_weights, known_columns
from training.train_transformer import Attention, PartError, draw_clips, failing_as, lesser

CONFIG = PRESETS["tiny"].transformer
FRAMES, CHUNK = 32, 4
CPU = torch.device("cpu")


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    model = Transformer(CONFIG).requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def pool():
    """Three episodes that turn left without end: every frame 48 or more is a revisit."""
    length = 80
    latents = torch.randn(3, length, *CONFIG.latent_shape, generator=rng(1))
    keys = torch.zeros(3, length, 6, dtype=torch.uint8)
    poses = torch.zeros(3, length, 3)
    poses[..., 0] = torch.arange(length) * (2 * math.pi / 48)
    return LatentPool(latents, keys, poses)


def training(**changes):
    rollouts = RolloutConfig(clips=4, uses=2, busy=1.0, longest_context=5)
    return TransformerTraining(context_chunks=2, rollouts=rollouts, **changes)


def test_gaps_leave_the_context_and_end_with_the_revisit():
    marks = torch.full((4000, 2), -1)
    marks[:2000] = torch.tensor([90, 21])  # chunk 22 shows again what chunk 5 showed
    gaps = draw_gaps(marks, 32, CHUNK, 0.5, 4, 16, rng(2))
    assert not gaps[:, :4].any()
    share = gaps.any(dim=1).float().mean()
    assert 0.45 < float(share) < 0.55
    placed = gaps[:2000][gaps[:2000].any(dim=1)]
    assert placed[:, 22].all() and not placed[:, :6].any()
    lengths = gaps[2000:].sum(dim=1)
    assert int(lengths.max()) <= 20 and set(range(2, 17)) <= set(lengths.tolist())
    ends = gaps[2000:, -1].float().mean()
    assert 0 < float(ends) < 0.2


def test_gaps_need_room_and_none_are_drawn_at_share_zero():
    marks = torch.full((64, 2), -1)
    assert not draw_gaps(marks, 4, CHUNK, 1.0, 4, 16, rng()).any()
    assert not draw_gaps(marks, 16, CHUNK, 0.0, 4, 16, rng()).any()
    assert draw_gaps(marks, 6, CHUNK, 1.0, 4, 16, rng()).any(dim=1).all()


def test_what_no_true_frame_showed_is_not_known():
    poses = torch.zeros(2, FRAMES, 3)
    poses[:, :, 0] = torch.arange(FRAMES) * (2 * math.pi / FRAMES)
    poses[1, 16:, 1] = 500.0  # the second clip is elsewhere from its middle on
    contexts = torch.tensor([2, 8])
    known = known_columns(poses, contexts, CHUNK, 4)
    assert known[0, :8].all() and known[1].all()
    # seen: from 45 degrees right of frame 0 to 45 left of frame 7; frame 16 looks the other way
    assert not known[0, 16].any() and known[0, 31].tolist() == [True, True, True, False]
    # turning left brings the new in at the left: column 0 looks left
    assert known[0, 8].tolist() == [False, True, True, True]
    assert known[0, 10].tolist() == [False, False, True, True]
    assert not known_columns(poses, torch.tensor([2, 4]), CHUNK, 4)[1, 16:].any()
    weights = column_weights(known, contexts, CHUNK, 0.3, 2.0)
    assert (weights[0, :8] == 1).all() and (weights[0, 16] == 0.3).all()
    assert weights[0, 10].tolist() == pytest.approx([0.3, 0.3, 1, 1])
    assert (weights[0, 31, :3] == 2).all() and (weights[1] == 1).all()


def test_rollouts_of_each_clip_start_after_its_own_context(model, pool):
    clips = pool.random_clips(2, FRAMES, rng(3))
    both = roll_out(model, clips.latents, clips.keys, torch.tensor([2, 5]), 2, 3.0, 7, False)
    alone = roll_out(model, clips.latents, clips.keys, 2, 2, 3.0, 7, False)
    changed = (both != clips.latents).flatten(2).any(dim=2)
    assert changed.sum(dim=1).tolist() == [FRAMES - 8, FRAMES - 20]
    torch.testing.assert_close(both[0], alone[0], rtol=1e-4, atol=1e-4)


def test_pool_gives_drifted_histories_of_true_clips_and_is_refilled_when_used(model, pool):
    rollouts = RolloutPool(training(), FRAMES, seed=1)
    assert rollouts.is_stale()
    facts = rollouts.refill(model, None, pool, rng(4))
    assert not rollouts.is_stale() and facts["invented_mse"] >= 0 and facts["edges"] > 0
    own = rollouts.draw(8, rng(5))
    assert rollouts.is_stale() and own.known.shape == (8, FRAMES, CONFIG.latent_width)
    kept = (own.history == own.clips.latents).flatten(2).all(dim=2)
    assert kept[:, :8].all() and not kept[:, 20:].any()
    assert torch.equal(own.target, own.clips.latents), "without a teacher the truth is aimed at"


def test_what_is_invented_aims_at_how_the_teacher_goes_on_from_the_rollout(model, pool):
    rollouts = RolloutPool(training(), FRAMES, seed=1)
    assert rollouts.has_teacher and not RolloutPool(training(continuation=False), 32, 1).has_teacher
    facts = rollouts.refill(model, model, pool, rng(4))
    own = rollouts.draw(8, rng(5))
    other = own.target != own.clips.latents
    known = own.known[:, :, None, None, :].expand_as(other)
    assert other.any() and not (other & known).any()
    assert 0 < facts["known"] < 1 and facts["continued_mse"] < facts["invented_mse"]
    assert own.weight[own.known].min() == 1 and own.weight[~own.known].max() == 0.5


def test_a_step_sees_rollouts_for_its_share_and_weighs_what_they_invented(model, pool):
    settings = training(gaps=1.0, invented=0.25)
    stage = Stage(FRAMES, 4, 1.0, rolled=0.5)
    rollouts = RolloutPool(settings, FRAMES, seed=1)
    rollouts.refill(model, None, pool, rng(4))
    clips = draw_clips(pool, rollouts, stage, CONFIG, settings, rng(6))
    same = (clips.history == clips.latents).flatten(1).all(dim=1)
    assert same.tolist() == [True, True, False, False]
    assert (clips.weight[:2] == 1).all() and set(clips.weight.unique().tolist()) <= {0.25, 1.0, 2.0}
    assert clips.rolled.tolist() == [False, False, True, True] and clips.known[:2].all()
    assert clips.hidden.any(dim=1).all() and not clips.hidden[:, :2].any()
    plain = draw_clips(pool, None, Stage(FRAMES, 4, 1.0), CONFIG, training(gaps=0.0), rng(6))
    assert plain.history is None and plain.weight is None and plain.hidden is None


def test_a_step_with_a_short_window_has_no_gaps(pool):
    settings = training(gaps=1.0, short_windows=(1,), short_chance=0.5)
    stage = Stage(FRAMES, 4, 1.0)
    masks = Attention("sdpa", stage, CONFIG, settings, CPU)
    clips = draw_clips(pool, None, stage, CONFIG, settings, rng(6))
    hidden = [masks.hide(clips, masks.pick(rng(seed))).hidden.any() for seed in range(20)]
    assert 2 < sum(map(bool, hidden)) < 18
    masks.hide(clips, masks.full)
    assert torch.equal(masks.hidden.buffer[:, : FRAMES // CHUNK], clips.hidden)


def test_returns_are_clips_whose_context_ends_with_the_first_visit(pool):
    config = EvaluationConfig(return_frames=64, return_after=40)
    revisits = find_revisits(pool.poses)
    chosen = choose_returns(revisits, 80, 16, 64, config)
    episode, frame, first = chosen.unbind(dim=1)
    assert set(episode.tolist()) == {0, 1, 2} and len(chosen) <= 9
    assert (first >= 0).all() and (first + 64 <= 80).all() and (frame - first <= 60).all()
    assert ((frame - 48 - first) <= 16).all()
    assert len(choose_returns(revisits, 80, 16, 40, config)) == 0


def test_returns_are_measured_with_and_without_the_history(model):
    torch.manual_seed(2)
    frames = torch.randint(0, 256, (2, 80, 32, 48, 3), dtype=torch.uint8, generator=rng(8))
    keys = torch.zeros(2, 80, 6, dtype=torch.uint8)
    keys[..., 4] = 1  # always left
    config = EvaluationConfig(steps=1, return_frames=72, return_after=40, window=1)
    autoencoder = Autoencoder(PRESETS["tiny"].autoencoder).eval()
    sampler = PRESETS["tiny"].sampler
    found = measure_returns(model, autoencoder, frames, keys, sampler, config)
    assert found["returns"] == 6 and 0 < found["return_psnr"] < 40
    blind = replace(config, window=18)  # as long as the clip: nothing is out of its reach
    assert measure_returns(model, autoencoder, frames, keys, sampler, blind)["return_gain"] == 0
    short = replace(config, return_after=100)
    assert measure_returns(model, autoencoder, frames, keys, sampler, short) == {}


def test_what_fails_is_left_out_one_by_one_and_said(tmp_path):
    log = Log(tmp_path / "log.jsonl")
    stage, settings = Stage(FRAMES, 4, 1.0, rolled=0.5, adversarial=1.0), training()
    with pytest.raises(PartError) as critic, failing_as("critic"):
        raise RuntimeError("no kernel")
    with pytest.raises(PartError) as rolled, failing_as("rollouts"):
        raise TypeError("no kernel")
    with pytest.raises(torch.OutOfMemoryError), failing_as("critic"):
        raise torch.OutOfMemoryError("full")
    plain = RuntimeError("no kernel")
    assert lesser(critic.value, stage, settings, "flex", log)[0].adversarial == 0
    without = lesser(rolled.value, stage, settings, "flex", log)[0]
    assert without.rolled == 0 and without.own > 0
    assert lesser(plain, stage, settings, "flex", log)[1].gaps == 0
    _, kept, attention = lesser(plain, stage, training(gaps=0.0), "flex", log)
    assert attention == "sdpa" and kept.gaps == 0
    assert lesser(plain, Stage(FRAMES, 4, 1.0), settings, "sdpa", log) is None
    said = (tmp_path / "log.jsonl").read_text()
    assert all(word in said for word in ("CRITIC FAILS", "ROLLOUTS FAIL", "GAPS FAIL", "FLEX FAIL"))


def test_clips_longer_than_episodes_are_refused(pool):
    with pytest.raises(UserError, match="at least as long"):
        pool.random_clips(1, 96, rng())


def test_mean_of_two_runs_is_their_mean_and_says_so(tmp_path):
    torch.manual_seed(1)
    preset = PRESETS["tiny"]
    autoencoder = Autoencoder(preset.autoencoder)
    runs = []
    for name, value, ancestor in (("a", 0.0, "x"), ("b", 1.0, "x"), ("c", 1.0, "y")):
        model = Transformer(preset.transformer)
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, value)
        facts = {"continued_from": {"command": ancestor}}
        runs.append(save_models(tmp_path / name, preset, model, autoencoder, facts))
    a, b, c = (manifest.folder for manifest in runs)
    mean = average_runs(a, b, tmp_path / "mean", 0.25)
    model, _ = load_models(mean, CPU, torch.float32)
    assert all((parameter == 0.25).all() for parameter in model.parameters())
    told = read_manifest(tmp_path / "mean").training["averaged"]
    assert [each["sha256"] for each in told] == [runs[0].sha256, runs[1].sha256]
    with pytest.raises(UserError, match="same weights"):
        average_runs(a, c, tmp_path / "wrong", 0.5)
    with pytest.raises(UserError, match="another folder"):
        average_runs(a, b, b, 0.5)

"""The stage on own rollouts, the critic's gradient, and poses laid at random in training."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from quantwm.worlds.embedded.config import PRESETS
from quantwm.worlds.embedded.pose import YAW_FEATURES
from quantwm.worlds.embedded.transformer import Transformer
from training.critic import (
    Critic,
    add_critic_gradient,
    chunks_of,
    context_of,
    critic_loss,
    mismatched_contexts,
)
from training.data import LatentPool
from training.fading import faded
from training.losses import (
    Clips,
    RolloutConfig,
    Stage,
    TransformerTraining,
    edge_error,
    forward_loss,
    training_pose,
    trusted_chunks,
    weighted_error,
)
from training.own_history import mixed_history, own_rollout
from training.progress import Budget, Log
from training.revisits import find_revisits, fitting_revisits, starts_with_revisit
from training.rollout import roll_out
from training.state import TrainState
from training.teacher_forcing import dense_mask, sdpa_attend, two_stream_tables
from training.train_transformer import train_stage

CONFIG = PRESETS["tiny"].transformer
FRAMES, CHUNK = 16, 4


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    model = Transformer(CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def clips():
    poses = torch.cumsum(torch.randn(2, FRAMES, 3, generator=rng(5)), dim=1) * 10
    keys = torch.randint(0, 2, (2, FRAMES, 6), generator=rng(6)).float()
    pose = training_pose(poses, CONFIG.grid[1], 0.0, rng(7))
    return Clips(torch.randn(2, FRAMES, *CONFIG.latent_shape, generator=rng(8)), keys, pose)


def attention():
    return sdpa_attend(dense_mask(FRAMES, CONFIG, FRAMES // CHUNK, "cpu"))


def test_random_axes_keep_what_lies_between_two_frames():
    poses = torch.cumsum(torch.randn(3, 8, 3, generator=rng(1)), dim=1) * 20
    products = []
    for seed in (1, 2):
        features = training_pose(poses, 8, 0.0, rng(seed)).double()
        yaw = features[..., :YAW_FEATURES]
        products.append(torch.einsum("btcf,bscf->btsc", yaw, yaw))
    torch.testing.assert_close(*products, rtol=0, atol=2e-4)


def test_lost_clips_keep_their_heading_only():
    features = training_pose(torch.randn(64, 4, 3, generator=rng(2)), 8, 0.5, rng(3))
    gone = (features[..., YAW_FEATURES:] == 0).all(dim=(1, 2, 3))
    assert 10 < int(gone.sum()) < 54
    assert (features[..., :YAW_FEATURES].abs().sum(dim=(1, 2, 3)) > 0).all()


def test_own_rollout_is_the_sampler_from_true_history(model, clips):
    """The parallel rollout's first generated chunk equals the sequential one, noise for noise."""
    tables = two_stream_tables(FRAMES, CONFIG, "cpu")
    clean = clips.latents
    own = own_rollout(
        model, clean, clips.keys, None, tables, attention(), 3.0, rng(4), torch.float32
    )
    noise = torch.randn(clean.shape, generator=rng(4))

    class Noise:
        """Feeds the chunks of the same noise to the sequential rollout."""

        first = CHUNK

    def chunk_noise(shape, generator, device):
        span = noise[:, Noise.first : Noise.first + CHUNK]
        Noise.first += CHUNK
        return span

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.rollout.torch.randn", chunk_noise)
        forced = roll_out(model, clean, clips.keys, 1, 2, 3.0, 0, teacher_forced=True)
    torch.testing.assert_close(own.chunks[:, CHUNK:], forced[:, CHUNK:], rtol=1e-4, atol=1e-4)
    assert own.level == pytest.approx(0.75) and not own.chunks.requires_grad


def test_mixed_history_keeps_the_context_and_whole_chunks():
    clean, own = torch.zeros(64, FRAMES, 1, 1, 1), torch.ones(64, FRAMES, 1, 1, 1)
    mixed = mixed_history(clean, own, CHUNK, 0.5, 1, rng(9)).flatten(1)
    assert (mixed[:, :CHUNK] == 0).all()
    by_chunk = mixed.unflatten(1, (-1, CHUNK))
    assert (by_chunk == by_chunk[..., :1]).all()
    share = float((mixed[:, CHUNK:].sum(dim=1) > 0).float().mean())
    assert 0.25 < share < 0.6
    assert (mixed_history(clean, own, CHUNK, 0.0, 1, rng(9)) == 0).all()


def context(clips, trusted=True):
    told = torch.full((2, FRAMES // CHUNK), trusted)
    return context_of(clips.latents, clips.keys, told, CHUNK)


def test_mismatched_contexts_have_another_frame_or_opposite_keys(clips):
    true = context(clips)
    channels = CONFIG.latent_channels
    wrong, differs = mismatched_contexts(true, channels, rng(1))
    frame = (wrong[:, :channels] != true[:, :channels]).flatten(1).any(dim=1)
    keys = (wrong[:, channels:] != true[:, channels:]).flatten(1).any(dim=1)
    assert not (frame & keys).any() and frame.any() and keys.any()
    assert torch.equal(differs.bool(), frame | keys)
    held = true[:, channels:, 0, 0].unflatten(1, (CHUNK, 6))
    opposite = wrong[:, channels:, 0, 0].unflatten(1, (CHUNK, 6))
    assert torch.equal(opposite[keys][..., [1, 0, 3, 2, 5, 4]], held[keys])
    still = context(replace(clips, keys=torch.zeros_like(clips.keys)), trusted=False)
    assert mismatched_contexts(still, channels, rng(1))[1].sum() == 0


def test_critic_learns_which_keys_and_frame_a_chunk_follows(clips):
    torch.manual_seed(0)
    critic, channels = Critic(CONFIG, width=16), CONFIG.latent_channels
    adam = torch.optim.Adam(critic.parameters(), lr=3e-3)
    real, true = chunks_of(clips.latents, CHUNK), context(clips)
    nothing = torch.zeros(len(real))
    for step in range(60):
        wrong = mismatched_contexts(true, channels, rng(step))
        loss = critic_loss(critic, real, 0 * real, true, nothing, wrong)
        adam.zero_grad()
        loss.backward()
        adam.step()
    wrong, differs = mismatched_contexts(true, channels, rng(99))
    with torch.no_grad():
        gap = (critic(real, true) - critic(real, wrong)).mean(dim=(1, 2, 3))
    assert float(gap[differs.bool()].mean()) > 0.3


def test_critic_pushes_where_much_is_open_and_as_long_as_was_asked_for(clips):
    torch.manual_seed(0)
    critic = Critic(CONFIG, width=8)
    error = 0.01 * torch.ones_like(clips.latents)
    error[1] *= 100  # the history says little about the second clip
    weight = (clips.latents + error).requires_grad_()
    counts = torch.ones(2 * (FRAMES // CHUNK - 1))
    counts[-1] = 0
    sigma = torch.full((2, FRAMES), 0.75)
    grads = {}
    for share in (0.0, 0.5):
        out = weight * 1.0
        loss, _ = weighted_error(out, clips.latents, sigma, CHUNK, 0.15)
        add_critic_gradient(
            critic, out, loss, clips.latents, (context(clips),), counts, 0.75**-2 * counts, share
        )
        grads[share], weight.grad = weight.grad.clone(), None
    pushed = (grads[0.5] - grads[0.0]).unflatten(1, (-1, CHUNK)).flatten(2).norm(dim=2)
    asked = grads[0.0].unflatten(1, (-1, CHUNK)).flatten(2).norm(dim=2)
    assert (pushed[:, 0] == 0).all() and pushed[1, -1] == 0
    # the open chunks' squared error is 5 / 2 of the mean of those that count: 1 / (1 + 2 / 5)
    torch.testing.assert_close(
        pushed[1, 1:-1] / asked[1, 1:-1], torch.full((2,), 0.5 / 1.4), rtol=2e-3, atol=0
    )
    assert (pushed[0, 1:] / asked[0, 1:] < 1e-3).all()


def test_critic_is_not_told_the_frame_before_where_the_history_is_not_true(clips):
    history = clips.latents.clone()
    history[0, 4:8] += 1
    hidden = torch.tensor([[False] * 4, [False, False, True, False]])
    rolled = torch.tensor([True, False])
    trusted, shown = trusted_chunks(history, clips.latents, hidden, rolled, CHUNK)
    expected = [[False, True, False, True], [False, True, True, False]]
    assert trusted.tolist() == expected
    assert shown.tolist() == [[False, True, True, True], expected[1]]
    faded, _ = trusted_chunks(history, clips.latents, None, None, CHUNK)
    assert faded[:, 1:].all(), "outside of rollouts a frame that differs is a faded true one"
    told = context_of(clips.latents, clips.keys, trusted, CHUNK).unflatten(0, (2, -1))
    before = told[:, :, : CONFIG.latent_channels].abs().sum(dim=(2, 3, 4)) > 0
    assert before.tolist() == [row[1:] for row in expected]
    held = told[0, 0, CONFIG.latent_channels :, 0, 0].view(CHUNK, 6)
    assert torch.equal(held, clips.keys[0, CHUNK : 2 * CHUNK])


def test_a_full_turn_is_a_revisit_and_a_glance_is_none():
    turn = 2 * np.pi / 48
    angles = np.concatenate((np.zeros(20), turn * np.arange(1, 49), np.full(12, 2 * np.pi)))
    glance = np.concatenate((np.zeros(34), turn * np.arange(1, 4), turn * np.arange(3, -1, -1)))
    glance = np.concatenate((glance, np.zeros(len(angles) - len(glance))))
    poses = torch.zeros(2, len(angles), 3)
    poses[0, :, 0], poses[1, :, 0] = torch.tensor(angles), torch.tensor(glance)
    found = find_revisits(poses)
    assert set(found[:, 0].tolist()) == {0}
    assert 64 <= int(found[:, 1].min()) <= 68 and int(found[0, 2]) <= 22
    fits = fitting_revisits(found, 64, 80)
    episodes, starts, marks = starts_with_revisit(fits, 32, 64, 80, rng(1))
    assert (episodes == 0).all() and (starts >= 5).all() and (starts <= 16).all()
    assert (marks[:, 0] < 64).all() and (marks[:, 0] - marks[:, 1] > 16).all()
    assert len(fitting_revisits(found, 16, 80)) == 0
    early = fitting_revisits(found, 68, 80, shown_within=16)
    _, starts, marks = starts_with_revisit(early, 32, 68, 80, rng(2), shown_within=16)
    assert (starts >= 0).all() and (starts <= 12).all() and (marks[:, 1] < 16).all()


def test_edge_error_sees_blur_in_judged_chunks_only(clips):
    clean = clips.latents
    judged = torch.zeros(2, FRAMES // CHUNK, dtype=torch.bool)
    judged[0, 2] = True
    blurred = clean.clone()
    blurred[0, 8:12] *= 0.5
    assert edge_error(clean, clean, judged, CHUNK) == 0
    weak = float(edge_error(blurred, clean, judged, CHUNK))
    steps = float(clean[0, 8:12].diff(dim=2).abs().mean() + clean[0, 8:12].diff(dim=3).abs().mean())
    assert weak == pytest.approx(0.5 * steps, rel=0.1)
    assert edge_error(blurred, clean, ~judged, CHUNK) == 0
    known = torch.ones(2, FRAMES, clean.shape[-1], dtype=torch.bool)
    assert float(edge_error(blurred, clean, judged, CHUNK, known)) == weak
    moved = clean.clone()
    moved[0, 8:12] = clean[0, 8:12].flip(3)  # another room of the same strength
    known[0, 8:12] = False
    there = float(edge_error(moved, clean, judged, CHUNK, known))
    assert there < 0.3 * float(edge_error(moved, clean, judged, CHUNK))


def test_columns_of_no_weight_do_not_count(clips):
    clean, sigma = clips.latents, torch.full((2, FRAMES), 0.75)
    out = clean.clone()
    out[..., 1] += 1
    weight = torch.ones(2, FRAMES, clean.shape[-1])
    weight[..., 1] = 0
    assert weighted_error(out, clean, sigma, CHUNK, 0.4)[0] > 0
    assert weighted_error(out, clean, sigma, CHUNK, 0.4, weight)[0] == 0


def test_a_teacher_says_what_is_where_and_not_how_sharp(clips):
    clean, sigma = clips.latents, torch.full((2, FRAMES), 0.75)
    known = torch.zeros(2, FRAMES, clean.shape[-1], dtype=torch.bool)
    rows, columns = torch.arange(clean.shape[-2])[:, None], torch.arange(clean.shape[-1])
    grain = (1 - 2 * ((rows + columns) % 2)).float()
    errors = {}
    for name, change in (("grain", grain), ("shift", torch.ones_like(grain))):
        for told in (None, known, ~known):
            loss, mse = weighted_error(clean + change, clean, sigma, CHUNK, 0.4, None, told)
            assert float(mse) == pytest.approx(1, rel=1e-4)
            errors.setdefault(name, []).append(float(loss) * 0.75**2)
    assert errors["shift"] == pytest.approx([1, 1, 1], rel=1e-4)
    assert errors["grain"][1] < 0.1 and errors["grain"][::2] == pytest.approx([1, 1], rel=1e-4)


def test_faded_histories_are_weaker_from_a_chunk_on_and_keep_their_context():
    history = torch.randn(64, FRAMES, 3, 6, 8, generator=rng(1)) + 1
    weak = faded(history, 0.5, CHUNK, 1, rng(2))
    changed = (weak != history).flatten(2).any(dim=2)
    assert not changed[:, :CHUNK].any() and 0.3 < float(changed[:, -1].float().mean()) < 0.7
    assert (changed[:, 1:].int().diff(dim=1) >= 0).all(), "once faded, it stays so"
    contrast = [x.std(dim=(3, 4)).mean(dim=2)[changed] for x in (weak, history)]
    assert (contrast[0] < contrast[1] + 1e-6).all() and contrast[0].mean() < 0.9 * contrast[
        1
    ].mean()
    assert torch.equal(faded(history, 0.0, CHUNK, 1, rng(2)), history)


def test_a_target_of_its_own_is_aimed_at_and_rollouts_do_not_fade(model, clips):
    tables = two_stream_tables(FRAMES, CONFIG, "cpu")
    stage, settings = Stage(FRAMES, 2, 1.0), TransformerTraining(faded=1.0, context_chunks=1)
    rolled = torch.tensor([False, True])
    own = replace(clips, history=clips.latents + 0.5, rolled=rolled)
    losses = {}
    for name, target in (("truth", None), ("other", clips.latents + 3)):
        given = replace(own, target=target)
        _, mse, out, stream = forward_loss(
            model, given, stage, tables, attention(), attention(), settings, rng(1), torch.float32
        )
        aim = clips.latents if target is None else target
        losses[name] = float((out.detach() - aim)[:, CHUNK:].square().mean())
        assert float(mse) == pytest.approx(losses[name], rel=1e-4)
    assert torch.equal(stream.history[1], own.history[1])
    assert not torch.equal(stream.history[0], own.history[0])
    assert losses["other"] > losses["truth"] + 1


def test_critic_learns_to_tell_blurred_chunks(clips):
    torch.manual_seed(0)
    critic = Critic(CONFIG, width=16)
    adam = torch.optim.Adam(critic.parameters(), lr=3e-3)
    real, fake = chunks_of(clips.latents, CHUNK), chunks_of(0.3 * clips.latents, CHUNK)
    losses = []
    for _ in range(40):
        loss = critic_loss(critic, real, fake, context(clips), torch.ones(len(fake)))
        losses.append(float(loss.detach()))
        adam.zero_grad()
        loss.backward()
        adam.step()
    assert losses[-1] < 0.6 * losses[0]


def test_every_kind_of_stage_steps_and_stays_finite(clips, tmp_path):
    training = TransformerTraining(
        short_windows=(1, 2),
        context_chunks=1,
        critic_warmup=1,
        max_steps=3,
        log_every=1,
        second_round=0.5,
        rollouts=RolloutConfig(clips=2, uses=1, busy=1.0, longest_context=2),
    )
    state = TrainState.fresh(CONFIG, training, 0, torch.device("cpu"))
    keys = clips.keys.to(torch.uint8)
    pool = LatentPool(clips.latents, keys, torch.zeros(2, FRAMES, 3))
    stages = (
        Stage(8, 1, 1.0),
        Stage(16, 1, 1.0, own=1.0),
        Stage(16, 2, 1.0, rolled=0.5, adversarial=0.5, edges=0.2),
    )
    for stage in stages:
        state.runs.append({"minutes": 1, "first_step": state.step, "seed": 0})
        train_stage(
            state, stage, pool, training, Budget(1), 60, "sdpa", 0, Log(), lambda state: None
        )
    assert state.step == 9 and state.critic is not None
    for parameter in state.model.parameters():
        assert torch.isfinite(parameter).all()


def test_pose_reaches_the_loss(model, clips):
    tables = two_stream_tables(FRAMES, CONFIG, "cpu")
    losses = []
    for pose in (clips.pose, None):
        told = Clips(clips.latents, clips.keys, pose)
        loss, *_ = forward_loss(
            model, told, Stage(FRAMES, 2, 1.0), tables, attention(), attention(),
            TransformerTraining(), rng(1), torch.float32,
        )  # fmt: skip
        losses.append(float(loss.detach()))
    assert losses[0] != losses[1]

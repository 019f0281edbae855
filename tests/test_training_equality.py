"""The parallel teacher-forcing forward equals a rollout through the cache, and its masks agree."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from quantwm.cache import CachePolicy, CacheSpec, KVCache, make_format
from quantwm.worlds.embedded.config import PRESETS
from quantwm.worlds.embedded.pose import pose_features
from quantwm.worlds.embedded.rope import rope_tables
from quantwm.worlds.embedded.transformer import Transformer
from training.gaps import HiddenChunks
from training.rollout import DenseHistory, forward_chunk
from training.teacher_forcing import (
    block_mask,
    dense_mask,
    flex_attend,
    predict_clip,
    sdpa_attend,
    two_stream_tables,
)

CONFIG = PRESETS["tiny"].transformer
FRAMES = 16


@pytest.fixture(scope="module")
def clip():
    """A model far from its start, and a clip with its noise, levels and keys."""
    torch.manual_seed(3)
    model = Transformer(CONFIG).requires_grad_(False).eval()
    for parameter in model.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
    clean, noisy = torch.randn(2, 2, FRAMES, *CONFIG.latent_shape)
    sigma = torch.rand(2, FRAMES // 4).repeat_interleave(4, dim=1)
    keys = torch.randint(0, 2, (2, FRAMES, 6)).float()
    return model, clean, noisy, sigma, keys


@pytest.fixture(scope="module")
def pose():
    """Features of a random walk, [2, FRAMES, columns, features]."""
    generator = torch.Generator().manual_seed(4)
    poses = torch.cumsum(10 * torch.randn(2, FRAMES, 3, generator=generator), dim=1)
    return pose_features(poses, CONFIG.grid[1])


@pytest.mark.parametrize("window", [1, 2, 4])
def test_training_forward_equals_rollout_through_the_cache(clip, pose, window):
    model, clean, noisy, sigma, keys = clip
    attend = sdpa_attend(dense_mask(FRAMES, CONFIG, window, "cpu"))
    tables = two_stream_tables(FRAMES, CONFIG, "cpu")
    parallel = predict_clip(
        model, clean, noisy, sigma, keys, tables, attend, torch.float32, pose
    )  # fmt: skip
    spec = CacheSpec(CONFIG.layers, CONFIG.heads, CONFIG.head_dim, CONFIG.tokens_per_frame, 4)
    policy = CachePolicy(window_frames=4 * (window + 1))
    fmt = make_format("bf16", exact=True)
    for batch in range(2):
        cache = KVCache(spec, fmt, policy, dtype=torch.float32)
        for first in range(0, FRAMES, 4):
            part = slice(first, first + 4)
            cos, sin = rope_tables(first, 4, CONFIG.grid, CONFIG.head_dim)
            held = keys[batch, part]
            cache.begin_chunk(first, 4)
            shared, head = model.condition(sigma[batch, part], held)
            out = model(
                noisy[batch, part], shared, head, cos, sin,
                lambda layer, c=cache: partial(c.attend, layer), pose=pose[batch, part],
            )  # fmt: skip
            torch.testing.assert_close(out, parallel[batch, part], rtol=1e-4, atol=1e-4)
            shared, head = model.condition(torch.zeros(4), held)
            model(
                clean[batch, part], shared, head, cos, sin,
                lambda layer, c=cache: partial(c.attend, layer, clean=True),
                pose=pose[batch, part],
            )  # fmt: skip
            cache.finalize_chunk()


def test_batched_rollout_equals_training_forward(clip, pose):
    model, clean, noisy, sigma, keys = clip
    attend = sdpa_attend(dense_mask(FRAMES, CONFIG, 4, "cpu"))
    level = torch.full_like(sigma, 0.5)
    tables = two_stream_tables(FRAMES, CONFIG, "cpu")
    parallel = predict_clip(
        model, clean, noisy, level, keys, tables, attend, torch.float32, pose
    )  # fmt: skip
    history = DenseHistory(CONFIG, FRAMES // 4)
    for first in range(0, FRAMES, 4):
        part = slice(first, first + 4)
        here = (keys[:, part], first)
        out = forward_chunk(model, history, noisy[:, part], 0.5, *here, False, pose[:, part])
        torch.testing.assert_close(out, parallel[:, part], rtol=1e-4, atol=1e-4)
        forward_chunk(model, history, clean[:, part], 0.0, *here, True, pose[:, part])


@pytest.mark.parametrize("window", [1, 3, 4])
def test_flex_mask_equals_dense_mask(clip, window):
    model, clean, noisy, sigma, keys = clip
    mask = block_mask(FRAMES, CONFIG, window, "cpu")
    dense = dense_mask(FRAMES, CONFIG, window, "cpu")
    index = torch.arange(len(dense))
    zero = torch.tensor(0)
    assert torch.equal(mask.mask_mod(zero, zero, index[:, None], index[None, :]), dense)
    tables = two_stream_tables(FRAMES, CONFIG, "cpu")
    outs = [
        predict_clip(model, clean, noisy, sigma, keys, tables, attend)
        for attend in (flex_attend(mask), sdpa_attend(dense))
    ]
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-4, atol=1e-4)


def test_no_chunk_sees_its_own_truth_or_the_future(clip):
    """Changing the truth of chunk 2 must leave the predictions of chunks 0 to 2 as they were."""
    model, clean, noisy, sigma, keys = clip
    attend = sdpa_attend(dense_mask(FRAMES, CONFIG, 4, "cpu"))
    tables = two_stream_tables(FRAMES, CONFIG, "cpu")
    before = predict_clip(model, clean, noisy, sigma, keys, tables, attend)
    changed = clean.clone()
    changed[:, 8:12] += 1
    after = predict_clip(model, changed, noisy, sigma, keys, tables, attend)
    assert torch.equal(before[:, :12], after[:, :12])
    assert not torch.allclose(before[:, 12:], after[:, 12:], atol=1e-3)


def hidden_chunks():
    """Chunk 1 of the first clip and chunks 1 and 2 of the second are hidden."""
    hidden = HiddenChunks(2, FRAMES // 4, "cpu")
    hidden.set(torch.tensor([[False, True, False, False], [False, True, True, False]]))
    return hidden


def test_training_forward_with_gaps_equals_a_rollout_that_lacks_those_chunks(clip, pose):
    model, clean, noisy, sigma, keys = clip
    hidden = hidden_chunks()
    attend = sdpa_attend(dense_mask(FRAMES, CONFIG, 4, "cpu"), hidden)
    tables = two_stream_tables(FRAMES, CONFIG, "cpu")
    level = torch.full_like(sigma, 0.5)
    parallel = predict_clip(model, clean, noisy, level, keys, tables, attend, pose=pose)
    for batch in range(2):
        history = DenseHistory(CONFIG, FRAMES // 4)
        one = slice(batch, batch + 1)
        for chunk in range(FRAMES // 4):
            part = slice(4 * chunk, 4 * chunk + 4)
            here = (keys[one, part], 4 * chunk)
            told = pose[one, part]
            out = forward_chunk(model, history, noisy[one, part], 0.5, *here, False, told)
            torch.testing.assert_close(out, parallel[one, part], rtol=1e-4, atol=1e-4)
            if not hidden.buffer[batch, chunk]:
                forward_chunk(model, history, clean[one, part], 0.0, *here, True, told)


@pytest.mark.parametrize("window", [1, 4])
def test_flex_with_gaps_equals_dense_and_follows_its_buffer(clip, window):
    model, clean, noisy, sigma, keys = clip
    hidden = hidden_chunks()
    mask = block_mask(FRAMES, CONFIG, window, "cpu", hidden)
    dense = dense_mask(FRAMES, CONFIG, window, "cpu")
    tables = two_stream_tables(FRAMES, CONFIG, "cpu")
    flex, sdpa = flex_attend(mask), sdpa_attend(dense, hidden)
    seen = []
    for gaps in (hidden.buffer[:, :4].clone(), torch.zeros(2, 4, dtype=torch.bool)):
        hidden.set(gaps)
        outs = [predict_clip(model, clean, noisy, sigma, keys, tables, a) for a in (flex, sdpa)]
        torch.testing.assert_close(outs[0], outs[1], rtol=1e-4, atol=1e-4)
        seen.append(outs[0])
    if window == 4:
        assert not torch.allclose(seen[0][:, 8:], seen[1][:, 8:], atol=1e-3)
    plain = predict_clip(model, clean, noisy, sigma, keys, tables, sdpa_attend(dense))
    torch.testing.assert_close(seen[1], plain, rtol=1e-4, atol=1e-4)


def test_gradients_with_gaps_are_finite_and_reach_no_hidden_chunk(clip):
    model, clean, noisy, sigma, keys = clip
    hidden = hidden_chunks()
    attend = sdpa_attend(dense_mask(FRAMES, CONFIG, 4, "cpu"), hidden)
    tables = two_stream_tables(FRAMES, CONFIG, "cpu")
    history = clean.clone().requires_grad_()
    out = predict_clip(model, history, noisy, sigma, keys, tables, attend)
    (gradient,) = torch.autograd.grad(out.square().sum(), history)
    by_chunk = gradient.unflatten(1, (4, 4)).abs().amax(dim=(2, 3, 4, 5))
    assert torch.isfinite(gradient).all()
    assert torch.equal(by_chunk[:, :3] == 0, hidden.buffer[:, :3])

"""EmbeddedWorld behind the World protocol: determinism, history, keys, pictures, scenes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantwm.cache import KVCache, make_format
from quantwm.errors import UserError
from quantwm.worlds.base import ChunkAction, LaneState
from quantwm.worlds.embedded import adapter
from quantwm.worlds.embedded.adapter import ASSETS, SPEC, EmbeddedWorld
from quantwm.worlds.embedded.dtypes import pick_cpu_dtype
from quantwm.worlds.embedded.keys import frame_vector
from quantwm.worlds.embedded.sampler import noise_levels, sample
from quantwm.worlds.embedded.scenes import load_scene

WALK = ChunkAction.held(frozenset({"w"}), 4)


@pytest.fixture(scope="module")
def world():
    return EmbeddedWorld.random("tiny", seed=1)


def lane_of(world, method="bf16", **settings):
    fmt = make_format(method, **settings)
    return LaneState("a", KVCache(world.spec.cache, fmt, world.spec.policy, dtype=world.dtype))


def noise_of(world, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, *world.spec.latent_shape, generator=generator)


def roll(world, lane, action=WALK, chunks=3):
    state = world.start(None, None, "", 0)
    for i, held in enumerate(state.actions):
        world.commit_chunk(lane, state.latents[4 * i : 4 * i + 4], held)
    outs = []
    for i in range(chunks):
        out = world.generate_chunk(lane, action, noise_of(world, i), 2)
        world.commit_chunk(lane, out.latents, action)
        outs.append(out.latents)
    return torch.cat(outs) if outs else None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("method", "settings"), [("bf16", {}), ("quantwm", {"centroids": 8})])
def test_rollout_is_bit_deterministic(dtype, method, settings):
    runs = []
    for _ in range(2):
        world = EmbeddedWorld.random("tiny", seed=1, dtype=dtype)
        lane = lane_of(world, method, **settings)
        runs.append(roll(world, lane))
        assert lane.next_frame == 16 + 12 and lane.cache.frames == 28
    assert torch.equal(*runs)
    assert runs[0].dtype == dtype and torch.isfinite(runs[0]).all()


def test_generate_leaves_the_history_and_its_bytes_alone(world):
    lane = lane_of(world)
    roll(world, lane, chunks=0)
    before = [tensor.clone() for tensor in lane.cache.history(1)]
    first = world.generate_chunk(lane, WALK, noise_of(world, 5), 2)
    assert lane.next_frame == 16 and lane.cache.frames == 16
    for old, new in zip(before, lane.cache.history(1), strict=True):
        assert torch.equal(old, new)
    again = world.generate_chunk(lane, WALK, noise_of(world, 5), 2)
    assert torch.equal(first.latents, again.latents)
    assert len(first.x0) == 2 and torch.equal(first.x0[-1], first.latents)


def test_keys_and_history_reach_the_picture(world):
    out = {}
    for name, action in (("walk", WALK), ("turn", ChunkAction.held(frozenset({"left"}), 4))):
        out[name] = roll(world, lane_of(world), action, chunks=1)
    assert not torch.equal(out["walk"], out["turn"])
    empty = lane_of(world)
    alone = world.generate_chunk(empty, WALK, noise_of(world, 0), 2).latents
    assert not torch.allclose(alone, out["walk"], atol=1e-4)


def test_failed_commit_leaves_the_lane_as_it_was(world):
    lane = lane_of(world)
    roll(world, lane, chunks=0)
    bad = torch.full((4, *world.spec.latent_shape), torch.nan)
    with pytest.raises(UserError):
        world.commit_chunk(lane, bad, WALK)
    assert lane.next_frame == 16 and lane.cache.frames == 16
    world.commit_chunk(lane, noise_of(world, 1), WALK)
    assert lane.next_frame == 20


def test_action_map():
    assert frame_vector(frozenset({"w", "left"})) == (1, 0, 0, 0, 1, 0)
    assert frame_vector(frozenset({"up", "right"})) == (1, 0, 0, 0, 0, 1)
    assert frame_vector(frozenset({"w", "down", "a", "d"})) == (0,) * 6
    with pytest.raises(UserError, match="unknown key 'x'"):
        frame_vector(frozenset({"x"}))


def test_bad_action_and_noise_are_refused(world):
    lane = lane_of(world)
    with pytest.raises(UserError, match="4 frames, got 3"):
        world.generate_chunk(lane, ChunkAction.held(frozenset(), 3), noise_of(world, 0), 2)
    with pytest.raises(UserError, match="noise must be"):
        world.generate_chunk(lane, WALK, torch.zeros(3, 3), 2)
    with pytest.raises(UserError, match="steps must be"):
        world.generate_chunk(lane, WALK, noise_of(world, 0), 0)
    assert world.generate_chunk(lane, WALK, noise_of(world, 0), 1).latents.shape[0] == 4


def test_noise_levels_fall_from_one():
    assert noise_levels(4, 3.0) == pytest.approx([1.0, 0.9, 0.75, 0.5])
    target = torch.ones(2, 3)
    got, steps = sample(lambda x, sigma: target, torch.randn(2, 3), 5, 3.0)
    assert torch.equal(got, target) and len(steps) == 5


def test_start_from_a_picture_and_a_clip(world):
    width, height = world.spec.video_size
    picture = np.zeros((100, 333, 3), np.uint8)
    state = world.start(None, picture, "", 0)
    assert state.frames.shape == (16, height, width, 3) and len(state.actions) == 4
    clip = np.stack([picture, picture + 200])
    frames = world.start(None, clip, "", 0).frames
    assert (frames[:15] == 0).all() and (frames[15] == 200).all()
    with pytest.raises(UserError, match="start picture"):
        world.start(None, np.zeros((4, 4), np.uint8), "", 0)
    with pytest.raises(UserError, match="unknown scene"):
        world.start("nowhere", None, "", 0)


def test_decode_gives_bytes_of_the_video_size(world):
    width, height = world.spec.video_size
    frames = world.decode(noise_of(world, 2))
    assert frames.shape == (4, height, width, 3) and frames.dtype == np.uint8
    assert world.weight_bytes() > 0 and world.weights_sha256()


def test_spec_of_the_shipped_world():
    assert SPEC.cache.tokens_per_chunk == 192 and SPEC.cache.bf16_bytes_per_token == 15_360
    assert SPEC.policy.span_tokens == 3072
    assert SPEC.format_settings["quantwm"]["centroids"] == 64
    assert SPEC.video_size == (128, 96)


def test_dtype_choice_and_refusal():
    assert pick_cpu_dtype(0.01) in (torch.float32, torch.bfloat16)
    with pytest.raises(UserError, match="float32 or bfloat16"):
        adapter.load("cpu", torch.float16)


def test_shipped_scenes_are_whole():
    world = EmbeddedWorld.random("shipped")
    world._scene_folder = ASSETS / "scenes"
    scenes = world.scenes()
    assert len(scenes) >= 6
    for scene in scenes:
        clip = load_scene(ASSETS / "scenes", scene.name, SPEC.video_size)
        assert len(clip.frames) == len(clip.keys) == 16
        assert clip.frames.std() > 10
        assert (ASSETS / "scenes" / scene.name / "thumbnail.webp").is_file()
    state = world.start(scenes[0].name, None, "", 0)
    assert state.latents.shape == (16, *SPEC.latent_shape)
    with pytest.raises(UserError, match=scenes[0].name):
        world.start("nowhere", None, "", 0)

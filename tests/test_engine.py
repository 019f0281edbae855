"""Lock-step lanes: same action and noise, independent results, determinism, clean failures."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from small_world import SPEC, SmallWorld

import quantwm.engine as engine_module
import quantwm.engine_checks as engine_checks
from quantwm.actions import parse_actions
from quantwm.cache.spec import CachePolicy
from quantwm.engine import Engine, chunk_noise
from quantwm.errors import UserError
from quantwm.lanes import CPU_MAX_TOKENS, lanes_for, limit_history
from quantwm.worlds.base import ChunkAction

ALL = ("bf16", "qvg", "quantwm")
ACTIONS = parse_actions("w-4, w+right-2, none-2, left-4", SPEC.keys, 2)


def run(names=ALL, *, seed=1, actions=ACTIONS, world=None, **options):
    """Blocks of a whole run, the start included."""
    world = world or SmallWorld()
    with Engine(world, lanes_for(SPEC, names), seed=seed, **options) as engine:
        return [engine.start(), *[engine.step(action) for action in actions]]


@functools.cache
def baseline():
    """The run that most tests compare with; made once."""
    return run()


def frames(blocks, lane):
    found = [next(x.frames for x in block.lanes if x.name == lane) for block in blocks]
    return np.concatenate(found)


def test_block_says_what_happened():
    blocks = run()
    assert [block.index for block in blocks] == [0, 1, 2, 3, 4, 5, 6]
    assert [block.first_frame for block in blocks] == [0, 4, 6, 8, 10, 12, 14]
    assert [lane.name for lane in blocks[-1].lanes] == list(ALL)
    assert blocks[3].action == ACTIONS[2]
    bf16, qvg, quantwm = blocks[-1].lanes
    tokens = (4 + 12) * 6
    assert bf16.tokens == qvg.tokens == quantwm.tokens == tokens
    assert bf16.kv_bytes == tokens * SPEC.cache.bf16_bytes_per_token
    assert (bf16.ratio, bf16.resident_ratio) == (1.0, 1.0)
    assert qvg.kv_bytes < bf16.kv_bytes
    assert qvg.ratio > 1
    assert all(lane.ms > 0 and lane.frames.dtype == np.uint8 for lane in blocks[-1].lanes)
    assert blocks[-1].ms >= sum(lane.ms for lane in blocks[-1].lanes)
    assert len(blocks[-1].x0["qvg"]) == 2
    parts = blocks[-1].memory.parts
    assert list(parts)[:5] == ["weights", "kv:bf16", "kv:qvg", "kv:quantwm", "scratch"]
    assert parts["kv:qvg"] == qvg.kv_bytes
    assert parts["scratch"] > 0


def test_start_shows_the_context_in_every_lane():
    start = run(actions=())[0]
    assert start.lanes[0].frames.shape == (4, 8, 12, 3)
    for lane in start.lanes:
        np.testing.assert_array_equal(lane.frames, start.lanes[0].frames)


def test_quantization_changes_frames():
    # otherwise every equality below would hold for a world that ignores its cache
    blocks = run()
    assert not np.array_equal(frames(blocks, "bf16"), frames(blocks, "qvg"))
    assert not np.array_equal(frames(blocks, "qvg"), frames(blocks, "quantwm"))


@pytest.mark.parametrize("lane", ALL)
@pytest.mark.parametrize("mode", ["free", "teacher"])
def test_a_lane_alone_equals_the_lane_among_others(lane, mode):
    alone = ("bf16",) if lane == "bf16" or mode == "free" else ("bf16", lane)
    names = (lane,) if mode == "free" else alone
    np.testing.assert_array_equal(frames(run(names, mode=mode), lane), frames(run(mode=mode), lane))


def test_order_of_lanes_does_not_matter():
    turned = run(tuple(reversed(ALL)))
    for lane in ALL:
        np.testing.assert_array_equal(frames(baseline(), lane), frames(turned, lane))


def test_same_seed_and_keys_give_the_same_frames_and_others_do_not():
    again = run()
    for lane in ALL:
        np.testing.assert_array_equal(frames(again, lane), frames(baseline(), lane))
    assert not np.array_equal(frames(run(seed=1), "bf16"), frames(run(seed=2), "bf16"))
    other = parse_actions("left-12", SPEC.keys, 2)
    assert not np.array_equal(frames(baseline(), "bf16"), frames(run(actions=other), "bf16"))


def test_unrelated_random_numbers_do_not_matter():
    want = frames(baseline(), "quantwm")
    torch.manual_seed(99)
    torch.rand(1000)
    state = torch.get_rng_state()
    np.testing.assert_array_equal(frames(run(), "quantwm"), want)
    # and a run does not consume anybody else's
    assert torch.equal(torch.get_rng_state(), state)


def test_every_lane_gets_the_same_noise_whatever_k_means_draws():
    world, plain = SmallWorld(), SmallWorld()
    run(world=world)
    run(("bf16",), world=plain)  # a lane without k-means
    for index in range(len(ACTIONS)):
        a, b, c = world.noises[3 * index : 3 * index + 3]
        assert torch.equal(a, b) and torch.equal(b, c)
        assert torch.equal(a, plain.noises[index])
        assert torch.equal(a, chunk_noise(1, index + 1, a.shape))


def test_noise_of_neighbouring_seeds_and_chunks_differs():
    seen = {
        chunk_noise(seed, index, (2, 4)).numpy().tobytes()
        for seed in range(8)
        for index in range(8)
    }
    assert len(seen) == 64
    assert chunk_noise(2**63 - 1, 10**6, (3,)).dtype == torch.float32


def test_restart_repeats_the_run():
    with Engine(SmallWorld(), lanes_for(SPEC, ALL), seed=1) as engine:
        first = [engine.start(), engine.step(ACTIONS[0])]
        engine.step(ACTIONS[1])
        again = [engine.start(), engine.step(ACTIONS[0])]
    for lane in ALL:
        np.testing.assert_array_equal(frames(first, lane), frames(again, lane))


def test_teacher_mode_gives_every_lane_the_same_history():
    world = SmallWorld()
    committed = {}
    original = world.commit_chunk

    def commit(lane, latents, action):
        committed.setdefault(lane.name, []).append(latents.clone())
        original(lane, latents, action)

    world.commit_chunk = commit
    blocks = run(world=world, mode="teacher")
    for name in ("qvg", "quantwm"):
        for ours, theirs in zip(committed[name], committed["bf16"], strict=True):
            assert torch.equal(ours, theirs)
    # the BF16 lane is its own teacher, and the others still show their own frames
    np.testing.assert_array_equal(frames(blocks, "bf16"), frames(baseline(), "bf16"))
    assert not np.array_equal(frames(blocks, "qvg"), frames(blocks, "bf16"))


def test_history_is_limited_alike_in_all_lanes():
    blocks = run(actions=ACTIONS * 2, max_tokens=60)  # 10 frames, the current chunk among them
    for lane in blocks[-1].lanes:
        assert lane.tokens == 8 * 6


def test_limit_history():
    assert limit_history(CachePolicy(), SPEC.cache, None).window_frames is None
    assert limit_history(CachePolicy(), SPEC.cache, 65).window_frames == 10
    policy = CachePolicy(sink_frames=2, window_frames=8)
    assert limit_history(policy, SPEC.cache, 6000) == policy
    with pytest.raises(UserError, match="needs at least 36"):
        limit_history(policy, SPEC.cache, 35)


def test_cpu_history_is_capped_by_default():
    engine = Engine(SmallWorld(), lanes_for(SPEC, ("bf16",)), seed=0)
    assert engine.max_tokens == CPU_MAX_TOKENS
    assert engine.lanes[0].policy.window_frames == CPU_MAX_TOKENS // 6
    assert f"{CPU_MAX_TOKENS:,} tokens" in engine.explain()
    assert "reference" in engine.explain()


def test_failed_denoising_leaves_the_engine_usable():
    world = SmallWorld()
    with Engine(world, lanes_for(SPEC, ALL), seed=1) as engine:
        blocks = [engine.start(), engine.step(ACTIONS[0])]
        world.fail["generate"] = ("quantwm", torch.OutOfMemoryError("CUDA out of memory"))
        with pytest.raises(UserError, match="ran out of memory") as caught:
            engine.step(ACTIONS[1])
        assert "\n" not in str(caught.value)
        blocks += [engine.step(action) for action in ACTIONS[1:]]
    for lane in ALL:
        np.testing.assert_array_equal(frames(blocks, lane), frames(baseline(), lane))


def test_a_failed_start_leaves_no_lane_ahead_of_others():
    world = SmallWorld()
    with Engine(world, lanes_for(SPEC, ALL), seed=1) as engine:
        world.fail["commit"] = ("quantwm", torch.OutOfMemoryError("CUDA out of memory"))
        with pytest.raises(UserError, match="ran out of memory, nothing was started"):
            engine.start()
        with pytest.raises(UserError, match="not started"):
            engine.step(ACTIONS[0])
        blocks = [engine.start(), *(engine.step(action) for action in ACTIONS)]
    for lane in ALL:
        np.testing.assert_array_equal(frames(blocks, lane), frames(baseline(), lane))


def test_nan_latents_are_named_and_dropped():
    world = SmallWorld()
    original = world.generate_chunk

    def spoil(lane, action, noise, steps):
        output = original(lane, action, noise, steps)
        if lane.name == "qvg":
            output.latents[0, 0, 0, 0] = float("nan")
        return output

    with Engine(world, lanes_for(SPEC, ALL), seed=1) as engine:
        blocks = [engine.start()]
        world.generate_chunk = spoil
        with pytest.raises(UserError, match="lane qvg produced NaN"):
            engine.step(ACTIONS[0])
        world.generate_chunk = original
        blocks += [engine.step(action) for action in ACTIONS]
    np.testing.assert_array_equal(frames(blocks, "bf16"), frames(baseline(), "bf16"))


def test_failed_first_commit_leaves_the_engine_usable():
    world = SmallWorld()
    with Engine(world, lanes_for(SPEC, ALL), seed=1) as engine:
        blocks = [engine.start()]
        world.fail["commit"] = ("bf16", RuntimeError("kernel\nfailed"))
        with pytest.raises(UserError, match="clean pass of lane bf16 failed in chunk 1"):
            engine.step(ACTIONS[0])
        blocks += [engine.step(action) for action in ACTIONS]
    np.testing.assert_array_equal(frames(blocks, "quantwm"), frames(baseline(), "quantwm"))


def test_failed_later_commit_closes_the_engine_in_one_line():
    world = SmallWorld()
    engine = Engine(world, lanes_for(SPEC, ALL), seed=1)
    engine.start()
    world.fail["commit"] = ("qvg", MemoryError())
    for _ in range(2):  # the second call says the same
        with pytest.raises(UserError, match="the engine is closed") as caught:
            engine.step(ACTIONS[0])
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="the engine is closed"):
        engine.start()


def test_interrupt_aborts_all_lanes():
    world = SmallWorld()
    with Engine(world, lanes_for(SPEC, ALL), seed=1) as engine:
        engine.start()
        world.fail["generate"] = ("qvg", KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            engine.step(ACTIONS[0])
        engine.step(ACTIONS[0])


def test_closed_or_not_started_engines_say_so():
    engine = Engine(SmallWorld(), lanes_for(SPEC, ("bf16",)), seed=1)
    with pytest.raises(UserError, match="call start"):
        engine.step(ACTIONS[0])
    engine.close()
    engine.close()
    with pytest.raises(UserError, match="closed"):
        engine.start()


def test_too_little_memory_is_found_before_anything_is_allocated(monkeypatch):
    monkeypatch.setattr(engine_checks, "free_bytes", lambda device: 2**20)
    monkeypatch.setattr(engine_module, "KVCache", None)
    with pytest.raises(UserError, match=r"too little memory.*1,048,576 bytes.*tokens") as caught:
        Engine(SmallWorld(), lanes_for(SPEC, ALL), seed=0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("names", "options", "words"),
    [
        ((), {}, "name at least one lane"),
        (("bf16", "kivi9"), {}, "unknown lane 'kivi9'; there are bf16, rtn"),
        (("bf16", "bf16"), {}, "named twice"),
        (("qvg",), {"mode": "teacher"}, "needs a bf16 lane"),
        (("bf16",), {"mode": "x"}, "unknown mode 'x'; there are free, teacher"),
        (("bf16",), {"seed": -1}, "a seed is a whole number"),
        (("bf16",), {"seed": True}, "a seed is a whole number"),
        (("bf16",), {"steps": 0}, "steps is a whole number from 1"),
        (("bf16",), {"max_tokens": 5}, "too short"),
        (("bf16",), {"max_tokens": 0}, "from 1"),
    ],
)
def test_bad_settings(names, options, words):
    with pytest.raises(UserError) as caught:
        Engine(SmallWorld(), lanes_for(SPEC, names), **({"seed": 0} | options))
    assert words in str(caught.value)


def test_bad_scene_and_action():
    engine = Engine(SmallWorld(), lanes_for(SPEC, ("bf16",)), seed=0, scene="cellar")
    with pytest.raises(UserError, match="room, hall"):
        engine.start()
    engine = Engine(SmallWorld(), lanes_for(SPEC, ("bf16",)), seed=0)
    engine.start()
    with pytest.raises(UserError, match="unknown key 'up'"):
        engine.step(ChunkAction.held(frozenset({"up"}), 2))


@functools.cache
def tiny_world():
    from quantwm.worlds.embedded.adapter import EmbeddedWorld

    return EmbeddedWorld.random("tiny", seed=0)


def run_tiny(names, **options):
    world = tiny_world()
    actions = parse_actions("w-4, right-4", world.spec.keys, 4)
    with Engine(world, lanes_for(world.spec, names), seed=3, steps=2, **options) as engine:
        return [engine.start(), *[engine.step(action) for action in actions]]


@pytest.mark.parametrize("lane", ALL)
def test_embedded_world_lane_alone_equals_lane_among_others(lane):
    together = run_tiny(ALL)
    np.testing.assert_array_equal(frames(run_tiny((lane,)), lane), frames(together, lane))
    assert not np.array_equal(frames(together, "bf16"), frames(together, "qvg"))


def test_embedded_world_takes_a_picture_and_teacher_mode():
    picture = np.random.default_rng(0).integers(0, 256, (70, 50, 3), dtype=np.uint8)
    blocks = run_tiny(("bf16", "qvg"), image=picture, mode="teacher")
    again = run_tiny(("bf16", "qvg"), image=picture, mode="teacher")
    np.testing.assert_array_equal(frames(blocks, "qvg"), frames(again, "qvg"))
    assert blocks[-1].lanes[0].tokens == blocks[-1].lanes[1].tokens

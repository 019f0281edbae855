"""Cached rollouts of the Wan family against attention written out with a mask."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from wan_helpers import CELLS, GRID, LATENT, TINY, make_cache, make_model, tiny_action

from quantwm.worlds.wan import hy_actions
from quantwm.worlds.wan.backbone import Pass
from quantwm.worlds.wan.memory_rollout import MemoryRollout
from quantwm.worlds.wan.prope import apply, cameras
from quantwm.worlds.wan.rotary import frame_angles, rotate
from quantwm.worlds.wan.schedules import flow_match_steps
from quantwm.worlds.wan.self_forcing import Conditions, SelfForcing

CLOSE = {"rtol": 0, "atol": 2e-5}
NONE = Conditions()


def visible(frames: int, chunk: int, window: int | None, sink: int) -> torch.Tensor:
    """bool [frames, frames]: which frame (column) each frame (row) sees."""
    query, key = torch.arange(frames)[:, None], torch.arange(frames)[None]
    stop = (query // chunk + 1) * chunk
    seen = key < stop
    if window is not None:
        seen &= (key < sink) | (key >= stop - (window - sink))
    return seen


class MaskedAttention:
    """All frames at once, under a mask: what the cached rollout must equal."""

    turns = None

    def __init__(self, frames: int, seen: torch.Tensor) -> None:
        self.table = frame_angles(torch.arange(frames), GRID, 128)
        self.mask = seen.repeat_interleave(CELLS, 0).repeat_interleave(CELLS, 1)

    def __call__(self, layer, q, k, v):
        q, k = rotate(q, *self.table), rotate(k, *self.table)
        return (F.scaled_dot_product_attention(q[None], k[None], v[None], self.mask)[0],)


@pytest.mark.parametrize(
    ("chunk", "window", "sink"),
    [(3, None, 0), (3, 7, 1), (3, 4, 0), (4, 9, 3), (4, 11, 6), (1, 4, 1), (2, 5, 3)],
)
def test_cached_chunks_equal_the_full_mask(chunk: int, window: int | None, sink: int) -> None:
    """Windows that end, and sinks that end, inside a chunk are among the cases."""
    model, frames = make_model(), 5 * chunk
    context = model.context_kv(torch.randn(5, 32))
    latents = torch.randn(frames, 16, *LATENT)
    attention = MaskedAttention(frames, visible(frames, chunk, window, sink))
    whole = model(latents.transpose(0, 1), Pass(torch.zeros(frames), attention, context))
    driver = SelfForcing(model, make_cache(model, chunk, window, sink), context, GRID)
    parts = [
        driver.commit(first, latents[first : first + chunk], NONE)
        for first in range(0, frames, chunk)
    ]
    torch.testing.assert_close(torch.cat(parts), whole.transpose(0, 1), **CLOSE)


class RollingCopies:
    """The published cache of one layer: a buffer whose tokens behind the sink move to the left
    when new ones do not fit; the same chunk may be written again at its place."""

    def __init__(self, size: int, sink: int, width: int) -> None:
        self.held, self.sink = torch.zeros(size, width), sink
        self.end = self.local_end = 0

    def write(self, start: int, new: torch.Tensor) -> torch.Tensor:
        """Tokens of a chunk at `start` of the rollout -> all that its queries see."""
        stop, size = start + len(new), len(self.held)
        if stop > self.end and len(new) + self.local_end > size:
            out = len(new) + self.local_end - size
            kept = self.held[self.sink + out : self.local_end].clone()
            self.held[self.sink : self.sink + len(kept)] = kept
            local = self.local_end + stop - self.end - out
        else:
            local = self.local_end + stop - self.end
        self.held[local - len(new) : local] = new
        self.end, self.local_end = stop, local
        return self.held[:local]


@given(
    chunk=st.integers(1, 4), sink=st.integers(0, 5), more=st.integers(0, 6),
    chunks=st.integers(1, 7), passes=st.integers(1, 3), seed=st.integers(0, 99),
)  # fmt: skip
def test_windows_by_frame_are_rolling_copies(
    chunk: int, sink: int, more: int, chunks: int, passes: int, seed: int
) -> None:
    """What every pass sees, and the order of it, bit for bit."""
    window, per_frame = sink + chunk + more, 2
    model = make_model(replace(TINY, layers=1, heads=1, head_dim=16))
    cache = make_cache(model, chunk, window, sink, cells=per_frame)
    copies = RollingCopies(window * per_frame, sink * per_frame, 2 * 16)
    generator = torch.Generator().manual_seed(seed)
    for first in range(0, chunk * chunks, chunk):
        cache.begin_chunk(first, chunk)
        for number in range(passes + 1):
            k, v = torch.randn(2, 1, chunk * per_frame, 16, generator=generator)
            seen = copies.write(first * per_frame, torch.cat([k[0], v[0]], dim=1))
            keys, values = cache.gather(0, k, v, clean=number == passes)
            assert torch.equal(torch.cat([keys[0], values[0]], dim=1), seen)
        cache.finalize_chunk()


def test_denoising_never_changes_older_frames() -> None:
    model = make_model(replace(TINY, in_channels=16))
    driver = SelfForcing(model, make_cache(model), model.context_kv(torch.randn(5, 32)), GRID)
    steps = flow_match_steps([1000, 500], 5.0)
    driver.commit(0, torch.randn(3, 16, *LATENT), NONE)
    before = [driver.cache.history(layer) for layer in range(2)]
    noise = torch.randn(3, 16, *LATENT)
    first = driver.denoise(3, noise, steps, lambda step: noise, NONE)
    again = driver.denoise(3, noise, steps, lambda step: noise, NONE)
    for layer in range(2):
        for old, new in zip(before[layer], driver.cache.history(layer), strict=True):
            assert torch.equal(old, new)
    assert torch.equal(first[-1].x0, again[-1].x0)
    assert driver.cache.frames == 3


def test_action_streams_are_cached_beside_the_frames() -> None:
    """The chunked rollout equals one with all frames in a single chunk cut by no window."""
    config = replace(TINY, in_channels=36, context="image", context_len=5, action=tiny_action())
    model = make_model(config)
    context = model.context_kv(torch.randn(5, 32))
    latents, channels = torch.randn(6, 16, *LATENT), torch.randn(20, 6, *LATENT)
    rows, mouse = torch.randn(21, 4), torch.randn(21, 2)

    def run(cache, size: int) -> list[torch.Tensor]:
        driver = SelfForcing(model, cache, context, GRID)
        return [
            driver.commit(
                first,
                latents[first : first + size],
                Conditions(channels[:, first : first + size], None, rows, mouse),
            )
            for first in range(0, 6, size)
        ]

    cache = make_cache(model, 3)
    parts = run(cache, 3)
    assert set(cache.ledger().parts) == {"bf16"}
    assert cache.history(0, "mouse")[0].shape == (2, 6 * CELLS, 64)
    assert cache.history(0, "keyboard")[0].shape == (2, 6, 64)
    # The first chunk sees nothing later, so a fresh cache gives it the same flow.
    alone = run(make_cache(model, 3), 3)[0]
    assert torch.equal(alone, parts[0])
    mouse[12:] += 1.0
    assert not torch.allclose(run(make_cache(model, 3), 3)[1], parts[1])


@pytest.mark.parametrize("method", ["qvg", "quantwm"])
def test_other_formats_carry_a_rollout(method: str) -> None:
    model = make_model(dtype=torch.bfloat16)
    cache = make_cache(model, 3, 7, 1, method, centroids=8)
    driver = SelfForcing(model, cache, model.context_kv(torch.randn(5, 32)), GRID)
    for first in range(0, 15, 3):
        flow = driver.commit(first, torch.randn(3, 16, *LATENT), NONE)
        assert torch.isfinite(flow).all()
    assert cache.frames == 4  # sink 1 and the 3 frames that the next chunk sees
    assert cache.ledger().parts["codes"] > 0


class JointMemory:
    """Memory and chunk in one sequence: the chunk sees all, the memory itself only."""

    turns = None

    def __init__(self, lenses, memory: int, frames: int) -> None:
        self.lenses = lenses
        self.table = frame_angles(torch.arange(frames), GRID, 128)
        seen = torch.ones(frames, frames, dtype=torch.bool)
        seen[:memory, memory:] = False
        self.mask = seen.repeat_interleave(CELLS, 0).repeat_interleave(CELLS, 1)

    def __call__(self, layer, q, k, v):
        def attend(q, k, v):
            return F.scaled_dot_product_attention(q[None], k[None], v[None], self.mask)[0]

        rotary = attend(rotate(q, *self.table), rotate(k, *self.table), v)
        projection, inverse = self.lenses.projection, self.lenses.inverse
        turned = attend(apply(projection.transpose(1, 2), q), apply(inverse, k), apply(inverse, v))
        return rotary, apply(projection, turned)


def test_a_memory_that_grows_equals_joint_attention_over_its_window() -> None:
    """The first chunk alone, the second after it; the third after the second alone, because the
    window has cut the first."""
    model = make_model(replace(TINY, prope=True, precision="fp32_modulation"))
    context = model.context_kv(torch.randn(5, 32))
    c2w, labels = hy_actions.trajectory(hy_actions.parse_pose("w-5, right-4, up-2"))
    lenses = cameras(
        hy_actions.world_to_camera(c2w), hy_actions.intrinsics(len(c2w)), torch.float32
    )
    labels = torch.from_numpy(labels)
    frames = torch.randn(12, 16, *LATENT)
    cache = make_cache(model, 4, window=8)
    driver = MemoryRollout(model, cache, context, GRID, (1000.0, 500.0, 0.0))
    driver.append(0, frames[:4], lenses.select(torch.arange(4)), labels[:4])
    before = [cache.history(layer)[0].clone() for layer in range(2)]
    _, trace = driver.denoise(
        frames[4:8], lenses.select(torch.arange(4)), lenses.select(torch.arange(4, 8)),
        labels[4:8], appended=4,
    )  # fmt: skip
    joint = JointMemory(lenses.select(torch.arange(8)), 4, 8)
    times = torch.cat([torch.full((4,), 14.0), torch.full((4,), 1000.0)])
    flow = model(frames[:8].transpose(0, 1), Pass(times, joint, context, labels=labels[:8]))
    torch.testing.assert_close(trace[0].flow, flow.transpose(0, 1)[4:], **CLOSE)
    for layer in range(2):
        assert torch.equal(cache.history(layer)[0], before[layer]), "denoising writes nothing"
    driver.append(4, frames[4:8], lenses.select(torch.arange(8)), labels[4:8])
    _, trace = driver.denoise(
        frames[8:], lenses.select(torch.arange(4, 8)), lenses.select(torch.arange(8, 12)),
        labels[8:12], appended=8,
    )  # fmt: skip
    # The second chunk's keys keep the context that they were computed in, the first is gone.
    joint = JointMemory(lenses.select(torch.arange(12)), 0, 12)
    chunk = torch.arange(12) // 4
    behind = chunk[:, None] - chunk[None]
    seen = (behind == 0) | (behind == 1)
    joint.mask = seen.repeat_interleave(CELLS, 0).repeat_interleave(CELLS, 1)
    times = torch.cat([torch.full((8,), 14.0), torch.full((4,), 1000.0)])
    flow = model(frames.transpose(0, 1), Pass(times, joint, context, labels=labels[:12]))
    torch.testing.assert_close(trace[0].flow, flow.transpose(0, 1)[8:], **CLOSE)
    driver.append(8, frames[8:], lenses.select(torch.arange(4, 12)), labels[8:12])
    assert cache.frames == 4, "a window counts the chunk that comes"
    assert torch.isfinite(cache.history(1)[0]).all()


def test_positions_do_not_end_at_1024_frames() -> None:
    """Attention scores depend on distance alone, far beyond the published table too."""
    x = torch.randn(1, 2 * CELLS, 128)
    scores = []
    for first in (3, 1023, 200_000):
        table = frame_angles(torch.tensor([first, first + 1]), GRID, 128)
        q = rotate(x.double(), *table)
        scores.append(q @ q.transpose(1, 2))
    torch.testing.assert_close(scores[1], scores[0], rtol=0, atol=1e-8)
    torch.testing.assert_close(scores[2], scores[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", ["bf16", "qvg"])
def test_an_encoded_sink_is_seen_and_never_evicted(method: str) -> None:
    """The sink ends inside the second chunk; encoding it changes where it is held, not what."""
    model = make_model(dtype=torch.bfloat16)
    context = model.context_kv(torch.randn(5, 32))
    latents = torch.randn(20, 16, *LATENT)
    caches = []
    for compress in (False, True):
        settings = {} if method == "bf16" else {"centroids": 8}
        cache = make_cache(model, 4, 11, 6, method, compress_sink=compress, **settings)
        driver = SelfForcing(model, cache, context, GRID)
        for first in range(0, 20, 4):
            driver.commit(first, latents[first : first + 4], NONE)
        caches.append(cache)
    plain, encoded = caches
    assert plain.frames == encoded.frames == 7
    if method == "bf16":
        assert all(map(torch.equal, plain.history(1), encoded.history(1)))
    else:
        assert "bf16_sink" in plain.ledger().parts
        assert "bf16_sink" not in encoded.ledger().parts
        assert encoded.ledger().total < plain.ledger().total

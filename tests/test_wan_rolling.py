"""The rolling window of any size equals the published rule written out, which has no cache."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from wan_helpers import make_cache, make_model

from quantwm.worlds.wan.backbone import CausalWan, ContextKV, Pass
from quantwm.worlds.wan.config import WanConfig
from quantwm.worlds.wan.rolling import RollingForcing, RollingRule
from quantwm.worlds.wan.rotary import frame_angles, rotate
from quantwm.worlds.wan.schedules import flow_match_steps

GRID = (1, 2)
CELLS = GRID[0] * GRID[1]
CONFIG = WanConfig(
    layers=2, heads=2, head_dim=24, ffn_dim=48, in_channels=16, out_channels=16, context_dim=12,
    context_len=6, freq_dim=16,
)  # fmt: skip

Seen = list[tuple[int, int]]
"""Frames of the sequence that are attended, and where each stands for who reads them."""


def seen_by_window(start: int, frames: int, n: int, limit: int, kept: int) -> Seen:
    """The anchor in the chunk before the oldest cached frame used, as many newest cached frames as
    fit, the window; the window that begins the video sees itself only."""
    own = [(frame, frame) for frame in range(start, start + frames)]
    if start == 0:
        return own
    cached = list(range(n, start))[-kept:]
    used = cached[max(len(cached) - max(limit - frames - n, 0), 0) :]
    oldest = used[0] if used else start
    anchor = [(frame, oldest - n + frame) for frame in range(n)]
    return anchor + [(frame, frame) for frame in used] + own


def seen_by_chunk(start: int, n: int, limit: int, kept: int) -> Seen:
    """The newest cached frames within the limit, the anchor unmoved as far as it is among them."""
    own = [(frame, frame) for frame in range(start, start + n)]
    if start == 0:
        return own
    cached = [*range(n), *list(range(n, start))[-kept:]]
    return [(frame, frame) for frame in cached[max(len(cached) - (limit - n), 0) :]] + own


class Written:
    """All finished chunks and a window in one sequence; keys are turned anew for every reader."""

    turns = None

    def __init__(self, readers: list[tuple[range, Seen]]) -> None:
        self.readers = readers

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        out = torch.empty_like(q)
        for rows, seen in self.readers:
            mine = torch.cat([torch.arange(f * CELLS, (f + 1) * CELLS) for f in rows])
            theirs = torch.cat([torch.arange(f * CELLS, (f + 1) * CELLS) for f, _ in seen])
            at = torch.tensor([place for _, place in seen])
            keys = rotate(k[:, theirs], *frame_angles(at, GRID, 24))
            queries = rotate(q[:, mine], *frame_angles(torch.tensor(list(rows)), GRID, 24))
            out[:, mine] = scaled_dot_product_attention(queries, keys, v[:, theirs])
        return (out,)


def flow_of(
    model: CausalWan, context: ContextKV, done: torch.Tensor, x: torch.Tensor,
    times: torch.Tensor, readers: list[tuple[range, Seen]],
) -> torch.Tensor:  # fmt: skip
    """Of x behind the finished frames, which are clean."""
    every = torch.cat([torch.zeros(len(done)), times])
    latents = torch.cat([done, x]).transpose(0, 1)
    return model(latents, Pass(every, Written(readers), context)).transpose(0, 1)[len(done) :]


@settings(max_examples=10)
@given(
    n=st.integers(1, 3), depth=st.integers(1, 4), more=st.integers(0, 5), spare=st.integers(0, 7),
    room=st.integers(0, 8), seed=st.integers(0, 99),
)  # fmt: skip
def test_every_window_is_as_the_rule_says(
    n: int, depth: int, more: int, spare: int, room: int, seed: int
) -> None:
    """more: chunks beyond those in flight; spare, room: of the limit and of the cache, frames."""
    limit, kept, chunks = n * (depth + 1) + spare, n + room, depth + more
    rule = RollingRule(n, limit, kept + 2 * n)
    model = make_model(CONFIG, seed)
    generator = torch.Generator().manual_seed(seed)
    context = model.context_kv(torch.randn(3, 12, generator=generator))
    shape = (n, 16, 2 * GRID[0], 2 * GRID[1])
    noise = torch.randn(n * chunks, *shape[1:], generator=generator)
    cache = make_cache(model, n, rule.policy(1).window_frames, n, cells=CELLS)
    steps = flow_match_steps([1000, 750, 500, 250][:depth], 5.0)
    driver = RollingForcing(model, cache, context, GRID, steps, rule)
    latents, windows = driver.run(
        noise, lambda window, chunk: torch.full(shape, 0.1 * (window - chunk)), every_clean=True
    )
    x = noise.clone()
    for number, window in enumerate(windows):
        first, last = max(0, number - depth + 1), min(chunks - 1, number)
        assert (window.first_chunk, window.last_chunk) == (first, last)
        start, frames = first * n, (last - first + 1) * n
        own = slice(start, start + frames)
        before = [
            (range(c * n, c * n + n), seen_by_chunk(c * n, n, limit, kept)) for c in range(first)
        ]
        seen = seen_by_window(start, frames, n, limit, kept)
        readers = [*before, (range(start, start + frames), seen)]
        flow = flow_of(model, context, latents[:start], x[own], window.timesteps, readers)
        torch.testing.assert_close(window.flow, flow, rtol=0, atol=2e-4)
        finished = x[start : start + n] - steps[number - first].sigma * flow[:n]
        seen = seen_by_chunk(start, n, limit, kept)
        readers = [*before, (range(start, start + n), seen)]
        clean = flow_of(model, context, latents[:start], finished, torch.zeros(n), readers)
        torch.testing.assert_close(window.clean_flow, clean, rtol=0, atol=2e-4)
        for chunk in range(first, last + 1):
            part, level = slice(chunk * n, chunk * n + n), number - chunk
            x0 = x[part] - steps[level].sigma * flow[part.start - start : part.stop - start]
            if level + 1 < depth:
                sigma = steps[level + 1].renoise_sigma
                x0 = (1 - sigma) * x0 + sigma * 0.1 * (number - chunk)
            x[part] = x0
    torch.testing.assert_close(latents, x, rtol=0, atol=2e-4)

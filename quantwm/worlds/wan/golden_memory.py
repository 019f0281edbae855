"""Golden rollout of HY-WorldPlay Wan-5B: memory selected and rebuilt per chunk."""

from __future__ import annotations

import torch

from quantwm.cache import CachePolicy
from quantwm.goldens import Comparison, GoldenSet
from quantwm.worlds.wan import hy_actions
from quantwm.worlds.wan.backbone import CausalWan
from quantwm.worlds.wan.golden_common import (
    DTYPES,
    SPAN_TOKENS,
    WatchedCache,
    build,
    channels_first,
    grid_of,
    open_cache,
    runs_of,
    sized,
)
from quantwm.worlds.wan.memory_frames import select
from quantwm.worlds.wan.memory_rollout import MemoryRollout
from quantwm.worlds.wan.prope import Cameras, apply, cameras
from quantwm.worlds.wan.rotary import frame_angles, rotate


def hy_worldplay(golden: GoldenSet, compare: Comparison) -> None:
    """Poses and labels from the pose string, selection, prefill caches and rollout."""
    info = golden.info["config"]
    moves = hy_actions.parse_pose(info["pose"])
    c2w, labels = hy_actions.trajectory(moves)
    w2c = hy_actions.world_to_camera(c2w)
    # A pose string may go on beyond the chunks that were run.
    for name, derived in (("w2c", w2c), ("action", torch.from_numpy(labels))):
        compare.require_equal(f"in.{name}", derived[: len(golden[f"in.{name}"])])
    selection = {}
    for chunk in range(1, info["num_chunks"]):
        first = chunk * info["chunk"]
        selection[chunk] = select(w2c[: first + info["chunk"]], first, golden["in.points_local"])
        compare.check(f"rollout.select.c{chunk}", torch.tensor(selection[chunk]))
    config = sized(golden, info["model"]["num_attention_heads"], info["text_len"])
    for run in runs_of(golden, "rollout", None):
        model = build(golden.weights, config, DTYPES[run])
        _hy_run(golden, compare, model, run, selection)


def _hy_run(
    golden: GoldenSet,
    compare: Comparison,
    model: CausalWan,
    run: str,
    selection: dict[int, list[int]],
) -> None:
    info, schedule = golden.info["config"], golden.info["schedule"]
    grid, size, prefix = grid_of(info["latent_hw"]), info["chunk"], f"rollout.{run}"
    policy = CachePolicy(span_tokens=SPAN_TOKENS)
    cache = open_cache(model, grid[0] * grid[1], size, policy, DTYPES[run])
    context = model.context_kv(golden["in.prompt_embeds"][0])
    driver = MemoryRollout(
        model, cache, context, grid, schedule["timesteps"], schedule["context_timestep"]
    )
    lenses = cameras(golden["in.w2c"], golden["in.K"], DTYPES[run])
    labels = golden["in.action"]
    latents = golden["in.noise"][0].float().transpose(0, 1).clone()
    image = golden["in.first_image_latent"][0][:, 0].float()
    latents[0] = image
    for chunk in range(info["num_chunks"]):
        own = torch.arange(chunk * size, chunk * size + size)
        memory = None
        if chunk:
            chosen = torch.tensor(selection[chunk])
            memory = lenses.select(chosen)
            driver.remember(latents[chosen], memory, labels[chosen])
            at = f"{prefix}.c{chunk}.prefill"
            compare.check(f"{at}.timestep", torch.full((len(chosen),), driver.context_timestep))
            _check_prefill(compare, at, cache, memory, grid)
        first = image if chunk == 0 else None
        x, trace = driver.denoise(latents[own], memory, lenses.select(own), labels[own], first)
        for index, step in enumerate(trace):
            at = f"{prefix}.c{chunk}.s{index}"
            compare.check(f"{at}.timestep", step.timesteps)
            compare.check(f"{at}.x_in", channels_first(step.x))
            compare.check(f"{at}.flow", channels_first(step.flow))
        latents[own] = x.float()
    compare.check(f"{prefix}.latents", channels_first(latents))


def _check_prefill(
    compare: Comparison, at: str, cache: WatchedCache, memory: Cameras, grid: tuple[int, int]
) -> None:
    """The published cache holds two maps of one k and v: rotated, and by the inverse cameras."""
    frames = torch.arange(memory.projection.shape[0])
    table = frame_angles(frames, grid, cache.spec.head_dim)
    for layer in range(cache.spec.layers):
        if not compare.wants(f"{at}.kv.layer{layer}.k"):
            continue
        k, v = cache.history(layer)
        keys = torch.cat([rotate(k, *table), apply(memory.inverse, k)], dim=-1)
        values = torch.cat([v, apply(memory.inverse, v)], dim=-1)
        compare.check(f"{at}.kv.layer{layer}.k", keys)
        compare.check(f"{at}.kv.layer{layer}.v", values)

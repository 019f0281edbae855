"""Golden rollouts of the conditioned self-forcing worlds: LingBot and Matrix-Game-2."""

from __future__ import annotations

from dataclasses import replace

import torch

from quantwm.goldens import Comparison, GoldenSet
from quantwm.worlds.wan import lingbot_actions, matrix_actions
from quantwm.worlds.wan.backbone import CausalWan
from quantwm.worlds.wan.golden_common import (
    DTYPES,
    WatchedCache,
    build,
    channels_first,
    check_cursors,
    check_trace,
    flat,
    grid_of,
    open_cache,
    policy_of,
    runs_of,
    sized,
)
from quantwm.worlds.wan.schedules import Step, flow_match_steps, unipc_steps
from quantwm.worlds.wan.self_forcing import Conditions, SelfForcing


def lingbot(golden: GoldenSet, compare: Comparison) -> None:
    """Sink and window, camera condition from poses; FP32 and autocast rules in BF16."""
    info = golden.info["config"]
    sizes, hw = info["model"], info["latent_hw"]
    config = sized(golden, sizes["num_heads"], sizes["text_len"])
    camera = _lingbot_camera(golden, compare, info["chunk_size"], hw)
    steps = unipc_steps(info["timesteps_index"], info["shift"])
    for name, values in (
        ("timesteps", [step.timestep for step in steps]),
        ("sigmas", [step.sigma for step in steps]),
        ("renoise_sigmas", [step.renoise_sigma for step in steps]),
        ("table_sigmas", [step.table_sigma for step in steps]),
    ):
        compare.check(f"rollout.fp32.{name}", torch.tensor(values))
    for run in runs_of(golden, "rollout", None):
        model = build(golden.weights, config, DTYPES[run])
        _lingbot_run(golden, compare, model, run, camera, steps)


def _lingbot_camera(
    golden: GoldenSet, compare: Comparison, chunk: int, hw: tuple[int, int]
) -> torch.Tensor:
    """The Pluecker condition of all frames, derived from the stored poses."""
    height, width = hw[0] * lingbot_actions.CELL, hw[1] * lingbot_actions.CELL
    poses = torch.from_numpy(
        lingbot_actions.latent_poses(golden["in.poses"].double().numpy(), chunk)
    )
    relative = lingbot_actions.relative_poses(poses)
    compare.check("rollout.fp32.relative_poses", relative)
    scaled = lingbot_actions.scaled_intrinsics(golden["in.intrinsics"][0].tolist(), height, width)
    compare.check("rollout.fp32.scaled_intrinsics", scaled)
    rays = lingbot_actions.pluecker(relative, scaled, height, width)
    camera = lingbot_actions.folded(rays).to(torch.bfloat16)
    compare.check("rollout.cond.plucker", camera)
    return camera


def _lingbot_run(
    golden: GoldenSet,
    compare: Comparison,
    model: CausalWan,
    run: str,
    camera: torch.Tensor,
    steps: tuple[Step, ...],
) -> None:
    info, grid = golden.info["config"], grid_of(golden.info["config"]["latent_hw"])
    size, per_frame = info["chunk_size"], grid[0] * grid[1]
    policy = policy_of(info["local_attn_size"], info["sink_size"])
    cache = open_cache(model, per_frame, size, policy, DTYPES[run])
    context = model.context_kv(golden["in.prompt_embeds"])
    driver, prefix = SelfForcing(model, cache, context, grid), f"rollout.{run}"
    latents = []
    for chunk in range(info["num_chunks"]):
        span = slice(chunk * size, chunk * size + size)
        image = golden["in.image_latents"][:, span].float()
        mask = torch.zeros(4, *image.shape[1:])
        mask[:, : 1 if chunk == 0 else 0] = 1
        conditions = Conditions(channels=torch.cat([mask, image]), camera=camera[:, span])
        compare.check(f"rollout.fp32.c{chunk}.y", conditions.channels)
        trace = driver.denoise(
            chunk * size,
            golden["in.noise"][:, span].float().transpose(0, 1),
            steps,
            lambda step, chunk=chunk: golden[f"in.c{chunk}.noise{step}"].float().transpose(0, 1),
            conditions,
        )
        turned = channels_first
        check_trace(compare, f"{prefix}.c{chunk}", trace, turned)
        latents.append(turned(trace[-1].x0))
        flow = driver.commit(chunk * size, trace[-1].x0, conditions)
        compare.check(f"{prefix}.c{chunk}.clean.flow", turned(flow))
        compare.check(f"{prefix}.c{chunk}.clean.timestep", 0.0)
    compare.check(f"{prefix}.latents", torch.cat(latents, dim=1))
    for layer in range(model.config.layers):
        keys, values = cache.attended["self", layer]
        at = f"{prefix}.kv.layer{layer}"
        compare.check(f"{at}.k", flat(keys))
        compare.check(f"{at}.v", flat(values))
        compare.check(f"{at}.text_k", flat(context[layer][0]))
        compare.check(f"{at}.text_v", flat(context[layer][1]))
        check_cursors(compare, at, keys.shape[1], info["num_chunks"] * size * per_frame)


def matrix_game2(golden: GoldenSet, compare: Comparison) -> None:
    """Three cached streams, actions per chunk; streaming and offline drivers, FP32 and BF16."""
    info = golden.info["config"]
    sizes = info["model"]
    rotary, rows = sizes["action_config"], golden["in.visual_context"].shape[1]
    config = sized(golden, sizes["num_heads"], rows, rotary["heads_num"])
    action = replace(
        config.action, rope_dim=rotary["rope_dim_list"][0], rope_theta=rotary["rope_theta"]
    )
    config = replace(config, action=action)
    for run in runs_of(golden, "rollout", None):
        model = build(golden.weights, config, DTYPES[run])
        _matrix_game2_run(golden, compare, model, run)


def _matrix_game2_run(golden: GoldenSet, compare: Comparison, model: CausalWan, run: str) -> None:
    info, dtype = golden.info["config"], DTYPES[run]
    grid, size = grid_of(info["latent_hw"]), info["num_frame_per_block"]
    per_frame, prefix = grid[0] * grid[1], f"rollout.{run}"
    policy = policy_of(info["model"]["local_attn_size"], info["model"]["sink_size"])
    cache = open_cache(model, per_frame, size, policy, dtype)
    context = model.context_kv(golden["in.visual_context"][0])
    driver = SelfForcing(model, cache, context, grid)
    driver.clean_timestep = float(info["context_noise"])
    steps = flow_match_steps(info["denoising_step_list"], info["timestep_shift"])
    rows = ActionRows(golden, dtype)
    latents = []
    for chunk in range(info["num_chunks"]):
        span = slice(chunk * size, chunk * size + size)
        keyboard, mouse = rows.advance(chunk, size)
        compare.check(f"{prefix}.c{chunk}.keyboard_cond", keyboard)
        if mouse is not None:
            compare.check(f"{prefix}.c{chunk}.mouse_cond", mouse)
        conditions = Conditions(
            channels=golden["in.cond_concat"][0][:, span], keyboard=keyboard, mouse=mouse
        )
        trace = driver.denoise(
            chunk * size,
            golden["in.noise"][0][:, span].transpose(0, 1).to(dtype),
            steps,
            lambda step, chunk=chunk: golden[f"in.c{chunk}.noise{step}"].to(dtype),
            conditions,
        )
        check_trace(compare, f"{prefix}.c{chunk}", trace, channels_first)
        latents.append(channels_first(trace[-1].x0))
        flow = driver.commit(chunk * size, trace[-1].x0, conditions)
        compare.check(f"{prefix}.c{chunk}.clean.flow", channels_first(flow))
        times = torch.full((size,), driver.clean_timestep)
        compare.check(f"{prefix}.c{chunk}.clean.timestep", times)
    compare.check(f"{prefix}.latents", torch.cat(latents, dim=1))
    _matrix_game2_caches(compare, model, cache, prefix, info["num_chunks"] * size)
    for layer, (k, v) in enumerate(context):
        for name, tensor in (("image_k", k), ("image_v", v)):
            stored = f"{prefix}.kv.layer{layer}.{name}"
            if compare.wants(stored):
                compare.check(stored, flat(tensor)[:, : compare.golden[stored].shape[1]])


def _matrix_game2_caches(
    compare: Comparison, model: CausalWan, cache: WatchedCache, prefix: str, frames: int
) -> None:
    """Final caches; the mouse stream's cells are the batch of the published layout."""
    for (stream, layer), (keys, values) in cache.attended.items():
        per_frame = cache.tokens_per_frame(stream)
        # Action streams count the blocks that have an action module.
        block = layer if stream == "self" else model.config.action.layers[layer]
        at = f"{prefix}.kv.layer{block}.{stream}"
        for name, tensor in (("k", keys), ("v", values)):
            if stream == "mouse":
                cells = tensor.unflatten(1, (-1, per_frame))
                compare.check(f"{at}.{name}", cells.permute(2, 1, 0, 3))
            else:
                compare.check(f"{at}.{name}", flat(tensor))
        # The mouse cursor counts frames: its cells are a batch.
        unit = 1 if stream == "mouse" else per_frame
        held = keys.shape[1] // per_frame
        check_cursors(compare, at, held * unit, frames * unit)


class ActionRows:
    """Action rows of a golden rollout: overwritten by keys per chunk, or as stored."""

    def __init__(self, golden: GoldenSet, dtype: torch.dtype) -> None:
        info = golden.info["config"]
        self.mode, self.dtype = info["mode"], dtype
        self.keys = info["keys"] if info["driver"] == "streaming" else None
        self.keyboard = golden["in.keyboard_cond"][0].float()
        has_mouse = bool(info["model"]["action_config"]["enable_mouse"])
        self.mouse = golden["in.mouse_cond"][0].float() if has_mouse else None

    def advance(self, chunk: int, size: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """All rows up to the end of the chunk, in the run's dtype."""
        stop = 1 + 4 * ((chunk + 1) * size - 1)
        if self.keys is not None:
            held = matrix_actions.parse_prompt(self.mode, self.keys[chunk])
            rows = matrix_actions.action_rows(self.mode, [held] * size, chunk * size)
            start = stop - len(rows[0])
            self.keyboard[start:stop] = rows[0]
            if self.mouse is not None:
                self.mouse[start:stop] = rows[1]
        mouse = None if self.mouse is None else self.mouse[:stop].to(self.dtype)
        return self.keyboard[:stop].to(self.dtype), mouse

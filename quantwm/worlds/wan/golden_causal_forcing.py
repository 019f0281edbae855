"""Golden rollouts of Causal-Forcing: chunkwise, framewise and the long rolling window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from quantwm.goldens import Comparison, GoldenSet, load_tensors
from quantwm.worlds.wan.backbone import CausalWan, ContextKV
from quantwm.worlds.wan.golden_common import (
    DTYPES,
    SPAN_TOKENS,
    build,
    check_cursors,
    check_trace,
    flat,
    grid_of,
    open_cache,
    policy_of,
    runs_of,
    sized,
)
from quantwm.worlds.wan.rolling import RollingForcing, RollingRule
from quantwm.worlds.wan.schedules import flow_match_steps
from quantwm.worlds.wan.self_forcing import Conditions, SelfForcing


def causal_forcing(golden: GoldenSet, compare: Comparison) -> None:
    """Windowed, full and framewise rollouts; FP32 and BF16."""
    info = golden.info["config"]
    config = sized(golden, info["model"]["num_heads"], info["model"]["text_len"])
    for rollout, rules in info["rollouts"].items():
        for run in runs_of(golden, rollout, rules):
            model = build(golden.weights, config, DTYPES[run])
            _causal_forcing_run(golden, compare, model, rollout, run, rules)


def _causal_forcing_run(
    golden: GoldenSet,
    compare: Comparison,
    model: CausalWan,
    rollout: str,
    run: str,
    rules: Mapping[str, Any],
) -> None:
    info, dtype = golden.info["config"], DTYPES[run]
    grid, size = grid_of(info["latent_hw"]), rules["num_frame_per_block"]
    per_frame = grid[0] * grid[1]
    policy = policy_of(rules["local_attn_size"], rules["sink_size"])
    cache = open_cache(model, per_frame, size, policy, dtype)
    context = model.context_kv(golden["in.prompt_embeds"][0])
    driver = SelfForcing(model, cache, context, grid)
    driver.clean_timestep = float(info["context_noise"])
    later = flow_match_steps(rules["denoising_step_list"], info["timestep_shift"])
    first = flow_match_steps(rules["first"], info["timestep_shift"]) if rules["first"] else later
    prefix, start, none = f"{rollout}.{run}", rules["initial_frames"], Conditions()
    latents = []
    if start:
        image = golden[f"{rollout}.in.initial_latent"][0].to(dtype)
        # Given frames are written chunk by chunk, or as they are where they fill none.
        parts = image.split(size) if start % size == 0 else (image,)
        firsts = range(0, start, len(parts[0]))
        flows = [
            driver.commit(first, part, none) for first, part in zip(firsts, parts, strict=True)
        ]
        compare.check(f"{prefix}.init.flow", torch.cat(flows))
        latents.append(image)
    noise = golden[f"{rollout}.in.noise"][0].to(dtype)
    for chunk in range(rules["num_chunks"]):
        frame = start + chunk * size
        trace = driver.denoise(
            frame,
            noise[chunk * size : chunk * size + size],
            later if chunk else first,
            lambda step, chunk=chunk: golden[f"{rollout}.in.c{chunk}.noise{step}"].to(dtype),
            none,
        )
        check_trace(compare, f"{prefix}.c{chunk}", trace, layout=lambda x: x)
        latents.append(trace[-1].x0)
        flow = driver.commit(frame, trace[-1].x0, none)
        compare.check(f"{prefix}.c{chunk}.clean.flow", flow)
        compare.check(
            f"{prefix}.c{chunk}.clean.timestep", torch.full((size,), driver.clean_timestep)
        )
    compare.check(f"{prefix}.latents", torch.cat(latents))
    end = (start + rules["num_chunks"] * size) * per_frame
    for layer in range(model.config.layers):
        keys, values = cache.attended["self", layer]
        at = f"{prefix}.kv.layer{layer}"
        compare.check(f"{at}.k", flat(keys))
        compare.check(f"{at}.v", flat(values))
        compare.check(f"{at}.text_k", flat(context[layer][0]))
        compare.check(f"{at}.text_v", flat(context[layer][1]))
        check_cursors(compare, at, keys.shape[1], end)


def causal_forcing_long(golden: GoldenSet, compare: Comparison) -> None:
    """The rolling window with its moving anchor."""
    sizes = golden.info["model_config"]
    config = sized(golden, sizes["num_heads"], sizes["text_len"])
    prompt = _prompt(golden)
    for run in runs_of(golden, "rolling", None):
        model = build(golden.weights, config, DTYPES[run])
        _long_run(golden, compare, model, run, model.context_kv(prompt[0]))


def _prompt(golden: GoldenSet) -> torch.Tensor:
    """Its own, or that of the set whose weights it shares."""
    if "in.prompt_embeds" in golden.tensors:
        return golden["in.prompt_embeds"]
    shared = golden.info["config"]["weights"].replace(".weights.safetensors", ".safetensors")
    return load_tensors(golden.folder / shared)["in.prompt_embeds"]


def _long_run(
    golden: GoldenSet, compare: Comparison, model: CausalWan, run: str, context: ContextKV
) -> None:
    info, grid, prefix = golden.info["config"], grid_of(golden.info["latent_hw"]), f"rolling.{run}"
    size, per_frame, dtype = info["num_frame_per_block"], grid[0] * grid[1], DTYPES[run]
    rule = RollingRule(
        chunk_frames=size,
        attention_frames=info["max_attention_frames"],
        cache_frames=info["cache_frames"],
    )
    cache = open_cache(model, per_frame, size, rule.policy(SPAN_TOKENS), dtype)
    steps = flow_match_steps(info["denoising_step_list"], info["timestep_shift"])
    driver = RollingForcing(model, cache, context, grid, steps, rule)
    latents, windows = driver.run(
        golden["rolling.in.noise"][0].to(dtype),
        lambda window, chunk: golden[f"rolling.in.w{window}.block{chunk}.noise"].to(dtype),
        every_clean=True,
    )
    for number, window in enumerate(windows):
        compare.check(f"{prefix}.w{number}.timestep", window.timesteps)
        compare.check(f"{prefix}.w{number}.flow", window.flow)
        compare.check(f"{prefix}.w{number}.clean.flow", window.clean_flow)
    compare.check(f"{prefix}.latents", latents)
    own = size * per_frame
    for layer in range(model.config.layers):
        keys, values = cache.attended["self", layer]
        at = f"{prefix}.kv.layer{layer}"
        compare.check(f"{at}.anchor_k", flat(keys[:, :own]))
        compare.check(f"{at}.newest_k", flat(keys[:, -own:]))
        compare.check(f"{at}.newest_v", flat(values[:, -own:]))
        held = min(keys.shape[1], rule.cache_frames * per_frame)
        compare.check(f"{at}.local_end_index", held)

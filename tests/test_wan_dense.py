"""Cached, chunked rollouts of random sizes equal tests/wan_dense.py, which has no cache at all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from wan_dense import Sequence, flow, image_context, text_context
from wan_helpers import make_cache, make_model, upstream_name, upstream_weights

from quantwm.goldens import Comparison, GoldenSet
from quantwm.worlds.wan import hy_actions
from quantwm.worlds.wan.backbone import CausalWan
from quantwm.worlds.wan.config import ActionConfig, WanConfig
from quantwm.worlds.wan.golden_causal_forcing import causal_forcing
from quantwm.worlds.wan.graphs import GraphedWan
from quantwm.worlds.wan.memory_rollout import MemoryRollout
from quantwm.worlds.wan.prope import cameras
from quantwm.worlds.wan.schedules import add_noise, flow_match_steps, to_x0, unipc_steps
from quantwm.worlds.wan.self_forcing import Conditions, SelfForcing

FAMILIES = ("text", "camera", "keys", "keyboard")
# Relative RMS. The models compute in FP32 (RoPE in FP64) or BF16, the reference in FP64.
LIMITS = {torch.float32: 2e-5, torch.bfloat16: 0.02}


@dataclass(frozen=True)
class Drawn:
    """Sizes of one rollout."""

    family: str
    heads: int
    head_dim: int
    grid: tuple[int, int]
    chunk: int
    chunks: int
    window: int | None
    sink: int
    steps: tuple[int, ...]
    rows: int
    seed: int
    dtype: torch.dtype


@st.composite
def drawn(draw: st.DrawFn, families: tuple[str, ...] = FAMILIES) -> Drawn:
    chunk = draw(st.integers(1, 4))
    sink = draw(st.integers(0, 5))
    window = draw(st.one_of(st.none(), st.integers(sink + chunk, sink + chunk + 6)))
    return Drawn(
        family=draw(st.sampled_from(families)),
        heads=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([16, 24, 64])),
        grid=draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 3), (3, 2)])),
        chunk=chunk,
        chunks=draw(st.integers(1, 5)),
        window=window,
        sink=0 if window is None else sink,
        steps=draw(st.sampled_from([(1000,), (1000, 500), (1000, 666, 333)])),
        rows=draw(st.integers(1, 8)),
        seed=draw(st.integers(0, 1000)),
        dtype=draw(st.sampled_from(sorted(LIMITS, key=str))),
    )


def config_of(case: Drawn) -> WanConfig:
    width = case.heads * case.head_dim
    plain = WanConfig(
        layers=2, heads=case.heads, head_dim=case.head_dim, ffn_dim=2 * width, in_channels=16,
        out_channels=16, context_dim=12, context_len=8, freq_dim=16,
    )  # fmt: skip
    if case.family == "camera":
        return replace(plain, in_channels=36, camera=True, camera_channels=24,
                       precision="fp32_residual")  # fmt: skip
    if case.family in ("keys", "keyboard"):
        action = ActionConfig(
            layers=(0,) if case.seed % 2 else (0, 1), heads=2, head_dim=16, keyboard_dim=4,
            mouse_dim=2 if case.family == "keys" else 0, embed_dim=6,
        )  # fmt: skip
        return replace(plain, in_channels=36, context="image", action=action)
    return plain


def published(model: CausalWan) -> dict[str, torch.Tensor]:
    """The model's weights in FP64 under the original names."""
    out = {}
    for name, tensor in model.state_dict().items():
        name = name.replace("condition_embedder.action_embedder.linear_1", "action_embedding.0")
        name = name.replace("condition_embedder.action_embedder.linear_2", "action_embedding.2")
        name = name.replace("attn1.to_out_prope.0", "self_attn.o_prope")
        out[upstream_name(name)] = tensor.double()
    return out


def seen_by(frames: int, chunk: int, window: int | None, sink: int) -> torch.Tensor:
    """bool [frames, frames]: a row's frame sees its own chunk, the sink and the newest others."""
    out = torch.zeros(frames, frames, dtype=torch.bool)
    for row in range(frames):
        stop = (row // chunk + 1) * chunk
        for column in range(stop):
            recent = window is None or column >= stop - (window - sink)
            out[row, column] = recent or column < sink
    return out


def given_to(case: Drawn, first: int, frames: int, generator: torch.Generator) -> dict:
    """Conditions of `frames` latent frames in all."""
    height, width = 2 * case.grid[0], 2 * case.grid[1]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype).float()

    out: dict[str, torch.Tensor | None] = dict.fromkeys(("channels", "camera", "keyboard", "mouse"))
    if case.family != "text":
        out["channels"] = normal(20, frames, height, width)
    if case.family == "camera":
        out["camera"] = normal(24, frames, height, width)
    if case.family in ("keys", "keyboard"):
        out["keyboard"] = normal(4 * frames, 4)
    if case.family == "keys":
        out["mouse"] = normal(4 * frames, 2)
    return out


def relative(mine: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((mine.double() - wanted).norm() / wanted.norm())


def compare(case: Drawn, graphed: bool = False) -> None:
    """Every flow of every step of a rollout, each fed with the cached rollout's own input."""
    config, total = config_of(case), case.chunk * case.chunks
    height, width = 2 * case.grid[0], 2 * case.grid[1]
    model = make_model(config, case.seed, case.dtype)
    generator = torch.Generator().manual_seed(case.seed)
    rows = torch.randn(case.rows, 12, generator=generator).to(case.dtype)
    weights = published(model)
    embed = text_context if config.context == "text" else image_context
    context = embed(weights, rows, 8) if config.context == "text" else embed(weights, rows)
    conditions = given_to(case, 0, total, generator)
    schedule = unipc_steps if case.family == "camera" else flow_match_steps
    steps = schedule([min(step, 999) for step in case.steps] if case.family == "camera"
                     else case.steps, 5.0)  # fmt: skip
    cells = case.grid[0] * case.grid[1]
    cache = make_cache(model, case.chunk, case.window, case.sink, cells=cells)
    forward = None
    if graphed:

        def rerun(segment):
            segment()
            return (), lambda: segment() and None

        forward = GraphedWan(model, case.chunk, rerun)
    driver = SelfForcing(model, cache, model.context_kv(rows), case.grid, forward)
    seen = seen_by(total, case.chunk, case.window, case.sink)
    acts_on = seen_by(total, case.chunk, case.window, 0)
    done = torch.empty(0, 16, height, width)
    limit = LIMITS[case.dtype]
    for first in range(0, total, case.chunk):
        own = slice(first, first + case.chunk)
        stop = first + case.chunk
        noises = [torch.randn(case.chunk, 16, height, width, generator=generator) for _ in steps]
        chunk_given = Conditions(
            **{name: None if t is None else t[:, own] if name in ("channels", "camera")
               else t[: 4 * stop] for name, t in conditions.items()}
        )  # fmt: skip
        trace = driver.denoise(first, noises[0], steps, lambda i, n=noises: n[i], chunk_given)
        driver.commit(first, trace[-1].x0, chunk_given)
        for index, (step, made) in enumerate(zip(steps, trace, strict=True)):
            latents = torch.cat([done, made.x.float()]).transpose(0, 1)
            if conditions["channels"] is not None:
                latents = torch.cat([latents, conditions["channels"][:, :stop]])
            times = torch.zeros(stop).double()
            times[first:] = step.timestep
            wanted = flow(
                weights, case.heads, 2, 16,
                Sequence(
                    latents, times, torch.arange(stop), seen[:stop, :stop], context,
                    None if conditions["camera"] is None else conditions["camera"][:, :stop],
                    conditions["keyboard"], conditions["mouse"], torch.arange(stop),
                    acts_on[:stop, :stop],
                ),
            )[:, first:].transpose(0, 1)  # fmt: skip
            off = relative(made.flow, wanted)
            assert off < limit, f"frame {first}, step {index}: {off:.1e}"
            x0 = to_x0(made.x, made.flow, step.sigma)
            assert torch.equal(x0, made.x0)
            if index + 1 < len(steps):
                after = add_noise(made.x0, noises[index + 1], steps[index + 1].renoise_sigma)
                assert torch.equal(after, trace[index + 1].x)
        done = torch.cat([done, trace[-1].x0.float()])


@settings(max_examples=25)
@given(drawn())
def test_a_rollout_of_any_size_equals_the_dense_reference(case: Drawn) -> None:
    compare(case)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", sorted(LIMITS, key=str), ids=str)
def test_each_family_with_windows_and_sinks_inside_chunks(family: str, dtype) -> None:
    compare(
        Drawn(family, 2, 24, (2, 3), 4, 4, 9, 3, (1000, 500), 5, 7, dtype),
        graphed=dtype == torch.float32,
    )


@settings(max_examples=8)
@given(drawn(("text",)), st.integers(1, 6), st.lists(st.integers(0, 3), min_size=6, max_size=6))
def test_a_memory_of_any_size_equals_the_dense_reference(
    case: Drawn, remembered: int, picked: list[int]
) -> None:
    """HY: un-rotated keys stored once serve RoPE and PRoPE; any frames in any number."""
    config = replace(config_of(case), prope=True, precision="fp32_modulation")
    model = make_model(config, case.seed, case.dtype)
    generator = torch.Generator().manual_seed(case.seed)
    height, width = 2 * case.grid[0], 2 * case.grid[1]
    keys = ("w", "right", "a", "up")
    walk = hy_actions.Walk()
    walk.advance([frozenset({keys[index]}) for index in picked] + [frozenset({"w"})] * 8)
    w2c = hy_actions.world_to_camera(torch.stack([torch.as_tensor(p) for p in walk.c2w]).numpy())
    lenses = cameras(w2c, hy_actions.intrinsics(len(w2c)), case.dtype)
    labels, count = torch.tensor(walk.labels), len(walk.labels)
    chosen = torch.randperm(count - case.chunk, generator=generator)[:remembered].sort().values
    own = torch.arange(count - case.chunk, count)
    past = torch.randn(len(chosen), 16, height, width, generator=generator).to(case.dtype)
    noise = torch.randn(case.chunk, 16, height, width, generator=generator)
    rows = torch.randn(case.rows, 12, generator=generator).to(case.dtype)
    cache = make_cache(model, case.chunk, cells=case.grid[0] * case.grid[1])
    rollout = MemoryRollout(model, cache, model.context_kv(rows), case.grid, (1000.0, 700.0, 0.0))
    for kept in (chosen[:1], chosen):  # the second takes the place of the first
        rollout.remember(past[: len(kept)], lenses.select(kept), labels[kept])
        assert cache.frames == len(kept)
    _, trace = rollout.denoise(noise, lenses.select(chosen), lenses.select(own), labels[own])
    weights, every = published(model), torch.cat([chosen, own])
    total, first = len(every), len(chosen)
    seen = torch.ones(total, total, dtype=torch.bool)
    seen[:first, first:] = False
    for step in trace:
        times = torch.full((total,), 14.0).double()
        times[first:] = step.timesteps
        sequence = Sequence(
            torch.cat([past.float(), step.x.float()]).transpose(0, 1), times,
            torch.arange(total), seen, text_context(weights, rows, 8), labels=labels[every],
            lenses=(lenses.projection[every], lenses.inverse[every]),
        )  # fmt: skip
        wanted = flow(weights, case.heads, 2, 16, sequence)[:, first:].transpose(0, 1)
        assert relative(step.flow, wanted) < LIMITS[case.dtype]


class _Kept(Comparison):
    """Keeps what an adapter produced."""

    def check(self, name: str, produced: torch.Tensor | float) -> None:
        self.made[name] = produced


@pytest.mark.parametrize(("width", "heads"), [(96, 4), (64, 1), (72, 3)])
def test_a_golden_set_of_another_size_is_run_as_it_says(width: int, heads: int) -> None:
    """Heads that are not 128 wide, frames given in advance, a sink that ends inside a chunk."""
    rules = {"num_frame_per_block": 2, "num_chunks": 3, "local_attn_size": 5, "sink_size": 3,
             "denoising_step_list": [1000], "first": None, "initial_frames": 4,
             "dtypes": ["fp32"]}  # fmt: skip
    model = make_model(
        WanConfig(layers=2, heads=heads, head_dim=width // heads, ffn_dim=40, in_channels=16,
                  out_channels=16, context_dim=12, context_len=8, freq_dim=16)
    )  # fmt: skip
    config = {"model": {"num_heads": heads, "text_len": 8}, "latent_hw": [4, 6],
              "context_noise": 0, "timestep_shift": 5.0, "rollouts": {"r": rules}}  # fmt: skip
    golden = GoldenSet("causal_forcing", Path(), {"config": config})
    torch.manual_seed(1)
    rows, given = torch.randn(1, 5, 12), torch.randn(1, 4, 16, 4, 6)
    noise = torch.randn(1, 6, 16, 4, 6)
    golden.__dict__["weights"] = upstream_weights(model)
    golden.__dict__["tensors"] = {
        "in.prompt_embeds": rows, "r.in.initial_latent": given, "r.in.noise": noise,
        "r.fp32.latents": torch.zeros(1),
    }  # fmt: skip
    kept = _Kept(golden)
    kept.made = {}
    causal_forcing(golden, kept)
    latents = kept.made["r.fp32.latents"].clone()
    latents[8:] = noise[0, 4:]
    times = torch.zeros(10).double()
    times[8:] = 1000.0
    weights = published(model)
    wanted = flow(
        weights, heads, 2, 16,
        Sequence(latents.transpose(0, 1), times, torch.arange(10), seen_by(10, 2, 5, 3),
                 text_context(weights, rows[0], 8)),
    )[:, 8:].transpose(0, 1)  # fmt: skip
    assert relative(kept.made["r.fp32.c2.s0.flow"], wanted) < LIMITS[torch.float32]

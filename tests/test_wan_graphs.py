"""Graphed Wan passes equal the model's own forward; on a CPU a capture that runs anew."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_wan_loading import CONFIGS
from wan_helpers import GRID, LATENT, make_cache, make_model

from quantwm.cache import KVCache
from quantwm.errors import UserError
from quantwm.worlds.wan import hy_actions, matrix_actions
from quantwm.worlds.wan.graphs import GraphedWan, worthwhile
from quantwm.worlds.wan.memory_rollout import MemoryRollout
from quantwm.worlds.wan.prope import cameras
from quantwm.worlds.wan.random_world import random_world
from quantwm.worlds.wan.schedules import flow_match_steps
from quantwm.worlds.wan.self_forcing import Conditions, SelfForcing

CHUNKS = 3
FORMATS = {"bf16": {}, "quantwm": {"centroids": 4}}


def rerun(segment):
    """A capture whose results are worthless until the first replay, as CUDA's are."""
    segment()

    def replay():
        segment()

    return (), replay


def conditions(name: str, chunk: int) -> Conditions:
    torch.manual_seed(chunk)
    channels = torch.randn(20, 3, *LATENT)
    if name == "lingbot_world_v2":
        return Conditions(channels, camera=torch.randn(384, 3, *LATENT))
    if name.startswith("matrix_game2"):
        held = [frozenset({"w"})] * 3 + [frozenset({"a"})] * (3 * chunk)
        mode = name.removeprefix("matrix_game2_")
        keyboard, mouse = matrix_actions.action_rows(mode, held, 0)
        return Conditions(channels, keyboard=keyboard, mouse=mouse)
    return Conditions()


def rollout(name: str, dtype: torch.dtype, method: str, graphed: bool) -> list[torch.Tensor]:
    """Flow of every pass of three chunks, with a prompt switch before the last."""
    config = CONFIGS[name]
    model = make_model(config, dtype=dtype)
    rows = [torch.randn(n, config.context_dim, generator=torch.Generator().manual_seed(n))
            for n in (5, 6)]  # fmt: skip
    contexts = [model.context_kv(r) for r in rows]
    forward = GraphedWan(model, 3, rerun) if graphed else None
    cache = make_cache(model, 3, window=7, sink=1, method=method, **FORMATS[method])
    out = []
    for chunk in range(CHUNKS):
        context = contexts[chunk == CHUNKS - 1]
        driver = SelfForcing(model, cache, context, GRID, forward)
        noise = torch.randn(3, 16, *LATENT, generator=torch.Generator().manual_seed(chunk))
        given = conditions(name, chunk)
        steps = flow_match_steps([1000, 500], 5.0)
        trace = driver.denoise(3 * chunk, noise, steps, lambda step, n=noise: n, given)
        out += [step.flow for step in trace]
        out.append(driver.commit(3 * chunk, trace[-1].x0, given))
    return out


@pytest.mark.parametrize("method", sorted(FORMATS))
@pytest.mark.parametrize("name", sorted(set(CONFIGS) - {"hy_worldplay_wan5b"}))
def test_every_pass_is_the_same_bits(name: str, method: str) -> None:
    dtype = torch.bfloat16 if method == "quantwm" else torch.float32
    plain, graphed = (rollout(name, dtype, method, graphed) for graphed in (False, True))
    for one, other in zip(plain, graphed, strict=True):
        assert torch.equal(one, other)


def test_a_memory_world_with_two_branches_too() -> None:
    model = make_model(CONFIGS["hy_worldplay_wan5b"])
    context = model.context_kv(torch.randn(5, model.config.context_dim))
    walk = hy_actions.Walk()
    walk.advance((frozenset({"w"}),) * 8)
    w2c = hy_actions.world_to_camera(torch.stack([torch.as_tensor(p) for p in walk.c2w]).numpy())
    lenses = cameras(w2c, hy_actions.intrinsics(len(w2c)), torch.float32)
    labels = torch.tensor(walk.labels)
    memory, own = torch.arange(4), torch.arange(4, 8)
    past, noise = torch.randn(4, 16, *LATENT), torch.randn(4, 16, *LATENT)

    def flows(forward):
        rollout = MemoryRollout(model, make_cache(model, 4), context, GRID, forward=forward)
        rollout.remember(past, lenses.select(memory), labels[memory])
        _, trace = rollout.denoise(
            noise, lenses.select(memory), lenses.select(own), labels[own], None
        )
        return [step.flow for step in trace]

    for one, other in zip(flows(None), flows(GraphedWan(model, 4, rerun)), strict=True):
        assert torch.equal(one, other)


def test_graphs_are_made_once_and_only_for_chunks() -> None:
    model = make_model()
    made = []

    def counted(segment):
        made.append(segment)
        return rerun(segment)

    forward = GraphedWan(model, 3, counted)
    driver = SelfForcing(model, make_cache(model), model.context_kv(torch.randn(5, 32)), GRID,
                         forward)  # fmt: skip
    for first in (0, 3, 6):
        driver.commit(first, torch.randn(3, 16, *LATENT), Conditions())
    assert len(made) == forward.count == model.config.layers + 1
    driver.commit(9, torch.randn(1, 16, *LATENT), Conditions())
    assert len(made) == model.config.layers + 1, "another length runs op by op"


def test_the_choice_follows_the_arithmetic() -> None:
    """Matrix-Game-2's chunk waits for launches; LingBot 14B's keeps the device busy."""
    small, large = make_model(), make_model(replace(CONFIGS["causal_forcing"], layers=1))
    weights = sum(p.numel() for p in small.blocks[0].parameters())
    assert worthwhile(small, int(1.5e12 / (2 * weights)))
    assert not worthwhile(large, int(1.5e12 / (2 * weights)) + 1)


def test_graphs_without_a_gpu_are_refused() -> None:
    from quantwm.worlds.wan import catalog
    from quantwm.worlds.wan.self_forcing_world import SelfForcingWorld
    from quantwm.worlds.wan.vae import VaeConfig, WanVae

    entry = replace(catalog.ENTRIES["causal_forcing"], config=CONFIGS["causal_forcing"])
    model, vae = make_model(), WanVae(VaeConfig(base=4, decoder_base=4))
    with pytest.raises(UserError, match="graphs need a CUDA device"):
        SelfForcingWorld(entry, model, vae, graphs=True)
    assert SelfForcingWorld(entry, model, vae).explain() == "world runs op by op"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["matrix_game2_universal", "lingbot_v2_1p3b"])
def test_cuda_graphs_equal_the_ops_one_by_one(cuda, name: str) -> None:
    from quantwm.engine import Engine
    from quantwm.lanes import lanes_for
    from quantwm.worlds.base import ChunkAction

    world = random_world(name, cuda, latent=(8, 16))
    action = ChunkAction.held(frozenset({"w"}), world.spec.cache.frames_per_chunk)

    def latents():
        with Engine(world, lanes_for(world.spec, ("bf16", "quantwm")), seed=0) as engine:
            engine.start()
            blocks = [engine.step(action) for _ in range(4)]
        return [x[-1] for block in blocks for x in block.x0.values()]

    graphed = latents()
    assert "CUDA graphs" in world.explain()
    world.forward = world.model
    for one, other in zip(graphed, latents(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("graphed", [False, True])
def test_static_keys_and_values_are_said_to_last(
    graphed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[tuple[bool, bool]] = set()
    attend = KVCache.attend

    def noted(self: KVCache, *given: object, lasting: bool = False, **options: bool):
        seen.add((options["clean"], lasting))
        return attend(self, *given, lasting=lasting, **options)

    monkeypatch.setattr(KVCache, "attend", noted)
    rollout("causal_forcing", torch.float32, "bf16", graphed)
    assert seen == {(False, graphed), (True, graphed)}

"""qtc in published worlds' geometries: baked keys are turned back, un-roped ones are left alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_wan_loading import CONFIGS
from wan_helpers import CELLS, GRID, LATENT, make_model

from quantwm.cache import CachePolicy, KVCache, make_format
from quantwm.cache.spec import RopeLayout
from quantwm.worlds.wan import catalog, hy_actions
from quantwm.worlds.wan.attention import AbsoluteAttention
from quantwm.worlds.wan.geometry import cache_spec, key_layout
from quantwm.worlds.wan.memory_rollout import MemoryRollout
from quantwm.worlds.wan.prope import cameras

HIGH = {"key_bits": 4.0, "value_bits": 4.0, "plain_bits": 6, "key_rows": 1.0, "value_rows": 1.0}


def _cache(name: str, method: str, **settings: object) -> KVCache:
    model = make_model(CONFIGS[name])
    kind = "memory" if name.startswith("hy") else "keys"
    layout = key_layout(model.config, LATENT, kind)
    spec = cache_spec(model.config, CELLS, 4, layout)
    fmt = make_format(method, **settings)
    return KVCache(spec, fmt, CachePolicy(span_tokens=10**6), dtype=torch.float32)


def test_every_published_world_says_how_its_keys_are_turned() -> None:
    for name, entry in catalog.ENTRIES.items():
        rope = entry.spec().cache.rope
        if entry.kind == "rolling":
            assert rope is None
            continue
        rows, columns = (size // 2 for size in entry.latent)
        assert rope == RopeLayout((44, 42, 42), (rows, columns), baked=entry.kind != "memory"), name


@pytest.mark.parametrize("name", ["causal_forcing", "lingbot_world_v2"])
def test_baked_keys_come_back_from_a_world_s_own_rope(name: str) -> None:
    """Keys of one token repeated at every place: un-rotated they are one point, and all but exact.

    Turned by another RoPE than the world's, they would be as far apart as they were.
    """
    cache = _cache(name, "qtc", plain_bits=1)
    spec = cache.spec
    one = torch.randn(spec.heads, 1, spec.head_dim, generator=torch.Generator().manual_seed(0))
    for first in (0, 4):
        cache.begin_chunk(first, 4)
        attention = AbsoluteAttention(cache, first, 4, GRID, True)
        k = one.expand(-1, 4 * CELLS, -1)
        exact = attention.positions.turn(k)
        for layer in range(spec.layers):
            attention(layer, attention.positions.turn(torch.ones_like(k)), exact, k)
        cache.finalize_chunk()
    found = cache.history(0)[0][:, -4 * CELLS :]
    assert float((found - exact).square().sum() / exact.square().sum()) < 1e-3


def test_hy_s_two_branches_read_one_un_roped_pair() -> None:
    """A rollout of HY's memory with qtc is close to the one with BF16, in both branches."""
    config = CONFIGS["hy_worldplay_wan5b"]
    model = make_model(config)
    context = model.context_kv(torch.randn(5, config.context_dim))
    walk = hy_actions.Walk()
    walk.advance((frozenset({"w"}),) * 8)
    w2c = hy_actions.world_to_camera(torch.stack([torch.as_tensor(p) for p in walk.c2w]).numpy())
    lenses = cameras(w2c, hy_actions.intrinsics(len(w2c)), torch.float32)
    labels = torch.tensor(walk.labels)
    memory, own = torch.arange(4), torch.arange(4, 8)
    past = torch.randn(4, 16, *LATENT, generator=torch.Generator().manual_seed(1))
    noise = torch.randn(4, 16, *LATENT, generator=torch.Generator().manual_seed(2))

    def flow(cache: KVCache) -> torch.Tensor:
        rollout = MemoryRollout(model, cache, context, GRID)
        rollout.remember(past, lenses.select(memory), labels[memory])
        chosen = lenses.select(memory), lenses.select(own)
        _, trace = rollout.denoise(noise, *chosen, labels[own], None)
        return trace[-1].flow

    exact = flow(_cache("hy_worldplay_wan5b", "bf16", exact=True))
    coded = _cache("hy_worldplay_wan5b", "qtc", **HIGH)
    assert coded.spec.rope is not None and not coded.spec.rope.baked
    rough = _cache("hy_worldplay_wan5b", "qtc", **{**HIGH, "plain_bits": 1})
    errors = [float((flow(c) - exact).norm() / exact.norm()) for c in (coded, rough)]
    assert errors[0] < 0.03 and errors[0] < 0.3 * errors[1]
    assert coded._segments[0].keys[0].rope is None


def test_a_layout_that_is_wrong_for_the_frame_is_refused() -> None:
    spec = catalog.ENTRIES["causal_forcing"].spec().cache
    with pytest.raises(ValueError, match="does not hold"):
        replace(spec, rope=replace(spec.rope, grid=(3, 3)))

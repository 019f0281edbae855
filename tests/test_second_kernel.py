"""The noise floor: BF16 through a second attention kernel, close to BF16 and not its reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_world import SPEC, SmallWorld

from quantwm.cache.formats import make_format
from quantwm.cache.kv_cache import KVCache
from quantwm.cache.second_kernel import SecondKernelCache
from quantwm.cache.spec import CachePolicy, CacheSpec
from quantwm.engine import Engine
from quantwm.lanes import is_bf16, is_floor, lanes_for
from quantwm.totals import errors_to_bf16
from quantwm.worlds.base import ChunkAction


def both(dtype: torch.dtype, bias: object = None) -> list[torch.Tensor]:
    """The attention of a second chunk, by the first kernel and by the second."""
    spec, found = CacheSpec(1, 2, 64, 6, 2), []
    for second in (False, True):
        cache = KVCache(spec, make_format("bf16"), CachePolicy(), dtype=dtype)
        read = SecondKernelCache(cache) if second else cache
        for chunk in range(2):
            seed = torch.Generator().manual_seed(chunk)
            q, k, v = torch.randn(3, 2, 12, 64, generator=seed).to(dtype)
            read.begin_chunk(2 * chunk, 2)
            found.append(read.attend(0, q, k, v, clean=True, score_bias=bias))
            read.finalize_chunk()
    return [found[1], found[3]]


def test_it_rounds_differently_and_means_the_same() -> None:
    first, second = both(torch.bfloat16)
    assert second.dtype == torch.bfloat16 and not torch.equal(first, second)
    assert (first.float() - second.float()).abs().max() < 0.05
    exact = both(torch.float32)
    torch.testing.assert_close(exact[0], exact[1], rtol=1e-5, atol=1e-5)


def test_a_score_bias_reaches_it() -> None:
    def bias(layer: int, stream: str, q: torch.Tensor, past: int) -> torch.Tensor:
        return torch.linspace(-2, 2, past, dtype=q.dtype).expand(q.shape[0], q.shape[1], past)

    plain, biased = both(torch.float32)[1], both(torch.float32, bias)
    torch.testing.assert_close(biased[0], biased[1], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(plain, biased[1], atol=1e-2)


@pytest.mark.parametrize("mode", ["free", "teacher"])
def test_a_floor_lane_runs_beside_the_reference_and_is_measured_by_it(mode: str) -> None:
    lanes = lanes_for(SPEC, ["bf16:floor", "bf16"])
    assert [lane.name for lane in lanes] == ["bf16-floor", "bf16"]
    assert [is_floor(lane) for lane in lanes] == [True, False]
    assert [is_bf16(lane) for lane in lanes] == [False, True]
    with Engine(SmallWorld(), lanes, seed=0, mode=mode) as engine:
        engine.start()
        block = engine.step(ChunkAction.held(frozenset({"w"}), 2))
        errors = errors_to_bf16(block, lanes)
        sizes = {lane.name: lane.kv_bytes for lane in block.lanes}
    assert np.all(errors["bf16"] == 0) and np.all(errors["bf16-floor"] < 4)
    assert sizes["bf16"] == sizes["bf16-floor"]

"""Graphed passes equal the transformer's own forward; on a CPU a capture that runs anew."""

from __future__ import annotations

import pytest
import torch

from benchmarks.frames import graphs_equal_eager
from quantwm.engine import Engine
from quantwm.errors import UserError
from quantwm.lanes import lanes_for
from quantwm.worlds.base import ChunkAction
from quantwm.worlds.embedded.adapter import EmbeddedWorld
from quantwm.worlds.embedded.graphs import GraphedDecoder, GraphedTransformer
from quantwm.worlds.embedded.rope import ChunkTables, rope_tables


def rerun(segment):
    """A capture as CUDA does it: static outputs, worthless until the first replay."""
    outputs = tuple(torch.full_like(tensor, 7.0) for tensor in segment())

    def replay():
        for kept, new in zip(outputs, segment(), strict=True):
            kept.copy_(new)

    return outputs, replay


def graphed_on_the_cpu(dtype):
    world = EmbeddedWorld.random("tiny", seed=1, dtype=dtype)
    tables = (world._rope.cos, world._rope.sin)
    shape = (world.spec.cache.frames_per_chunk, *world.spec.latent_shape)
    world._graphed = (
        GraphedTransformer(world._transformer, tables, rerun),
        GraphedDecoder(world._autoencoder, shape, rerun),
    )
    return world


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lanes", ["bf16,qvg,quantwm", "qtc,bf16"])
def test_static_tensors_change_no_bit_in_lanes_that_take_turns(dtype, lanes):
    assert graphs_equal_eager(graphed_on_the_cpu(dtype), lanes)


def test_two_engines_share_one_graphed_world():
    world = graphed_on_the_cpu(torch.float32)
    action = ChunkAction.held(frozenset({"w"}), 4)

    def frames(engines):
        blocks = [engine.start() for engine in engines]
        for _ in range(2):
            blocks = [engine.step(action) for engine in engines]
        return [torch.from_numpy(block.lanes[0].frames) for block in blocks]

    def engines():
        return [Engine(world, lanes_for(world.spec, ["bf16"]), seed=seed) for seed in (1, 2)]

    together = frames(engines())
    for got, alone in zip(together, engines(), strict=True):
        assert torch.equal(got, frames([alone])[0])
    assert not torch.equal(*together)


def test_graphs_without_a_gpu_are_refused_and_the_choice_is_named():
    with pytest.raises(UserError, match="graphs need a CUDA device"):
        EmbeddedWorld.random("tiny", graphs=True)
    assert EmbeddedWorld.random("tiny").explain() == "world runs op by op"
    assert graphed_on_the_cpu(torch.float32).explain() == "world replays 4 CUDA graphs"


def test_tables_in_place_are_those_made_anew():
    tables = ChunkTables(4, (2, 3), 64, 10000.0, "cpu")
    memory = [tensor.data_ptr() for tensor in (tables.cos, tables.sin)]
    for first in (0, 4, 1020, 1024, 1028, 8, 99_996, 0):
        found = tables.seek(first)
        for got, made in zip(found, rope_tables(first, 4, (2, 3), 64), strict=True):
            assert torch.equal(got, made), first
    assert memory == [tensor.data_ptr() for tensor in (tables.cos, tables.sin)]


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["tiny", "shipped"])
def test_cuda_graphs_equal_the_ops_one_by_one(cuda, preset):
    world = EmbeddedWorld.random(preset, seed=1, device=cuda, dtype=torch.bfloat16)
    assert graphs_equal_eager(world, "bf16,qvg,quantwm")

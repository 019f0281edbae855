"""Rollouts that run together give what each gives alone, up to the rounding of larger products."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from quantwm.errors import UserError
from quantwm.report.jobs import Job, run_job, script
from quantwm.report.together import batches, run_jobs
from quantwm.worlds.base import ChunkAction
from quantwm.worlds.embedded.adapter import EmbeddedWorld
from quantwm.worlds.embedded.graphs import GraphedDecoder, GraphedTransformer
from tests.test_embedded_graphs import rerun

LANES = ("floor", "rtn", "kivi", "qvg", "qvg-pro", "quantwm")


@pytest.fixture(scope="module")
def world() -> EmbeddedWorld:
    return EmbeddedWorld.random("tiny", seed=3)


def job_of(world, text: str, chunks: int, **settings) -> Job:
    rng = np.random.default_rng(chunks)
    picture = rng.integers(0, 256, (4, 32, 48, 3), np.uint8)
    plain = Job("main", text, None, 5, script(text, chunks, world), LANES, picture=picture)
    return replace(plain, **settings)


@pytest.mark.parametrize("mode", ["free", "teacher"])
def test_sessions_side_by_side_are_the_sessions_alone(world, mode):
    settings = {"mode": mode, "consistency": True, "keep": (3,)}
    jobs = [
        job_of(world, "w-4, left-4", 2, **settings),
        job_of(world, "d-2, right-6, w-4", 3, **settings),
    ]
    for job, found in zip(jobs, run_jobs(world, jobs), strict=True):
        alone = run_job(world, job)
        assert found.job is job and set(found.series) == set(alone.series) == {"bf16", *LANES}
        for lane, expected in alone.series.items():
            series = found.series[lane]
            assert len(series.mse) == 4 * len(job.actions) and series.ms == []
            assert series.tokens == expected.tokens
            assert series.kv_bytes == pytest.approx(expected.kv_bytes, rel=2e-3)
            assert series.resident_ratio == pytest.approx(expected.resident_ratio, rel=2e-3)
            for name in ("mse", "ssim", "temporal", "excess", "sharpness", "consistency"):
                np.testing.assert_allclose(
                    getattr(series, name), getattr(expected, name), rtol=0.02, atol=0.02
                )
            np.testing.assert_allclose(found.frames[lane], alone.frames[lane], atol=2)
        assert max(found.series["quantwm"].mse) > 0.1


def test_a_session_does_not_see_its_neighbour(world):
    left, right, other = (job_of(world, text, 2) for text in ("w-8", "a-8", "s-8"))
    beside_right, beside_other = (run_jobs(world, [left, one])[0] for one in (right, other))
    for lane, series in beside_right.series.items():
        assert series.mse == beside_other.series[lane].mse


def test_batches_share_what_their_cache_shares(world):
    jobs = [job_of(world, "w-16", n, seed=seed) for seed in (1, 2) for n in (3, 1, 4, 2)]
    jobs += [job_of(world, "w-4", 1, seed=1, mode="teacher")]
    found = batches(jobs, 3)
    assert [len(batch) for batch in found] == [3, 1, 3, 1, 1]
    assert [len(job.actions) for job in found[0]] == [1, 2, 3]
    assert sorted(map(id, jobs)) == sorted(id(job) for batch in found for job in batch)
    for batch in found:
        assert len({(job.seed, job.mode) for job in batch}) == 1


def test_graphed_sessions_are_the_sessions_op_by_op(world):
    jobs = [job_of(world, "w-4, left-4", 2), job_of(world, "right-8", 2)]
    plain = run_jobs(world, jobs)
    twin = EmbeddedWorld.random("tiny", seed=3)
    together = twin.together(2)
    tables = (together._rope.cos, together._rope.sin)
    shape = (2 * twin.spec.cache.frames_per_chunk, *twin.spec.latent_shape)
    together._graphed = (
        GraphedTransformer(together._transformer, tables, rerun, (2,)),
        GraphedDecoder(together._autoencoder, shape, rerun),
    )
    for found, expected in zip(run_jobs(twin, jobs), plain, strict=True):
        for lane, series in expected.series.items():
            assert found.series[lane].mse == series.mse, lane


def test_wrong_numbers_of_sessions_are_refused(world):
    with pytest.raises(UserError, match="1 or more"):
        world.together(0)
    together = world.together(2)
    with pytest.raises(UserError, match="as many actions, got 1"):
        together.generate_chunk(None, [ChunkAction.held(frozenset(), 4)], torch.zeros(1), 2)

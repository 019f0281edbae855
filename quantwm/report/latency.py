"""How long a chunk of each lane takes, measured behind everything else, while nothing else works.

Rounds of one rollout with all methods as lanes: a round's first half warms kernels and graphs, its
second half counts. The engine runs lanes one after the other and waits for the device around each,
so that a lane's chunk is alone on it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from quantwm.metrics import bootstrap
from quantwm.report.jobs import REFERENCE, Job, JobResult, LaneSeries, run_job
from quantwm.worlds.base import World

TIMING = 15.0
"""Seconds that the rounds may take; the first one is whole however long that is, unless the report
has a deadline."""
ROUNDS = 8
"""At most: 96 chunks a lane with the full preset."""
TIMED = 2
"""Chunks of the first round that are measured although the deadline has come."""
SPREAD = (10, 90)
"""Percentiles of a chunk's milliseconds that are shown beside their median."""
MARGIN = 1.2
"""Over the seconds of the round before, what must be left for another one to begin."""


def first_chunks(world: World, job: Job) -> JobResult:
    """The run's first chunks: what a chunk takes, roughly, and kernels that are loaded.

    On a GPU one more: kernels are compiled in the first, and other processes load meanwhile.
    """
    return run_job(world, job, 0.0, TIMED + (world.device.type == "cuda"))


def measure(world: World, job: Job, deadline: float) -> list[JobResult]:
    """Rounds of the latency run. deadline: seconds since the epoch, infinity for none."""
    began = time.time()
    rounds = [run_job(world, job, deadline, TIMED)]
    stop = min(deadline, began + TIMING)
    while len(rounds) < ROUNDS:
        spent = time.time() - began
        if time.time() + MARGIN * spent / len(rounds) > stop:
            break
        rounds.append(run_job(world, job))
    return rounds


def pace_of(result: JobResult) -> float:
    """Seconds of a chunk of a lane, from the quickest one of each."""
    spent = [min(series.ms) / 1e3 for series in result.series.values()]
    return sum(spent) / len(spent)


def latency_of(rounds: Sequence[JobResult]) -> dict[str, dict[str, Any]]:
    """Per lane: ms (median), spread (percentiles), chunks and rounds that counted, tokens held.

    overhead: median over chunks of the ratio to the BF16 lane's same chunk, less 1, with a
    bootstrap interval over chunks: on a machine that does other things as well it is wide.
    """
    if not rounds:
        return {}
    exact = _counted(rounds, REFERENCE)
    return {
        name: {
            "ms": float(np.median(own)),
            "spread": [float(value) for value in np.percentile(own, SPREAD)],
            "overhead": bootstrap(own / exact - 1, statistic=_median).to_json(),
            "chunks": len(own),
            "rounds": len(rounds),
            "tokens": rounds[-1].series[name].tokens,
        }
        for name, own in ((name, _counted(rounds, name)) for name in rounds[0].series)
    }


def warm_ms(series: LaneSeries) -> list[float]:
    """Milliseconds of the chunks of the second half, when kernels and graphs are warm."""
    return series.ms[len(series.ms) // 2 :]


def _counted(rounds: Sequence[JobResult], lane: str) -> np.ndarray:
    return np.concatenate([warm_ms(found.series[lane]) for found in rounds])


def _median(drawn: np.ndarray) -> np.ndarray:
    return np.median(drawn, axis=1)

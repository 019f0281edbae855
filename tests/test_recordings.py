"""Work that is recorded and replayed, by hand: inputs, results, keys, failures."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quantwm.cache import explain, recorded
from quantwm.cache.codebook import Codebook
from quantwm.cache.formats.base import QueryGuide
from quantwm.cache.recorded import NO_MEMORY, Recordings
from tests.tape import Tape


def test_inputs_and_results_by_hand() -> None:
    tape = Tape()
    recordings = Recordings(tape, most=2, rows=4)
    scale = torch.tensor(2.0)

    def work(x: torch.Tensor, y: torch.Tensor | None) -> Any:
        made = Codebook(x * scale, None if y is None else (x + y).half())
        return made, (made.centroids, x), QueryGuide(y), "fixed", None

    def run(rows: int, y: torch.Tensor | None, value: float) -> Any:
        x = torch.full((rows, 3), value)
        made, (same, given), guide, *rest = found = recordings.run("kind", (x, y), work)
        assert torch.equal(made.centroids, 2 * x) and same is made.centroids
        assert rest == ["fixed", None] and torch.equal(given, x)
        assert (made.scales is None) == (y is None)
        if y is not None:
            assert torch.equal(made.scales, (x + y).half()) and torch.equal(guide.weights, y)
        return found

    kept = [run(4, None, value) for value in (1.0, 2.0, 3.0)]
    assert tape.recorded == 1 and tape.replayed == 2
    assert [made.centroids[0, 0].item() for made, *_ in kept] == [2.0, 4.0, 6.0]
    for value in (1.0, 2.0, 3.0):
        run(4, torch.full((4, 3), 5.0 * value), value)
    assert recordings.count == 2 and tape.recorded == 2
    for value in (1.0, 2.0, 3.0):  # a third kind is one too many
        run(2, None, value)
    assert recordings.count == 2 and tape.recorded == 2
    scale.fill_(3.0)
    assert recordings.run("kind", (torch.ones(4, 3), None), work)[0].centroids[0, 0] == 3.0


def test_what_fails_the_first_time_is_not_known() -> None:
    recordings, fails = Recordings(Tape(), most=4), True

    def work() -> torch.Tensor:
        if fails:
            raise MemoryError("no memory")
        return torch.ones(2)

    with pytest.raises(MemoryError):
        recordings.run("kind", (), work)
    fails = False
    counts = []
    for _ in range(3):
        assert torch.equal(recordings.run("kind", (), work), torch.ones(2))
        counts.append(recordings.count)
    assert counts == [0, 1, 1]


def test_a_cpu_records_nothing() -> None:
    assert recorded.recorder_for(torch.device("cpu"), "model") is None
    assert NO_MEMORY not in explain("cpu")

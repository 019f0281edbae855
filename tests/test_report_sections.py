"""The report's plots and contact sheets, and what its sentences say beside the numbers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from quantwm.evaluation.episodes import Episode
from quantwm.report.document import Section
from quantwm.report.jobs import JobResult
from quantwm.report.pictures import sheets_of
from quantwm.report.revisit import FULL_TURN, SHOWN, recall, revisit_jobs
from quantwm.report.sections import curves
from quantwm.report.sections.attention import _fewer, _keys_matter
from quantwm.report.sections.fidelity import _cost_verdicts, _ratio_verdict
from quantwm.report.sections.flicker import revisits
from quantwm.report.variants import ALL
from quantwm.report.writer import SHEETS, with_sheets

WORLD = SimpleNamespace(
    spec=SimpleNamespace(cache=SimpleNamespace(frames_per_chunk=4, tokens_per_frame=48))
)


def figure(mean: float, low: float, high: float, count: int = 32) -> dict:
    return {"mean": mean, "low": low, "high": high, "count": count}


@pytest.fixture
def turned() -> tuple[Episode, list[JobResult]]:
    """A full turn whose whole history shows the truth and whose short one shows black."""
    frames = np.random.default_rng(0).integers(0, 256, (16 + FULL_TURN, 6, 8, 3), dtype=np.uint8)
    length = len(frames)
    episode = Episode(
        "turn", 16, frames, np.arange(length), np.zeros((length, 6), np.uint8),
        np.zeros((length, 3), np.float32), {"scene": "hall"},
    )  # fmt: skip
    jobs = revisit_jobs(WORLD, [episode], (ALL["qvg"],))
    shown = {"revisit-whole": frames[-SHOWN:] // 2 * 2, "revisit-short": 0 * frames[-SHOWN:]}
    return episode, [
        JobResult(job, {}, dict.fromkeys(("bf16", "qvg"), shown[job.experiment])) for job in jobs
    ]


def test_recall_is_measured_against_the_truth_and_shown_beside_it(turned) -> None:
    episode, results = turned
    rows = {(row["history"], row["lane"]): row for row in recall(WORLD, [episode], results)}
    assert rows["whole", "qvg"]["psnr"]["mean"] > 45 > 10 > rows["short", "qvg"]["psnr"]["mean"]
    sheets = sheets_of([*results, *results], [episode])
    assert list(sheets) == [
        f"revisit: Reappear: a full turn, {history} history, its end"
        for history in ("whole", "short")
    ]
    names, pictures = zip(*next(iter(sheets.values())), strict=True)
    assert names == ("truth", "BF16", "QVG") and (pictures[0] == episode.frames[-SHOWN:]).all()


def test_the_short_runs_are_shown_in_the_two_sections_they_serve() -> None:
    lanes = ("bf16", "qvg", "quantwm", "qvg-keys", "psac")
    shown = {name: np.zeros((2, 6, 8, 3), np.uint8) for name in lanes}
    job = SimpleNamespace(experiment="short", label="hall, seed 0, walk 1", keep=(0, 7))
    sheets = sheets_of([JobResult(job, {}, shown)], [])
    titles = {title: [name for name, _ in rows] for title, rows in sheets.items()}
    what = "hall, seed 0, walk 1; columns: frames 0, 7"
    assert titles == {
        f"roles: {what}": ["BF16", "QVG", "QuantWM", "QVG K2V16"],
        f"ablation: {what}": ["BF16", "QVG", "PSAC", "QuantWM"],
    }
    shown_as = with_sheets([Section("a") for _ in range(8)], sheets)
    assert shown_as[3].sheets[0].title == f"Free runs: {what}"
    assert {SHEETS[title.split(":")[0]] for title in titles} == {0, 3} and SHEETS["revisit"] == 6
    assert sheets_of([JobResult(job, {}, {})], []) == {}


def test_recall_is_plotted_from_the_worst_episode_to_the_best() -> None:
    rows = [
        {"task": "Reappear: x", "history": history, "lane": lane, "values": values}
        for history, lane, values in (
            ("whole", "bf16", [3.0, 1.0, 2.0]), ("whole", "rtn", [1.0, 1.0, 1.0]),
            ("short", "bf16", [0.5, 0.0, 1.0]), ("short", "qvg", [1.0, 1.0, 1.0]),
        )
    ]  # fmt: skip
    (plot,) = curves.recall(rows)
    assert plot.lines == {"BF16": [1.0, 2.0, 3.0], "BF16, short": [0.0, 0.5, 1.0]}
    assert list(plot.x) == [1, 2, 3] and curves.recall([]) == []


def test_ranks_are_plotted_beside_the_papers() -> None:
    rows = {"quantwm": {"difference": figure(0, 0, 0)}, "rank2": {"difference": figure(-1, -2, 0)}}
    (plot,) = curves.sweeps(rows)
    assert plot.lines["here"] == [-1, None, 0.0, None, None] and plot.x[2] == 3.0
    assert plot.lines["paper: HY"][0] == pytest.approx(-0.0536)
    assert curves.sweeps({"quantwm": rows["quantwm"]}) == []


def test_stretches_and_layers_are_lines() -> None:
    parts = [
        {"seconds": [0, 10], "x": figure(1, 1, 1)},
        {"seconds": [10, 20], "x": figure(3, 3, 3)},
    ]
    lanes = {"bf16": {"stretches": parts}, "floor": {"stretches": parts}}
    (plot,) = curves.over_stretches(lanes, "x", "X", "levels")
    assert plot.lines == {"BF16": [1, 3]} and plot.x == [5, 15]
    assert curves.over_stretches({"bf16": {"stretches": parts[:1]}}, "x", "X", "levels") == []
    layers = {"0": {"shift": 0.5}, "9": {"shift": 0.25}}
    (plot,) = curves.shift_by_layer({"qvg": {"by_layer": layers}, "qsac": {"by_layer": layers}})
    assert plot.lines == {"QVG": [0.5, 0.25]} and plot.x == [0, 9]
    rows = {"qvg": {"curve": [30.0, 20.0]}, "quantwm": {}}
    (plot,) = curves.ablation_by_frame({"rows": rows}, 10.0)
    assert plot.lines == {"QVG": [30.0, 20.0]} and plot.x == [0.0, 0.1]


def test_how_many_fewer_selections_stands_beside_the_papers() -> None:
    verdict = _fewer(figure(0.6, 0.59, 0.61), figure(0.8, 0.79, 0.81))
    assert verdict.word == "holds" and "25% fewer, the paper's 70%" in verdict.because
    assert _fewer(figure(0.8, 0.7, 0.9), figure(0.8, 0.7, 0.9)).word == "undecided"


def test_layers_where_keys_are_worse_than_values_are_named() -> None:
    def errors(keys: float, values: float) -> dict:
        return {"k_rel": figure(keys, keys, keys), "v_rel": figure(values, values, values),
                "output_rel": figure(keys, keys, keys)}  # fmt: skip

    layers = {"0": {"k_rel": 0.5, "v_rel": 0.4}, "9": {"k_rel": 0.1, "v_rel": 0.9}}
    attention = {"qvg": {"by_layer": layers}, "qvg-keys": errors(0.3, 0.0)}
    attention["qvg-values"] = errors(0.0, 0.6) | {"output_rel": figure(0.1, 0.1, 0.1)}
    verdict = _keys_matter(attention, {"between": {"qvg": figure(2, 1, 3)}})
    assert verdict.word == "holds" and "the larger in 0 of 0, 9" in verdict.because


@pytest.mark.parametrize(("device", "word"), [("cuda:0", "does not hold"), ("cpu", "undecided")])
def test_a_cpu_says_nothing_of_latency_on_gpus(device: str, word: str) -> None:
    lane = {"overhead": figure(0.3, 0.2, 0.4), "ms": 15.0}
    found = {"report": {"device": device}, "sweep": {"rows": {}}, "latency": {"quantwm": lane}}
    assert _cost_verdicts(found)[0].word == word


@pytest.mark.parametrize(
    ("tokens", "ratio", "word"),
    [(4992, 5.4, "does not hold"), (4992, 6.3, "holds"), (1728, 5.1, "undecided")],
)
def test_a_ratio_is_decided_once_a_span_is_full(tokens: int, ratio: float, word: str) -> None:
    lane = {"tokens": tokens, "ratio": ratio, "resident_ratio": ratio}
    assert _ratio_verdict({"lanes": {"quantwm": lane}}, 3072).word == word


@pytest.mark.parametrize(("planned", "line"), [({}, "no truth"), ({"revisit-whole": 1}, "time")])
def test_why_there_is_no_recall_is_said(planned: dict, line: str) -> None:
    section = revisits({"revisit": [], "report": {"planned": planned}})
    assert line in section.text[-1] and {v.word for v in section.verdicts} == {"not measured"}

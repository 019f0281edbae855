"""The report: its numbers, verdicts decided by them, and one whole run in its least form."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from quantwm.cache.formats import make_format
from quantwm.cache.kv_cache import KVCache
from quantwm.cache.spec import CachePolicy
from quantwm.cli import main
from quantwm.errors import UserError
from quantwm.report import jobs, numbers, plan, running
from quantwm.report.document import Plot, Section, Sheet, both, compared, judge, sentence
from quantwm.report.html import _cell, _section, to_png
from quantwm.report.jobs import Job, LaneSeries, run_job, script
from quantwm.report.one_role import OneRoleFormat
from quantwm.report.plan import recording_jobs, rollout_jobs, units_of
from quantwm.report.plots import _styles, to_svg
from quantwm.report.pool import Failure, Workers, WorldSource, task_of
from quantwm.report.results import _fidelity
from quantwm.report.scale import PRESETS, SCRIPTS
from quantwm.report.sections.fidelity import _whole_table
from quantwm.report.sections.flicker import _minute_verdict, _recall_verdicts, _unseen
from quantwm.report.turns import interleaved, long_ones
from quantwm.report.variants import ABLATION, LANES, ROLES, SWEEPS, known
from quantwm.worlds.embedded.adapter import EmbeddedWorld
from tests.cache_helpers import SPEC, run_chunk


@pytest.fixture(scope="module")
def world() -> EmbeddedWorld:
    return EmbeddedWorld.random("tiny")


def figure(mean: float, low: float, high: float, count: int = 32) -> dict:
    return {"mean": mean, "low": low, "high": high, "count": count}


@pytest.mark.parametrize(("role", "exact"), [("keys", 1), ("values", 0)])
@pytest.mark.parametrize("name", ["qvg", "quantwm"])
def test_one_role_leaves_the_other_exact(name, role, exact):
    inner = make_format(name, centroids=4, group_size=8)
    caches = [
        KVCache(SPEC, fmt, CachePolicy(span_tokens=24), seed=1)
        for fmt in (OneRoleFormat(inner, role), inner, make_format("bf16"))
    ]
    for cache in caches:
        for _ in range(3):
            run_chunk(cache)
    one, whole, plain = (cache.history(0) for cache in caches)
    np.testing.assert_array_equal(one[exact].float(), plain[exact].float())
    assert not np.array_equal(one[1 - exact].float(), plain[1 - exact].float())
    if name == "qvg":  # quantwm's keys depend on queries alone, which are the same
        np.testing.assert_array_equal(one[1 - exact].float(), whole[1 - exact].float())
    half, both_roles = (cache.ledger().parts["codes"] for cache in caches[:2])
    assert half * 2 == both_roles


def test_units_are_distinct_and_enough(world):
    units = units_of(world, PRESETS["full"])
    assert len(units) == len(set(units)) == 32
    assert all(unit.script in SCRIPTS for unit in units)


def test_every_part_of_the_full_report_has_32_scenes_that_differ(world):
    scale = PRESETS["full"]
    jobs = [*rollout_jobs(world, scale), *recording_jobs(world, scale)]
    for name in {job.experiment for job in jobs}:
        own = [job for job in jobs if job.experiment == name]
        assert len({(j.scene, j.seed, j.actions) for j in own}) == 32 == len({j.label for j in own})
    assert scale.revisits == 32


def test_the_plan_covers_every_experiment_and_known_lane(world):
    jobs = rollout_jobs(world, PRESETS["full"])
    ran = {lane for job in jobs for lane in job.lanes} | {"bf16"}
    assert ran == {v.name for v in known((*LANES, *ROLES, *ABLATION, *SWEEPS))}
    chunks = {job.experiment: len(job.actions) for job in jobs}
    assert (chunks["main"], chunks["minute"]) == (22, 131)
    assert {len(j.keep) > 0 for j in jobs if j.experiment == "still"} == {True, False}


def test_a_rollout_is_against_bf16_and_repeats_itself(world):
    job = Job("main", "x", None, 3, script("w-4, left-4", 2, world), ("quantwm",), keep=(0, 7))
    first, again = run_job(world, job), run_job(world, job)
    exact, lane = first.series["bf16"], first.series["quantwm"]
    assert exact.mse == [0.0] * 8 and exact.excess == [0.0] * 7 and exact.ssim == [1.0] * 8
    assert lane.mse == again.series["quantwm"].mse and max(lane.mse) > 0
    assert len(lane.ms) == 2 and lane.kv_bytes > 0 and len(lane.temporal) == 7
    assert first.frames["bf16"].shape == (2, 32, 48, 3)


def run_here(world, tasks, deadline=float("inf")):
    with Workers(WorldSource(random_preset="tiny"), [world.device], 1, world) as workers:
        return workers.run(tasks, deadline, lambda text: None)


def test_lpips_is_measured_where_its_weights_are(world, monkeypatch):
    scale = replace(PRESETS["minimal"], scenes=1)
    plain = next(j for j in rollout_jobs(world, scale) if j.experiment == "main")
    monkeypatch.setattr(plan, "missing_for_lpips", lambda: None)
    monkeypatch.setattr(jobs, "load_lpips", lambda device: lambda a, b: float((a != b).any()))
    jobs.lpips_on.cache_clear()
    wanted = next(j for j in rollout_jobs(world, scale) if j.experiment == "main")
    assert (plain.lpips, wanted.lpips) == (False, True)
    found = run_job(world, replace(wanted, lanes=("rtn",)))
    jobs.lpips_on.cache_clear()
    lane, exact = found.series["rtn"], found.series["bf16"]
    assert lane.lpips == [float(m > 0) for m in lane.mse] and exact.lpips == [0.0] * 8
    table = _whole_table(_fidelity([found], 8.75))
    assert table.rows[1][0] == "RTN" and table.rows[1][3] != "-" and "no LPIPS" not in table.caption


def test_tasks_stop_at_the_deadline(world):
    tasks = [task_of(lambda w: w.weights_sha256())] * 2
    assert run_here(world, tasks, 0.0) == [None, None]
    assert run_here(world, tasks) == ["random-tiny-0"] * 2


def _fail(world) -> None:
    raise UserError("this lane\nbroke")


def test_a_failing_task_does_not_cost_the_others(world):
    tasks = [task_of(_fail), task_of(lambda w: 7)]
    assert run_here(world, tasks) == [Failure("this lane broke"), 7]


def _end(world) -> None:
    if multiprocessing.parent_process() is not None:
        os._exit(3)


def test_tasks_of_a_process_that_ends_are_done_here(world):
    source = WorldSource(random_preset="tiny")
    tasks = [task_of(_end), *[task_of(_number, n) for n in range(4)]]
    with Workers(source, [world.device], 2, world) as workers:
        workers.ready()
        assert workers.run(tasks, float("inf"), lambda text: None) == [None, 0, 1, 2, 3]


def _number(world, number: int) -> int:
    return number


def test_processes_that_do_not_start_are_one_line():
    with (
        Workers(WorldSource(random_preset="no such preset"), [torch.device("cpu")], 2) as workers,
        pytest.raises(UserError, match="2 processes do not all start on cpu"),
    ):
        workers.ready()


def test_what_fails_together_is_done_alone(world, monkeypatch):
    def picky(world, jobs, deadline):
        if len(jobs) > 1:
            raise UserError("not together")
        return [run_job(world, job) for job in jobs]

    monkeypatch.setattr(running, "run_jobs", picky)
    scale = replace(PRESETS["minimal"], recorded_scenes=0)
    order = running.Order(scale, together=2)
    workers = Workers(WorldSource(random_preset="tiny"), [world.device], 1, world)
    jobs = rollout_jobs(world, scale)
    jobs = [replace(j, lanes=("quantwm",), seed=0) for j in jobs if j.experiment == "main"]
    run = running._Run(workers, order, lambda text: None, lambda results: None)
    found = run.rollouts(jobs)
    assert found.errors == [] and [r.job for r in found.results] == jobs
    assert run._failures == ["not together"]


def test_the_longest_come_first_and_experiments_take_turns(world):
    job = rollout_jobs(world, PRESETS["minimal"])[0]
    long = replace(job, actions=job.actions * 9)
    kinds = {"main": job, "still": job, "minute": long}
    groups = [[replace(own, experiment=kind)] for kind, own in kinds.items() for _ in range(4)]
    found = [group[0].experiment for group in interleaved(groups, 4)]
    assert found[:6] == ["minute"] * 4 + ["main", "still"] and sorted(found) == sorted([*kinds] * 4)
    assert found[-1] == "still"  # what most tables rest on is through sooner
    two = [group[0].experiment for group in interleaved(groups, 2)]
    assert two[:5] == ["minute"] * 2 + ["main", "still", "main"] and two[-1] == "minute"
    alone = [group[0].experiment for group in interleaved(groups, 0)]
    assert alone[0] == "main" and alone.count("minute") == 4
    full, small = ([[j] for j in rollout_jobs(world, PRESETS[name])] for name in ("full", "small"))
    assert long_ones(full) == {"minute"} and long_ones(small) == set()


def test_windows_mark_divergence():
    near = LaneSeries(mse=[10.0] * 88, ssim=[0.9] * 88, excess=[1.0] * 87)
    far = LaneSeries(mse=[10.0] * 20 + [3000.0] * 68, ssim=[0.5] * 88, excess=[2.0] * 87)
    early, middle, late = numbers.windows_of([near, far], 8.75)
    assert [w["parted"] for w in (early, middle, late)] == [0.0, 0.5, 0.5]
    assert early["psnr"]["mean"] == pytest.approx(10 * np.log10(255**2 / 10))
    assert late["excess"]["mean"] == 1.5 and early["psnr"]["count"] == 2


def test_verdicts_follow_the_numbers():
    assert judge("c", figure(2, 1, 3), "dB", "x").word == "holds"
    assert judge("c", figure(-2, -3, -1), "dB", "x").word == "does not hold"
    assert judge("c", figure(1, -1, 3), "dB", "x").word == "undecided"
    assert judge("c", figure(2, 1, 3, count=4), "dB", "x").word == "undecided"
    assert judge("c", figure(2, 1, 3, count=5), "dB", "x").word == "holds"
    assert judge("c", None, "dB", "x").word == "not measured"
    less = compared("a", figure(1, 0.9, 1.1), "b", figure(2, 1.9, 2.1), less=True)
    more = compared("a", figure(1, 0.9, 1.1), "b", figure(2, 1.9, 2.1))
    assert (less.word, more.word) == ("holds", "does not hold")
    assert both("c", [less, more]).word == "does not hold"
    assert both("c", [less, less]).word == "holds"


@pytest.mark.parametrize(
    ("moved", "excess", "word"),
    [((0.001, -0.004, 0.006), (1.6, 1.4, 1.8), "holds"),
     ((0.007, -0.020, 0.030), (1.6, 1.4, 1.8), "undecided"),
     ((0.001, -0.004, 0.006), (0.6, 0.4, 0.8), "undecided"),
     ((0.001, -0.004, 0.006), (0.3, 0.2, 0.4), "does not hold"),
     ((0.150, 0.120, 0.180), (1.6, 1.4, 1.8), "does not hold"),
     ((-0.150, -0.180, -0.120), (1.6, 1.4, 1.8), "does not hold")],
)  # fmt: skip
def test_unseen_flicker_is_decided_by_whole_intervals(moved, excess, word):
    exact = {"consistency": figure(0.95, 0.92, 0.98), "temporal": figure(1, 1, 1)}
    found = {
        "scenes": 32,
        "lanes": {"bf16": exact, "qvg": {"moved": figure(*moved), "excess": figure(*excess)}},
    }
    assert _unseen(found, "Standing still").word == word
    assert _unseen(found | {"scenes": 4}, "Standing still").word == "undecided"


def test_consistency_is_compared_scene_by_scene():
    lane, exact = (
        [LaneSeries(consistency=[v] * 3) for v in row] for row in ([0.9, 0.5], [1.0, 0.6])
    )
    assert numbers.moved_of(lane, exact)["mean"] == pytest.approx(-0.1 / 0.8)
    assert numbers.moved_of(lane, exact)["low"] == pytest.approx(-0.1 / 0.8)
    assert numbers.moved_of([LaneSeries()], [LaneSeries()]) is None


@pytest.mark.parametrize(
    ("ours", "word"),
    [((0.60, 0.59, 0.61), "holds"), ((0.60, 0.49, 0.71), "undecided"),
     ((0.90, 0.89, 0.91), "does not hold")],
)  # fmt: skip
def test_a_minute_is_undecided_while_intervals_overlap(ours, word):
    lanes = {
        name: {"consistency": figure(*scores, count=8)}
        for name, scores in (
            ("bf16", (0.6, 0.6, 0.6)),
            ("qvg", (0.5, 0.49, 0.51)),
            ("quantwm", ours),
        )
    }
    assert _minute_verdict(lanes, 60.0).word == word


@pytest.mark.parametrize(
    ("lost", "word"),
    [([0.1, 0.2, 0.1], "holds"), ([0.1, 3.0, 2.0], "undecided"), ([2.0, 2.5, 2.2], "does not hold"),
     ([0.1], "undecided")],
)  # fmt: skip
def test_a_cache_remembers_as_well_only_if_its_whole_interval_does(lost, word):
    truth = [20.0] * len(lost)
    rows = [
        {"task": "Reappear: x", "history": "whole", "lane": lane, "values": values}
        for lane, values in (("bf16", truth), ("quantwm", [20.0 - x for x in lost]))
    ]
    (verdict,) = _recall_verdicts(rows)
    assert verdict.word == word and "BF16's PSNR less QuantWM's" in verdict.because


@pytest.mark.parametrize(
    ("text", "html"),
    [("23.41", "<td>23.41</td>"), ("-", "<td>-</td>"), ("a < b", "<td>a &lt; b</td>"),
     ("1.0 [0.9, 1.1]", "<td>1.0<small>[0.9, 1.1]</small></td>"),
     ("19.85 [18.68, 20.98] (divergence: 62% parted)",
      "<td>19.85<small>[18.68, 20.98]</small><small>divergence: 62% parted</small></td>"),
     ("37.2% [1.0, 2.0]", "<td>37.2%<small>[1.0, 2.0]</small></td>"),
     ("w" * 20 + " " + "x" * 20, f'<td class="words">{"w" * 20} {"x" * 20}</td>')],
)  # fmt: skip
def test_an_interval_stands_below_its_mean(text, html):
    assert _cell(text) == html


def test_a_verdict_is_a_sentence():
    section = Section("t", verdicts=[judge("Claim", figure(2, 1, 3), "dB", "its PSNR")])
    wanted = "Its PSNR is 2.00 [1.00, 3.00] dB over 32 scenes."
    assert sentence("its end.") == "Its end."
    assert wanted in _section(section) and "32 scenes.." not in _section(section)


def test_plots_and_sheets():
    svg = to_svg(Plot("T <1>", "s", "dB", [0, 1, 2], {"a": [1, None, 3], "b": [2, 2, 2]}))
    assert svg.count("<polyline") == 5 and "T &lt;1&gt;, dB" in svg
    assert to_svg(Plot("T", "s", "dB", [], {})) == ""
    few, many = (_styles(names) for names in (["BF16", "QTC"], ["rank", "QVG", "QTC", "BF16"]))
    assert few == [many[3], many[2]] and len(set(many)) == 4
    frames = np.zeros((3, 10, 12, 3), np.uint8)
    assert to_png(Sheet("t", [("a", frames), ("b", frames[:2])])).startswith(b"\x89PNG")


def test_a_whole_report_in_its_least_form(tmp_path, capsys):
    out = tmp_path / "report"
    status = main(["report", "--out", str(out), "--minimal", "--random-weights", "--device", "cpu"])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert status == 0 and len(document["claims"]) >= 15
    html = (out / "report.html").read_text()
    for number in range(1, 9):
        assert f'<section id="part{number - 1}"><h2>{number}. ' in html
    assert set(re.findall(r'<a href="#part(\d)">', html)) >= set("01234")
    assert "http://" not in html and "https://" not in html and "<script" not in html
    assert html.count("data:image/png") == 7 and "prefers-color-scheme:dark" in html
    found = json.loads((out / "results.json").read_text())
    assert set(found["fidelity"]["lanes"]) == {v.name for v in known(LANES)}
    assert set(found["sweep"]["rows"]) == {"quantwm", *(v.name for v in known(SWEEPS))}
    text = (out / "evidence.md").read_text()
    assert "random-tiny" in text and len(re.findall(r"^## \d\. ", text, re.M)) == 8
    assert status == 0 and found["report"]["rollouts_skipped"] == 0

"""The report's seconds are a promise: what is left out, who is stopped, what is left of a run."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from quantwm.cli import main
from quantwm.errors import UserError
from quantwm.report import latency, pool, running
from quantwm.report.jobs import Job, script
from quantwm.report.plan import latency_job
from quantwm.report.pool import Workers, WorldSource, make_current, task_of
from quantwm.report.scale import PRESETS
from quantwm.report.schedule import OutOfTime, Schedule, Size
from quantwm.report.together import run_jobs
from quantwm.report.writer import write_report
from quantwm.worlds.embedded.adapter import EmbeddedWorld

SOURCE = WorldSource(random_preset="tiny")


@pytest.fixture(scope="module")
def world() -> EmbeddedWorld:
    return EmbeddedWorld.random("tiny")


def quiet(_: object) -> None:
    pass


def test_what_would_not_end_in_time_is_passed_over():
    sizes = [Size("long", 100), Size("short", 10), Size("short", 10), Size("other", 5)]
    schedule = Schedule(sizes, deadline=100.0, pace=1.0)
    assert schedule.next(0.0) == 1  # 100 pieces of a second each do not fit with the margin
    schedule.ended(1, 40.0)
    assert schedule.next(40.0) == 2  # measured: 4 s a piece
    schedule.again(2)
    assert schedule.next(55.0) == 3  # 48 s no longer fit, 24 s do
    assert schedule.next(55.0) == 2  # nothing fits: the smallest may be lucky in 45 s
    schedule.again(2)
    assert schedule.next(81.0) is None and schedule.next(100.0) is None


def test_a_pace_that_nothing_confirms_does_not_keep_everything_waiting():
    schedule = Schedule([Size("a", 9), Size("b", 4)], deadline=10.0, pace=100.0)
    assert schedule.next(0.0) == 1


def test_without_a_deadline_tasks_keep_their_order():
    schedule = Schedule([Size("a", 9), Size("b", 4)], deadline=float("inf"))
    assert [schedule.next(0.0), schedule.next(0.0), schedule.next(0.0)] == [0, 1, None]


@pytest.mark.parametrize("count", [1, 2])
def test_rollouts_stop_at_the_deadline(world, count):
    jobs = [Job("main", str(i), None, 3, script("w-8", 2, world), ("qvg",)) for i in range(count)]
    with pytest.raises(OutOfTime):
        run_jobs(world, jobs, deadline=0.0)


def test_the_latency_run_ends_early_but_has_its_chunks(world):
    job = latency_job(world, PRESETS["full"])
    first = latency.first_chunks(world, job)
    assert len(job.actions) == 24 and len(first.series["qtc"].ms) == latency.TIMED
    assert latency.pace_of(first) > 0
    (cut,) = latency.measure(world, job, 0.0)
    assert len(cut.series["qtc"].ms) == latency.TIMED


def test_latency_is_of_several_rounds_and_says_of_how_many_chunks(world, monkeypatch):
    monkeypatch.setattr(latency, "TIMING", 3600.0)  # a slow machine has no fewer rounds
    monkeypatch.setattr(latency, "ROUNDS", 2)
    job = latency_job(world, PRESETS["small"])
    rounds = latency.measure(world, job, float("inf"))
    found = latency.latency_of(rounds)
    assert len(rounds) == 2 and set(found) == {"bf16", *job.lanes}
    warm = len(job.actions) - len(job.actions) // 2
    for lane in found.values():
        assert lane["chunks"] == lane["overhead"]["count"] == warm * len(rounds)
        assert lane["spread"][0] <= lane["ms"] <= lane["spread"][1]
    assert found["bf16"]["overhead"]["mean"] == 0 and latency.latency_of([]) == {}


def test_latency_comes_last_and_alone(world, monkeypatch):
    events = []
    monkeypatch.setattr(latency, "measure", lambda *_: events.append("latency") or [])
    monkeypatch.setattr(running, "run_jobs", lambda *_: events.append("rollout") or [])
    monkeypatch.setattr(running, "study_attention", lambda *_: events.append("study"))
    with Workers(SOURCE, [world.device], 1, world) as workers:
        monkeypatch.setattr(workers, "end", lambda: events.append("end"))
        running.make_results(workers, running.Order(PRESETS["minimal"]), quiet, quiet)
    assert events[-3:] == ["end", "latency", "end"] and {"rollout", "study"} <= {*events[:-3]}


def test_a_lane_that_cannot_be_timed_is_said(world, monkeypatch):
    def broken(*_):
        raise UserError("no such\nlane here")

    monkeypatch.setattr(latency, "measure", broken)
    order = running.Order(replace(PRESETS["minimal"], recorded_scenes=0))
    monkeypatch.setattr(running.plan, "rollout_jobs", lambda *_: [])
    with Workers(SOURCE, [world.device], 1, world) as workers:
        results = running.make_results(workers, order, quiet, quiet)
    assert results.numbers["report"]["failures"] == ["latency: no such lane here"]
    assert results.numbers["latency"] == {}


def _sleep(world) -> None:
    time.sleep(600)


def _seven(world) -> int:
    return 7


def test_processes_that_do_not_heed_the_deadline_are_stopped(world, monkeypatch):
    late = [0.0]
    monkeypatch.setattr(pool, "time", SimpleNamespace(time=lambda: time.time() + late[0]))
    with Workers(SOURCE, [world.device], 2, world) as workers:
        assert workers.ready()
        began = time.time()

        def seen(results) -> None:
            assert list(results.values()) == [7]
            late[0] = 600.0 + pool.GRACE  # however long the other process took for its seven

        tasks = [task_of(_sleep), task_of(_seven)]
        assert workers.run(tasks, began + 600, quiet, seen=seen) == [None, 7]
        assert time.time() - began < 250, "it does not wait for what sleeps"
        assert workers.run([task_of(_seven)], float("inf"), quiet) == [7]  # in this process


def test_a_device_without_a_number_is_the_first(monkeypatch):
    chosen = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda d: chosen.append(torch.cuda._utils._get_device_index(d))
    )
    for name in ("cuda", "cuda:1", "cpu"):
        make_current(torch.device(name))
    assert chosen == [0, 1]


def test_a_run_that_is_ended_leaves_what_it_has(world, monkeypatch, tmp_path):
    class Ended(Exception):
        pass

    def save(results) -> None:
        write_report(tmp_path, results, "command")
        if results.numbers["report"]["rollouts"].get("short"):
            raise Ended

    monkeypatch.setattr(running, "SAVING", 0.0)
    monkeypatch.setattr(running, "WRITING", 0.0)
    order = running.Order(PRESETS["minimal"])
    with pytest.raises(Ended):
        running.make_results(Workers(SOURCE, [world.device], 1, world), order, quiet, save)
    about = json.loads((tmp_path / "results.json").read_text())["report"]
    assert not about["complete"] and about["rollouts"]["short"] == 1
    assert about["rollouts_skipped"] == about["rollouts_planned"] - sum(about["rollouts"].values())
    assert "THE RUN HAD NOT ENDED" in (tmp_path / "evidence.md").read_text()


def test_a_report_of_no_time_at_all_is_written(tmp_path, capsys):
    out = tmp_path / "report"
    flags = ["--random-weights", "--device", "cpu", "--seconds", "1", "--scenes", "3"]
    assert main(["report", "--out", str(out), *flags]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    about = json.loads((out / "results.json").read_text())["report"]
    assert about["complete"] and about["scenes"] == 3 and about["seconds"] < 60
    assert about["rollouts_skipped"] > 0 and document["seconds"] == about["seconds"]


@pytest.mark.parametrize(("wanted", "units"), [(1, 1), (8, 8), (32, 32), (64, 64), (13, 13)])
def test_a_scale_of_so_many_scenes(wanted, units):
    scale = PRESETS["full"].of_scenes(wanted)
    assert scale.units == units
    assert scale.minute_scenes == scale.units
    assert (PRESETS["full"] == scale) == (wanted == 32)

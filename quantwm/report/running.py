"""Runs everything that the report needs, within the time that it is given."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from quantwm.cache import dispatch
from quantwm.describe import hardware, versions
from quantwm.evaluation.episodes import Episode
from quantwm.report import plan, revisit
from quantwm.report.attention import study_attention
from quantwm.report.jobs import Job, JobResult, run_job
from quantwm.report.pool import Failure, Task, Workers, reasons, task_of
from quantwm.report.results import Document, Found, Results, results_of
from quantwm.report.scale import SCRIPTS, Scale
from quantwm.report.schedule import Size
from quantwm.report.together import batches, run_jobs
from quantwm.report.variants import ABLATION, ALL, METHODS, ROLES, known
from quantwm.worlds.base import World

SOONER = {"main": 0.6, "short": 0.6}
LONG = 3.0
"""Of experiments, a rollout's work over the median one's from which on it begins first."""

STARTING = 0.4
"""Share of the seconds that the processes may take to start; latency is left out behind it."""
TIMING = 0.12
"""Share of the seconds that measuring latency may take."""
TIMED = 2
"""Chunks of the latency run that are measured however long they take."""
CROWDED = 0.5
"""Seconds of a chunk of a lane in each of P processes on a device, over P times those of one
alone: small kernels of several processes overlap."""
SAVING = 30.0
"""Seconds between two writings of what is there so far; more where writing takes long."""
WRITING = 10.0
"""Seconds between two writings over those that the last took."""

Save = Callable[[Results], None]


@dataclass(frozen=True)
class Order:
    """What the report is told.

    Attributes:
        truth: folder of truth episodes, None without. processes: that share the devices, all of
        whose names are in `devices`.
        together: rollouts of one kind that a process runs side by side.
        seconds: after which nothing is measured any more; infinity for no limit.
        began: when these seconds began, since the epoch; now when None.
    """

    scale: Scale
    truth: Path | None = None
    processes: int = 1
    devices: tuple[str, ...] = ()
    together: int = 1
    seconds: float = float("inf")
    began: float | None = None


def make_results(
    workers: Workers, order: Order, report: Callable[[str], None], save: Save
) -> Results:
    """Run it all. report: told about progress, one line at a time. save: given what is there, now
    and then, so that a run that is ended leaves a report."""
    return _Run(workers, order, report, save).whole()


class _Run:
    """One run of the report."""

    def __init__(
        self, workers: Workers, order: Order, report: Callable[[str], None], save: Save
    ) -> None:
        self._workers, self._order = workers, order
        self._report, self._save = report, save
        self._began = time.time() if order.began is None else order.began
        self._deadline = self._began + order.seconds
        self._found = Found(None, [], [])
        self._episodes: Sequence[Episode] = ()
        self._rollouts: Sequence[Job] = ()
        self._failures: list[str] = []
        self._next_save = time.time() + SAVING

    def whole(self) -> Results:
        order, workers, scale = self._order, self._workers, self._order.scale
        world = workers.world
        self._report("starting processes")
        quiet = workers.ready()
        self._episodes = revisit.load_tasks(order.truth, scale, world)
        self._rollouts = plan.rollout_jobs(world, scale)
        self._rollouts += revisit.revisit_jobs(world, self._episodes, plan.few_of(scale))
        if quiet and time.time() < self._deadline:
            self._report("latency")
            share = min(self._deadline, time.time() + TIMING * order.seconds)
            self._found.latency = run_job(world, plan.latency_job(world, scale), share, TIMED)
        self.rollouts(self._rollouts)
        return self._results(complete=True)

    def rollouts(self, rollouts: Sequence[Job]) -> Found:
        """Studies of recordings, and results of rollouts in the plan's order."""
        self._rollouts = rollouts
        recordings = plan.recording_jobs(self._workers.world, self._order.scale)
        studied = tuple(v.name for v in known((*METHODS, *ROLES, *ABLATION)))
        groups = interleaved(batches(rollouts, self._order.together))
        first = long_ones(groups)
        longest = sum(group[0].experiment in first for group in groups)
        tasks = [(group, self._task(group), self._size(group)) for group in groups]
        tasks[longest:longest] = [
            (
                [],
                task_of(study_attention, job, studied, self._deadline),
                Size("recording", (1 + len(studied)) * len(job.actions)),
            )
            for job in recordings
        ]
        done = self._run(tasks, [])
        # What fails together may do alone: one scene's mistake must not cost the others.
        pairs = list(zip((group for group, _, _ in tasks), done, strict=True))
        broken = [group for group, one in pairs if len(group) > 1 and isinstance(one, Failure)]
        singles = [[job] for group in broken for job in group]
        self._run([(group, self._task(group), self._size(group)) for group in singles], pairs)
        return self._found

    def _task(self, group: Sequence[Job]) -> Task[Any]:
        return task_of(run_jobs, group, self._deadline)

    def _size(self, group: Sequence[Job]) -> Size:
        """On a GPU a launch costs the same for several rollouts side by side."""
        work = work_of(group)
        if self._workers.world.device.type != "cuda":
            work *= len(group)
        return Size(group[0].experiment, work)

    def _run(
        self, tasks: Sequence[tuple[list[Job], Task[Any], Size]], earlier: Sequence[Any]
    ) -> list[Any]:
        """Run tasks and keep what is found, beside that of earlier ones."""

        def seen(results: Mapping[int, Any]) -> None:
            if time.time() < self._next_save:
                return
            self._keep([*earlier, *((tasks[place][0], one) for place, one in results.items())])
            self._save_now()

        done = self._workers.run(
            [task for _, task, _ in tasks],
            self._deadline,
            self._report,
            sizes=[size for _, _, size in tasks],
            pace=self._pace(),
            seen=seen,
        )
        groups = (group for group, _, _ in tasks)
        self._keep([*earlier, *zip(groups, done, strict=True)])
        return done

    def _pace(self) -> float:
        """Seconds of a chunk of a lane, reckoned from the latency run; 0 without one."""
        if self._found.latency is None:
            return 0.0
        spent = [series.ms[-1] / 1e3 for series in self._found.latency.series.values()]
        crowd = self._order.processes / max(len(self._order.devices), 1)
        return sum(spent) / len(spent) * max(1.0, CROWDED * crowd)

    def _keep(self, pairs: Sequence[tuple[Sequence[Job], Any]]) -> None:
        places = {(job.experiment, job.label): place for place, job in enumerate(self._rollouts)}
        results: list[JobResult] = []
        errors: list[Any] = []
        for group, one in pairs:
            if one is None or isinstance(one, Failure):
                continue
            if group:
                results.extend(one)
            else:
                errors.append(one)
        results.sort(key=lambda r: places[r.job.experiment, r.job.label])
        self._found.results, self._found.errors = results, errors
        self._failures = reasons([one for _, one in pairs])

    def _save_now(self) -> None:
        began = time.time()
        self._save(self._results(complete=False))
        self._next_save = time.time() + max(SAVING, WRITING * (time.time() - began))

    def _results(self, complete: bool) -> Results:
        told = about(self._workers.world, self._order, self._found.results, self._began)
        skipped = len(self._rollouts) - len(self._found.results)
        told |= {
            "rollouts_planned": len(self._rollouts),
            "rollouts_skipped": skipped,
            "complete": complete,
            "seconds": round(time.time() - self._began, 1),
            "failures": self._failures,
        }
        return results_of(self._workers.world, told, self._found, self._episodes)


def interleaved(groups: Sequence[list[Job]]) -> list[list[Job]]:
    """Experiments taking turns, so that a limit on time takes scenes from all and not one whole.

    The longest come first, or all would wait for them at the end. Those that most tables rest on
    come sooner: they are through after 60% of the time.
    """
    first = long_ones(groups)
    by_experiment: dict[str, list[list[Job]]] = {}
    for group in groups:
        by_experiment.setdefault(group[0].experiment, []).append(group)
    turns = [
        (
            experiment not in first,
            place / len(several) * SOONER.get(experiment, 1.0),
            order,
            group,
        )
        for order, (experiment, several) in enumerate(by_experiment.items())
        for place, group in enumerate(several)
    ]
    return [turn[-1] for turn in sorted(turns, key=lambda turn: turn[:3])]


def long_ones(groups: Sequence[list[Job]]) -> set[str]:
    """Experiments whose rollouts take much longer than most: one minute, where it is one."""
    work: dict[str, int] = {}
    for group in groups:
        name = group[0].experiment
        work[name] = max(work_of(group), work.get(name, 0))
    middle = median(work.values()) if work else 0
    return {name for name, each in work.items() if each > LONG * middle}


def work_of(group: Sequence[Job]) -> int:
    """Chunks of lanes that rollouts side by side make, one after the other."""
    return max(len(job.actions) for job in group) * (1 + len(group[0].lanes))


def about(world: World, order: Order, results: Sequence[JobResult], began: float) -> Document:
    """Of the run: world, weights, machine, and how many rollouts of each experiment there are."""
    spec = world.spec
    counts: dict[str, int] = {}
    for result in results:
        counts[result.job.experiment] = counts.get(result.job.experiment, 0) + 1
    return {
        "scale": order.scale.name,
        "scenes": order.scale.units,
        "seconds_given": order.seconds if order.seconds < float("inf") else None,
        "world": spec.name,
        "title": spec.title,
        "weights_sha256": world.weights_sha256(),
        "steps": spec.default_steps[world.device.type],
        "device": str(world.device),
        "hardware": hardware(world.device),
        "versions": versions(),
        "kernels": dispatch.explain(world.device),
        "dtype": str(world.dtype).removeprefix("torch."),
        "policy": asdict(spec.policy),
        "fps": spec.fps,
        "scripts": list(SCRIPTS),
        "rollouts": counts,
        "processes": order.processes,
        "devices": list(order.devices),
        "together": order.together,
        "missing": [v.title for v in ALL.values() if not v.known],
        "time": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(began)),
    }

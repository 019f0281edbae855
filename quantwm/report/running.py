"""Runs everything that the report needs, within the time that it is given."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from quantwm.cache import dispatch
from quantwm.describe import hardware, versions
from quantwm.errors import UserError
from quantwm.evaluation.episodes import Episode
from quantwm.report import latency, plan, revisit
from quantwm.report.attention import study_attention
from quantwm.report.jobs import Job, JobResult
from quantwm.report.pool import GRACE, Failure, Task, Workers, reasons, task_of
from quantwm.report.results import Document, Found, Results, results_of
from quantwm.report.scale import SCRIPTS, Scale
from quantwm.report.schedule import Size
from quantwm.report.together import batches, run_jobs
from quantwm.report.turns import interleaved, work_of
from quantwm.report.variants import ALL
from quantwm.worlds.base import World

T = TypeVar("T")
STARTING = 0.4
"""Share of the seconds for which the start of all processes is waited for."""
TIMING_SHARE = 0.12
"""Of the seconds, what is kept for measuring latency behind everything else; at most as much as
its rounds take and the processes need to end."""
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
        kept = min(latency.TIMING + GRACE, TIMING_SHARE * order.seconds)
        self._stop = self._deadline - kept
        self._first: JobResult | None = None
        self._untimed = ""
        self._found = Found([], [], [])
        self._episodes: Sequence[Episode] = ()
        self._rollouts: Sequence[Job] = ()
        self._failures: list[str] = []
        self._next_save = time.time() + SAVING

    def whole(self) -> Results:
        order, workers, scale = self._order, self._workers, self._order.scale
        world = workers.world
        timed = plan.latency_job(world, scale)
        self._report("starting processes")
        if world.device.type == "cuda" or order.seconds < float("inf"):
            # While the processes load theirs: a schedule needs to know what a chunk takes, and
            # kernels that are compiled here are compiled for all.
            self._first = self._timed(lambda: latency.first_chunks(world, timed))
        workers.ready()
        self._episodes = revisit.load_tasks(order.truth, scale, world)
        self._rollouts = plan.rollout_jobs(world, scale)
        self._rollouts += revisit.revisit_jobs(world, self._episodes, plan.few_of(scale))
        self.rollouts(self._rollouts)
        workers.end()
        if time.time() < self._deadline:
            self._report("latency, alone")
            rounds = self._timed(lambda: latency.measure(world, timed, self._deadline))
            self._found.latency = rounds or []
        return self._results(complete=True)

    def _timed(self, measure: Callable[[], T]) -> T | None:
        """A measurement in this process; what it says when it fails is kept, once."""
        try:
            return measure()
        except (UserError, RuntimeError) as error:  # torch's own errors are RuntimeErrors
            self._untimed = f"latency: {' '.join(str(error).split())[:300]}"
            return None

    def rollouts(self, rollouts: Sequence[Job]) -> Found:
        """Studies of recordings, and results of rollouts in the plan's order."""
        self._rollouts = rollouts
        recordings = plan.recording_jobs(self._workers.world, self._order.scale)
        groups = [*batches(rollouts, self._order.together), *([job] for job in recordings)]
        groups = interleaved(groups, self._order.processes // 2)
        tasks = [(group, self._task(group), self._size(group)) for group in groups]
        done = self._run(tasks, [])
        # What fails together may do alone: one scene's mistake must not cost the others.
        pairs = list(zip((group for group, _, _ in tasks), done, strict=True))
        broken = [group for group, one in pairs if len(group) > 1 and isinstance(one, Failure)]
        singles = [[job] for group in broken for job in group]
        self._run([(group, self._task(group), self._size(group)) for group in singles], pairs)
        return self._found

    def _task(self, group: Sequence[Job]) -> Task[Any]:
        if group[0].experiment == plan.RECORDED:
            return task_of(study_attention, group[0], plan.studied(), self._stop)
        return task_of(run_jobs, group, self._stop)

    def _size(self, group: Sequence[Job]) -> Size:
        """On a GPU a launch costs the same for several rollouts side by side."""
        if group[0].experiment == plan.RECORDED:
            return Size(plan.RECORDED, (1 + len(plan.studied())) * len(group[0].actions))
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
            self._stop,
            self._report,
            sizes=[size for _, _, size in tasks],
            pace=self._pace(),
            seen=seen,
        )
        groups = (group for group, _, _ in tasks)
        self._keep([*earlier, *zip(groups, done, strict=True)])
        return done

    def _pace(self) -> float:
        """Seconds of a chunk of a lane, reckoned from the first chunks; 0 without them."""
        if self._first is None:
            return 0.0
        crowd = self._order.processes / max(len(self._order.devices), 1)
        return latency.pace_of(self._first) * max(1.0, CROWDED * crowd)

    def _keep(self, pairs: Sequence[tuple[Sequence[Job], Any]]) -> None:
        places = {(job.experiment, job.label): place for place, job in enumerate(self._rollouts)}
        results: list[JobResult] = []
        errors: list[Any] = []
        for group, one in pairs:
            if one is None or isinstance(one, Failure):
                continue
            if group[0].experiment == plan.RECORDED:
                errors.append(one)
            else:
                results.extend(one)
        results.sort(key=lambda r: places[r.job.experiment, r.job.label])
        self._found.results, self._found.errors = results, errors
        self._failures = reasons([one for _, one in pairs])

    def _save_now(self) -> None:
        began = time.time()
        self._save(self._results(complete=False))
        self._next_save = time.time() + max(SAVING, WRITING * (time.time() - began))

    def _results(self, complete: bool) -> Results:
        told = about(self._workers.world, self._order, self._found, self._began)
        recordings = plan.recording_jobs(self._workers.world, self._order.scale)
        planned = counts_of([*self._rollouts, *recordings])
        done = sum(told["rollouts"].values())
        told |= {
            "planned": planned,
            "rollouts_planned": sum(planned.values()),
            "rollouts_skipped": sum(planned.values()) - done,
            "complete": complete,
            "seconds": round(time.time() - self._began, 1),
            "failures": [*filter(None, [self._untimed]), *self._failures],
        }
        return results_of(self._workers.world, told, self._found, self._episodes)


def counts_of(jobs: Sequence[Job]) -> dict[str, int]:
    """How many of each experiment."""
    return dict(Counter(job.experiment for job in jobs))


def about(world: World, order: Order, found: Found, began: float) -> Document:
    """Of the run: world, weights, machine, and how many rollouts of each experiment there are."""
    spec = world.spec
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
        "rollouts": counts_of([result.job for result in found.results])
        | ({plan.RECORDED: len(found.errors)} if found.errors else {}),
        "processes": order.processes,
        "devices": list(order.devices),
        "together": order.together,
        "missing": [v.title for v in ALL.values() if not v.known],
        "time": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(began)),
    }

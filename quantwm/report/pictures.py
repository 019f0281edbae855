"""Contact sheets: what the lanes of a few rollouts show, for the sections they belong to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from quantwm.evaluation.episodes import Episode
from quantwm.report.jobs import REFERENCE, Job, JobResult
from quantwm.report.revisit import TASKS, truth_of
from quantwm.report.variants import ABLATION, ALL, ROLES

Rows = list[tuple[str, np.ndarray]]

SPLIT = {
    "roles": ("qvg", "quantwm", *(v.name for v in ROLES)),
    "ablation": ("qvg", *(v.name for v in ABLATION), "quantwm"),
}
"""The short runs serve two sections: which lanes each one shows."""


def sheets_of(results: Sequence[JobResult], episodes: Sequence[Episode]) -> dict[str, Rows]:
    """Title, "experiment: what it is", -> rows (lane's title, frames uint8 [n, H, W, 3])."""
    sheets: dict[str, Rows] = {}
    for result in results:
        job, frames = result.job, result.frames
        if not frames:
            continue
        if job.experiment.startswith("revisit-"):
            _add_recall(sheets, result, episodes)
        elif job.experiment == "short":
            for name, lanes in SPLIT.items():
                sheets[_title(name, job)] = _rows(frames, (REFERENCE, *lanes))
        else:
            sheets[_title(job.experiment, job)] = _rows(frames, tuple(frames))
    return sheets


def _title(name: str, job: Job) -> str:
    """Which rollout, and which of its frames stand in the columns, counted from 0."""
    return f"{name}: {job.label}; columns: frames {', '.join(map(str, job.keep))}"


def _rows(frames: Mapping[str, np.ndarray], lanes: Sequence[str]) -> Rows:
    return [(ALL[lane].title, frames[lane]) for lane in lanes if lane in frames]


def _add_recall(sheets: dict[str, Rows], result: JobResult, episodes: Sequence[Episode]) -> None:
    """The first episode of each task and history: the truth, and what every lane recalls of it."""
    episode = episodes[int(result.job.label)]
    history = result.job.experiment.removeprefix("revisit-")
    title = f"revisit: {TASKS.get(episode.kind, episode.kind)}, {history} history, its end"
    if title in sheets:
        return
    shown = next(iter(result.frames.values()))
    truth = truth_of(episode, result.job)
    if truth is not None and truth.shape[1:] == shown.shape[1:]:
        sheets[title] = [("truth", truth), *_rows(result.frames, tuple(result.frames))]

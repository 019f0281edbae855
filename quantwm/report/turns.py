"""In which order the report's rollouts begin: what the end of the time cuts off is least wanted."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from quantwm.report.jobs import Job

SOONER = {"main": 0.5, "short": 0.5, "taught": 0.6, "attention": 0.7, "still": 0.8}
"""Experiments that more tables and claims rest on: they are through after such a share of the
time, and the first of each round. Of the others the last scenes are lost first."""
LONG = 3.0
"""Of experiments, a rollout's work over the median one's from which on it begins first."""


def interleaved(groups: Sequence[list[Job]], at_once: int) -> list[list[Job]]:
    """Experiments taking turns, so that a limit on time takes scenes from all and not one whole.

    at_once: how many of the longest begin first, or all would wait for them at the end; the
    others of their kind take turns like the rest. Half of the processes is a good number: with
    one process nothing waits, and a minute of generation must not come before every table.
    """
    first = long_ones(groups)
    by_experiment: dict[str, list[list[Job]]] = {}
    for group in groups:
        by_experiment.setdefault(group[0].experiment, []).append(group)
    waiting = at_once
    turns: list[tuple[bool, float, float, list[Job]]] = []
    for experiment, several in by_experiment.items():
        weight = SOONER.get(experiment, 1.0)
        for place, group in enumerate(several):
            ahead = experiment in first and waiting > 0
            waiting -= ahead
            turns.append((not ahead, place / len(several) * weight, weight, group))
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

"""Revisit recall on truth: what a world shows when it comes back to a place it has seen.

In the manner of CMBench (arXiv 2609.39096): in a Reappear task the camera turns away from what it
saw and on until it reappears; in a Revisit task it leaves through a door and comes back. The world
is given 16 true frames and the true keys, and its last four frames, where the camera stands as it
stood at the start, are compared with the truth: by PSNR, and by the cosine of the world's own
autoencoder features (CMBench compares DINOv2 features of detected objects, which need weights that
are not here).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from quantwm.actions import pack_frames
from quantwm.evaluation.episodes import Episode, load_folder
from quantwm.metrics import frame_mse, psnr_of_mse
from quantwm.report.jobs import POOLED, Job, JobResult
from quantwm.report.numbers import Figure, figure
from quantwm.report.scale import Scale
from quantwm.report.variants import Variant, known
from quantwm.worlds.base import World

TASKS = {"turn": "Reappear: a full turn", "back": "Revisit: through a door and back"}
FULL_TURN = 48
"""Frames of 7.5 degrees: where a turn comes back for the first time."""
SHORT_FRAMES = 24
"""A history that ends before the revisited place: what is then recalled is chance."""
SHOWN = 4
"""Frames at the end that are compared: one chunk."""


def load_tasks(folder: Path | None, scale: Scale, world: World) -> list[Episode]:
    """The first truth episodes of each kind; none without a folder or for other frame sizes."""
    if folder is None or not folder.is_dir():
        return []
    width, height = world.spec.video_size
    fitting = [e for e in load_folder(folder) if e.frames.shape[1:3] == (height, width)]
    picked: list[Episode] = []
    for kind in scale.revisit_kinds:
        picked += [e for e in fitting if e.kind == kind][: scale.revisits]
    return picked


def histories(world: World) -> dict[str, int | None]:
    """Name -> tokens of history: the whole window, and too little to remember."""
    per_frame = world.spec.cache.tokens_per_frame
    return {"whole": None, "short": SHORT_FRAMES * per_frame}


def revisit_jobs(
    world: World, episodes: Sequence[Episode], variants: Sequence[Variant]
) -> list[Job]:
    """Two rollouts an episode, one for each history.

    The scripts in assets/truth follow a start scene and do not hold its frames; others hold theirs.
    """
    size = world.spec.cache.frames_per_chunk
    jobs = []
    for number, episode in enumerate(episodes):
        keys = [episode.held(i) for i in range(episode.context, _stop(episode))]
        actions = pack_frames(keys, size)
        frames = len(actions) * size
        last = tuple(range(frames - SHOWN, frames))
        for name, tokens in histories(world).items():
            jobs.append(
                Job(
                    experiment=f"revisit-{name}",
                    label=str(number),
                    scene=None if episode.has(0) else str(episode.origin.get("scene")),
                    seed=0,
                    actions=actions,
                    lanes=tuple(variant.name for variant in known(variants)),
                    picture=episode.clip(0, episode.context) if episode.has(0) else None,
                    max_tokens=tokens,
                    keep=last,
                )
            )
    return jobs


def recall(
    world: World, episodes: Sequence[Episode], results: Sequence[JobResult]
) -> list[dict[str, Any]]:
    """Per task, history and lane: PSNR and feature cosine to the truth, over episodes.

    values: the PSNR of every episode, in the same order for all lanes.
    """
    scores: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for result in results:
        episode = episodes[int(result.job.label)]
        truth = truth_of(episode, result.job)
        if truth is None:
            continue
        history = result.job.experiment.removeprefix("revisit-")
        for lane, frames in result.frames.items():
            score = _score(world, frames[-len(truth) :], truth)
            scores.setdefault((episode.kind, history, lane), []).append(score)
    return [
        {
            "task": TASKS.get(kind, kind),
            "history": history,
            "lane": lane,
            "psnr": figure([psnr for psnr, _ in found]),
            "values": [psnr for psnr, _ in found],
            "cosine": _cosine([cosine for _, cosine in found]),
        }
        for (kind, history, lane), found in scores.items()
    ]


def _stop(episode: Episode) -> int:
    """The frame behind the revisit."""
    if episode.kind == "turn":
        return min(episode.length, episode.context + FULL_TURN)
    return episode.length


def truth_of(episode: Episode, job: Job) -> np.ndarray | None:
    """The true frames of a rollout's end, uint8 [n, H, W, 3]; None when none of them is stored."""
    stop = _stop(episode)
    if stop != episode.context + sum(len(action.frames) for action in job.actions):
        return None  # the last chunk was filled up: it does not end where the truth does
    index = [i for i in range(stop - SHOWN, stop) if episode.has(i)]
    return episode.clip(index[0], index[-1] + 1) if index else None


def _score(world: World, frames: np.ndarray, truth: np.ndarray) -> tuple[float, float]:
    psnr = psnr_of_mse(float(frame_mse(frames, truth).mean()))
    encode: Any = getattr(world, "encode", None)
    if encode is None:
        return psnr, float("nan")
    a, b = (
        F.normalize(F.adaptive_avg_pool2d(encode(x).float(), POOLED).flatten(1), dim=1)
        for x in (frames, truth)
    )
    return psnr, float(torch.sum(a * b, dim=1).mean())


def _cosine(values: Sequence[float]) -> Figure | None:
    return figure([value for value in values if not math.isnan(value)])

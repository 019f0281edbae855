"""The acceptance table of the embedded world: every episode run, every row measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from quantwm.evaluation.episodes import Episode
from quantwm.evaluation.measures import (
    Estimate,
    bootstrap,
    brightness,
    colourfulness,
    contrast,
    gradient_energy,
    judge_motion,
    mean_psnr,
    ratio,
)
from quantwm.evaluation.rollout import Run
from quantwm.evaluation.sheet import Strip
from quantwm.metrics import temporal_difference

if TYPE_CHECKING:
    from quantwm.worlds.embedded.adapter import EmbeddedWorld

WINDOW = 16  # frames, of the memory ablation
TURN = 48  # frames of a full turn
ENDS = 8  # frames at which a revisit, and a free run's beginning, are measured
LATE = 64


@dataclass(frozen=True)
class Amount:
    """How much is run. forced_chunks: next chunks a walk; free_frames: of a walk; unseen_turn and
    turn_ablation: the two rows for information that cost a run each. sheet_maps: strips of each
    kind. timed_chunks: for the row of speed."""

    forced_chunks: int = 16
    free_frames: int = 256
    unseen_turn: bool = True
    turn_ablation: bool = True
    sheet_maps: int = 4
    timed_chunks: int = 8


AMOUNTS = {
    "full": Amount(),
    "small": Amount(
        forced_chunks=3, free_frames=0, unseen_turn=False, turn_ablation=False, timed_chunks=2
    ),
}


@dataclass
class Findings:
    """Per row, a list of values for every map that has the row; strips for the contact sheet."""

    rows: dict[str, dict[int, list[list[float]]]] = field(default_factory=dict)
    strips: list[Strip] = field(default_factory=list)

    def add(self, row: str, episode: Episode, *values: float) -> None:
        """One measurement of a map; several of one map are averaged."""
        number = int(episode.origin["map_seed"])
        self.rows.setdefault(row, {}).setdefault(number, []).append(list(values))

    def estimates(self) -> dict[str, Estimate]:
        """Mean over maps and interval of every row; two values make a ratio, or a share in %."""
        found = {}
        for row, maps in self.rows.items():
            table = [np.mean(values, axis=0).tolist() for values in maps.values()]
            combine = None if len(table[0]) == 1 else _share if row in SHARES else ratio
            found[row] = bootstrap(table, combine)
        return found


SHARES = ("keys", "keys_truth")


def _share(means: np.ndarray) -> np.ndarray:
    return 100.0 * ratio(means)


class Evaluation:
    """Runs episodes one after the other and keeps what they say."""

    def __init__(
        self,
        world: EmbeddedWorld,
        amount: Amount,
        steps: int | None = None,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.world, self.amount, self._report = world, amount, report
        self.steps = world.spec.default_steps[world.device.type] if steps is None else steps
        self.size = world.spec.cache.frames_per_chunk
        self.found = Findings()

    def run(self, episodes: Sequence[Episode]) -> Findings:
        """Every episode by its kind."""
        began = time.monotonic()
        by_kind = {
            "turn": self._turn,
            "back": self._back,
            "long": self._long,
            "keys": self._keys,
            "still": self._still,
            "walk": self._walk,
        }
        for number, episode in enumerate(episodes, start=1):
            by_kind[episode.kind](episode)
            if episode.kind in ("turn", "back", "keys", "walk"):
                self._judge_truth(episode)
            spent = time.monotonic() - began
            left = spent / number * (len(episodes) - number)
            self._report(
                f"episode {number}/{len(episodes)} ({episode.kind}), {spent:.0f} s, "
                f"about {left:.0f} s left"
            )
        return self.found

    def _start(self, episode: Episode, window: int | None = None) -> Run:
        run = Run(self.world, episode, self.steps, window)
        run.follow(range(episode.context // self.size))
        return run

    def _chunks(self, episode: Episode, first: int, frames: int | None = None) -> range:
        """Chunks of episode frames from `first` on."""
        end = episode.length if frames is None else min(first + frames, episode.length)
        return range(first // self.size, end // self.size)

    def _turn(self, episode: Episode) -> None:
        """The second of two turns, the first being history; and the first by itself."""
        start = episode.length - TURN
        places = [start + TURN // 4 * (i + 1) - 1 for i in range(4)]
        frames, quarters = self._second_turn(episode, start, places)
        first = episode.frame(start - 1)
        self.found.add("turn_first", episode, _psnr(frames[-1], first))
        opposite = episode.frame(start + TURN // 2 - 1)
        self.found.add("turn_chance", episode, _psnr(opposite, first))
        self.found.add("turn_quarters", episode, quarters)
        self._judge(frames, episode, start)
        self._strip(f"second turn, map {_map(episode)}", episode, places, frames, start)
        if self.amount.turn_ablation:
            _, short = self._second_turn(episode, start, places, WINDOW)
            self.found.add("ablation_turn", episode, quarters - short)
        if self.amount.unseen_turn:
            frames = self._start(episode).free(self._chunks(episode, episode.context, TURN))
            first = episode.frame(episode.context - 1)
            self.found.add("turn_unseen", episode, _psnr(frames[-1], first))

    def _second_turn(
        self, episode: Episode, start: int, places: list[int], window: int | None = None
    ) -> tuple[np.ndarray, float]:
        """Free frames from `start` on after a history of truth, and their PSNR at some places."""
        run = Run(self.world, episode, self.steps, window)
        run.follow(range(start // self.size))
        frames = run.free(self._chunks(episode, start))
        reached = [_psnr(frames[at - start], episode.frame(at)) for at in places]
        return frames, float(np.mean(reached))

    def _back(self, episode: Episode) -> None:
        """There and back with all of the history and with a short window; the same noise."""
        first, end = episode.context, episode.length
        truth = episode.clip(end - ENDS, end)
        reached = {}
        for name, window in (("back", None), ("back_window", WINDOW)):
            frames = self._start(episode, window).free(self._chunks(episode, first))
            reached[name] = mean_psnr(frames[-ENDS:], truth)
            self.found.add(name, episode, reached[name])
            if window is None:
                if not self.amount.free_frames:
                    self._begin(frames, episode)
                self._judge(frames, episode, first)
                self._appearance(frames, episode)
                places = [i for i in range(first, end, 8) if episode.has(i)][-8:]
                self._strip(f"there and back, map {_map(episode)}", episode, places, frames, first)
        self.found.add("ablation", episode, reached["back"] - reached["back_window"])

    def _long(self, episode: Episode) -> None:
        frames = self._start(episode).free(self._chunks(episode, episode.context))
        truth = episode.clip(episode.length - ENDS, episode.length)
        self.found.add("long", episode, mean_psnr(frames[-ENDS:], truth))

    def _keys(self, episode: Episode) -> None:
        frames = self._start(episode).free(self._chunks(episode, episode.context))
        self._judge(frames, episode, episode.context)

    def _still(self, episode: Episode) -> None:
        frames = self._start(episode).free(self._chunks(episode, episode.context))
        self.found.add("still", episode, float(temporal_difference(frames).mean()))

    def _walk(self, episode: Episode) -> None:
        """Next chunks from truth, the autoencoder alone, and a long free run."""
        first = episode.context
        self._autoencoder(episode)
        chunks = self._chunks(episode, first, self.amount.forced_chunks * self.size)
        for chunk, frames in zip(chunks, self._start(episode).forced(chunks), strict=True):
            truth = episode.clip(chunk * self.size, (chunk + 1) * self.size)
            self.found.add("next_chunk", episode, mean_psnr(frames, truth))
        if not self.amount.free_frames:
            return
        chunks = self._chunks(episode, first, self.amount.free_frames)
        frames = self._start(episode).free(chunks)
        self._begin(frames, episode)
        self._judge(frames, episode, first)
        self._appearance(frames, episode)
        late = range(max(0, len(frames) - LATE), len(frames))
        shown = np.stack([frames[i] for i in late])
        true = np.stack([episode.frame(first + i) for i in late])
        for row, measure in APPEARANCE.items():
            self.found.add(f"{row}_late", episode, measure(shown), measure(true))
        places = [first + i for i in (7, 31, 63, 95, 127, 159, 207, 255) if i < len(frames)]
        self._strip(f"free walk, map {_map(episode)}", episode, places, frames, first)

    def _autoencoder(self, episode: Episode) -> None:
        """Every eighth true frame there and back again."""
        frames = np.stack([episode.frames[i] for i in range(0, len(episode.frames), 8)])
        values = []
        for start in range(0, len(frames), 16):
            batch = frames[start : start + 16]
            values.append(mean_psnr(self.world.decode(self.world.encode(batch)), batch))
        self.found.add("autoencoder", episode, float(np.mean(values)))

    def _begin(self, frames: np.ndarray, episode: Episode) -> None:
        """The first frames after the context: of walks, or of there-and-back where no walk runs
        free. Episodes that begin standing still would be too easy."""
        first = episode.context
        truth = episode.clip(first, first + ENDS)
        self.found.add("first_8", episode, mean_psnr(frames[:ENDS], truth))

    def _judge(self, frames: np.ndarray, episode: Episode, first: int) -> None:
        """Motion of free frames that begin at `first`."""
        shown = np.concatenate((episode.frame(first - 1)[None], frames))
        self._add_judged("keys", shown, episode, first)

    def _judge_truth(self, episode: Episode) -> None:
        """The same judge on truth's own frames, as far as they are stored without a gap."""
        first = last = episode.context
        while episode.has(last):
            last += 1
        last -= (last - first) % self.size
        if last > first:
            shown = episode.clip(first - 1, last)
            self._add_judged("keys_truth", shown, episode, first)

    def _add_judged(self, row: str, shown: np.ndarray, episode: Episode, first: int) -> None:
        right = judge_motion(shown, episode, first, self.size, self.world.device)
        if right:
            self.found.add(row, episode, sum(right), len(right))

    def _appearance(self, frames: np.ndarray, episode: Episode) -> None:
        """Sharpness and colour of free frames and truth's, where truth is stored."""
        first = episode.context
        places = [i for i in range(len(frames)) if episode.has(first + i)]
        shown = np.stack([frames[i] for i in places])
        true = np.stack([episode.frame(first + i) for i in places])
        for row, measure in APPEARANCE.items():
            self.found.add(row, episode, measure(shown), measure(true))

    def _strip(
        self, title: str, episode: Episode, places: list[int], frames: np.ndarray, first: int
    ) -> None:
        kind = title.split(",")[0]
        if (
            sum(strip.title.startswith(kind) for strip in self.found.strips)
            < self.amount.sheet_maps
        ):
            truth = np.stack([episode.frame(i) for i in places])
            shown = np.stack([frames[i - first] for i in places])
            self.found.strips.append(Strip(title, truth, shown))


APPEARANCE: dict[str, Callable[[np.ndarray], float]] = {
    "sharpness": gradient_energy,
    "brightness": brightness,
    "colour": colourfulness,
    "contrast": contrast,
}


def _psnr(frame: np.ndarray, truth: np.ndarray) -> float:
    return mean_psnr(frame[None], truth[None])


def _map(episode: Episode) -> str:
    return str(episode.origin.get("scene", episode.origin["map_seed"]))

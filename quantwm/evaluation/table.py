"""The rows of the acceptance table: what is wanted, and what was reached beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quantwm.evaluation.measures import Estimate


@dataclass(frozen=True)
class RowSpec:
    """One row. low, high: what is wanted, None where that side is open; neither: for information.

    digits: after the point, for people. per_map: measured map by map, so with an interval.
    """

    key: str
    title: str
    unit: str
    low: float | None = None
    high: float | None = None
    digits: int = 2

    @property
    def wanted(self) -> str:
        """In words."""
        unit = f" {self.unit}" if self.unit else ""
        if self.low is not None and self.high is not None:
            return f"{self.low:g} to {self.high:g}{unit}"
        if self.low is not None:
            return f"at least {self.low:g}{unit}"
        return "-" if self.high is None else f"at most {self.high:g}{unit}"


ROWS = (
    RowSpec("autoencoder", "autoencoder on unseen maps", "dB", 34.0),
    RowSpec("next_chunk", "next chunk from a history of truth", "dB", 27.0),
    RowSpec("first_8", "free running, first 8 frames", "dB", 25.0),
    RowSpec("turn_first", "full turn: after 360 degrees to the first frame", "dB", 22.0),
    RowSpec("turn_quarters", "full turn: quarters to truth", "dB", 20.0),
    RowSpec("turn_unseen", "full turn of an unseen room: after 360 degrees to the first", "dB"),
    RowSpec("turn_chance", "for scale: truth at 180 degrees to the first frame", "dB"),
    RowSpec("back", "there and back through a door, 64+ frames apart", "dB", 20.0),
    RowSpec("back_window", "the same with a window of 16 frames", "dB"),
    RowSpec("ablation", "memory: full history over a 16-frame window", "dB", 3.0),
    RowSpec("ablation_turn", "memory: the same at the quarters of the turn", "dB"),
    RowSpec("long", "long walk and back", "dB"),
    RowSpec("sharpness", "sharpness of free frames over truth's", "", 0.75, 1.25, 3),
    RowSpec("sharpness_late", "sharpness of the last 64 of them", "", None, None, 3),
    RowSpec("brightness", "mean brightness of free frames over truth's", "", 0.75, 1.25, 3),
    RowSpec("colour", "mean colourfulness of free frames over truth's", "", 0.75, 1.25, 3),
    RowSpec("contrast", "contrast of free frames over truth's", "", 0.75, 1.25, 3),
    RowSpec("brightness_late", "brightness of the last 64 of them", "", None, None, 3),
    RowSpec("colour_late", "colourfulness of the last 64", "", None, None, 3),
    RowSpec("contrast_late", "contrast of the last 64", "", None, None, 3),
    RowSpec("still", "standing still: change a frame, grey levels", ""),
    RowSpec("keys", "follows the keys: chunks that turn and step right", "%", 98.0, None, 1),
    RowSpec("keys_truth", "the same judge on truth's frames", "%", 99.0, None, 1),
    RowSpec("fps", "three lanes at 2k tokens, default steps", "frames/s", 3.5),
    RowSpec("weights_mb", "weights in all", "MB", None, 44.0),
)
"""In the order of the table. Rows without a wanted value help to read those that have one."""


@dataclass(frozen=True)
class Row:
    """A row with what was reached; ok is None where nothing is wanted."""

    spec: RowSpec
    reached: float
    low: float | None = None
    high: float | None = None
    maps: int | None = None

    @property
    def ok(self) -> bool | None:
        """Whether the value itself (not its interval) is within what is wanted."""
        if self.spec.low is None and self.spec.high is None:
            return None
        above = self.spec.low is None or self.reached >= self.spec.low
        return above and (self.spec.high is None or self.reached <= self.spec.high)

    def to_json(self) -> dict[str, Any]:
        """Plain data, rounded to a digit more than people see."""
        digits = self.spec.digits + 1

        def rounded(value: float | None) -> float | None:
            return None if value is None else round(value, digits)

        return {
            "row": self.spec.key,
            "title": self.spec.title,
            "unit": self.spec.unit,
            "wanted": [self.spec.low, self.spec.high],
            "reached": rounded(self.reached),
            "interval": [rounded(self.low), rounded(self.high)],
            "maps": self.maps,
            "ok": self.ok,
        }

    def cells(self) -> list[str]:
        """Cells for people: title, wanted, reached, interval, maps, ok."""
        digits = self.spec.digits
        unit = f" {self.spec.unit}" if self.spec.unit else ""
        between = "" if self.low is None else f"{self.low:.{digits}f} to {self.high:.{digits}f}"
        verdict = {None: "", True: "yes", False: "no"}[self.ok]
        maps = "" if self.maps is None else str(self.maps)
        reached = f"{self.reached:.{digits}f}{unit}"
        return [self.spec.title, self.spec.wanted, reached, between, maps, verdict]


HEAD = ["measure", "wanted", "reached", "95 %", "maps", "ok"]


def make_rows(
    estimates: dict[str, Estimate], values: dict[str, float], specs: Sequence[RowSpec] = ROWS
) -> list[Row]:
    """Rows in the table's order. estimates: measured map by map; values: measured once."""
    rows = []
    for spec in specs:
        if spec.key in estimates:
            found = estimates[spec.key]
            rows.append(Row(spec, found.value, found.low, found.high, found.maps))
        elif spec.key in values:
            rows.append(Row(spec, values[spec.key]))
    return rows

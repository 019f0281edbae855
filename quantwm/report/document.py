"""What a report is made of, before it is written as HTML or Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from quantwm.report.numbers import Figure

Word = Literal["holds", "does not hold", "undecided", "not measured"]


@dataclass(frozen=True)
class Table:
    """Cells of text; the first row is the head. caption: what was measured, one or two lines."""

    caption: str
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Plot:
    """Lines over a common x axis; None breaks a line."""

    title: str
    x_label: str
    y_label: str
    x: Sequence[float]
    lines: Mapping[str, Sequence[float | None]]


@dataclass(frozen=True)
class Sheet:
    """Pictures: a row a lane, (its name, uint8 [n, H, W, 3])."""

    title: str
    rows: Sequence[tuple[str, np.ndarray]]


@dataclass(frozen=True)
class Verdict:
    """A claim of the paper, whether it holds here, and the numbers that decided."""

    claim: str
    word: Word
    because: str


@dataclass
class Section:
    """One part of the report."""

    title: str
    text: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    sheets: list[Sheet] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)


def cell(figure: Figure | None, digits: int = 2, scale: float = 1.0, unit: str = "") -> str:
    """A mean with its interval, "23.41 [22.9, 23.9]"; "-" when there is none."""
    if figure is None or figure["mean"] is None:
        return "-"
    mean, low, high = (figure[k] * scale for k in ("mean", "low", "high"))
    if figure["count"] < 2:
        return f"{mean:.{digits}f}{unit}"
    return f"{mean:.{digits}f}{unit} [{low:.{digits}f}, {high:.{digits}f}]"


def plain(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A number, "-" when there is none."""
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def counted(count: int, thing: str, plural: str = "s") -> str:
    """A number of things: 1 scene, 32 scenes."""
    return f"{count} {thing}" + ("" if count == 1 else plural)


def sentence(text: str) -> str:
    """With a capital letter and one full stop."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


LEAST_SCENES = 5
"""Below these a bootstrap over scenes says little more than the least and the most of them."""


def judge(
    claim: str, difference: Figure | None, unit: str, what: str, each: str = "scene"
) -> Verdict:
    """A claim that a paired difference is above zero, decided by its interval.

    what: the difference in words, "QuantWM's PSNR less QVG's". each: what was counted.
    """
    if difference is None or difference["mean"] is None:
        return Verdict(claim, "not measured", f"{what} was not measured in this run")
    because = f"{what} is {cell(difference)} {unit} over {counted(difference['count'], each)}"
    if difference["count"] < LEAST_SCENES:
        return Verdict(claim, "undecided", f"{because}; so few decide nothing")
    if difference["low"] > 0:
        return Verdict(claim, "holds", because)
    if difference["high"] < 0:
        return Verdict(claim, "does not hold", because)
    return Verdict(claim, "undecided", f"{because}: the interval covers zero")


def both(claim: str, parts: Sequence[Verdict]) -> Verdict:
    """A claim of several parts: it holds when all do, and not when one does not."""
    words = [part.word for part in parts]
    if "does not hold" in words:
        word: Word = "does not hold"
    else:
        word = next((w for w in ("not measured", "undecided") if w in words), "holds")
    return Verdict(claim, word, "; ".join(part.because for part in parts))


def compared(what: str, a: Figure, other: str, b: Figure, less: bool = False) -> Verdict:
    """Whether figure a is above b (below with `less`), by non-overlapping intervals."""
    because = f"{what} is {cell(a, 4)}, {other} {cell(b, 4)}"
    if min(a["count"], b["count"]) < 2:
        return Verdict("", "undecided", f"{because}; one recording decides nothing")
    low, high = (a, b) if less else (b, a)
    if low["high"] < high["low"]:
        return Verdict("", "holds", because)
    if low["low"] > high["high"]:
        return Verdict("", "does not hold", because)
    return Verdict("", "undecided", f"{because}: the intervals overlap")

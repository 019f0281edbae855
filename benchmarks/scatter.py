"""Points and lines over two axes as SVG, with nothing but text: one panel beside the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 520, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 34, 44
KEY_LINE = 18
COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#444444", "#8b4fb3",
)  # fmt: skip
"""Okabe and Ito's, which colour-blind readers can tell apart; shapes differ as well."""
SHAPES = ("circle", "square", "diamond", "triangle")


@dataclass(frozen=True)
class Series:
    """Points that belong together, joined in their order; labels: one a point, shown at it."""

    name: str
    points: Sequence[tuple[float, float]]
    labels: Sequence[str]


@dataclass(frozen=True)
class Panel:
    """One pair of axes. log: whether y is logarithmic."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log: bool = False


@dataclass(frozen=True)
class Axis:
    """Numbers to places: low and high are at the ends."""

    low: float
    high: float
    start: float
    stop: float
    log: bool

    def place(self, value: float) -> float:
        low, high, at = (_scaled(v, self.log) for v in (self.low, self.high, value))
        return self.start + (at - low) / (high - low) * (self.stop - self.start)

    def ticks(self) -> list[float]:
        if self.log:
            first = math.floor(math.log10(self.low))
            last = math.ceil(math.log10(self.high))
            marks = [m * 10.0**e for e in range(first, last + 1) for m in (1, 2, 5)]
        else:
            step = _round_step((self.high - self.low) / 6)
            first = math.ceil(self.low / step)
            marks = [n * step for n in range(first, math.floor(self.high / step) + 1)]
        return [m for m in marks if self.low <= m <= self.high]


def _scaled(value: float, log: bool) -> float:
    return math.log10(value) if log else value


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= step)


def _axis(values: Sequence[float], start: float, stop: float, log: bool) -> Axis:
    low, high = min(values), max(values)
    if log:
        return Axis(low / 1.3, high * 1.3, start, stop, log)
    room = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    return Axis(low - room, high + room, start, stop, log)


def to_svg(title: str, panels: Sequence[Panel], note: str) -> str:
    """A whole file. Panels without a point are left out. note: a line below."""
    shown = [panel for panel in panels if any(s.points for s in panel.series)]
    names = list(dict.fromkeys(s.name for panel in shown for s in panel.series))
    keys = -(-len(names) // 4)
    width = max(len(shown), 1) * WIDTH
    height = 30 + HEIGHT + keys * KEY_LINE + 34
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="16" y="22" font-size="15" font-weight="bold">{escape(title)}</text>',
    ]
    for number, panel in enumerate(shown):
        body.append(f'<g transform="translate({number * WIDTH} 30)">')
        body += _panel(panel, names)
        body.append("</g>")
    for number, name in enumerate(names):
        x, y = 20 + number % 4 * 250, 30 + HEIGHT + 14 + number // 4 * KEY_LINE
        body.append(_mark(x, y - 4, number))
        body.append(f'<text x="{x + 12}" y="{y}">{escape(name)}</text>')
    body.append(f'<text x="16" y="{height - 12}" fill="#666">{escape(note)}</text>')
    return "\n".join([*body, "</svg>", ""])


def _panel(panel: Panel, names: Sequence[str]) -> list[str]:
    points = [point for series in panel.series for point in series.points]
    x = _axis([p[0] for p in points], LEFT, WIDTH - RIGHT, False)
    y = _axis([p[1] for p in points], HEIGHT - BOTTOM, TOP, panel.log)
    body = [f'<text x="{LEFT}" y="20">{escape(panel.title)}</text>']
    for mark in x.ticks():
        at = x.place(mark)
        body.append(_line(at, TOP, at, HEIGHT - BOTTOM))
        body.append(_text(at, HEIGHT - BOTTOM + 16, f"{mark:g}", "middle"))
    for mark in y.ticks():
        at = y.place(mark)
        body.append(_line(LEFT, at, WIDTH - RIGHT, at))
        body.append(_text(LEFT - 6, at + 4, f"{mark:g}", "end"))
    body.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, panel.x_label, "middle"))
    body.append(
        f'<text transform="translate(14 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" '
        f'text-anchor="middle">{escape(panel.y_label)}</text>'
    )
    for series in panel.series:
        body += _series(series, x, y, names.index(series.name))
    return body


def _series(series: Series, x: Axis, y: Axis, number: int) -> list[str]:
    placed = [(x.place(a), y.place(b)) for a, b in series.points]
    colour = COLOURS[number % len(COLOURS)]
    body = []
    if len(placed) > 1:
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in placed)
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" opacity=".6"/>')
    for (a, b), label in zip(placed, series.labels, strict=True):
        body.append(_mark(a, b, number))
        if label:
            body.append(_text(a + 7, b - 5, label, "start", size=9))
    return body


def _mark(x: float, y: float, number: int) -> str:
    rounds = number + number // len(COLOURS)  # so that no two of 32 have one look
    colour, shape = COLOURS[number % len(COLOURS)], SHAPES[rounds % len(SHAPES)]
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>'
    corners = {
        "square": ((-4, -4), (4, -4), (4, 4), (-4, 4)),
        "diamond": ((0, -5), (5, 0), (0, 5), (-5, 0)),
        "triangle": ((0, -5), (5, 4), (-5, 4)),
    }[shape]
    path = " ".join(f"{x + a:.1f},{y + b:.1f}" for a, b in corners)
    return f'<polygon points="{path}" fill="{colour}"/>'


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#e3e6ea"/>'


def _text(x: float, y: float, text: str, anchor: str, size: int = 12) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">'
        f"{escape(text)}</text>"
    )

"""Line plots as inline SVG: told apart by colour and dash, readable on light and dark."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from html import escape

from quantwm.report.document import Plot
from quantwm.report.variants import BF16, FLOOR, METHODS

WIDTH, HEIGHT = 720, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 150, 28, 40
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#8f6fd6")
"""Okabe and Ito's, which colour-blind readers can tell apart, two of them darker; the last has a
contrast of 3.9 to the light page and 4.7 to the dark one."""
DASHES = ("", "7 4", "2 3", "9 3 2 3", "4 2", "12 4", "9 2 2 2 2 2")
PLACES = {lane.title: place for place, lane in enumerate((FLOOR, *METHODS))}
"""A lane looks the same in every plot; other lines take what the lanes beside them leave."""


def to_svg(plot: Plot) -> str:
    """One plot with axes, grid and a legend beside it."""
    values = [v for line in plot.lines.values() for v in line if v is not None and math.isfinite(v)]
    if not values or not plot.x:
        return ""
    low, high = _room(min(values), max(values))
    x_high = max(plot.x) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + x / x_high * (WIDTH - LEFT - RIGHT)
        down = TOP + (high - y) / (high - low) * (HEIGHT - TOP - BOTTOM)
        return across, down

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(plot.title)}">',
        f'<text x="{LEFT}" y="16" class="head">{escape(plot.title)}, {escape(plot.y_label)}</text>',
    ]
    for tick in _ticks(low, high):
        _, y = place(0, tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" class="end">{tick:g}</text>')
    for tick in _ticks(0, x_high):
        x, _ = place(tick, low)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" class="mid">{tick:g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 6}" class="mid">{escape(plot.x_label)}</text>')
    styles = _styles(list(plot.lines))
    for number, (name, line) in enumerate(plot.lines.items()):
        style = styles[number]
        placed = [None if y is None else place(x, y) for x, y in zip(plot.x, line, strict=False)]
        points = [" ".join(f"{a:.1f},{b:.1f}" for a, b in run) for run in _runs(placed)]
        parts += [f'<polyline points="{run}" {style}/>' for run in points]
        y = TOP + 8 + 18 * number
        start = WIDTH - RIGHT + 12
        parts.append(f'<polyline points="{start},{y} {start + 28},{y}" {style}/>')
        parts.append(f'<text x="{start + 34}" y="{y + 4}">{escape(name)}</text>')
    return "".join([*parts, "</svg>"])


def _styles(names: Sequence[str]) -> list[str]:
    """Attributes of every line, in the order of the names; BF16, the reference, has the ink's."""
    taken = {PLACES[name] for name in names if name in PLACES}
    free = [place for place in range(len(COLOURS)) if place not in taken] or range(len(COLOURS))
    others = itertools.cycle(free)
    styles = []
    for name in names:
        if name == BF16.title:
            styles.append(_style("var(--ink)", ""))
        else:
            place = PLACES[name] if name in PLACES else next(others)
            styles.append(_style(COLOURS[place], DASHES[place]))
    return styles


def _style(colour: str, dash: str) -> str:
    return f'fill="none" style="stroke:{colour}" stroke-width="1.8" stroke-dasharray="{dash}"'


def _runs(points: Sequence[tuple[float, float] | None]) -> list[list[tuple[float, float]]]:
    """Stretches without a gap."""
    runs: list[list[tuple[float, float]]] = [[]]
    for point in points:
        if point is None:
            runs.append([])
        else:
            runs[-1].append(point)
    return [run for run in runs if run]


def _room(low: float, high: float) -> tuple[float, float]:
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return low - margin, high + margin


def _ticks(low: float, high: float) -> list[float]:
    """Four to eight round numbers."""
    raw = (high - low) / 5
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw)
    first = math.ceil(low / step)
    return [round(i * step, 10) for i in range(first, math.floor(high / step) + 1)]

"""A session's plots as one PNG: PSNR, excess flicker, bytes and time of each chunk, by lane."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PANEL = (760, 190)
LEFT, RIGHT, TOP, BOTTOM = 70, 150, 28, 26
PAPER, INK, GRID = (255, 255, 255), (40, 44, 52), (222, 226, 232)
COLOURS = (
    (0, 114, 178),
    (213, 94, 0),
    (0, 158, 115),
    (204, 121, 167),
    (184, 134, 11),
    (86, 180, 233),
)
"""Okabe and Ito's, which colour-blind readers can tell apart; markers differ by lane as well."""

TITLES = {
    "psnr": "PSNR to BF16, dB",
    "excess": "Excess flicker over BF16, grey levels",
    "mib": "KV cache, MiB",
    "ms": "Milliseconds a chunk",
}


@dataclass
class PlotLines:
    """What the plots show: by panel and lane, one value a chunk; None where there is none."""

    lines: dict[str, dict[str, list[float | None]]] = field(
        default_factory=lambda: {name: {} for name in TITLES}
    )

    def add(self, lane: str, **values: float | None) -> None:
        """One chunk of one lane: psnr, excess, mib, ms."""
        for name, value in values.items():
            self.lines[name].setdefault(lane, []).append(value)

    def save(self, path: Path) -> None:
        """One PNG, a panel below the other; nothing when no chunk was recorded."""
        from PIL import Image

        panels = [(TITLES[n], lanes) for n, lanes in self.lines.items() if _numbers(lanes)]
        if not panels:
            return
        whole = Image.new("RGB", (PANEL[0], PANEL[1] * len(panels)), PAPER)
        for number, (title, lanes) in enumerate(panels):
            whole.paste(_panel(title, lanes), (0, number * PANEL[1]))
        whole.save(path)


def _numbers(lanes: Mapping[str, Sequence[float | None]]) -> list[float]:
    found = (v for line in lanes.values() for v in line)
    return [v for v in found if v is not None and math.isfinite(v)]


def _panel(title: str, lanes: Mapping[str, Sequence[float | None]]) -> Any:
    from PIL import Image, ImageDraw, ImageFont

    picture = Image.new("RGB", PANEL, PAPER)
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(size=12)
    low, high = min(_numbers(lanes)), max(_numbers(lanes))
    margin = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    low, high = low - margin, high + margin
    chunks = max(map(len, lanes.values()))

    def place(chunk: float, value: float) -> tuple[float, float]:
        across = LEFT + chunk / max(chunks - 1, 1) * (PANEL[0] - LEFT - RIGHT)
        return across, TOP + (high - value) / (high - low) * (PANEL[1] - TOP - BOTTOM)

    draw.text((LEFT, 8), title, fill=INK, font=font)
    for value in (low + margin, (low + high) / 2, high - margin):
        _, y = place(0, value)
        draw.line([(LEFT, y), (PANEL[0] - RIGHT, y)], fill=GRID)
        draw.text((6, y - 7), f"{value:.4g}", fill=INK, font=font)
    draw.text((LEFT, PANEL[1] - 18), "chunk 1", fill=INK, font=font)
    draw.text((PANEL[0] - RIGHT - 24, PANEL[1] - 18), str(chunks), fill=INK, font=font)
    for number, (name, line) in enumerate(lanes.items()):
        _line(draw, font, number, name, line, place)
    return picture


def _line(
    draw: Any, font: Any, number: int, name: str, line: Sequence[float | None], place: Any
) -> None:
    colour = COLOURS[number % len(COLOURS)]
    points = [place(i, v) for i, v in enumerate(line) if v is not None and math.isfinite(v)]
    if len(points) > 1:
        draw.line(points, fill=colour, width=2)
    for x, y in points[:: max(1, len(points) // 12)]:
        _marker(draw, number, x, y, colour)
    y = TOP + 8 + 16 * number
    _marker(draw, number, PANEL[0] - RIGHT + 14, y, colour)
    draw.text((PANEL[0] - RIGHT + 24, y - 7), name[:18], fill=INK, font=font)


def _marker(draw: Any, number: int, x: float, y: float, colour: tuple[int, ...]) -> None:
    """Circle, square, triangle, diamond by turns, so that lines differ without colour."""
    r = 3.5
    shapes = (
        lambda: draw.ellipse([x - r, y - r, x + r, y + r], fill=colour),
        lambda: draw.rectangle([x - r, y - r, x + r, y + r], fill=colour),
        lambda: draw.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=colour),
        lambda: draw.polygon([(x, y - r), (x + r, y), (x, y + r), (x - r, y)], fill=colour),
    )
    shapes[number % len(shapes)]()

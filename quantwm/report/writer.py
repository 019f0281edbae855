"""Writes a report's files: report.html, results.json, evidence.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quantwm.report.document import Section, Sheet
from quantwm.report.html import to_html
from quantwm.report.markdown import to_markdown
from quantwm.report.results import Results
from quantwm.report.sections import all_sections
from quantwm.session import write_atomically

FILES = ("report.html", "results.json", "evidence.md")

SHEETS = {
    "roles": 0, "main": 1, "ablation": 3, "sweep": 4, "still": 5, "turn": 5, "revisit": 6,
    "minute": 7, "larger": 7,
}  # fmt: skip
"""Experiment -> index of the section that shows its contact sheets."""
WORDS = {
    "roles": "Free runs", "main": "Free runs", "ablation": "Free runs", "sweep": "Free runs",
    "still": "Standing still", "turn": "A slow turn", "minute": "One minute",
    "larger": "The larger resolution",
}  # fmt: skip
"""Experiment -> what a reader sees; a recall's title says what it is."""


def write_report(folder: Path, results: Results, command: str) -> list[Path]:
    """All three files into a folder that exists. OSError when the disk says no."""
    sections = with_sheets(all_sections(results.numbers), results.pictures)
    texts = (
        to_html(results.numbers, sections),
        json.dumps(results.numbers, indent=1, allow_nan=False) + "\n",
        to_markdown(results.numbers, sections, command),
    )
    paths = [folder / name for name in FILES]
    for path, text in zip(paths, texts, strict=True):
        write_atomically(path, text)
    return paths


def with_sheets(
    sections: list[Section], pictures: Mapping[str, Sequence[tuple[str, np.ndarray]]]
) -> list[Section]:
    """The sections with their contact sheets."""
    for title, rows in pictures.items():
        name, _, what = title.partition(": ")
        words = f"{WORDS[name]}: {what}" if name in WORDS else what
        sections[SHEETS[name]].sheets.append(Sheet(words, rows))
    return sections


def summary(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """The last line of `report`: what was measured, and every claim with its verdict."""
    return {
        "claims": [
            {"claim": v.claim, "here": v.word, "because": v.because}
            for section in all_sections(numbers)
            for v in section.verdicts
        ],
        **{key: numbers["report"][key] for key in ("scale", "weights_sha256", "device", "seconds")},
        "rollouts": numbers["report"]["rollouts"],
    }

"""The eight sections of the report, from its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantwm.report.document import Section
from quantwm.report.sections.attention import ablation, roles, selection
from quantwm.report.sections.fidelity import cost, fidelity
from quantwm.report.sections.flicker import flicker, minute, revisits

SECTIONS = (roles, fidelity, selection, ablation, cost, flicker, revisits, minute)


def all_sections(numbers: Mapping[str, Any]) -> list[Section]:
    """Tables, plots and verdicts; contact sheets are added by the writer."""
    return [make(numbers) for make in SECTIONS]

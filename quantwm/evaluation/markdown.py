"""Results of an evaluation as Markdown, to be put into documents as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SHOWN_SHA = 12  # characters


def as_markdown(document: Mapping[str, Any], rows: Sequence[Sequence[str]]) -> str:
    """A table under a line that says what was measured, on what, with which weights."""
    lines = [_about(document), "", _line(rows[0]), "|" + "-|" * len(rows[0])]
    lines += [_line(row) for row in rows[1:]]
    return "\n".join(lines) + "\n"


def _about(document: Mapping[str, Any]) -> str:
    versions, hardware = document["versions"], document["hardware"]
    on = hardware.get("gpu") or f"{hardware['cores']} cores of {hardware['cpu']}"
    return (
        f"Weights {document['weights_sha256'][:SHOWN_SHA]}, subset {document['subset']}, "
        f"{document['maps']} maps, {document['steps']} denoising steps, {document['dtype']} "
        f"on {on}, torch {versions['torch']}, Python {versions['python']}."
    )


def _line(cells: Sequence[str]) -> str:
    return "|" + "|".join(cell.strip().replace("|", r"\|") for cell in cells) + "|"

"""The report as Markdown, for docs/evidence.md: the same tables and verdicts, no pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quantwm.report.document import Section, Table, sentence
from quantwm.report.html import about_line, how_line, world_name


def to_markdown(numbers: Mapping[str, Any], sections: Sequence[Section], command: str) -> str:
    """The whole file. command: what makes it again."""
    about = numbers["report"]
    verdicts = [v for section in sections for v in section.verdicts]
    parts = [
        f"# The paper's evidence on {world_name(about)}",
        "Made by one command, which writes this file, an HTML report with plots and contact "
        "sheets, and the numbers as JSON:",
        f"```\n{command}\n```",
        about_line(about),
        how_line(about),
        "## Claims",
        _table(Table("", [["claim of the paper", "here"], *([v.claim, v.word] for v in verdicts)])),
    ]
    for section in sections:
        parts += [f"## {section.title}", *(text for text in section.text if text)]
        parts += [f"**{v.claim}: {v.word}.** {sentence(v.because)}" for v in section.verdicts]
        parts += [_table(table) for table in section.tables]
    return "\n\n".join(parts) + "\n"


def _table(table: Table) -> str:
    head, *rows = table.rows
    lines = [head, ["-"] * len(head), *rows]
    text = "\n".join(f"|{'|'.join(map(_cell, line))}|" for line in lines)
    return f"{table.caption}\n\n{text}" if table.caption else text


def _cell(text: object) -> str:
    return str(text).replace("|", "\\|")

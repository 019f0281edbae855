"""The one exception type whose message is meant for a person."""

from __future__ import annotations

LONGEST = 1000


class UserError(ValueError):
    """A user's mistake: one line that says what was wrong and what would be right.

    The command line prints it without a traceback and leaves with status 2; the page shows it.
    """

    def __str__(self) -> str:
        """One printable line, whatever names from files are in it."""
        text = super().__str__()[:LONGEST]
        return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text)

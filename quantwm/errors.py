"""The one exception type whose message is meant for a person."""

from __future__ import annotations


class UserError(ValueError):
    """A user's mistake: one line that says what was wrong and what would be right.

    The command line prints it without a traceback and leaves with status 2; the page shows it.
    """

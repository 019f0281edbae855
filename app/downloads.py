"""One download at a time, in the background, for all pages to see."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from quantwm.errors import UserError

log = logging.getLogger("quantwm.app")
Fetch = Callable[[str, bool, Callable[[str, float], None]], None]
"""(world, agreed, progress) -> None when the files are here; UserError when they cannot be had."""


class Downloads:
    """Runs `fetch` on a thread of its own. What is under way, and how the last one ended, is
    known to everybody: the files are the machine's, not a visitor's."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._state: dict[str, object] = {}

    def start(self, world: str, agreed: bool) -> None:
        """Begin, unless it is under way already.

        Raises:
            UserError: another world is on its way.
        """
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                if self._state.get("world") == world:
                    return
                raise UserError(f"{self._state.get('world')} is being downloaded; wait until it is")
            self._state = {"world": world, "stage": "Asking the hub", "progress": 0.0,
                           "running": True, "error": None}  # fmt: skip
            self._thread = threading.Thread(
                target=self._run, args=(world, agreed), name="download", daemon=True
            )
            self._thread.start()

    def state(self) -> dict[str, object]:
        """world, stage, progress, running and error of the newest one; {} before any."""
        with self._lock:
            return dict(self._state)

    def wait(self, seconds: float) -> None:
        """Until the one under way is over, for tests and a clean end."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)

    def _run(self, world: str, agreed: bool) -> None:
        error: str | None = None
        try:
            self._fetch(world, agreed, self._progress)
        except UserError as mistake:
            error = str(mistake)
        except Exception:
            log.exception("download of %s failed", world)
            error = f"the download of {world} failed; the server's log says why"
        with self._lock:
            self._state |= {"running": False, "error": error}

    def _progress(self, stage: str, share: float) -> None:
        with self._lock:
            self._state |= {"stage": stage, "progress": min(max(share, 0.0), 1.0)}

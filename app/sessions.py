"""Who is here, who drives, who waits: one world at a time, and nothing outlives its page."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from app import limits
from app.controls import Board, ControlDesk
from app.files import SessionFiles, SessionFolder
from quantwm.errors import UserError

log = logging.getLogger("quantwm.app")


@dataclass
class Session:
    """One open page.

    Attributes:
        token: random; the page shows it with every message, nobody else knows it.
        slot: its place on the control and status boards.
        folder: where its recordings and archives lie, deleted with the session.
    """

    token: str
    slot: int
    folder: SessionFolder
    opened: float = field(default_factory=time.monotonic)
    last_seen: float = field(default_factory=time.monotonic)


class SessionManager:
    """Opens and closes sessions and gives the one world to one of them at a time.

    `holder` drives; `waiting` keeps the order in which others pressed Drive. Whether somebody
    waits is written to the last slot of the status board, where a forked loop can read it.
    """

    def __init__(self, files: SessionFiles, capacity: int = limits.MAX_SESSIONS) -> None:
        self.files = files
        self.desk = ControlDesk(capacity)
        self.status = Board(capacity + 1)
        self.probes = Board(capacity)
        self._house = capacity
        self._lock = threading.RLock()
        self._sessions: dict[str, Session] = {}
        self._by_hash: dict[str, str] = {}
        self._early: deque[str] = deque(maxlen=capacity)
        self._free = list(range(capacity - 1, -1, -1))
        self._waiting: list[str] = []
        self._holder: str | None = None

    def open(self, session_hash: str) -> Session:
        """The session of this page, made when it is new.

        Raises:
            UserError: there are too many, or the page was closed before it was this far.
        """
        with self._lock:
            if session_hash in self._early:
                self._early.remove(session_hash)
                raise UserError("this page was closed before it had begun; reload it")
            token = self._by_hash.get(session_hash)
            if token is not None:
                return self._sessions[token]
            if not self._free:
                self._drop_oldest()
            session = Session(secrets.token_urlsafe(18), self._free.pop(), self.files.folder())
            self._sessions[session.token] = session
            self._by_hash[session_hash] = session.token
            self.desk.forget(session.slot)
            self.status.clear(session.slot)
            self.probes.clear(session.slot)
            return session

    def get(self, token: object) -> Session:
        """The session that this token names.

        Raises:
            UserError: the token is unknown, for example after the server was started again.
        """
        with self._lock:
            session = self._sessions.get(token) if isinstance(token, str) else None
            if session is None:
                raise UserError("this page's session has ended; reload the page to start a new one")
            session.last_seen = time.monotonic()
            return session

    def close_hash(self, session_hash: str | None) -> None:
        """The page with this Gradio session hash is gone, perhaps before it was opened: on a busy
        server the first call of a page may be answered after its last."""
        with self._lock:
            token = self._by_hash.get(session_hash or "")
            if token is None and session_hash:
                self._early.append(session_hash)
        if token is not None:
            self.close(token)

    def close(self, token: str) -> None:
        """Forget a session and delete its files; its loop, if it drives, is told to stop."""
        with self._lock:
            session = self._sessions.pop(token, None)
            if session is None:
                return
            self._by_hash = {h: t for h, t in self._by_hash.items() if t != token}
            self._leave(token)
            driving = self._holder == token
            if not driving:
                self._free.append(session.slot)
        if not driving:
            session.folder.delete()

    def join(self, token: str) -> int:
        """Stand in line; the place is 0 for the one whose turn it is.

        Raises:
            UserError: the line is full.
        """
        with self._lock:
            self.get(token)
            if self._holder != token and token not in self._waiting:
                if len(self._waiting) >= limits.MAX_QUEUE:
                    raise UserError(
                        f"{limits.MAX_QUEUE} visitors are waiting already; try again in a while"
                    )
                self._waiting.append(token)
                self._tell_house()
            return self.place(token) or 0

    def leave(self, token: str) -> None:
        with self._lock:
            self._leave(token)

    def place(self, token: str) -> int | None:
        """0 while driving, how many turns come before otherwise, None when not in line."""
        with self._lock:
            if self._holder == token:
                return 0
            if token not in self._waiting:
                return None
            return self._waiting.index(token) + (1 if self._holder is not None else 0)

    @contextmanager
    def hold(self, token: str) -> Iterator[Session]:
        """Own the world inside this block. Whatever ends it, the world is free afterwards.

        Raises:
            UserError: the session is gone, or somebody else holds the world.
        """
        with self._lock:
            session = self.get(token)
            if self._holder is not None:
                raise UserError("the world is in use; press Drive to stand in line")
            self._leave(token)
            self._holder = token
        try:
            yield session
        finally:
            with self._lock:
                self._holder = None
                gone = token not in self._sessions
                if gone:
                    self._free.append(session.slot)
            if gone:
                session.folder.delete()

    def alive(self, token: str) -> bool:
        with self._lock:
            return token in self._sessions

    def wanted(self) -> bool:
        """Whether somebody waits; readable in a forked process too."""
        return bool(self.status.read(self._house).get("waiting"))

    def census(self) -> dict[str, int]:
        """How many pages are open, stand in line and drive, and how many slots are taken."""
        with self._lock:
            return {
                "sessions": len(self._sessions),
                "waiting": len(self._waiting),
                "holding": int(self._holder is not None),
                "slots": self._house - len(self._free),
            }

    def _leave(self, token: str) -> None:
        if token in self._waiting:
            self._waiting.remove(token)
            self._tell_house()

    def _tell_house(self) -> None:
        self.status.write(self._house, {"waiting": len(self._waiting)})

    def _drop_oldest(self) -> None:
        """Make room: the page that was silent longest goes, if it is really silent."""
        idle = [t for t in self._sessions if t != self._holder]
        oldest = min(idle, key=lambda t: self._sessions[t].last_seen, default=None)
        silent = oldest and time.monotonic() - self._sessions[oldest].last_seen
        if oldest is None or silent < limits.VANISHED_SECONDS:
            log.warning("a page was refused: %s", self.census())
            raise UserError("too many pages are open on this server; try again in a while")
        self.close(oldest)

"""What the page may ask of the server: check it, act on it, answer with plain data.

No Gradio here, so that every answer can be tested without a browser.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Protocol

from app import limits, wire
from app.backend import MODES, Backend, Catalogue, Settings
from app.controls import ALL_KEYS, number, parse_snapshot, whole
from app.downloads import Downloads
from app.files import SessionFolder, read_upload
from app.inspector.probe import Prober
from app.runner import Runner
from app.sessions import Session, SessionManager
from app.zero import Turn, is_zero_gpu, lent
from quantwm.errors import UserError

log = logging.getLogger("quantwm.app")


def answer(call: Callable[..., dict[str, object]]) -> Callable[..., dict[str, object]]:
    """Turn a UserError into an answer; anything else into a number that is in the log."""

    @wraps(call)
    def answered(*args: object) -> dict[str, object]:
        try:
            return {"ok": True, **call(*args)}
        except UserError as error:
            return {"ok": False, "error": str(error)}
        except Exception:
            return {"ok": False, "error": _logged()}

    return answered


def _logged() -> str:
    ticket = secrets.token_hex(3)
    log.exception("unexpected error %s", ticket)
    return f"something went wrong on the server (error {ticket} in its log); press Drive again"


def parse_settings(raw: object, catalogue: Catalogue) -> Settings:
    """Check a visitor's choices against what this page offers.

    Raises:
        UserError: names the field, what it was and what it may be.
    """
    if not isinstance(raw, Mapping):
        raise UserError("the settings are missing; reload the page")
    lanes = raw.get("lanes", list(catalogue.chosen))
    offered = [lane.name for lane in catalogue.lanes]
    if not isinstance(lanes, list) or not lanes or len(lanes) > limits.MAX_LANES:
        raise UserError(f"choose one to {limits.MAX_LANES} caches of {', '.join(offered)}")
    if any(lane not in offered for lane in lanes) or len(set(map(str, lanes))) != len(lanes):
        raise UserError(f"caches must be different ones of {', '.join(offered)}")
    mode = raw.get("mode", "free")
    if mode not in MODES:
        raise UserError(f"mode must be one of {', '.join(MODES)}, got {str(mode)[:40]!r}")
    if mode == "teacher" and "bf16" not in lanes:
        raise UserError("teacher-forced mode needs the BF16 cache; tick it or choose free-running")
    picture = raw.get("picture")
    return Settings(
        scene=_one_of(raw.get("scene", catalogue.scene), catalogue.scenes, "scene"),
        seed=whole(raw.get("seed", catalogue.seed), "the seed", 0, limits.MAX_SEED),
        lanes=tuple(name for name in offered if name in lanes),
        mode=str(mode),
        steps=whole(
            raw.get("steps", catalogue.steps), "denoising steps", 1, limits.MAX_DENOISING_STEPS
        ),
        speed=number(raw.get("speed", 1.0), "the speed", 0.0, limits.MAX_SPEED),
        picture=None if picture is None else whole(picture, "the picture", 1, limits.MAX_PICTURES),
        world=catalogue.world.name,
        prompt=checked_prompt(raw.get("prompt", ""), catalogue),
        script=_one_of(raw.get("script"), catalogue.scripts, "script"),
    )


def _one_of(name: object, offered: Sequence[Named], what: str) -> str | None:
    """A name that is offered; None where nothing is chosen, or nothing is to be had."""
    names = [one.name for one in offered]
    if (name is None and what == "script") or (not names and name is None):
        return None
    if name not in names:
        listed = ", ".join(names) or "none here"
        raise UserError(f"unknown {what} {str(name)[:40]!r}; choose one of {listed}")
    return str(name)


def _unreadable(letter: str) -> bool:
    """Control characters but for white space, and halves of characters beyond U+FFFF."""
    return (letter < " " and letter not in "\n\t\r") or "\ud800" <= letter < "\ue000"


def checked_prompt(prompt: object, catalogue: Catalogue) -> str:
    """A prompt as typed; an empty one means the world's own. UserError on what cannot be one."""
    if not isinstance(prompt, str):
        raise UserError(f"the prompt must be text, got {type(prompt).__name__}")
    if prompt.strip() and not catalogue.prompts:
        raise UserError(f"{catalogue.world.name} takes no prompt; leave it empty")
    if len(prompt) > limits.MAX_PROMPT_CHARACTERS:
        raise UserError(
            f"a prompt has at most {limits.MAX_PROMPT_CHARACTERS:,} characters, "
            f"got {len(prompt):,}: shorten it"
        )
    if prompt and not prompt.isprintable() and any(_unreadable(letter) for letter in prompt):
        raise UserError("the prompt holds control or half characters; type it again")
    return prompt.strip()


class Named(Protocol):
    """What is chosen by name."""

    name: str


class Handlers:
    """The answers of one server process. `uploads` is where the web server keeps what visitors
    send; nothing outside it is read."""

    def __init__(
        self,
        backend: Backend,
        sessions: SessionManager,
        uploads: Path,
        spaces: Any | None = None,
    ) -> None:
        """spaces: Hugging Face's package of that name, where the page runs on a Space."""
        self.backend = backend
        self.sessions = sessions
        self.uploads = uploads
        self.downloads = Downloads(backend.download)
        self._turn = self._make_turn(spaces)

    def hello(self, session_hash: str) -> str:
        """First message of a page: its token and what there is to choose."""
        try:
            session = self.sessions.open(session_hash)
        except UserError as error:
            return wire.message("error", message=str(error))
        return wire.hello_message(self.backend.catalogue(), session.token)

    def closed(self, session_hash: str | None) -> None:
        self.sessions.close_hash(session_hash)

    @answer
    def control(self, payload: object) -> dict[str, object]:
        """Store a snapshot of the controls; the answer says how loading and the line stand."""
        session = self._session(payload)
        fields = payload if isinstance(payload, Mapping) else {}
        settings = fields.get("settings")
        catalogue = self._catalogue(settings)
        # A world that gives way to another may still have its keys held.
        snapshot = parse_snapshot(payload, {**catalogue.world.keys, **ALL_KEYS})
        if settings is not None:
            parse_settings(settings, catalogue)
        fresh = self.sessions.desk.submit(session.slot, snapshot)
        return {
            "fresh": fresh,
            "place": self.sessions.place(session.token),
            **self.sessions.status.read(session.slot),
        }

    @answer
    def join(self, payload: object) -> dict[str, object]:
        """Stand in line for the world with settings that are right."""
        session = self._session(payload)
        self._settings(payload)
        return {"place": self.sessions.join(session.token)}

    @answer
    def leave(self, payload: object) -> dict[str, object]:
        self.sessions.leave(self._session(payload).token)
        return {}

    @answer
    def picture(self, payload: object) -> dict[str, object]:
        """Check an uploaded start picture or video and keep it for this session."""
        session = self._session(payload)
        path = payload.get("path")
        frames = self._catalogue(payload.get("settings")).world.context_frames
        picture = read_upload(path, self.uploads, max(frames, 1))
        Path(path).unlink(missing_ok=True)
        number_kept = session.folder.save_picture(picture)
        shown = picture[-1] if picture.ndim == 4 else picture  # where a video leaves off
        return {"picture": number_kept, "shown": wire.encode_picture(shown, lossless=False)}

    @answer
    def download(self, payload: object) -> dict[str, object]:
        """Pack the newest recording; the driving loop has been asked for a copy (`flushes`)."""
        session = self._session(payload)
        flushes = whole(payload.get("flushes", 0), "flushes", 0, 2**31)
        deadline = time.monotonic() + limits.FLUSH_SECONDS
        while self.sessions.place(session.token) == 0:
            state = self.sessions.status.read(session.slot)
            if int(state.get("flushed", 0)) >= flushes:
                break
            if time.monotonic() > deadline:
                raise UserError("the recording is still being written; try again in a moment")
            time.sleep(limits.IDLE_POLL_SECONDS)
        recording = session.folder.latest_recording()
        if recording is None:
            raise UserError("nothing has been recorded yet; press Drive first")
        token = self.sessions.files.archive(recording, session.folder)
        return {"url": f"session/{token}.zip", "name": f"{recording.name}.zip"}

    @answer
    def check(self, payload: object) -> dict[str, object]:
        """Whether Reset may use these settings."""
        self._session(payload)
        self._settings(payload)
        return {}

    @answer
    def worlds(self, payload: object) -> dict[str, object]:
        """All worlds, what is here of them, and the download that is under way."""
        self._session(payload)
        download = self.downloads.state()  # first: what it says is over, the cards then show
        cards = [wire.card_fields(card) for card in self.backend.worlds()]
        return {"worlds": cards, "download": download}

    @answer
    def world(self, payload: object) -> dict[str, object]:
        """Everything there is to choose in one world."""
        session = self._session(payload)
        name = payload.get("world")
        if not isinstance(name, str) or not name:
            raise UserError("name the world to look at")
        catalogue = self.backend.catalogue(name)
        return {"hello": wire.hello_fields(catalogue, session.token, ())}

    @answer
    def fetch(self, payload: object) -> dict[str, object]:
        """Start downloading a world whose terms the visitor has agreed to."""
        self._session(payload)
        name = payload.get("world")
        card = next((c for c in self.backend.worlds() if c.name == name), None)
        if card is None:
            raise UserError(f"unknown world {str(name)[:40]!r}; choose one of the list")
        agreed = payload.get("agreed") is True
        if card.terms and not agreed:
            raise UserError(f"{card.title} is downloaded only after its licence is agreed to")
        self.downloads.start(card.name, agreed)
        return {"download": self.downloads.state()}

    def drive(self, payload: object) -> Iterator[str]:
        """One turn: messages until it is over. Ends cleanly on any mistake and frees the world.

        A ticket that left the line, or was taken over by a newer press of Drive, says nothing.
        """
        ticket = 0
        try:
            session = self._session(payload)
            ticket = whole(payload.get("ticket"), "ticket", 0, 2**31)
            if self.sessions.place(session.token) is None:
                return
            settings = self._settings(payload)
            with self.sessions.hold(session.token):
                yield from self._turn(session.token, session.slot, session.folder, settings, ticket)
        except UserError as error:
            yield wire.message("error", drive=ticket, message=str(error))
        except Exception:
            yield wire.message("error", drive=ticket, message=_logged())

    def _make_turn(self, spaces: Any | None) -> Turn:
        """What drives, wrapped for a lent GPU where there is one.

        In a forked process the table of sessions is a copy from the past: there the closed
        generator ends the turn, and mistakes must become messages before they cross back.
        """
        forked = is_zero_gpu(spaces)

        def turn(
            token: str, slot: int, folder: SessionFolder, settings: Settings, ticket: int
        ) -> Iterator[str]:
            runner = Runner(
                self.backend,
                self.sessions.desk,
                self.sessions.status,
                slot,
                folder,
                alive=lambda: forked or self.sessions.alive(token),
                wanted=self.sessions.wanted,
                check=lambda raw: parse_settings(raw, self._catalogue(raw)),
                ticket=ticket,
                prober=Prober(self.sessions.probes, slot, folder.path),
            )
            try:
                yield from runner.messages(settings)
            except UserError as error:
                yield wire.message("error", drive=ticket, message=str(error))
            except Exception:
                yield wire.message("error", drive=ticket, message=_logged())

        return lent(turn, spaces)

    def _catalogue(self, settings: object) -> Catalogue:
        """Of the world that the settings name, or of the proposed one."""
        name = settings.get("world") if isinstance(settings, Mapping) else None
        if name is not None and not isinstance(name, str):
            raise UserError(f"the world must be a name, got {type(name).__name__}")
        return self.backend.catalogue(name or "")

    def _settings(self, payload: Mapping[str, object]) -> Settings:
        raw = payload.get("settings")
        return parse_settings(raw, self._catalogue(raw))

    def _session(self, payload: object) -> Session:
        if not isinstance(payload, Mapping):
            raise UserError(f"a message must be an object, got {type(payload).__name__}")
        return self.sessions.get(payload.get("sess"))

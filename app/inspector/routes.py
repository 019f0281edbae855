"""The inspector's addresses: its page, clips, sheets of raw frames, slices, curves, uploads.

Plain HTTP beside Gradio: frames must arrive byte for byte and be asked for one sheet at a time.
A page's session token is the only key; nothing that comes from outside becomes a path.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import secrets
from collections.abc import Awaitable, Callable
from functools import wraps
from pathlib import Path

import numpy as np
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from app.controls import whole
from app.inspector import demo, probe, ring, slices, sources
from app.inspector.clips import Clip, ClipStore, require_room
from app.inspector.curves import CurveJobs
from app.sessions import Session, SessionManager
from app.wire import sheet
from quantwm.errors import UserError

log = logging.getLogger("quantwm.app")
WEB = Path(__file__).resolve().parent.parent / "web" / "inspector"
FILES = {path.name: path for path in sorted(WEB.iterdir()) if path.suffix in (".js", ".css")}
FORM_BYTES = 2**20
"""What a form may hold beside its files: names and borders."""
Handler = Callable[..., Awaitable[Response]]


class Inspector:
    """Clips per page, and the routes over them."""

    def __init__(self, sessions: SessionManager) -> None:
        self._sessions = sessions
        self._stores: dict[str, ClipStore] = {}
        self._curves = CurveJobs()
        self._own: set[str] = set()

    def routes(self) -> list[Route]:
        return [
            Route("/inspect", self._page),
            Route("/inspect/web/{name}", self._file),
            Route("/inspect/api/offers", answered(self._offers)),
            Route("/inspect/api/leave", answered(self._leave), methods=["POST"]),
            Route("/inspect/api/open", answered(self._open), methods=["POST"]),
            Route("/inspect/api/upload", answered(self._upload), methods=["POST"]),
            Route("/inspect/api/sheet", answered(self._sheet)),
            Route("/inspect/api/slice", answered(self._slice)),
            Route("/inspect/api/curves", answered(self._curve)),
            Route("/inspect/api/curves.csv", answered(self._csv)),
            Route("/inspect/api/tokens", answered(self._tokens), methods=["POST"]),
        ]

    def forget(self) -> None:
        """Drop the clips of pages that are gone; their folders were deleted with them."""
        for token in [token for token in self._stores if not self._sessions.alive(token)]:
            self._stores.pop(token, None)

    async def _page(self, request: Request) -> Response:
        return FileResponse(WEB / "inspector.html", headers={"Cache-Control": "no-cache"})

    async def _file(self, request: Request) -> Response:
        path = FILES.get(request.path_params["name"])
        if path is None:
            return PlainTextResponse("there is no such file", 404)
        return FileResponse(path, headers={"Cache-Control": "no-cache"})

    async def _offers(self, request: Request) -> Response:
        """What can be opened. A page of its own, which no driving page opened, gets a session."""
        token = request.query_params.get("session")
        live = bool(token)
        if token:
            self._session(token)
        else:
            token = self._sessions.open(f"inspector-{secrets.token_hex(8)}").token
            self._own.add(token)
        offered = list(demo.demos().items())
        most = sources.MAX_UPLOAD_BYTES
        found = {"session": token, "live": live, "demos": offered, "upload_bytes": most}
        return JSONResponse({"ok": True, **found})

    async def _leave(self, request: Request) -> Response:
        """A page of its own was closed; a driving page's session is not the inspector's to end."""
        token = request.query_params.get("session", "")
        if token in self._own:
            self._own.discard(token)
            self._sessions.close(token)
            self.forget()
        return JSONResponse({"ok": True})

    async def _open(self, request: Request) -> Response:
        """A clip of the live run, or of a session that ships with the project."""
        asked = await request.json()
        session = self._session(asked.get("session"))
        source = asked.get("source")
        if source == "live":
            clip = await asyncio.to_thread(ring.take_clip, session.folder.path, _clips(session))
        else:
            clip = await asyncio.to_thread(demo.open_demo, source, _clips(session))
        return self._kept(session, clip)

    async def _upload(self, request: Request) -> Response:
        """One session archive, or two to four videos: a multipart form."""
        session = self._session(request.query_params.get("session"))
        folder = _clips(session)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_length(request, folder)
        received: list[tuple[Path, str]] = []
        try:
            async with request.form(max_files=sources.MAX_LANES, max_fields=0) as form:
                for upload in form.getlist("file"):
                    if isinstance(upload, str):
                        raise UserError("send files, not text")
                    received.append((await _received(upload, folder), upload.filename or "file"))
            clip = await asyncio.to_thread(sources.from_uploads, received, folder)
        finally:
            for path, _ in received:
                path.unlink(missing_ok=True)
        return self._kept(session, clip)

    async def _sheet(self, request: Request) -> Response:
        """Frames of all lanes as one PNG: columns are lanes, rows are frames."""
        clip = self._clip(request)
        number = _whole(request, "number", 0, clip.info.frames)
        start = number * clip.info.sheet_frames
        if start >= clip.info.frames:
            raise UserError(f"this clip has {clip.info.frames} frames; sheet {number} is behind it")
        frames = clip.read(start, start + clip.info.sheet_frames)
        lanes = [frames[:, lane] for lane in range(frames.shape[1])]
        return _png(await asyncio.to_thread(lambda: _packed(sheet(lanes))))

    async def _slice(self, request: Request) -> Response:
        """The history of a line, lanes side by side, time downwards."""
        clip = self._clip(request)
        width, height = clip.info.size
        ends = [
            (_whole(request, f"x{end}", 0, width - 1), _whole(request, f"y{end}", 0, height - 1))
            for end in (0, 1)
        ]
        return _png(
            await asyncio.to_thread(lambda: _packed(slices.slice_sheet(clip, ends[0], ends[1])))
        )

    async def _curve(self, request: Request) -> Response:
        """Curves so far, and how far they are."""
        clip = self._clip(request)
        return JSONResponse({"ok": True, **self._curves.state(clip)})

    async def _csv(self, request: Request) -> Response:
        clip = self._clip(request)
        text = self._curves.csv(clip)
        named = {"Content-Disposition": 'attachment; filename="quantwm-curves.csv"'}
        return PlainTextResponse(text, media_type="text/csv", headers=named)

    async def _tokens(self, request: Request) -> Response:
        """Which patches of the past a patch's query picks, answered by the loop that drives."""
        asked = await request.json()
        session = self._session(asked.get("session"))
        frame, x, y = (whole(asked.get(name), name, 0, 2**31) for name in ("frame", "x", "y"))
        answer = await asyncio.to_thread(
            probe.ask,
            self._sessions.probes,
            session.slot,
            session.folder.path,
            frame,
            x,
            y,
            lambda: self._sessions.place(session.token) == 0,
        )
        return JSONResponse({"ok": True, **answer})

    def _kept(self, session: Session, clip: Clip) -> Response:
        self.forget()
        store = self._stores.setdefault(session.token, ClipStore())
        store.keep(clip)
        self._curves.start(clip)
        info = {**vars(clip.info), "sheet_frames": clip.info.sheet_frames}
        return JSONResponse({"ok": True, "clip": clip.token, "info": info})

    def _session(self, token: object) -> Session:
        return self._sessions.get(token)

    def _clip(self, request: Request) -> Clip:
        session = self._session(request.query_params.get("session"))
        store = self._stores.get(session.token)
        if store is None:
            raise UserError("this clip is gone; open it again")
        return store.get(request.query_params.get("clip"))


def answered(handler: Handler) -> Handler:
    """A UserError becomes an answer with its line, anything else a number that is in the log."""

    @wraps(handler)
    async def call(request: Request) -> Response:
        try:
            return await handler(request)
        except UserError as error:
            return JSONResponse({"ok": False, "error": str(error)}, 400)
        except json.JSONDecodeError:
            return JSONResponse({"ok": False, "error": "the message is not JSON"}, 400)
        except HTTPException as error:  # a form that is none, or of more files than are taken
            line = " ".join(str(error.detail).split())[:200]
            return JSONResponse({"ok": False, "error": f"the upload was refused: {line}"}, 400)
        except Exception:
            ticket = secrets.token_hex(3)
            log.exception("unexpected error %s", ticket)
            line = f"something went wrong on the server (error {ticket} in its log)"
            return JSONResponse({"ok": False, "error": line}, 500)

    return call


def _clips(session: Session) -> Path:
    return session.folder.path / "clips"


def _check_length(request: Request, folder: Path) -> None:
    """Before a byte is taken: the form is spooled to disk whole before its files are seen."""
    text = request.headers.get("content-length", "")
    if not text.isdecimal():
        raise UserError("an upload says how long it is (Content-Length)")
    length, limit = int(text[:18]), sources.MAX_LANES * sources.MAX_UPLOAD_BYTES + FORM_BYTES
    if length > limit:
        raise UserError(
            f"{length / 2**20:,.0f} MB are more than is taken: {sources.MAX_LANES} files of at "
            f"most {sources.MAX_UPLOAD_BYTES // 2**20} MB; cut them shorter"
        )
    require_room(folder, 2 * length)


async def _received(upload: object, folder: Path) -> Path:
    """A sent file under a random name, refused as soon as it is too large."""
    path = folder / f"upload-{secrets.token_hex(8)}"
    size = 0
    with path.open("wb") as file:
        while block := await upload.read(1 << 20):  # type: ignore[attr-defined]
            size += len(block)
            if size > sources.MAX_UPLOAD_BYTES:
                file.close()
                path.unlink()
                limit = sources.MAX_UPLOAD_BYTES // 2**20
                raise UserError(f"the file is larger than {limit} MB; cut it shorter")
            file.write(block)
    return path


def _whole(request: Request, name: str, low: int, high: int) -> int:
    text = request.query_params.get(name, "")
    if not (text.isascii() and text.isdecimal()) or not low <= int(text[:12]) <= high:
        raise UserError(f"{name} must be a whole number from {low} to {high}, got {text[:40]!r}")
    return int(text)


def _packed(picture: np.ndarray) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    # PNG without a colour profile: what the browser draws is what was made.
    Image.fromarray(picture).save(out, "png", compress_level=1)
    return out.getvalue()


def _png(data: bytes) -> Response:
    return Response(
        data, media_type="image/png", headers={"Cache-Control": "private, max-age=3600"}
    )

"""The Gradio page: one stage, its events and its routes. Layout lives in web/, behaviour in
handlers."""

from __future__ import annotations

import atexit
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr
from starlette.requests import Request as WebRequest
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route

from app import limits, wire
from app.backend import Backend
from app.files import SessionFiles
from app.handlers import Handlers
from app.inspector.routes import Inspector
from app.sessions import SessionManager
from app.stage import make_stage
from app.theme import make_head, make_theme

TITLE = "QuantWM - one world, several caches"


def uploads_folder() -> Path:
    """Where Gradio keeps what visitors send."""
    default = Path(tempfile.gettempdir()) / "gradio"
    return Path(os.environ.get("GRADIO_TEMP_DIR") or default)


def build(backend: Backend, spaces: Any | None = None) -> tuple[gr.Blocks, dict[str, object]]:
    """The page and the arguments with which to launch it. spaces: as in `Handlers`."""
    sessions = SessionManager(SessionFiles())
    atexit.register(sessions.files.delete)
    handlers = Handlers(backend, sessions, uploads_folder(), spaces)
    inspector = Inspector(sessions)

    def hello(request: gr.Request) -> str:
        return handlers.hello(request.session_hash)

    def drive(event: gr.EventData) -> Iterator[str]:
        yield from handlers.drive(event._data)

    def closed(request: gr.Request) -> None:
        handlers.closed(request.session_hash)

    with gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=(600, 3600)) as demo:
        stage = make_stage(
            wire.hello_message(backend.catalogue(), None),
            [
                handlers.control,
                handlers.join,
                handlers.check,
                handlers.leave,
                handlers.picture,
                handlers.download,
                handlers.worlds,
                handlers.world,
                handlers.fetch,
            ],
        )
        demo.load(hello, None, stage, queue=False, show_progress="hidden", api_visibility="private")
        stage.drive(
            drive,
            None,
            stage,
            concurrency_id="gpu",
            concurrency_limit=1,
            show_progress="hidden",
            trigger_mode="multiple",
            api_visibility="private",
        )
        demo.unload(closed)
    demo.queue(max_size=limits.MAX_QUEUE, default_concurrency_limit=1, api_open=False)

    def archive(request: WebRequest) -> Response:
        found = sessions.files.fetch(request.path_params["token"])
        if found is None:
            return PlainTextResponse("this archive is gone; download the session again", 404)
        return FileResponse(found[0], filename=found[1], media_type="application/zip")

    options = {
        "theme": make_theme(),
        "head": make_head(),
        "footer_links": [],
        "run_history": False,
        "ssr_mode": False,
        "show_error": False,
        "quiet": True,
        "max_file_size": limits.MAX_UPLOAD_BYTES,
        "max_threads": 16,
        "state_session_capacity": limits.MAX_SESSIONS,
        "blocked_paths": [str(Path(__file__).resolve().parent.parent)],
        "app_kwargs": {
            "routes": [Route("/session/{token:str}.zip", archive), *inspector.routes()],
        },
    }
    demo.quantwm = handlers
    return demo, options

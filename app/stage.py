"""The stage: one HTML component that is the whole page, loaded from the files in web/."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import gradio as gr

WEB = Path(__file__).parent / "web"

SCRIPTS = (
    "format.js",
    "player.js",
    "input.js",
    "lanes.js",
    "panels.js",
    "worlds.js",
    "state.js",
    "talk.js",
    "show.js",
    "main.js",
)
"""In the order in which they run, in one function scope."""


def make_stage(value: str, server_functions: Sequence[Callable[..., object]]) -> gr.HTML:
    """The component. It draws what `value` (one JSON message) says and triggers "drive" when a
    visitor drives.

    The template holds no value, so Gradio never renders it again and the canvases stay. A subclass
    would say the same, but Gradio writes a type stub beside the file of every subclass.
    """
    return gr.HTML(
        value=value,
        html_template=(WEB / "stage.html").read_text(),
        js_on_load="\n".join((WEB / name).read_text() for name in SCRIPTS),
        apply_default_css=False,
        padding=False,
        elem_id="quantwm",
        server_functions=[_plain(function) for function in server_functions],
    )


def _plain(method: Callable[..., object]) -> Callable[[object], object]:
    """Gradio marks server functions by an attribute, which a bound method cannot carry."""

    def call(payload: object) -> object:
        return method(payload)

    call.__name__ = method.__name__
    return call

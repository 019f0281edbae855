"""Gradio's own chrome, made quiet: system fonts (nothing is fetched) and no margins of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import gradio as gr

STYLES = [Path(__file__).parent / "web" / name for name in ("stage.css", "worlds.css")]


def make_head() -> str:
    """Goes into <head> as it is: Gradio would parse and rewrite a stylesheet given to it as css,
    which loses shorthands that hold variables, and container queries."""
    return (
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{''.join(style.read_text() for style in STYLES)}</style>"
    )


SANS = ("ui-sans-serif", "system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif")
MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace")


def make_theme() -> gr.themes.Base:
    import gradio as gr

    return gr.themes.Base(font=SANS, font_mono=MONO).set(
        body_background_fill="var(--qwm-page)",
        body_background_fill_dark="var(--qwm-page)",
    )

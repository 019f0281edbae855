"""The recorded sessions that ship with the project, for machines without a GPU or weights."""

from __future__ import annotations

import json
from pathlib import Path

from app.inspector.clips import Clip
from app.inspector.sources import from_session
from quantwm.errors import UserError

DEMO = Path(__file__).resolve().parent.parent.parent / "assets" / "demo"


def demos() -> dict[str, str]:
    """Name -> title of every shipped session, in the order of their names."""
    found = {}
    for folder in sorted(DEMO.glob("*/session.json")) if DEMO.is_dir() else ():
        document = json.loads(folder.read_text(encoding="utf-8"))
        name = folder.parent.name
        found[name] = str(document.get("title") or name.replace("-", " ").capitalize())
    return found


def demo_page() -> str:
    """The page that opens the first of the shipped sessions; it needs no weights.

    Raises:
        UserError: none is there.
    """
    known = demos()
    if not known:
        raise UserError(f"{DEMO} holds no session; fetch the repository whole")
    return f"/inspect#open={next(iter(known))}"


def open_demo(name: object, clips: Path) -> Clip:
    """A shipped session as a clip.

    Raises:
        UserError: there is none of this name; the text lists them.
    """
    known = demos()
    if not isinstance(name, str) or name not in known:
        offered = ", ".join(known) or "none: assets/demo is empty"
        raise UserError(f"there is no such recorded session; there are {offered}")
    return from_session(DEMO / name, clips, known[name])

"""Recorded action scripts of the embedded world: keys that show something, and where to start."""

from __future__ import annotations

import json
from pathlib import Path

from quantwm.errors import UserError
from quantwm.worlds.base import Script

JSON_LIMIT = 100_000  # bytes


def list_scripts(folder: Path) -> list[Script]:
    """Scripts in a folder, by name; empty when there are none."""
    return [_read(path) for path in sorted(folder.glob("*.json"))]


def save_script(folder: Path, script: Script) -> None:
    """Writes NAME.json."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {"title": script.title, "scene": script.scene, "actions": script.actions}
    text = json.dumps(data, indent=1) + "\n"
    (folder / f"{script.name}.json").write_text(text, encoding="utf-8")


def _read(path: Path) -> Script:
    try:
        if path.stat().st_size > JSON_LIMIT:
            raise UserError(f"{path} is larger than {JSON_LIMIT} bytes: not an action script")
        data = json.loads(path.read_text(encoding="utf-8"))
        return Script(path.stem, *(str(data[key]) for key in ("title", "actions", "scene")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error!r}); fetch it again") from error

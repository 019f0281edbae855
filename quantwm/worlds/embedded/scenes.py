"""Start scenes of the embedded world: 16 true frames with their keys, as PNG and JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quantwm.errors import UserError
from quantwm.worlds.base import Scene
from quantwm.worlds.embedded.config import KEYS

JSON_LIMIT = 100_000  # bytes


@dataclass(frozen=True)
class SceneClip:
    """frames uint8 [T, H, W, 3]; keys: per frame, the keys held during the step that led to it."""

    frames: np.ndarray
    keys: tuple[frozenset[str], ...]


def list_scenes(folder: Path) -> list[Scene]:
    """Scenes in a folder, by name; empty when there are none."""
    found = []
    for path in sorted(folder.glob("*/scene.json")):
        data = _read(path)
        found.append(Scene(path.parent.name, data["title"], str(path.parent / "thumbnail.png")))
    return found


def load_scene(folder: Path, name: str, size: tuple[int, int]) -> SceneClip:
    """Reads one scene. size: (width, height) that its frames must have. UserError otherwise."""
    import imageio.v3 as imageio

    known = [scene.name for scene in list_scenes(folder)]
    if name not in known:
        listed = ", ".join(known) or "none (assets/scenes is empty)"
        raise UserError(f"unknown scene {name!r}; there are {listed}")
    data = _read(folder / name / "scene.json")
    strip = imageio.imread(folder / name / "frames.png")
    count, (width, height) = len(data["keys"]), size
    if strip.shape != (count * height, width, 3) or strip.dtype != np.uint8:
        raise UserError(
            f"scene {name!r}: frames.png is {strip.shape}, which is not {count} frames of "
            f"{width} x {height} in RGB; fetch it again"
        )
    return SceneClip(strip.reshape(count, height, width, 3), data["keys"])


def save_scene(folder: Path, name: str, title: str, clip: SceneClip, origin: dict) -> None:
    """Writes scene.json, frames.png (frames below each other, lossless) and thumbnail.png."""
    import imageio.v3 as imageio

    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    count, height, width, _ = clip.frames.shape
    imageio.imwrite(target / "frames.png", clip.frames.reshape(count * height, width, 3))
    imageio.imwrite(target / "thumbnail.png", clip.frames[-1].repeat(2, axis=0).repeat(2, axis=1))
    keys = [[key for key in KEYS if key in held] for held in clip.keys]
    data = {"title": title, "keys": keys, "origin": origin}
    text = json.dumps(data, indent=None) + "\n"
    (target / "scene.json").write_text(text, encoding="utf-8")


def _read(path: Path) -> dict:
    try:
        if path.stat().st_size > JSON_LIMIT:
            raise UserError(f"{path} is larger than {JSON_LIMIT} bytes: not a scene")
        data = json.loads(path.read_text(encoding="utf-8"))
        keys = tuple(frozenset(held) for held in data["keys"])
        title = str(data["title"])
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error!r}); fetch it again") from error
    if not keys or any(not held <= set(KEYS) for held in keys):
        raise UserError(f"{path} holds keys other than {', '.join(KEYS)}; fetch it again")
    return {"title": title, "keys": keys}

"""Where a session starts: scenes of 16 true frames with their keys (WebP, JSON), or a picture."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from quantwm.errors import UserError
from quantwm.sheets import read_sheet, write_sheet
from quantwm.video import fit
from quantwm.worlds.base import Scene
from quantwm.worlds.embedded.config import KEYS

JSON_LIMIT = 100_000  # bytes
FIRST = "carpet-pillars"
"""The scene that is proposed: straight ahead, between two pillars, lies a door and a room behind
it, 1,400 map units or 42 frames of walking. In others a pillar, a tree or a wall is nearer."""


@dataclass(frozen=True)
class SceneClip:
    """frames uint8 [T, H, W, 3]; keys: per frame, the keys held during the step that led to it."""

    frames: np.ndarray
    keys: tuple[frozenset[str], ...]


def list_scenes(folder: Path) -> list[Scene]:
    """Scenes in a folder, `FIRST` first and the others by name; empty when there are none."""
    found = []
    for path in sorted(folder.glob("*/scene.json")):
        data = _read(path)
        found.append(Scene(path.parent.name, data["title"], str(path.parent / "thumbnail.webp")))
    return sorted(found, key=lambda scene: scene.name != FIRST)


def load_scene(folder: Path, name: str, size: tuple[int, int]) -> SceneClip:
    """Reads one scene. size: (width, height) that its frames must have. UserError otherwise."""
    known = [scene.name for scene in list_scenes(folder)]
    if name not in known:
        listed = ", ".join(known) or "none (assets/scenes is empty)"
        raise UserError(f"unknown scene {name!r}; there are {listed}")
    data = _read(folder / name / "scene.json")
    path = folder / name / "frames.webp"
    try:
        frames = read_sheet(path, len(data["keys"]), size)
    except (OSError, ValueError) as error:
        raise UserError(f"scene {name!r}: {path} is damaged ({error}); fetch it again") from error
    return SceneClip(frames, data["keys"])


def save_scene(folder: Path, name: str, title: str, clip: SceneClip, origin: dict) -> None:
    """Writes scene.json, frames.webp (see `write_sheet`) and thumbnail.webp, its last frame."""
    from PIL import Image

    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    write_sheet(target / "frames.webp", clip.frames)
    last = Image.fromarray(clip.frames[-1])
    last.save(target / "thumbnail.webp", quality=85, method=6)
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


def still_clip(image: np.ndarray, size: tuple[int, int], frames: int) -> np.ndarray:
    """A picture uint8 [H, W, 3] held for `frames` frames, or the end of a clip [T, H, W, 3].

    A shorter clip is preceded by its first frame. Every picture is cropped and resized to
    size = (width, height).
    """
    clip = image[None] if image.ndim == 3 else image
    if clip.ndim != 4 or clip.shape[3] != 3 or clip.dtype != np.uint8 or 0 in clip.shape:
        raise UserError(
            f"a start picture is uint8 [height, width, 3] or a clip of them, "
            f"got {image.dtype} {image.shape}"
        )
    fitted = np.stack([fit(picture, size) for picture in clip[-frames:]])
    missing = frames - len(fitted)
    return np.concatenate((np.repeat(fitted[:1], missing, axis=0), fitted))


def seed_picture(size: tuple[int, int], seed: int) -> np.ndarray:
    """Soft colour patches, for worlds without scenes."""
    width, height = size
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    x = torch.from_numpy(coarse).permute(2, 0, 1)[None].float()
    x = F.interpolate(x, (height, width), mode="bilinear", align_corners=False)
    return x[0].round().to(torch.uint8).permute(1, 2, 0).numpy()

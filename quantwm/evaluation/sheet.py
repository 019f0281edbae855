"""The contact sheet: strips of truth with the model's frames below them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BAR = 16  # pixels, of a strip's title
GAP = 6
IN_DOCUMENTS = 6  # strips: two maps of each kind, about 100 KB


@dataclass(frozen=True)
class Strip:
    """A title and two rows: truth and model, each uint8 [n, H, W, 3]."""

    title: str
    truth: np.ndarray
    model: np.ndarray


def draw_sheet(strips: Sequence[Strip]) -> np.ndarray:
    """All strips below each other, uint8 [height, width, 3]."""
    widest = max(strip.truth.shape[0] * strip.truth.shape[2] for strip in strips)
    parts = []
    for strip in strips:
        rows = [np.concatenate(list(clip), axis=1) for clip in (strip.truth, strip.model)]
        parts.append(_title(f"{strip.title}: truth above, model below", widest))
        for row in rows:
            parts.append(np.pad(row, ((0, 0), (0, widest - row.shape[1]), (0, 0))))
        parts.append(np.full((GAP, widest, 3), 255, np.uint8))
    return np.concatenate(parts[:-1])


def save_sheet(folder: Path, strips: Sequence[Strip]) -> Path:
    """Writes contact-sheet.png, and the first strips as contact-sheet.webp, for documents."""
    from PIL import Image

    path = folder / "contact-sheet.png"
    Image.fromarray(draw_sheet(strips)).save(path)
    few = Image.fromarray(draw_sheet(strips[:IN_DOCUMENTS]))
    few.save(path.with_suffix(".webp"), quality=65, method=6)
    return path


def _title(text: str, width: int) -> np.ndarray:
    from PIL import Image, ImageDraw, ImageFont

    bar = Image.new("RGB", (width, BAR), (255, 255, 255))
    font = ImageFont.load_default(size=12)
    ImageDraw.Draw(bar).text((3, 0), text, fill=(16, 18, 22), font=font)
    return np.asarray(bar)

"""Start pictures and video frames: pixels of a person's file to model pixels and back."""

from __future__ import annotations

import numpy as np
import torch

from quantwm.errors import UserError
from quantwm.video import fit

CONDITION_LATENTS = 21  # latent frames of the clip that the image models were trained on


def start_picture(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """uint8 [H, W, 3] or a clip of them -> uint8 [height, width, 3] at the world's size."""
    picture = image[0] if image.ndim == 4 and len(image) else image
    if picture.ndim != 3 or picture.shape[-1] != 3 or picture.dtype != np.uint8:
        raise UserError(
            f"a start picture is uint8 [height, width, 3], got {picture.dtype} "
            f"{list(picture.shape)}"
        )
    return fit(picture, size)


def plain_picture(size: tuple[int, int], seed: int) -> np.ndarray:
    """A sky over a ground, coloured from the seed: a start where no picture was given."""
    width, height = size
    colours = np.random.default_rng(seed).integers(70, 200, (2, 3))
    rows = np.linspace(0.0, 1.0, height)[:, None]
    sky, ground = colours[0] + 40 * (1 - rows), colours[1] - 50 * (1 - rows)
    column = np.where(rows < 0.55, sky, ground)
    picture = np.repeat(column[:, None], width, axis=1)
    return picture.clip(0, 255).astype(np.uint8)


def to_signed(picture: np.ndarray) -> torch.Tensor:
    """uint8 [H, W, 3] -> float32 [3, H, W] in -1..1."""
    return torch.tensor(picture).permute(2, 0, 1).float() / 127.5 - 1.0


def to_bytes(video: torch.Tensor) -> np.ndarray:
    """[3, T, H, W] in -1..1 -> uint8 [T, H, W, 3]."""
    pixels = ((video.float() + 1.0) * 127.5).round().clamp(0, 255).to(torch.uint8)
    return pixels.permute(1, 2, 3, 0).cpu().numpy()

"""What an engine is told, checked and completed; and what running out of memory says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quantwm.cache.plan import plan_lanes
from quantwm.cache.remedy import CacheMemoryError, require_memory
from quantwm.engine_types import LaneConfig
from quantwm.errors import UserError
from quantwm.memory import free_bytes
from quantwm.video import fit
from quantwm.worlds.base import StartState, World


def out_of_memory(happened: str, error: BaseException) -> str:
    """One line for a person: what happened, and what would fit."""
    fits = "free memory, drop a lane or keep less history (--max-tokens)"
    if isinstance(error, CacheMemoryError):
        fits = f"{error.remedy}; or {fits}"
    return f"the device ran out of memory, {happened}; {fits}"


def checked_seed(seed: int) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise UserError(f"a seed is a whole number from 0 to 2^63 - 1, got {seed!r}")
    return seed


def steps_for(world: World, steps: int | None) -> int:
    if steps is None:
        defaults = world.spec.default_steps
        return defaults.get(world.device.type) or max(defaults.values())
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= 1000:
        raise UserError(f"steps is a whole number from 1 to 1000, got {steps!r}")
    return steps


def first_scene(world: World) -> str | None:
    # named, so that a session repeats its scene even after others were added before it
    scenes = world.scenes()
    return scenes[0].name if scenes else None


def fitted_picture(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """A picture [H, W, 3] or clip [T, H, W, 3] in the world's size; a clip of one is a picture."""
    if image.dtype != np.uint8 or image.ndim not in (3, 4) or image.shape[-1] != 3:
        raise UserError(
            f"a start picture is uint8 [H, W, 3], a clip [T, H, W, 3]; got {image.dtype} "
            f"{list(image.shape)}"
        )
    if 0 in image.shape:
        raise UserError("the start picture is empty")
    pictures = image if image.ndim == 4 else image[None]
    fitted = np.stack([fit(picture, size) for picture in pictures])
    return fitted[0] if len(fitted) == 1 else fitted


def check_memory(world: World, lanes: Sequence[LaneConfig]) -> None:
    """UserError when the caches cannot fit; a lane without a window is planned for one span."""
    on_gpu = world.device.type == "cuda"
    of_run = world.dtype.itemsize, on_gpu, world.spec.remade
    planned = plan_lanes(world.spec.cache, lanes, *of_run)
    free = free_bytes(world.device)
    if free is not None:
        require_memory(planned, free)


def check_start(state: StartState, frames_per_chunk: int) -> None:
    if len(state.latents) != len(state.actions) * frames_per_chunk:
        raise UserError(
            f"a start holds whole chunks of {frames_per_chunk} latent frames with their actions, "
            f"got {len(state.latents)} frames and {len(state.actions)} actions"
        )

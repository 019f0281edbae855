"""Hugging Face's ZeroGPU, where a page's turn runs in a forked process that holds the GPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

from app import limits

Turn = Callable[..., Iterator[str]]
"""Plain picklable arguments in, texts out: both cross a process border there."""


def load_spaces() -> Any | None:
    """The package `spaces`, None where it is not installed: everywhere but on a Space.

    To be imported before anything touches CUDA: it takes CUDA's place until a GPU is lent.
    """
    try:
        return importlib.import_module("spaces")
    except ImportError:
        return None


def is_zero_gpu(spaces: Any | None) -> bool:
    """Whether GPUs are lent here; the package does nothing on any other machine."""
    config = getattr(getattr(spaces, "config", None), "Config", None)
    return bool(getattr(config, "zero_gpu", False))


def lent(turn: Turn, spaces: Any | None) -> Turn:
    """The turn, on a lent GPU where there are any; itself elsewhere."""
    if not is_zero_gpu(spaces):
        return turn
    return spaces.GPU(duration=limits.ZERO_GPU_SECONDS)(turn)

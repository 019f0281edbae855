"""Scores of published models over two videos: LPIPS and VBench's, or one line why there are none.

Nothing is downloaded: a score whose weights are not on the machine is named as missing.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from quantwm.errors import UserError
from quantwm.metrics.vbench import as_tensor, load_scores

PairDistance = Callable[[np.ndarray, np.ndarray], float]
"""Of a frame and a reference's frame, uint8 [H, W, 3] each."""
SMALLEST_LPIPS = 32
"""Pixels of the shorter side: below, AlexNet's last layers have nothing to look at."""
LPIPS_FILE = "alexnet-owt-7be5be79.pth"
"""Torchvision's AlexNet; torchmetrics brings LPIPS's own heads."""


def lpips_weights() -> Path:
    """Where torchvision looks for AlexNet before it would download it."""
    return Path(torch.hub.get_dir()) / "checkpoints" / LPIPS_FILE


def missing_for_lpips() -> str | None:
    """One line that says what LPIPS lacks; None when it can be computed."""
    for package in ("torchmetrics", "torchvision"):
        if importlib.util.find_spec(package) is None:
            return f"no LPIPS: it needs {package}; install it with: pip install {package}"
    if not lpips_weights().is_file():
        return f"no LPIPS: its weights are not here; put {LPIPS_FILE} into {lpips_weights().parent}"
    return None


class LearnedMeter:
    """Every learned score that the machine has the models for, frame by frame, of two videos.

    models: folder of VBench's files (quantwm.metrics.vbench.MODELS), None without.
    """

    def __init__(self, models: Path | None, device: torch.device | str = "cpu") -> None:
        self._device = device
        makers, self._missing = load_scores(models, device)
        self._pairs = {name: (make(), make()) for name, make in makers.items()}
        self._lpips: PairDistance | None = None
        self._distances: list[float] = []
        problem = missing_for_lpips()
        if problem is None:
            self._lpips = load_lpips(device)
        else:
            self._missing.insert(0, problem)

    @torch.no_grad()
    def update(self, frame: np.ndarray, reference: np.ndarray) -> None:
        """Add one frame of each video, uint8 [H, W, 3]."""
        own, other = (as_tensor(picture, self._device) for picture in (frame, reference))
        for first, second in self._pairs.values():
            first.add(own)
            second.add(other)
        if self._lpips is not None:
            self._distances.append(self._lpips(frame, reference))

    def scores(self) -> tuple[dict[str, Any], list[str]]:
        """(score -> value, {"a", "b"} for VBench's; one line for each that is missing)."""
        found: dict[str, Any] = {
            name: {"a": first.value(), "b": second.value()}
            for name, (first, second) in self._pairs.items()
        }
        if self._distances:
            found["lpips"] = fmean(self._distances)
        return found, list(self._missing)


def load_lpips(device: torch.device | str) -> PairDistance:
    """LPIPS of two frames of at least SMALLEST_LPIPS pixels a side.

    Raises:
        UserError: something is missing; the line says what, as `missing_for_lpips` does.
    """
    problem = missing_for_lpips()
    if problem is not None:
        raise UserError(problem)
    return partial(_distance, _network(device), device)


@torch.no_grad()
def _distance(
    network: Any, device: torch.device | str, frame: np.ndarray, reference: np.ndarray
) -> float:
    own, other = (as_tensor(picture, device) / 127.5 - 1 for picture in (frame, reference))
    return float(network(own, other))


def _network(device: torch.device | str) -> Any:
    from torchmetrics.image.lpip import LearnedPerceptualImagePatchSimilarity

    return LearnedPerceptualImagePatchSimilarity(net_type="alex").to(device)

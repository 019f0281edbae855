"""VBench's subject and background consistency, aesthetic and imaging quality, where models are.

Nothing is downloaded. `MODELS` says which files are looked for, in the folder that a user names.
The formulas are VBench's (Huang et al. 2024): consistency is the mean over frames t >= 2 of
(cos(f_1, f_t) + cos(f_(t-1), f_t)) / 2; aesthetic quality the mean of LAION's head over 10;
imaging quality the mean of MUSIQ-SPAQ over 100.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quantwm.errors import UserError
from quantwm.metrics.vit import VisionTransformer

Features = Callable[[Tensor], Tensor]
"""uint8-valued float [N, 3, H, W] in 0..255 -> features [N, C], or scores [N]."""

MODELS = {
    "subject_consistency": ("dino_vitbase16_pretrain.pth",),
    "background_consistency": ("ViT-B-32.pt",),
    "aesthetic_quality": ("ViT-L-14.pt", "sa_0_4_vit_l_14_linear.pth"),
    "imaging_quality": ("musiq_spaq.ts",),
}
"""Score -> its files. The first and the last of aesthetic are state dicts; the ViT-*.pt of OpenAI's
CLIP are TorchScript; musiq_spaq.ts is a TorchScript export of pyiqa's musiq-spaq, [N, 3, H, W] in
0..1 -> [N] in 0..100, which its user makes, because its source has a licence of its own."""

SIDE = 224
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
MUSIQ_SIDE = 512


@dataclass
class ConsistencyScore:
    """VBench's consistency over frames that come one by one."""

    features: Features
    _first: Tensor | None = None
    _last: Tensor | None = None
    _values: list[float] = field(default_factory=list)

    def add(self, picture: Tensor) -> None:
        """One frame, [1, 3, H, W] in 0..255."""
        feature = F.normalize(self.features(picture).float(), dim=-1)[0]
        if self._first is None or self._last is None:
            self._first = feature
        else:
            near = [max(0.0, float(feature @ other)) for other in (self._first, self._last)]
            self._values.append(sum(near) / 2)
        self._last = feature

    def value(self) -> float | None:
        return fmean(self._values) if self._values else None


@dataclass
class MeanScore:
    """The mean of a score a frame, over its scale."""

    features: Features
    scale: float
    _values: list[float] = field(default_factory=list)

    def add(self, picture: Tensor) -> None:
        """One frame, [1, 3, H, W] in 0..255."""
        self._values.append(float(self.features(picture).float().reshape(-1)[0]) / self.scale)

    def value(self) -> float | None:
        return fmean(self._values) if self._values else None


def load_scores(
    folder: Path | None, device: torch.device | str
) -> tuple[dict[str, Callable[[], Any]], list[str]]:
    """(name -> a maker of fresh scores, one line for each that is missing)."""
    makers: dict[str, Callable[[], Any]] = {}
    missing = []
    for name, files in MODELS.items():
        absent = [file for file in files if folder is None or not (folder / file).is_file()]
        if absent or folder is None:
            where = "no folder of models was named (--models)" if folder is None else str(folder)
            missing.append(f"no {name}: it needs {' and '.join(files)}; {where}")
            continue
        makers[name] = _maker(name, [folder / file for file in files], device)
    return makers, missing


def as_tensor(frame: np.ndarray, device: torch.device | str) -> Tensor:
    """uint8 [H, W, 3] -> float32 [1, 3, H, W] in 0..255."""
    return torch.from_numpy(np.ascontiguousarray(frame)).to(device).permute(2, 0, 1)[None].float()


def _maker(name: str, paths: Sequence[Path], device: torch.device | str) -> Callable[[], Any]:
    if name == "subject_consistency":
        model = VisionTransformer(_state_dict(paths[0]), device)
        features = _prepared(model, IMAGENET, crop=False)
        return lambda: ConsistencyScore(features)
    if name == "imaging_quality":
        musiq = _script(paths[0], device)
        return lambda: MeanScore(lambda x: musiq(_at_most(x / 255, MUSIQ_SIDE)), 100.0)
    clip = _script(paths[0], device)
    features = _prepared(clip.encode_image, CLIP, crop=True)
    if name == "background_consistency":
        return lambda: ConsistencyScore(features)
    head = _state_dict(paths[1])
    weight, bias = (head[key].to(device).float() for key in ("weight", "bias"))

    def aesthetic(pictures: Tensor) -> Tensor:
        return F.linear(F.normalize(features(pictures).float(), dim=-1), weight, bias)

    return lambda: MeanScore(aesthetic, 10.0)


def _prepared(
    model: Features, statistics: tuple[tuple[float, ...], tuple[float, ...]], crop: bool
) -> Features:
    """The model behind VBench's preparation: shorter side to 224, bicubic, normalised."""

    @torch.no_grad()
    def features(pictures: Tensor) -> Tensor:
        mean, deviation = (
            torch.tensor(values, device=pictures.device).view(1, 3, 1, 1) for values in statistics
        )
        height, width = pictures.shape[2:]
        scale = SIDE / min(height, width)
        size = (max(SIDE, round(height * scale)), max(SIDE, round(width * scale)))
        x = F.interpolate(pictures, size=size, mode="bicubic", align_corners=False)
        if crop:
            top, left = (size[0] - SIDE) // 2, (size[1] - SIDE) // 2
            x = x[..., top : top + SIDE, left : left + SIDE]
        return model((x / 255 - mean) / deviation)

    return features


def _at_most(pictures: Tensor, side: int) -> Tensor:
    longest = max(pictures.shape[2:])
    if longest <= side:
        return pictures
    size = [max(1, round(edge * side / longest)) for edge in pictures.shape[2:]]
    return F.interpolate(pictures, size=size, mode="bilinear", align_corners=False)


def _script(path: Path, device: torch.device | str) -> Any:
    try:
        return torch.jit.load(str(path), map_location=device).float().eval()
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(f"{path.name} is not a TorchScript file that this torch reads") from error


def _state_dict(path: Path) -> dict[str, Tensor]:
    import pickle

    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, OSError, EOFError) as error:
        raise UserError(f"{path.name} is not a file of weights that torch reads safely") from error
    if not isinstance(found, dict):
        raise UserError(f"{path.name} holds no state dict")
    return found

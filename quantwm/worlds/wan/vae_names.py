"""The VAE's published names (original and diffusers', 2.1 and 2.2) turned into this module's."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from quantwm.errors import UserError
from quantwm.worlds.wan.checkpoint import Weights, open_weights, shape_of
from quantwm.worlds.wan.loading import Progress, assign, on_meta
from quantwm.worlds.wan.names import strip_prefix
from quantwm.worlds.wan.vae import MEAN_21, STD_21, VaeConfig, WanVae

_PARTS = {"residual.0": "norm1", "residual.2": "conv1", "residual.3": "norm2",
          "residual.6": "conv2", "shortcut": "conv_shortcut"}  # fmt: skip
_MIDDLE = {"0": "resnets.0", "1": "attentions.0", "2": "resnets.1"}
_WHOLE = {"conv1.": "quant_conv.", "conv2.": "post_quant_conv."}


def _resnets(names: Mapping[str, object]) -> int:
    """Residual blocks of an encoder level, counted in whichever naming."""
    nested = {int(m.group(1)) for m in map(
        re.compile(r"encoder\.(?:down_blocks|downsamples)\.0\.(?:resnets|downsamples)\.(\d+)\."
                   r"(?:norm1|residual)").match, names) if m}  # fmt: skip
    if nested:
        return len(nested)
    flat = re.compile(r"encoder\.(?:down_blocks|downsamples)\.(\d+)\.resample\.")
    steps = sorted({int(m.group(1)) for m in map(flat.match, names) if m})
    if not steps:
        raise UserError("these are not the weights of a Wan VAE: no encoder.down_blocks")
    return steps[0]


def _own(name: str, resnets: int) -> str:
    """One published name -> this module's name."""
    for old, new in _WHOLE.items():
        if name.startswith(old):
            return new + name[len(old) :]
    side, _, rest = name.partition(".")
    if side not in ("encoder", "decoder"):
        return name
    for old, new in _PARTS.items():
        rest = rest.replace(f".{old}.", f".{new}.")
    rest = re.sub(r"^conv1\.", "conv_in.", rest)
    rest = re.sub(r"^head\.0\.", "norm_out.", rest)
    rest = re.sub(r"^head\.2\.", "conv_out.", rest)
    rest = re.sub(r"^middle\.([012])\.", lambda m: f"mid_block.{_MIDDLE[m.group(1)]}.", rest)
    blocks = "down_blocks" if side == "encoder" else "up_blocks"
    sampler = "downsampler" if side == "encoder" else "upsampler"
    per_level = resnets if side == "encoder" else resnets + 1

    def placed(level: int, index: int, tail: str) -> str:
        if index == per_level:
            return f"{blocks}.{level}.{sampler}.{tail}"
        return f"{blocks}.{level}.resnets.{index}.{tail}"

    rest = rest.replace(".upsamplers.0.", ".upsampler.")
    nested = re.match(r"(?:down|up)samples\.(\d+)\.(?:down|up)samples\.(\d+)\.(.*)", rest)
    if nested:
        return f"{side}.{placed(int(nested[1]), int(nested[2]), nested[3])}"
    flat = re.match(
        r"(?:downsamples|upsamples|down_blocks)\.(\d+)\.(?!resnets|downsampler)(.*)", rest
    )
    if flat:
        level, index = divmod(int(flat[1]), per_level + 1)
        return f"{side}.{placed(level, index, flat[2])}"
    return f"{side}.{rest}"


def canonical_vae(weights: Mapping[str, torch.Tensor]) -> Weights:
    """Published VAE weights under this module's names."""
    names = {strip_prefix(name): name for name in weights}
    resnets = _resnets(names)
    return {_own(name, resnets): weights[old] for name, old in names.items()}


def infer_vae_config(
    weights: Mapping[str, torch.Tensor],
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
) -> VaeConfig:
    """Sizes of canonical weights; latent statistics are the 2.1 VAE's unless given."""

    def sizes(name: str) -> tuple[int, ...]:
        return shape_of(weights, name, 5, "a Wan VAE")

    channels = sizes("post_quant_conv.weight")[0]
    base, pixels = sizes("encoder.conv_in.weight")[:2]
    if mean is None or std is None:
        if channels != len(MEAN_21):
            raise UserError(
                f"the latent statistics of a {channels}-channel VAE stand in its config.json, "
                "which must lie beside the weights"
            )
        mean, std = MEAN_21, STD_21
    return VaeConfig(
        base=base,
        decoder_base=sizes("decoder.conv_out.weight")[1],
        latent_channels=channels,
        resnets=_resnets(weights),
        residual=pixels == 12,
        mean=tuple(mean),
        std=tuple(std),
    )


def load_vae(
    path: Path | str,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
) -> WanVae:
    """Wan2.1_VAE.pth, or a diffusers vae folder (2.1 or 2.2) -> a WanVae on `device`."""
    path = Path(path)
    weights = canonical_vae(open_weights(path))
    mean, std = _statistics(path if path.is_dir() else path.parent)
    config = infer_vae_config(weights, mean, std)
    vae = on_meta(lambda: WanVae(config))
    assign(vae, weights, "a Wan VAE", dtype, device, progress)
    return vae


def _statistics(folder: Path) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """latents_mean and latents_std of a diffusers config.json, where there is one."""
    file = folder / "config.json"
    if not file.is_file():
        return None, None
    try:
        config = json.loads(file.read_text())
        mean, std = config.get("latents_mean"), config.get("latents_std")
        if mean is None or std is None:
            return None, None
        mean, std = tuple(map(float, mean)), tuple(map(float, std))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{file} is not a VAE's config.json") from None
    if not all(map(math.isfinite, (*mean, *std))) or min(std, default=1.0) <= 0:
        raise UserError(f"{file} must give finite latents_mean and latents_std above 0")
    return mean, std

"""Put opened weights into a module: checked strictly, assigned one by one, never held twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

from quantwm.errors import UserError
from quantwm.worlds.wan.backbone import CausalWan
from quantwm.worlds.wan.checkpoint import Weights, open_weights
from quantwm.worlds.wan.config import WanConfig
from quantwm.worlds.wan.names import canonical, family, infer_config

SHOWN = 3  # differences named in a message; the count says how many there are

Progress = Callable[[int, int], None]
"""Called with bytes assigned so far and bytes in all."""


def differences(
    expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]
) -> list[str]:
    """Every missing, unexpected and misshapen tensor, in words."""
    out = [f"{name} is missing" for name in expected if name not in found]
    out += [f"{name} is not expected" for name in found if name not in expected]
    for name, tensor in expected.items():
        if name not in found:
            continue
        if found[name].shape != tensor.shape:
            out.append(f"{name} has shape {list(found[name].shape)}, expected {list(tensor.shape)}")
        elif (kind := _not_numbers(found[name])) is not None:
            out.append(f"{name} holds {kind}, expected dense floating-point numbers")
    return out


def _not_numbers(tensor: torch.Tensor) -> str | None:
    """What a tensor holds instead of weights; integers would need scales that have no name."""
    if tensor.is_meta:
        return "no data"
    if tensor.layout != torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    return None if tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.")


def assign(
    module: nn.Module,
    weights: Weights,
    what: str,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
) -> None:
    """Give a meta-device module its weights; UserError names the first few differences.

    Each memory-mapped tensor is converted on its way to the device and dropped from `weights`
    before the next one is read, so the device holds one copy and the host none.
    """
    expected = module.state_dict()
    problems = differences(expected, weights)
    if problems:
        shown = "; ".join(problems[:SHOWN])
        more = f" (and {len(problems) - SHOWN} more)" if len(problems) > SHOWN else ""
        raise UserError(f"these weights do not fit {what}: {shown}{more}")
    total = sum(tensor.numel() for tensor in expected.values()) * dtype.itemsize
    done = 0
    for name in expected:
        tensor = weights.pop(name).to(device=device, dtype=dtype, copy=True)
        done += tensor.numel() * dtype.itemsize
        _place(module, name, tensor)
        if progress is not None:
            progress(done, total)
    module.eval()


def _place(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Replace one parameter or buffer in its own submodule, without walking the whole model."""
    parent, _, leaf = name.rpartition(".")
    owner = module.get_submodule(parent)
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[leaf] = tensor


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """Run a constructor on the meta device: names and shapes, no memory."""
    with torch.device("meta"):
        return build()


def load_transformer(
    path: Path | str,
    dtype: torch.dtype,
    device: torch.device | str,
    expect: str | None = None,
    config: WanConfig | None = None,
    prefer_ema: bool = False,
    progress: Progress | None = None,
) -> CausalWan:
    """A published transformer file or folder -> a CausalWan on `device`.

    expect: family the caller chose; UserError when the file is another model.
    config: sizes to hold the file to; inferred from its shapes when left out.
    """
    weights = canonical(open_weights(path, prefer_ema))
    found = family(weights)
    if expect is not None and found != expect:
        raise UserError(f"{path} is {found}, not {expect}: choose that world or another folder")
    if config is None:
        config = infer_config(weights)
    model = on_meta(lambda: CausalWan(config))
    assign(model, weights, found, dtype, device, progress)
    return model

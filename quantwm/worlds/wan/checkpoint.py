"""Open published weight files as they are: safetensors, folders of shards, and .pt wrappers."""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from quantwm.errors import UserError

Weights = dict[str, torch.Tensor]
PICKLES = (".pt", ".pth", ".bin")
SAFE_TORCH = (2, 10)  # first release whose weights_only loading is safe (CVE-2026-24747)
_WRAPPERS = ("generator", "generator_ema", "state_dict", "model_state_dict", "model", "module")


def open_weights(path: Path | str, prefer_ema: bool = False) -> Weights:
    """All tensors of a file or folder, memory-mapped and unwrapped, under the file's own names.

    path: a .safetensors, .pt, .pth or .bin file, or a folder with one model in it.
    prefer_ema: take `generator_ema` where a wrapper holds both copies (framewise checkpoints).
    Raises UserError on a missing, truncated or foreign file, and on a pickle with code in it.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"no weights at {path}: give a .safetensors, .pt or .pth file or a folder")
    files = weight_files(path)
    weights: Weights = {}
    for file in files:
        part = _open_pickle(file, prefer_ema) if file.suffix in PICKLES else _open_safe(file)
        doubled = next((name for name in part if name in weights), None)
        if doubled is not None:
            raise UserError(f"{file.name} and another file both hold {doubled}: keep one model")
        weights.update(part)
    return weights


def weight_files(path: Path) -> list[Path]:
    """The files that make up one model; UserError where that is not clear or some are missing."""
    if path.is_file():
        if path.name.endswith(".index.json"):
            return _indexed(path)
        if path.suffix not in (".safetensors", *PICKLES):
            kinds = ", ".join((".safetensors", *PICKLES))
            raise UserError(f"{path.name} is not a weight file: {kinds} are read")
        return [path]
    indexes = sorted(path.glob("*.index.json"))
    if len(indexes) == 1:
        return _indexed(indexes[0])
    safe = sorted(path.glob("*.safetensors"))
    if len(safe) == 1:
        return _all_shards(safe)
    if safe and all(_shard(file) for file in safe):
        return _all_shards(safe)
    pickles = sorted(file for file in path.iterdir() if file.suffix in PICKLES)
    if not safe and len(pickles) == 1:
        return pickles
    found = ", ".join(file.name for file in (safe or pickles)[:4]) or "no weight file"
    raise UserError(f"{path} must hold one model (one file, or shards with their index): {found}")


def _shard(file: Path) -> re.Match[str] | None:
    return re.search(r"-(\d+)-of-(\d+)\.safetensors$", file.name)


def _all_shards(files: list[Path]) -> list[Path]:
    """Shards without an index: complete when every number of 1..n is there."""
    match = _shard(files[0])
    if match and len(files) != int(match.group(2)):
        raise UserError(
            f"half downloaded: {len(files)} of {int(match.group(2))} shards in {files[0].parent}"
        )
    return files


def _indexed(index: Path) -> list[Path]:
    try:
        names = sorted({name + "" for name in json.loads(index.read_text())["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{index.name} is not a weight index: it has no weight_map") from None
    files = []
    for name in names:
        if Path(name).name != name:
            raise UserError(f"{index.name} names a file outside its folder: {name}")
        files.append(index.parent / name)
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise UserError(f"half downloaded: {index.parent} lacks {', '.join(missing[:3])}")
    return files


def _open_safe(file: Path) -> Weights:
    try:
        return load_file(file)
    except (SafetensorError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{file.name} is not a whole safetensors file ({reason})") from None


def _open_pickle(file: Path, prefer_ema: bool) -> Weights:
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if version < SAFE_TORCH:
        raise UserError(
            f"{file.name} is a pickle: reading it safely needs torch >= 2.10, this is "
            f"{torch.__version__}"
        )
    if not zipfile.is_zipfile(file):
        raise UserError(
            f"{file.name} is not a whole torch file of torch 1.6 or newer: fetch it again, or save "
            "it anew with a torch of today"
        )
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:
        raise UserError(f"{file.name} holds more than tensors; such a pickle is not run") from None
    except MemoryError:
        raise
    except Exception as error:  # of a damaged pickle anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{file.name} is not a whole torch file ({reason[:120]})") from None
    return unwrap(content, file.name, prefer_ema)


def shape_of(
    weights: Mapping[str, torch.Tensor], name: str, axes: int, what: str
) -> tuple[int, ...]:
    """The sizes of a tensor from which a model's sizes are read.

    what: a model's name, as in "half a checkpoint of {what}". UserError where the tensor is not
    there, is empty or has another number of axes.
    """
    if name not in weights:
        raise UserError(f"these are not the weights of {what}: {name} is missing")
    shape = tuple(weights[name].shape)
    if len(shape) != axes or 0 in shape:
        raise UserError(
            f"these are not the weights of {what}: {name} has shape {list(shape)}, expected "
            f"{axes} sizes above 0"
        )
    return shape


def unwrap(content: object, name: str, prefer_ema: bool = False) -> Weights:
    """The state dict inside a saved object, through any number of known wrappers."""
    for _ in range(4):
        if not isinstance(content, Mapping):
            break
        if content and all(isinstance(value, torch.Tensor) for value in content.values()):
            return {str(key): value for key, value in content.items()}
        order = _WRAPPERS if not prefer_ema else ("generator_ema", *_WRAPPERS)
        inner = [content[key] for key in order if isinstance(content.get(key), Mapping)]
        if not any(inner):
            break
        content = next(found for found in inner if found)
    known = ", ".join(_WRAPPERS)
    raise UserError(f"{name} holds no state dict (looked for tensors, or one of {known})")

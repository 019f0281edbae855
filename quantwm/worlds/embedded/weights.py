"""Weight files of the embedded world: safetensors shards and the manifest that vouches for them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantwm.errors import UserError
from quantwm.worlds.embedded.autoencoder import Autoencoder
from quantwm.worlds.embedded.config import EmbeddedConfig
from quantwm.worlds.embedded.transformer import Transformer

MANIFEST = "manifest.json"
SHARD_LIMIT = 15_500_000  # bytes; files of the repository stay under 16 MB
MANIFEST_LIMIT = 1_000_000
FORMAT = 1

Progress = Callable[[str, float], None]
"""(stage in words, fraction from 0 to 1)."""


@dataclass(frozen=True)
class Manifest:
    """The parsed manifest: config, files with size and sha256, and how the weights were made."""

    folder: Path
    config: EmbeddedConfig
    files: tuple[tuple[str, int, str], ...]
    training: Mapping[str, Any]

    @property
    def sha256(self) -> str:
        """One hash over names, sizes and hashes of all files, in the manifest's order."""
        text = "".join(f"{name} {size} {digest}\n" for name, size, digest in self.files)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def bytes_total(self) -> int:
        return sum(size for _, size, _ in self.files)


def read_manifest(folder: Path) -> Manifest:
    """Reads and checks the manifest of a folder of weights. UserError says what is wrong."""
    path = folder / MANIFEST
    if not path.is_file():
        raise UserError(
            f"weights of the embedded world not found: {path} is missing; fetch the repository "
            f"whole, or train them with python -m training.run_all"
        )
    if path.stat().st_size > MANIFEST_LIMIT:
        raise UserError(f"{path} is larger than {MANIFEST_LIMIT} bytes: not a manifest")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise UserError(f"{path} has format {data['format']!r}; this version reads {FORMAT}")
        files = tuple(_file_entry(entry) for entry in data["files"])
        training = dict(data["training"])
        config_data = data["config"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error!r}); fetch it again") from error
    if not files:
        raise UserError(f"{path} lists no weight files; fetch it again")
    return Manifest(folder, EmbeddedConfig.from_json(config_data), files, training)


def _file_entry(entry: Mapping[str, Any]) -> tuple[str, int, str]:
    name, size, digest = entry["name"], entry["bytes"], entry["sha256"]
    plain = isinstance(name, str) and Path(name).name == name and not name.startswith(".")
    if not plain or type(size) is not int or size < 1 or not isinstance(digest, str):
        raise UserError(f"the manifest names a file it should not: {name!r}; fetch it again")
    return name, size, digest


def check_files(manifest: Manifest, progress: Progress | None = None) -> None:
    """Existence, size and sha256 of every file, before anything is read into a model."""
    done = 0
    for name, size, digest in manifest.files:
        path = manifest.folder / name
        if not path.is_file():
            raise UserError(f"weight file {path} is missing; fetch the repository whole")
        found = path.stat().st_size
        if found != size:
            raise UserError(
                f"weight file {path} has {found} bytes where the manifest says {size} "
                f"(cut off, or a pointer instead of the file?); fetch it again"
            )
        if file_sha256(path) != digest:
            raise UserError(
                f"weight file {path} was altered: its sha256 is not the manifest's; fetch it again"
            )
        done += size
        if progress is not None:
            progress("checking weights", done / manifest.bytes_total)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_models(
    manifest: Manifest,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> tuple[Transformer, Autoencoder]:
    """Checked files -> both models on the device, in `dtype`, ready for inference.

    The modules start on the meta device and take the loaded tensors as they are, shard by shard,
    so that memory never holds a second copy of the weights.
    """
    from safetensors import SafetensorError, safe_open

    check_files(manifest, progress)
    with torch.device("meta"):
        models = torch.nn.ModuleDict(
            {
                "transformer": Transformer(manifest.config.transformer),
                "autoencoder": Autoencoder(manifest.config.autoencoder),
            }
        )
    expected = {name: tensor.shape for name, tensor in models.state_dict().items()}
    missing = set(expected)
    for index, (name, _, _) in enumerate(manifest.files):
        shard = {}
        try:
            with safe_open(str(manifest.folder / name), framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 - a safe_open handle is no mapping
                    shard[key] = file.get_tensor(key).to(device=device, dtype=_stored(key, dtype))
        except SafetensorError as error:
            raise UserError(f"weight file {name} cannot be read: {error}") from error
        for key, tensor in shard.items():
            if expected.get(key) != tensor.shape:
                raise UserError(
                    f"weight file {name}: tensor {key} {tuple(tensor.shape)} does not fit the "
                    f"manifest's config"
                )
        models.load_state_dict(shard, strict=False, assign=True)
        missing -= set(shard)
        if progress is not None:
            progress("loading weights", (index + 1) / len(manifest.files))
    if missing:
        raise UserError(f"the weight files lack {len(missing)} tensors, first {min(missing)}")
    return finish(models["transformer"], device), finish(models["autoencoder"], device)


def finish(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Inference mode; convolution weights in the layout that their kernels like best."""
    model.eval().requires_grad_(False)
    if isinstance(model, Autoencoder):
        model.to(memory_format=torch.channels_last)
    return model.to(device)


def _stored(key: str, dtype: torch.dtype) -> torch.dtype:
    """The latents' mean and deviation stay float32 in the model (16 numbers each)."""
    return torch.float32 if ".latent_" in key else dtype


def save_models(
    folder: Path,
    config: EmbeddedConfig,
    transformer: Transformer,
    autoencoder: Autoencoder,
    training: Mapping[str, Any],
) -> Manifest:
    """Writes BF16 shards and the manifest; each file is whole as soon as it has its name.

    training: how the weights were made (commands, data, hardware, minutes, metrics), as JSON data.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for prefix, model in (("transformer", transformer), ("autoencoder", autoencoder)):
        for key, tensor in model.state_dict().items():
            name = f"{prefix}.{key}"
            stored = _stored(name, torch.bfloat16)
            tensors[name] = tensor.detach().to("cpu", stored).contiguous()
    files = []
    shards = _split(tensors)
    for number, names in enumerate(shards, start=1):
        file_name = f"weights-{number}-of-{len(shards)}.safetensors"
        partial = folder / f".{file_name}.part"
        save_file({name: tensors[name] for name in names}, str(partial))
        partial.chmod(0o644)
        path = partial.replace(folder / file_name)
        entry = {"name": file_name, "bytes": path.stat().st_size, "sha256": file_sha256(path)}
        files.append(entry)
    manifest = {
        "format": FORMAT,
        "config": config.to_json(),
        "files": files,
        "training": dict(training),
    }
    partial = folder / f".{MANIFEST}.part"
    partial.write_text(json.dumps(manifest) + "\n", encoding="utf-8")
    partial.replace(folder / MANIFEST)
    return read_manifest(folder)


def _split(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Names in order, cut into shards under the limit."""
    shards: list[list[str]] = [[]]
    held = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size() + 256  # the header's share
        if shards[-1] and held + size > SHARD_LIMIT:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    return shards

"""Recorded q, k, v of clean passes: a safetensors file read with checks, and its recorder."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantwm.cache.spec import CacheSpec, RopeLayout
from quantwm.errors import UserError

MAX_FILE_BYTES = 16 * 2**30
PARTS = ("q", "k", "v")
_NAME = re.compile(r"layer(\d{1,4})\.([qkv])")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class RecordedTensors:
    """q, k, v per layer, [heads, tokens, head_dim], keys after RoPE, as attention saw them."""

    layers: Mapping[int, Mapping[str, torch.Tensor]]
    metadata: Mapping[str, str]

    @property
    def shape(self) -> tuple[int, int, int]:
        """[heads, tokens, head_dim], the same for every tensor."""
        first = next(iter(self.layers.values()))["k"]
        return tuple(first.shape)  # type: ignore[return-value]

    def metadata_int(self, name: str) -> int | None:
        """A whole number from the metadata, or None where it says nothing."""
        text = self.metadata.get(name, "")
        return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None

    def rope(self) -> RopeLayout | None:
        """How positions are in the keys, for formats that undo it; None when the file is silent.

        Raises:
            UserError: metadata that is there but does not describe a layout.
        """
        split, grid = self.metadata.get("rope_split_thw"), self.metadata.get("grid_hw")
        if split is None or grid is None:
            return None
        try:
            theta = float(self.metadata.get("rope_theta", "10000"))
            channels = tuple(int(part) for part in split.split(","))
            rows, columns = (int(part) for part in grid.split(","))
        except ValueError as error:
            raise UserError(
                f"metadata rope_split_thw {split[:40]!r}, grid_hw {grid[:40]!r} and rope_theta "
                'are numbers like "44,42,42", "6,8" and "10000"'
            ) from error
        return RopeLayout(channels, (rows, columns), theta)  # type: ignore[arg-type]


def load_tensors(path: Path) -> RecordedTensors:
    """Read a file of recorded tensors.

    Names are `layer{i}.q|k|v`, layout [heads, tokens, head_dim], all of one shape and finite.

    Raises:
        UserError: one line that names the tensor and what would be right.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise UserError(f"no such file: {path}")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise UserError(f"{path.name} is larger than {MAX_FILE_BYTES // 2**30} GiB")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            layers = _check_names(path, list(file.keys()))
            shape = tuple(file.get_slice(f"layer{next(iter(layers))}.k").get_shape())
            _check_shape(path, shape)
            tensors = {
                layer: {part: _read(file, f"layer{layer}.{part}", shape) for part in PARTS}
                for layer in layers
            }
            metadata = dict(file.metadata() or {})
    except (SafetensorError, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path.name} is not a readable safetensors file: {reason}") from error
    if metadata.get("rope", "post") != "post":
        raise UserError(f"{path.name} holds keys before RoPE; record them after it, as cached")
    return RecordedTensors(tensors, metadata)


def default_layers(layers: int) -> tuple[int, ...]:
    """First, middle and last layer: a recording of all of them is seldom needed."""
    return tuple(dict.fromkeys((0, layers // 2, layers - 1)))


class TensorRecorder:
    """Collects q, k, v of one cache's clean passes and writes them as a file for `study`."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers = layers
        self.spec: CacheSpec | None = None
        self.first_frame = 0
        self._chunks: dict[str, list[torch.Tensor]] = {
            f"layer{layer}.{part}": [] for layer in layers for part in PARTS
        }

    def attach(self, cache: Any, spec: CacheSpec) -> RecordingCache:
        """The cache with its clean passes recorded; forgets what an earlier run recorded."""
        self.spec = spec
        for chunks in self._chunks.values():
            chunks.clear()
        return RecordingCache(cache, self)

    def begin(self, first_frame: int) -> None:
        """A chunk begins at this latent frame; the first one is where the recording begins."""
        if self.tokens == 0:
            self.first_frame = first_frame

    def add(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Keep one layer's tensors of one clean pass, [heads, tokens, head_dim]."""
        if layer in self.layers:
            for part, tensor in zip(PARTS, (q, k, v), strict=True):
                kept = tensor.detach().to("cpu", torch.bfloat16, copy=True).contiguous()
                self._chunks[f"layer{layer}.{part}"].append(kept)

    @property
    def tokens(self) -> int:
        """Tokens recorded so far."""
        return sum(chunk.shape[1] for chunk in self._chunks[f"layer{self.layers[0]}.k"])

    def save(self, path: Path) -> None:
        """Write the file; it appears whole or not at all."""
        from safetensors.torch import save_file

        if self.spec is None or self.tokens == 0:
            raise UserError("nothing was recorded: run at least one chunk first")
        tensors = {name: torch.cat(chunks, dim=1) for name, chunks in self._chunks.items()}
        metadata = {
            "layout": "[heads, tokens, head_dim]",
            "rope": "post",
            "chunk_tokens": str(self.spec.tokens_per_chunk),
            "tokens_per_frame": str(self.spec.tokens_per_frame),
            "first_frame": str(self.first_frame),
        }
        if self.spec.rope is not None:
            metadata["rope_split_thw"] = ",".join(map(str, self.spec.rope.split))
            metadata["grid_hw"] = ",".join(map(str, self.spec.rope.grid))
            metadata["rope_theta"] = repr(self.spec.rope.theta)
        partial = path.with_name(path.name + ".part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, partial, metadata)
            os.replace(partial, path)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror or error}") from error


class RecordingCache:
    """A KVCache whose clean passes are copied to a recorder; everything else passes through."""

    def __init__(self, cache: Any, recorder: TensorRecorder) -> None:
        self._cache = cache
        self._recorder = recorder

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *arguments: Any,
        **options: Any,
    ) -> torch.Tensor:
        """KVCache.attend; q, k, v of a clean pass are recorded first."""
        if options.get("clean"):
            self._recorder.add(layer, q, k, v)
        return self._cache.attend(layer, q, k, v, *arguments, **options)

    def begin_chunk(self, first_frame: int, frames: int) -> None:
        """KVCache.begin_chunk; the recording's first frame is noted."""
        self._recorder.begin(first_frame)
        self._cache.begin_chunk(first_frame, frames)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def _check_names(path: Path, names: list[str]) -> list[int]:
    found: dict[int, set[str]] = {}
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            raise UserError(
                f"{path.name}: unknown tensor {name[:60]!r}; names are layer0.q, .k, .v"
            )
        found.setdefault(int(match[1]), set()).add(match[2])
    if not found:
        raise UserError(f"{path.name} holds no tensor; it needs layer0.q, layer0.k and layer0.v")
    for layer, parts in sorted(found.items()):
        missing = [part for part in PARTS if part not in parts]
        if missing:
            raise UserError(f"{path.name}: layer{layer}.{missing[0]} is missing")
    return sorted(found)


def _check_shape(path: Path, shape: tuple[int, ...]) -> None:
    if len(shape) != 3 or min(shape) < 1:
        raise UserError(f"{path.name}: tensors are [heads, tokens, head_dim], got {list(shape)}")


def _read(file: Any, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    found = tuple(file.get_slice(name).get_shape())
    if found != shape:
        raise UserError(
            f"{name} is {list(found)}, the others are {list(shape)}; all have one shape"
        )
    tensor = file.get_tensor(name)
    if tensor.dtype not in _DTYPES:
        raise UserError(f"{name} is {tensor.dtype}; use bfloat16, float16 or float32")
    if not bool(torch.isfinite(tensor).all()):
        raise UserError(f"{name} holds NaN or infinite values; record it again")
    return tensor

"""A safetensors file written and read in bounded memory, and refused before it can do harm.

Written here and not with the safetensors library, which takes all tensors in memory at once. What
is written can be read by it (the tests do). Reading checks the header against the file's size
before anything of the header's choosing is allocated.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from quantwm.errors import UserError

MAX_HEADER_BYTES = 16 << 20
MAX_HEADER_PARTS = 500_000
"""Commas and opening brackets. A cache of 40 layers and 40 spans has a header of 4 MB with 400,000;
16 MB of nothing but empty lists would take 5 s and 400 MB to parse."""

BLOCK_BYTES = 64 << 20
"""Moved between a device and the file at once."""

DTYPES: dict[str, torch.dtype] = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: what it is, and where its bytes begin behind the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int

    def empty(self) -> Tensor:
        """Without data: what it would be."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a file; it appears whole or not at all. Tensors are contiguous, on any device.

    Raises UserError when it cannot be written.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    stop = 0
    for name, tensor in tensors.items():
        start, stop = stop, stop + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
    text = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES or _parts(text) > MAX_HEADER_PARTS:
        raise UserError(f"{path.name}: {len(tensors):,} tensors are too many for one file")
    partial = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _write_file(partial, text, tensors)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


def _write_file(path: Path, header: bytes, tensors: Mapping[str, Tensor]) -> None:
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        for tensor in tensors.values():
            _write_tensor(file, tensor)


def _write_tensor(file: BinaryIO, tensor: Tensor) -> None:
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    for part in flat.split(BLOCK_BYTES):
        file.write(part.cpu().numpy().data)


def read_header(file: BinaryIO, name: str) -> tuple[list[Entry], dict[str, str]]:
    """Tensors and metadata of an open file, checked against its size; no data is read.

    name: of the file, for messages. Raises UserError.
    """
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > size - 8:
        raise UserError(f"{name} is cut short: its header does not fit in {size:,} bytes")
    if length > MAX_HEADER_BYTES:
        raise UserError(f"{name}: a header of {length:,} bytes is more than {MAX_HEADER_BYTES:,}")
    header = parse_json(file.read(length), name)
    if not isinstance(header, dict):
        raise UserError(f"{name}: the header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise UserError(f"{name}: __metadata__ is not an object of texts")
    entries = sorted((_entry(name, *item) for item in header.items()), key=lambda e: e.start)
    stop = 0
    for entry in entries:
        if entry.start != stop:
            raise UserError(f"{name}: tensor {entry.name[:40]!r} does not begin where another ends")
        stop += entry.nbytes
    if stop != size - 8 - length:
        raise UserError(f"{name}: tensors of {stop:,} bytes in {size - 8 - length:,} bytes of data")
    return entries, metadata


def _entry(file: str, name: str, found: object) -> Entry:
    if not isinstance(found, dict) or set(found) != {"dtype", "shape", "data_offsets"}:
        raise UserError(f"{file}: tensor {name[:40]!r} is not dtype, shape and data_offsets")
    dtype, shape, offsets = found["dtype"], found["shape"], found["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise UserError(f"{file}: tensor {name[:40]!r} has an unknown dtype")
    if not is_counts(shape) or len(shape) > 6 or not is_counts(offsets) or len(offsets) != 2:
        raise UserError(f"{file}: shape and offsets of {name[:40]!r} are not whole numbers from 0")
    nbytes = DTYPES[dtype].itemsize
    for count in shape:
        nbytes *= count
        if nbytes > 2**62:  # so that a product of many numbers stays a number
            break
    if offsets[1] - offsets[0] != nbytes:
        raise UserError(f"{file}: tensor {name[:40]!r} of {shape} {dtype} has other offsets")
    return Entry(name, DTYPES[dtype], tuple(shape), offsets[0], nbytes)


def is_counts(value: object) -> bool:
    """Whether it is a list of whole numbers from 0 that a tensor could have."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**62 for n in value)


def read_tensors(
    file: BinaryIO, name: str, entries: Sequence[Entry], device: torch.device
) -> list[Tensor]:
    """The data of all entries in their order, each moved to the device before the next is read.

    The file stands behind its header. Raises UserError when it ends early.
    """
    tensors = []
    for entry in entries:
        flat = torch.empty(entry.nbytes, dtype=torch.uint8)
        if entry.nbytes and file.readinto(flat.numpy().data) != entry.nbytes:
            raise UserError(f"{name} ends inside tensor {entry.name[:40]!r}")
        tensors.append(flat.view(entry.dtype).view(entry.shape).to(device))
    return tensors


def _parts(text: bytes) -> int:
    return sum(text.count(mark) for mark in (b",", b"[", b"{"))


def parse_json(text: bytes | str, name: str) -> Any:
    """JSON without NaN, repeated keys or nesting deep enough to stop the parser; else UserError.

    It is also refused when it has so many parts that reading them would take seconds.
    """
    raw = text.encode(errors="replace") if isinstance(text, str) else text
    if _parts(raw) > MAX_HEADER_PARTS:
        raise UserError(f"{name}: a header of more than {MAX_HEADER_PARTS:,} parts")
    try:
        return json.loads(text, parse_constant=_refuse, object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:80]
        raise UserError(f"{name}: the header is not readable JSON ({reason})") from error


def printable(text: object, most: int = 60) -> str:
    """The beginning of what a file says, fit for one line of a message."""
    return "".join(c if c.isprintable() else "?" for c in str(text)[:most])


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found

"""What the commands share: one-line argument errors, the JSON last line, progress, devices."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

import torch

from quantwm.cache.formats import split_method, takes
from quantwm.errors import UserError


class Parser(argparse.ArgumentParser):
    """An argument parser whose mistakes are UserErrors: one line, no usage text."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def emit(document: Mapping[str, object]) -> None:
    """Print the result: the last line on standard output, one JSON document."""
    print(json.dumps(document, allow_nan=False), flush=True)


def say(text: str) -> None:
    """Print a line for the person; standard output stays free for the result."""
    print(text, file=sys.stderr, flush=True)


def open_folder(path: Path, option: str) -> Path:
    """Makes a folder that is to be written into. UserError when that is impossible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{option} must be a folder to write into: {path}: {error.strerror}") from (
            error
        )
    if not os.access(path, os.W_OK):
        raise UserError(f"{option} must be a folder to write into: {path} is read-only")
    return path


def progress(text: str) -> None:
    """Overwrite one progress line on a terminal; silent elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def progress_done() -> None:
    """Leave the progress line."""
    if sys.stderr.isatty():
        print(file=sys.stderr)


def names(text: str) -> tuple[str, ...]:
    """A comma-separated list, "bf16,qvg"."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def integer(low: int, high: int) -> Callable[[str], int]:
    """An argparse type: a whole number from low to high."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"{text[:40]!r} is not a whole number from {low:,} to {high:,}"
            )
        return value

    return read


def clustered(method: str, asked: int | None, default: int) -> dict[str, object]:
    """The setting "centroids" of a method: as asked for, or else the preset's own where one is
    named; nothing for formats without codebooks. What the method itself says comes before it."""
    name, own = split_method(method)
    if not takes(name, "centroids") or (asked is None and "preset" in own):
        return {}
    return {"centroids": default if asked is None else asked}


def add_device(parser: argparse.ArgumentParser) -> None:
    """The --device argument."""
    parser.add_argument(
        "--device",
        default="auto",
        help="auto (a GPU when there is one), cpu, cuda or cuda:N",
    )


def pick_device(text: str) -> torch.device:
    """The device of a --device argument. UserError when it does not exist."""
    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"unknown device {text[:40]!r}; use auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise UserError(f"device {text} does not exist: {count} CUDA devices found; use cpu")
    return device


def table(rows: list[list[str]]) -> str:
    """Rows of cells as aligned text; the first row is the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join(lines)


def number(value: float | None, digits: int = 3, unit: str = "") -> str:
    """A number for a table, "-" when there is none."""
    return "-" if value is None else f"{value:.{digits}f}{unit}"

"""What a command here checks before it spends time, and how it says what is wrong."""

from __future__ import annotations

import shlex
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from quantwm.cli.common import open_folder as open_folder  # for the commands here too
from quantwm.errors import UserError

SEEDS = 100
"""Maps of a run begin at 10,000 times its seed, unseen ones at 1,000,000: more would train on what
is measured."""
KEPT_FREE = 0.9
"""Share of the free memory that frames may take: latents, models and clips come after them."""


def in_one_line(command: Callable[[], None]) -> int:
    """Runs a command's work; a person's mistake ends it with one line and exit status 2."""
    try:
        command()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 0


def need_between(option: str, value: float, low: float, high: float | None = None) -> None:
    """UserError for a number outside low ... high; high None: no bound."""
    if value >= low and (high is None or value <= high):
        return
    wanted = f"at least {low}" if high is None else f"{low} to {high}"
    raise UserError(f"{option} must be {wanted}, got {value}")


def without_folders(words: Mapping[str, str], argv: Sequence[str]) -> str:
    """A command's arguments with a word in place of each of its folders, by option: a manifest
    says how weights were made, not where. As argparse reads them: --out=X, and --ou X too."""
    told: list[str] = []
    hidden = None
    for given in argv:
        if hidden is not None:
            given, hidden = hidden, None
        elif given.startswith("--"):
            option, equals, _ = given.partition("=")
            word = words.get(option) or next(
                (word for known, word in words.items() if known.startswith(option)), None
            )
            if word is not None and equals:
                given = f"{option}={word}"
            elif word is not None:
                hidden = word
        told.append(given)
    return shlex.join(told)


def check_frames_fit(
    episodes: int, of_one: int, free: int | None, option: str = "--episodes"
) -> None:
    """UserError when the frames of `episodes`, of_one bytes each, are more than they may take of
    `free` bytes; None: not known, then it is tried. option: what sets their number."""
    if free is not None and episodes * of_one > KEPT_FREE * free:
        raise UserError(
            f"the frames of {episodes} episodes take {episodes * of_one / 1e9:.1f} GB and "
            f"{free / 1e9:.1f} are free; {option} {int(KEPT_FREE * free / of_one)} would fit"
        )


def stored_shape(path: Path) -> tuple[int, ...]:
    """Shape of the frames of an episode's file, of which only the head is read; () when damaged."""
    try:
        with zipfile.ZipFile(path) as parts, parts.open("frames.npy") as head:
            version = np.lib.format.read_magic(head)
            read = {(1, 0): np.lib.format.read_array_header_1_0}.get(
                version, np.lib.format.read_array_header_2_0
            )
            return read(head)[0]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return ()


def check_episodes(folder: Path, shape: tuple[int, ...], all_must_fit: bool) -> None:
    """UserError when episodes that lie in a folder already are not of this shape: any of them, or
    every one of them (a few damaged ones among hundreds are left out later)."""
    paths = sorted(folder.glob("episode-*.npz"))
    bad = [path for path in paths if stored_shape(path) != shape]
    if bad and (all_must_fit or len(bad) == len(paths)):
        found = stored_shape(bad[0])
        said = f"has frames of {list(found)}" if found else "cannot be read"
        raise UserError(
            f"{bad[0]} {said}, this run needs {list(shape)}; give another --work, or remove it and "
            f"{len(bad) - 1} more like it"
        )

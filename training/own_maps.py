"""Maps that somebody else made: which ones a WAD holds, and which are kept unseen."""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quantwm.errors import UserError

LUMP = struct.Struct("<ii8s")
HEAD = struct.Struct("<4sii")
MOST_LUMPS = 100_000
NAME = re.compile(r"[A-Z0-9][A-Z0-9_]*")
"""What a map may be called: names go onto command lines and into messages."""


@dataclass(frozen=True)
class OwnMaps:
    """Some maps of a WAD; an episode of seed s walks the (s modulo n)-th of the n."""

    wad: Path
    names: tuple[str, ...]

    def of_seed(self, seed: int) -> str:
        """The map's name."""
        return self.names[seed % len(self.names)]

    @property
    def arguments(self) -> list[str]:
        """The same for a process's command line."""
        return ["--wad", str(self.wad.resolve()), "--maps", *self.names]


def is_whole_game(wad: Path) -> bool:
    """Whether a WAD brings its own art (IWAD) or needs a game's (PWAD)."""
    with wad.open("rb") as file:
        return file.read(4) == b"IWAD"


def map_names(wad: Path) -> list[str]:
    """Names of the maps in a WAD, in its order. UserError when it is none or holds none."""
    try:
        data = wad.read_bytes()
    except OSError as error:
        raise UserError(f"--wad must be a WAD file: {wad}: {error.strerror}") from error
    kind, count, start = HEAD.unpack(data[: HEAD.size].ljust(HEAD.size, b"\0"))
    end = start + count * LUMP.size
    if kind not in (b"IWAD", b"PWAD") or not 0 < count <= MOST_LUMPS or not 0 < start < end:
        raise UserError(f"--wad must be a WAD file, an IWAD or a PWAD: {wad} is neither")
    if end > len(data):
        raise UserError(f"{wad} is cut off: its directory of {count} lumps is not in it")
    lumps = [LUMP.unpack_from(data, start + i * LUMP.size)[2] for i in range(count)]
    names = [lump.split(b"\0")[0].decode("ascii", "replace").upper() for lump in lumps]
    # a map is a marker followed by its things (Doom's format) or its text (UDMF)
    starts = [a for a, b in itertools.pairwise(names) if b in ("THINGS", "TEXTMAP")]
    maps = [name for name in starts if NAME.fullmatch(name)]
    if not maps:
        raise UserError(f"{wad} holds no map; a map is a marker such as MAP01 and its lumps")
    return maps


def choose_names(wad: Path, wanted: Sequence[str] | None) -> tuple[str, ...]:
    """Those maps of a WAD, all without a wish. UserError for one that it does not hold."""
    there = map_names(wad)
    named = tuple(name.upper() for name in wanted or there)
    for name in named:
        if name not in there:
            raise UserError(f"{wad} holds no map {name}; it holds {', '.join(there)}")
    return named


def choose_maps(
    wad: Path, wanted: Sequence[str] | None, unseen: Sequence[str] | None
) -> tuple[OwnMaps, OwnMaps]:
    """The maps to train on and those to measure on.

    Without `unseen`, every fifth map (the last of each five, and at least one) is kept from
    training where there are three or more; of one or two maps all serve for both.
    """
    named = list(choose_names(wad, wanted))
    apart = list(choose_names(wad, unseen)) if unseen else []
    if not apart and len(named) >= 3:
        apart = named[4::5] or named[-1:]
    trained = [name for name in named if name not in apart] if apart else named
    if not trained:
        raise UserError("--unseen-maps leaves no map to train on; leave one out")
    return OwnMaps(wad, tuple(trained)), OwnMaps(wad, tuple(apart or named))

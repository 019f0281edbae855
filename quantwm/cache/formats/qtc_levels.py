"""Lloyd-Max levels of the unit Gaussian for 1 to 6 bits, and the quantizer built on them."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

MAX_WIDTH = 6


def lloyd_max(bits: int, iterations: int = 20000) -> list[float]:
    """The positive half of the 2**bits levels that minimise the mean squared error.

    Lloyd's two conditions in turn: borders half-way between levels, levels at the mean of the
    density between borders. 6 bits settle to 12 digits within 20,000 rounds.
    """
    count = 2 ** (bits - 1)
    levels = [4.0 * (i + 0.5) / count for i in range(count)]
    for _ in range(iterations):
        borders = [0.0, *((a + b) / 2 for a, b in pairwise(levels)), math.inf]
        updated = [_mean(a, b) for a, b in pairwise(borders)]
        moved = max(abs(a - b) for a, b in zip(levels, updated, strict=True))
        levels = updated
        if moved < 1e-13:
            break
    return levels


def distortion(levels: list[float] | tuple[float, ...]) -> float:
    """Mean squared error of a unit Gaussian on these positive levels and their mirror image."""
    borders = [0.0, *((a + b) / 2 for a, b in pairwise(levels)), math.inf]
    cells = zip(levels, pairwise(borders), strict=True)
    # At a centroid, E[(x - level)^2] = E[x^2] - level^2 P per cell.
    return 1.0 - 2.0 * sum(level**2 * _mass(a, b) for level, (a, b) in cells)


def _mass(low: float, high: float) -> float:
    return 0.5 * (math.erfc(low / math.sqrt(2)) - math.erfc(high / math.sqrt(2)))


def _mean(low: float, high: float) -> float:
    def density(x: float) -> float:
        return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    return (density(low) - density(high)) / _mass(low, high)


def source_text() -> str:
    """The tables below as code, as `lloyd_max` gives them."""
    lines = ["HALF_LEVELS: tuple[tuple[float, ...], ...] = ("]
    for bits in range(1, MAX_WIDTH + 1):
        row = [f"{level:.9f}" for level in lloyd_max(bits)]
        lines.append("    (")
        for start in range(0, len(row), 7):
            lines.append("        " + ", ".join(row[start : start + 7]) + ",")
        lines.append("    ),")
    return "\n".join([*lines, ")"])


# fmt: off
HALF_LEVELS: tuple[tuple[float, ...], ...] = (
    (
        0.797884561,
    ),
    (
        0.452780035, 1.510417608,
    ),
    (
        0.245094179, 0.756005281, 1.343909279, 2.151945705,
    ),
    (
        0.128395030, 0.388048299, 0.656759119, 0.942340456, 1.256231197, 1.618046386, 2.069017227,
        2.732589571,
    ),
    (
        0.065889660, 0.198051830, 0.331378306, 0.466699523, 0.604933624, 0.747135704, 0.894565117,
        1.048783320, 1.211804381, 1.386340340, 1.576228079, 1.787233218, 2.028728399, 2.317739404,
        2.691119577, 3.260732493,
    ),
    (
        0.033409506, 0.100278289, 0.167296903, 0.234566985, 0.302192846, 0.370282645, 0.438949672,
        0.508313781, 0.578503031, 0.649655581, 0.721921941, 0.795467656, 0.870476587, 0.947154945,
        1.025736349, 1.106488240, 1.189720142, 1.275794486, 1.365141020, 1.458276375, 1.555831225,
        1.658588900, 1.767541883, 1.883977241, 2.009611043, 2.146810217, 2.298981210, 2.471304798,
        2.672273835, 2.917406791, 3.240437055, 3.744101271,
    ),
)
# fmt: on
"""`source_text()` of the functions above; a test compares them."""

DISTORTIONS = (1.0, *(distortion(half) for half in HALF_LEVELS))
"""Of a unit Gaussian coded with 0 .. 6 bits."""


@lru_cache(maxsize=8)
def table(device: torch.device) -> Tensor:
    """All levels behind each other, float32 [128]; level 2**b + code is that of a b-bit code.

    For b from 0 to 6: level 1, the one level of 0 bits, is 0.
    """
    rows = [torch.zeros(2)]
    rows += [torch.tensor([-x for x in reversed(half)] + list(half)) for half in HALF_LEVELS]
    return torch.cat(rows).to(device)


@lru_cache(maxsize=8)
def pair_table(device: torch.device) -> Tensor:
    """Two levels at once, complex64 [2**15]: of the bytes of a 16-bit word, low one first."""
    levels = table(device)
    high, low = torch.meshgrid(levels, levels, indexing="ij")
    pairs = torch.zeros(128, 256, dtype=torch.complex64, device=device)
    pairs[:, :128] = torch.complex(low, high)
    return pairs.flatten()


def look_up(places: Tensor) -> Tensor:
    """Levels at places of `table`. uint8 [N, even] -> float32 of the same shape."""
    words = places.contiguous().view(torch.int16)
    levels = pair_table(places.device).index_select(0, words.flatten().int())
    return torch.view_as_real(levels).view(places.shape)


@lru_cache(maxsize=64)
def borders(bits: int, device: torch.device) -> Tensor:
    """Values at which the code changes, float32 [2**bits - 1]."""
    half = HALF_LEVELS[bits - 1]
    positive = [(a + b) / 2 for a, b in pairwise(half)]
    return torch.tensor([-x for x in reversed(positive)] + [0.0, *positive], device=device)


def quantize(x: Tensor, bits: int) -> Tensor:
    """Code of the nearest level. x: float32, any shape -> uint8; the lower one on a tie."""
    edges = borders(bits, x.device)
    if bits > 3:
        return torch.bucketize(x.contiguous(), edges).to(torch.uint8)
    # Up to 7 comparisons take less than a binary search does.
    codes = (x > edges[0]).to(torch.uint8)
    for edge in edges[1:]:
        codes += x > edge
    return codes


CELLS = 64
"""Cells of 1/16 along the positive half line; borders of 6 bits are .067 apart, one in a cell."""
LAST_CELL = 4.0 - 1 / 16
"""Beyond it a magnitude counts as in the last cell, which no border is above."""


@lru_cache(maxsize=8)
def cell_table(device: torch.device) -> Tensor:
    """The quantizer as one look-up, by width 0 .. 6 and cell of the magnitude, int32 [7, CELLS].

    The border in the cell (a huge number where there is none) as a float32 whose five lowest bits
    are the number of positive borders below the cell: at most 2**-18 of it from where it should be.
    """
    edge = torch.arange(CELLS + 1) / 16.0
    counts = torch.zeros(MAX_WIDTH + 1, CELLS, dtype=torch.int32)
    inside = torch.full((MAX_WIDTH + 1, CELLS), 1e38)
    for bits in range(1, MAX_WIDTH + 1):
        positive = borders(bits, torch.device("cpu"))[2 ** (bits - 1) :]
        below = (positive[None, :] < edge[:, None]).sum(1)
        counts[bits] = below[:-1].to(torch.int32)
        cells = torch.bucketize(positive, edge, right=True) - 1
        inside[bits, cells] = positive
    return ((inside.view(torch.int32) & -32) | counts).to(device)


@lru_cache(maxsize=8)
def pair_levels(device: torch.device) -> Tensor:
    """Levels of two codes at once, for the kernel: two BF16, the first in the lower half.

    int32 [5461]; pairs of w-bit codes begin at (4**w - 1) / 3. A pair's code has digit 0 of both
    codes in its lowest 4 bits, then digit 1, digit 2, the odd bits, as they lie in the words of
    qtc_planes.py.
    """
    levels, parts = table(torch.device("cpu")), []
    for width in range(MAX_WIDTH + 1):
        code = torch.arange(4**width)
        both = torch.zeros(2, 4**width, dtype=torch.long)
        for digit in range(width // 2):
            field = (code >> 4 * digit) & 15
            both += torch.stack((field & 3, field >> 2)) << 2 * digit
        if width % 2:
            field = code >> 4 * (width // 2)
            both += torch.stack((field & 1, field >> 1)) << (width - 1)
        parts.append(levels[2**width + both].t())
    return torch.cat(parts).to(torch.bfloat16).contiguous().view(torch.int32).flatten().to(device)

"""Bytes of the scratch that a cache of some length will have been given; see workspace.py."""

from __future__ import annotations

from quantwm.cache.workspace import GROWTH, SCRATCH_LIMIT, heads_at_once


def scratch_bytes(
    heads: int, head_dim: int, tokens: int, chunk: int, windowed: bool, itemsize: int
) -> int:
    """Keys and values of one layer: a window is reserved at once, an open history in steps.

    tokens: of the history and the chunk that reads it. chunk: by which an open history grows; 0
    where it is not known, and then the scratch is what these tokens need.
    """
    most = SCRATCH_LIMIT // (2 * itemsize)
    held, seen = 0, tokens if windowed or not chunk else min(chunk, tokens)
    while True:
        together = heads_at_once(heads, seen, head_dim, itemsize)
        needed = together * seen * head_dim
        if needed > held:
            held = max(needed, min(int(held * GROWTH), most) // head_dim * head_dim)
        if seen >= tokens:
            return held * 2 * itemsize
        # The next length that does not fit; beyond the limit every length is given its own.
        room = held // (together * head_dim) // chunk * chunk + chunk
        seen = tokens if needed >= most else min(max(room, seen + chunk), tokens)

"""Keys without the rotation of their positions, for formats that ask for it: undone and redone.

RoPE turns the pairs of a key by its place, so that one channel of two keys that mean the same
differs from place to place. What is fitted to keys (centroids, ranges, the queries' directions)
fits better once that is undone. It is a rotation, so no error grows by it. Queries are un-rotated
too, and their moment is averaged over the relative positions that they will read from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from quantwm.cache.dispatch import Decode, note_fallback
from quantwm.cache.formats.qtc_metric import mean_over_offsets
from quantwm.cache.positions import TokenPositions, rotate_, turns
from quantwm.cache.spec import RopeLayout
from quantwm.cache.statistics import moment

HORIZON_FRAMES = 64
"""Frames ahead of a key from which a query may read it, or the cache's window where that is less:
as the transform code has it (QtcConfig.horizon_frames)."""


CPU_ELEMENTS, GPU_ELEMENTS = 1 << 17, 1 << 23
"""Of the float32 temporary that is turned: 512 KB stay in a core's L2 cache, and are what decoding
works on anyway; on a GPU 32 MB, so that launches do not count."""


@runtime_checkable
class Unrotates(Protocol):
    """A format whose keys may come without their rotation."""

    unrotates: bool
    """Whether they are to."""


def wants_unrotated(fmt: Any) -> bool:
    """Whether keys are to come to this format without their rotation."""
    return isinstance(fmt, Unrotates) and fmt.unrotates


@dataclass(frozen=True)
class KeyTurns:
    """How RoPE turned the keys of some tokens; the same in all slots.

    Attributes:
        rope: of the stream, with positions baked into its keys.
        positions: of the tokens.
    """

    rope: RopeLayout
    positions: TokenPositions

    @classmethod
    def of(cls, rope: RopeLayout | None, positions: TokenPositions) -> KeyTurns | None:
        """None where there is nothing to undo: no position is in the keys, or nobody knows how."""
        return None if rope is None or not rope.baked else cls(rope, positions)

    def of_slot(self, slot: int) -> KeyTurns:
        return self

    def select(self, keep: slice | Tensor) -> KeyTurns:
        """Of the tokens in a range, or at ascending int64 positions (a CPU tensor)."""
        return replace(self, positions=self.positions.select(keep))

    def joined(self, later: KeyTurns) -> KeyTurns:
        """Of these and later tokens behind them."""
        return replace(self, positions=self.positions.joined(later.positions))

    def tensors(self) -> list[Tensor]:
        """What it holds beside the places of tokens: nothing."""
        return []

    def places(self) -> list[Tensor]:
        """Of its tokens, once some between them were dropped."""
        return [] if self.positions.places is None else [self.positions.places]

    def undone(self, x: Tensor) -> Tensor:
        """Without the rotation, in x's type. x: [H, N, D]."""
        turn = turns(self.rope, self.positions, 0, self.positions.count, x.device)
        return rotate_(x.to(torch.float32, copy=True), turn, inverse=True).to(x.dtype)

    def redo(
        self, decode: Decode, out: Tensor, offset: int, start: int, stop: int, first_head: int
    ) -> None:
        """Tokens start..stop-1 of a span without rotation, turned; as `dispatch.Decode` has it."""
        turn = turns(self.rope, self.positions, start, stop, out.device)
        heads, _, head_dim = out.shape
        together, room = (heads, GPU_ELEMENTS) if out.is_cuda else (1, CPU_ELEMENTS)
        step = max(room // (together * head_dim), 1)
        for head in range(0, heads, together):
            for first in range(start, stop, step):
                last = min(first + step, stop)
                keys = torch.empty(together, last - first, head_dim, device=out.device)
                decode(keys, 0, first, last, first_head + head)
                rotate_(keys, turn[first - start : last - start])
                place = slice(offset + first - start, offset + last - start)
                out[head : head + together, place] = keys


def query_moment(
    q: Tensor, rope: RopeLayout | None, positions: TokenPositions, window_frames: int | None
) -> Tensor | None:
    """Sum over q of what un-rotated keys are read by, at all relative positions.

    q: [H, Nq, D] at these positions -> float32 [H, D, D]; the trace is that of `moment`. None where
    queries are fewer or more than the tokens whose positions are known.
    """
    if rope is None:
        return moment(q)
    if q.shape[1] != positions.count:
        note_fallback(
            "un-rotated keys learn nothing from queries without a token each: where they "
            "stand is not known"
        )
        return None
    known = KeyTurns.of(rope, positions)
    seen = moment(q if known is None else known.undone(q.float()))
    horizon = min(HORIZON_FRAMES, window_frames or HORIZON_FRAMES)
    return mean_over_offsets(seen.double(), rope, horizon).float()

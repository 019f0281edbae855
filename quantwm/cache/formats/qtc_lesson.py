"""What past chunks taught, as encoding takes it: bases that spans share, a guide for each chunk."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from quantwm.cache.dispatch import qtc_kernels
from quantwm.cache.formats.qtc_basis import Basis
from quantwm.cache.formats.qtc_metric import metric
from quantwm.cache.formats.qtc_ready import Ready
from quantwm.cache.formats.qtc_statistics import QueryMoment, SlotStatistics
from quantwm.cache.formats.qtc_tokens import Projection
from quantwm.cache.positions import TokenPositions
from quantwm.cache.spec import RopeLayout


@dataclass(frozen=True)
class Lesson:
    """The bases of all slots, shared by every span that is encoded while they last.

    Attributes:
        generation: counts bases since the cache was reset, from 1.
        keys, values: one basis per slot.
        asked_at: tokens seen when it was last asked whether a new one would pay.
        promised: mean cost of a token's error, per slot, of keys and of values, per head.
    """

    generation: int
    keys: tuple[Basis, ...]
    values: tuple[Basis, ...]
    asked_at: int
    promised: tuple[tuple[tuple[float, ...], tuple[float, ...]], ...]

    @property
    def key(self) -> int:
        return self.generation

    def tensors(self) -> list[Tensor]:
        return [t for basis in (*self.keys, *self.values) for t in basis.tensors()]


@dataclass(frozen=True)
class SlotGuide:
    """What encoding one slot's chunk needs: where its tokens stand, what past chunks taught."""

    rope: RopeLayout | None
    positions: TokenPositions
    queries: QueryMoment
    horizon_frames: int
    keys: Basis | None
    values: Basis | None
    asked_at: int = 0
    slot: int = 0
    ready: Ready | None = None

    @classmethod
    def unknown(cls, tokens: int, device: torch.device) -> SlotGuide:
        """Before anything is known: the first tokens, no position in the keys."""
        queries = SlotStatistics.empty(device).queries
        return cls(None, TokenPositions(0, tokens), queries, 1, None, None)

    def metric(self) -> Tensor | None:
        """Of key errors, float64 or float32 [H, D, D]; None before any query."""
        found = None if self.ready is None else self.ready.metric(self.slot)
        if found is not None:
            return found
        return slot_metric(self.queries, self.rope, self.horizon_frames)

    def projection(self, role: str) -> Projection | None:
        """On the basis of keys in that metric, or of values in the plain one, where it is made for
        a run of slots at once."""
        return None if self.ready is None else self.ready.projection(self.slot, role)


@dataclass(frozen=True)
class LearnedGuide:
    """The same for all slots of one chunk; positions are those of its tokens that are encoded."""

    rope: RopeLayout | None
    positions: TokenPositions
    queries: tuple[QueryMoment, ...]
    horizon_frames: int
    lesson: Lesson | None

    def of_slot(self, slot: int) -> SlotGuide:
        lesson = self.lesson
        return SlotGuide(
            self.rope,
            self.positions,
            self.queries[slot],
            self.horizon_frames,
            None if lesson is None else lesson.keys[slot],
            None if lesson is None else lesson.values[slot],
            0 if lesson is None else lesson.asked_at,
            slot,
            self._ready,
        )

    @cached_property
    def _ready(self) -> Ready | None:
        """None where the kernels do not run, and before anything was seen."""
        known = self.queries[0].moment.deviations
        if not self.queries[0].count and self.lesson is None:
            return None
        if self.lesson is None:
            shape, bases = known.shape, None
        else:
            shape = self.lesson.keys[0].mean.shape
            bases = self.lesson.keys, self.lesson.values
        kernels = qtc_kernels(known.device, shape[1])
        if kernels is None:
            return None
        return Ready(kernels, self.rope, self.queries, self.horizon_frames, bases, tuple(shape))

    def forget(self) -> None:
        """Drop what was made for the encoding alone; it is made again when asked for."""
        self.__dict__.pop("_ready", None)

    def select(self, keep: slice | Tensor) -> LearnedGuide:
        return replace(self, positions=self.positions.select(keep))

    def tensors(self) -> list[Tensor]:
        """What it holds beside the bases and the places of tokens."""
        ready = self.__dict__.get("_ready")
        made = [] if ready is None else ready.tensors()
        return [*(t for slot in self.queries for t in slot.moment.tensors()), *made]

    def places(self) -> list[Tensor]:
        """Of its tokens, once some between them were dropped."""
        return [] if self.positions.places is None else [self.positions.places]


def slot_metric(queries: QueryMoment, rope: RopeLayout | None, horizon: int) -> Tensor | None:
    """Metric of key errors, float64 [H, D, D]; None before any query."""
    if not queries.count:
        return None
    return metric(queries.moment.matrix(), rope, horizon)

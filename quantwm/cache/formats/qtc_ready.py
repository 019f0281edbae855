"""What encoding a chunk needs of past queries and of the bases, for a run of layers at once.

On a GPU only: one layer's matrices are some 40 of 128 x 128, and the 124 small operations that
metric and projection take cost more in launches than in arithmetic. Layers are written in order,
so the newest run is all that is held (52 MB at D = 128), and it is dropped when the chunk is
committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantwm.cache.dispatch import QtcKernels
from quantwm.cache.formats import qtc_metric
from quantwm.cache.formats.qtc_basis import Basis
from quantwm.cache.formats.qtc_correlations import Correlations
from quantwm.cache.formats.qtc_statistics import QueryMoment
from quantwm.cache.formats.qtc_tokens import Projection
from quantwm.cache.spec import RopeLayout

HEADS = 320
"""Of a run: 8 layers of 40 heads, whose products fill a GPU."""


@dataclass(frozen=True)
class _Run:
    """Of slots first .. first + count - 1, heads behind each other."""

    first: int
    metric: Tensor | None
    keys: Projection | None
    values: Projection | None


class Ready:
    """Metrics and projections of all slots, made a run of slots at a time."""

    def __init__(
        self,
        kernels: QtcKernels,
        rope: RopeLayout | None,
        queries: Sequence[QueryMoment],
        horizon_frames: int,
        bases: tuple[Sequence[Basis], Sequence[Basis]] | None,
        shape: tuple[int, int],
    ) -> None:
        """bases: keys' and values' by slot; shape: heads and their size."""
        self._kernels, self._rope, self._queries = kernels, rope, queries
        self._horizon, self._bases = horizon_frames, bases
        self._heads, self._head_dim = shape
        self._slots = max(1, HEADS // self._heads)
        self._held: _Run | None = None

    def metric(self, slot: int) -> Tensor | None:
        """Of a slot's key errors, float32 [H, D, D]; None before any query."""
        found = self._run(slot).metric
        return None if found is None else found[self._own(slot)]

    def projection(self, slot: int, role: str) -> Projection | None:
        """On a slot's basis in that metric, of values in the plain one; None without a basis."""
        found = getattr(self._run(slot), role)
        return None if found is None else found.heads(self._own(slot))

    def tensors(self) -> list[Tensor]:
        """All that it holds now."""
        run = self._held
        if run is None:
            return []
        found = [] if run.metric is None else [run.metric]
        for part in (run.keys, run.values):
            found += [] if part is None else [part.high, part.low, part.costs]
        return found

    def _own(self, slot: int) -> slice:
        first = (slot % self._slots) * self._heads
        return slice(first, first + self._heads)

    def _run(self, slot: int) -> _Run:
        first = slot // self._slots * self._slots
        if self._held is None or self._held.first != first:
            self._held = None  # before its memory is wanted for the next
            self._held = self._made(first)
        return self._held

    def _made(self, first: int) -> _Run:
        some = slice(first, first + self._slots)
        metric = None
        if all(moment.count for moment in self._queries[some]):
            moments = Correlations.joined([m.moment for m in self._queries[some]]).matrix()
            metric = qtc_metric.metric(moments, self._rope, self._horizon, torch.float32)
        if self._bases is None:
            return _Run(first, metric, None, None)
        keys, values = (_joined(bases[some]) for bases in self._bases)
        of: Any = Projection.of
        return _Run(first, metric, of(self._kernels, keys, metric), of(self._kernels, values, None))


def _joined(bases: Sequence[Basis]) -> Basis:
    """The heads of all of them behind each other."""
    columns = zip(*(basis.tensors() for basis in bases), strict=True)
    widths = tuple(width for basis in bases for width in basis.host_widths)
    return Basis(*map(torch.cat, columns), widths)

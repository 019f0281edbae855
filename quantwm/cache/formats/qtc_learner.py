"""Life of a basis: learned from past chunks only, replaced at growing distances and when it pays.

The first basis comes when enough tokens have been seen. From then on, each time their number has
grown by half, the question is: would a new basis take more off the error, as measured since the
last time, than its own bytes would if they were spent on codes?
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from quantwm.cache.dispatch import note_fallback
from quantwm.cache.formats import qtc_basis
from quantwm.cache.formats.qtc_basis import Basis, basis_bytes
from quantwm.cache.formats.qtc_correlations import Correlations
from quantwm.cache.formats.qtc_doubts import doubts
from quantwm.cache.formats.qtc_lesson import LearnedGuide, Lesson, slot_metric
from quantwm.cache.formats.qtc_metric import metric
from quantwm.cache.formats.qtc_span import QtcSpan
from quantwm.cache.formats.qtc_statistics import SlotStatistics
from quantwm.cache.formats.qtc_tokens import Tokens
from quantwm.cache.formats.qtc_worker import Job
from quantwm.cache.positions import TokenPositions
from quantwm.cache.spec import RopeLayout

OutputMetric = Callable[[int], Tensor]
"""Slot -> W^T W of the rows of the output weights that each head's values meet, [H, D, D]."""
GROWTH = 1.5
MEASURED = 64
"""Tokens of a chunk, evenly spread, on which the error is measured: it is asked about all heads of
all layers together, so one chunk of 3 heads and 10 layers leaves 3 % of a deviation to chance."""
ASKED = 64
"""Queries of a chunk that say which of its tokens matter."""
MOST_MASS = 8.0
"""Of a token, in means: a token that gets all the attention is no covariance."""
LEARNED = 1536
"""Tokens of a chunk, at least and evenly spread, that teach once ENOUGH have: 3.6 % of a variance
is left to chance in one chunk, and a chunk of 4,680 takes a third of the time."""
ENOUGH = 32
"""Tokens a channel that have been seen when chunks begin to be thinned."""
MATRICES = 512
"""Heads whose bases are made together: at D = 128 a float64 matrix each is 64 MB, and there are a
few of them."""
KEY_SHRINKAGE, VALUE_SHRINKAGE = 0.05, 0.03


@dataclass(frozen=True)
class Coding:
    """What a basis is made to: bits a token, channels that may be coded, most bits of a channel,
    keys then values; the relative positions that its metric is averaged over (none at 0); whether
    it weighs by queries at all; what an error of a value costs (qtc.py); and the tokens seen before
    the first one."""

    budgets: tuple[int, int]
    rows: tuple[int, int]
    max_widths: tuple[int, int]
    horizon_frames: int
    weigh: bool
    value_metric: str
    first_tokens: int


Told = tuple[Lesson | None, tuple[str, ...]]
"""What the worker gives: the next lesson, and notes for `explain`."""


class QtcLearner:
    """Statistics of all slots and what is made of them. Immutable: `with_chunk` gives the next.

    What it makes is made by the worker, always, so that whoever asks gets the same bits.
    """

    def __init__(
        self,
        coding: Coding,
        rope: RopeLayout | None,
        statistics: Sequence[SlotStatistics],
        window_tokens: int,
        output: OutputMetric | None = None,
    ) -> None:
        """window_tokens: that a history holds at most; 0 without a limit. output: the metric of a
        slot's value errors, None for their squares."""
        self.coding, self.rope = coding, rope
        self.statistics = tuple(statistics)
        self.window_tokens, self.output = window_tokens, output
        self._job: tuple[Lesson | None, Job[Told]] | None = None
        self._guide: LearnedGuide | None = None

    def tensors(self) -> list[Tensor]:
        return [tensor for slot in self.statistics for tensor in slot.tensors()]

    def observe(
        self,
        slot: int,
        k: Tensor,
        v: Tensor,
        q: Tensor | None,
        positions: TokenPositions,
        encoded: tuple[QtcSpan, QtcSpan] | None,
    ) -> SlotStatistics:
        """The slot's statistics with a chunk in them.

        k, v: [H, N, D]; q: [H, Nq, D] or None; encoded: what the chunk's last tokens became, for
        the measured error; None while they stay BF16.
        """
        keys, values = Tokens.of(k, self.rope, positions), Tokens(v, None, positions)
        queries = mass = None
        if q is not None and self.coding.weigh and (self.rope is None or q.shape[1] == k.shape[1]):
            queries = Tokens.of(q, self.rope, positions)
        if q is not None and self.coding.value_metric == "attention":
            mass = attention_mass(q, k)
        before = self.statistics[slot]
        thin = before.keys.count >= ENOUGH * k.shape[2]
        after = before.with_chunk(
            self._taught(keys, thin), self._taught(values, thin),
            None if queries is None else self._taught(queries, thin), mass,
        )  # fmt: skip
        if encoded is None or encoded[0].asked_at == 0:
            return after
        return self._with_residual(slot, after, keys, values, encoded)

    def _taught(self, tokens: Tokens, thin: bool) -> tuple[Tokens, int]:
        """The tokens that teach, and how many they stand for.

        Every step-th, with a step that the columns of a frame are no multiple of part of, so that
        all columns come.
        """
        count = tokens.given.shape[1]
        step = max(count // LEARNED, 1) if thin else 1
        columns = 2 if self.rope is None else 2 * self.rope.grid[1]
        while math.gcd(step, columns) > 1:
            step -= 1
        return tokens.every(step), count

    def _with_residual(
        self,
        slot: int,
        after: SlotStatistics,
        keys: Tokens,
        values: Tokens,
        encoded: tuple[QtcSpan, QtcSpan],
    ) -> SlotStatistics:
        """Cost of the errors of some tokens, in the metric that the chunk was encoded with."""
        tokens = encoded[0].tokens
        step = -(-tokens // MEASURED)
        key_error, value_error = (
            part.last(tokens).every(step).plain - span.thinned(step)
            for part, span in zip((keys, values), encoded, strict=True)
        )
        metrics = self._written_with(slot), self._output(slot)
        cost = torch.stack(
            [
                ((e if read is None else e @ read.float()) * e).sum((1, 2), dtype=torch.float64)
                for e, read in zip((key_error, value_error), metrics, strict=True)
            ]
        )
        return after.with_residual(cost, key_error.shape[1], encoded[0].asked_at)

    def _written_with(self, slot: int) -> Tensor | None:
        """Metric that the open chunk's keys were encoded with."""
        known, guide = self.statistics[slot], self._guide
        if guide is not None and guide.queries[slot] is known.queries:
            return guide.of_slot(slot).metric()
        return self._metric(known)

    def with_chunk(self, observed: Mapping[int, SlotStatistics]) -> QtcLearner:
        if self._guide is not None:
            self._guide.forget()
        updated = [observed.get(slot, old) for slot, old in enumerate(self.statistics)]
        return QtcLearner(self.coding, self.rope, updated, self.window_tokens, self.output)

    def restored(self, statistics: Sequence[SlotStatistics]) -> QtcLearner:
        """The learner with statistics that another one had."""
        return QtcLearner(self.coding, self.rope, statistics, self.window_tokens, self.output)

    def guide(self, lesson: Lesson | None, positions: TokenPositions) -> LearnedGuide:
        queries = tuple(slot.queries for slot in self.statistics)
        self._guide = LearnedGuide(
            self.rope, positions, queries, self.coding.horizon_frames, lesson
        )
        return self._guide

    def begin(self, current: Lesson | None) -> None:
        """Start on what `lesson` will be asked after this chunk, beside the stream."""
        if self._asked(current) and (self._job is None or self._job[0] is not current):
            reads = [*self.tensors(), *([] if current is None else current.tensors())]
            work = partial(self._told, current)
            self._job = current, Job(work, reads, self.statistics[0].keys.total.device)

    def lesson(self, current: Lesson | None) -> Lesson | None:
        """The bases for the next chunk: the current ones, new ones, or none yet."""
        if not self._asked(current):
            return current
        self.begin(current)
        try:
            lesson, notes = self._job[1].result(_tensors_of)
        except BaseException:
            self._job = None  # it may be asked for again, and holds what the failed work held
            raise
        for note in notes:
            note_fallback(note)
        return lesson

    def in_work(self) -> tuple[list[Tensor], int]:
        """What `begin` has started: tensors once they are made, and until then the bytes that
        new bases of all slots will take (none where the present ones turn out to do)."""
        if self._job is None:
            return [], 0
        if self._job[1].running:
            heads, head_dim = self.statistics[0].keys.total.shape
            one = sum(basis_bytes(rows, head_dim) for rows in self.coding.rows)
            return [], len(self.statistics) * heads * one
        found = self._job[1].made()
        return ([] if found is None else _tensors_of(found)), 0

    def _seen(self) -> int:
        return min(slot.keys.count for slot in self.statistics)

    def _asked(self, current: Lesson | None) -> bool:
        first = self.coding.first_tokens if current is None else GROWTH * current.asked_at
        return self._seen() >= first

    def _told(self, current: Lesson | None) -> Told:
        """The next lesson, and all that `explain` is to be told of it."""
        lesson, note = self._next(current)
        found = doubts(self.statistics, (KEY_SHRINKAGE, VALUE_SHRINKAGE))
        return lesson, tuple(found if note is None else [note, *found])

    def _next(self, current: Lesson | None) -> tuple[Lesson | None, str | None]:
        """The next lesson, and what is to be said when there should have been another."""
        seen = self._seen()
        if current is not None and not self._pays(current, current, seen):
            return replace(current, asked_at=seen), None
        try:
            renewed = self._learn(1 if current is None else current.generation + 1, seen)
        except torch.linalg.LinAlgError as failure:
            kept = "codes without a basis" if current is None else "keeps its last basis"
            note = f"qtc {kept}: no basis comes of {seen:,} tokens ({failure})"
            return current and replace(current, asked_at=seen), note
        if current is None or self._pays(current, renewed, seen):
            return renewed, None
        return replace(current, asked_at=seen), None

    def _learn(self, generation: int, seen: int) -> Lesson:
        """Bases of all slots, some layers at a time."""
        heads, head_dim = self.statistics[0].keys.total.shape
        slots = max(1, MATRICES // heads)
        keys: list[Basis] = []
        values: list[Basis] = []
        promised: list[tuple[tuple[float, ...], tuple[float, ...]]] = []
        for first in range(0, len(self.statistics), slots):
            some = range(len(self.statistics))[first : first + slots]
            found = [self._fit(some, role, head_dim) for role in range(2)]
            for slot in range(len(some)):
                own = slice(slot * heads, (slot + 1) * heads)
                keys.append(found[0][0].heads(own))
                values.append(found[1][0].heads(own))
                promised.append((tuple(found[0][1][own]), tuple(found[1][1][own])))
        return Lesson(generation, tuple(keys), tuple(values), seen, tuple(promised))

    def _metric(self, slot: SlotStatistics) -> Tensor | None:
        return slot_metric(slot.queries, self.rope, self.coding.horizon_frames)

    def _output(self, slot: int) -> Tensor | None:
        return None if self.output is None else weighed_by(self.output(slot))

    def _fit(self, slots: Sequence[int], role: int, head_dim: int) -> tuple[Basis, list[float]]:
        """The basis of all heads of some slots, behind each other, and what it promises them."""
        known = [self.statistics[slot] for slot in slots]
        moments = [(own.keys, own.values)[role] for own in known]
        mean = torch.cat([m.mean for m in moments])
        cov = qtc_basis.covariance(
            Correlations.joined([m.scatter for m in moments]).matrix(),
            mean,
            (KEY_SHRINKAGE, VALUE_SHRINKAGE)[role],
        )
        metrics = [self._metric(own) for own in known]
        if role == 1:
            metrics = [self._output(slot) for slot in slots]
        read = None
        if any(metric is not None for metric in metrics):
            plain = torch.eye(head_dim, dtype=torch.float64, device=mean.device)
            plain = plain.expand(len(moments[0].mean), -1, -1)
            read = torch.cat([plain if metric is None else metric for metric in metrics])
        coding = self.coding
        basis, promised = qtc_basis.fit_basis(
            cov, read, mean, coding.budgets[role], coding.rows[role], coding.max_widths[role]
        )
        return basis, promised.tolist()

    def _pays(self, current: Lesson, other: Lesson, seen: int) -> bool:
        """Whether the measured error stands so far above another lesson's promise.

        A basis lasts, on average, as long again as the history that taught it (or the window).
        Its bits spread over those tokens would, as code bits, take 6 dB per bit and channel. With
        the current lesson for the other: whether to go and look, since on data as before a new
        basis promises what the last one did.
        """
        measured = [s for s in self.statistics if s.asked_at == current.asked_at]
        if len(measured) != len(self.statistics) or not measured[0].residual_count:
            return False
        cost = torch.stack([slot.residual / slot.residual_count for slot in measured])
        promised = torch.tensor(other.promised, dtype=torch.float64, device=cost.device)
        gained = torch.log2(cost.clamp(min=1e-30) / promised.clamp(min=1e-30)).mean((0, 2)) / 2
        life = min(seen, self.window_tokens) if self.window_tokens else seen
        worth = 0.0
        for role, bases in enumerate((other.keys, other.values)):
            coded = sum(16 * sum(w > 0 for w in widths) for b in bases for widths in b.host_widths)
            bits = 8 * sum(t.numel() * t.element_size() for b in bases for t in b.tensors())
            worth += float(gained[role]) * coded - bits / life
        return worth > 0 and math.isfinite(worth)


def _tensors_of(found: Told) -> list[Tensor]:
    return [] if found[0] is None else found[0].tensors()


def attention_mass(q: Tensor, k: Tensor) -> Tensor:
    """What a chunk's own queries give each of its tokens, float32 [H, N], mean 1 or less.

    q: [H, Nq, D], k: [H, N, D], as attention sees them; some queries, evenly spread.
    """
    step = -(-q.shape[1] // ASKED)
    scores = q[:, ::step].float() @ k.float().transpose(1, 2) * q.shape[2] ** -0.5
    return (torch.softmax(scores, dim=-1).mean(1) * k.shape[1]).clamp(max=MOST_MASS)


def weighed_by(output: Tensor) -> Tensor:
    """Metric of value errors, float64 [H, D, D], of output weights' W^T W: [H, D, D]."""
    return metric(output, None, 0)

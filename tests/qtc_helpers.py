"""Seeded tensors, keys with a spectrum, a qtc cache that remembers its input; shared by tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantwm.cache import CachePolicy, CacheSpec, KVCache, make_format
from quantwm.cache.formats.qtc_learner import QtcLearner
from quantwm.cache.positions import TokenPositions, rotate_, turns
from quantwm.cache.spec import RopeLayout

ROPE = RopeLayout((12, 10, 10), (2, 3))
SPEC = CacheSpec(layers=2, heads=2, head_dim=32, tokens_per_frame=6, frames_per_chunk=4, rope=ROPE)
SMALL_ROPE = RopeLayout((8, 4, 4), (2, 3))
CPU = torch.device("cpu")


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def positive_definite(seed: int, size: int = 32, heads: int = 2) -> Tensor:
    """float64 [heads, size, size] with a spectrum over three decades."""
    turn = torch.linalg.qr(randn(heads, size, size, seed=seed, dtype=torch.float64))[0]
    return turn @ torch.diag(torch.logspace(1, -2, size, dtype=torch.float64)) @ turn.mT


class Source:
    """q, k, v of a stationary process: few strong directions, others for queries, RoPE baked."""

    def __init__(self, spec: CacheSpec = SPEC, seed: int = 0, spread: float = 1.5) -> None:
        self.spec, self.generator = spec, torch.Generator().manual_seed(seed)
        size, heads = spec.head_dim, spec.heads
        self.shapes = [self._shape(heads, size, spread) for _ in range(3)]
        self.means = [self._randn(heads, 1, size) for _ in range(3)]

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def _shape(self, heads: int, size: int, spread: float) -> Tensor:
        turn = torch.linalg.qr(self._randn(heads, size, size))[0]
        return turn * torch.logspace(spread / 2, -spread / 2, size)

    def chunk(self, first_frame: int, frames: int) -> tuple[Tensor, Tensor, Tensor]:
        tokens = frames * self.spec.tokens_per_frame
        q, k, v = (
            self._randn(self.spec.heads, tokens, self.spec.head_dim) @ shape.mT + mean
            for shape, mean in zip(self.shapes, self.means, strict=True)
        )
        rope = self.spec.rope
        if rope is not None and rope.baked:
            places = TokenPositions(first_frame * self.spec.tokens_per_frame, tokens)
            turn = turns(rope, places, 0, tokens, CPU)
            rotate_(q, turn)
            rotate_(k, turn)
        return tuple(t.to(torch.bfloat16).float() for t in (q, k, v))  # type: ignore[return-value]


class Lane:
    """A cache, and the exact keys and values of what it was given."""

    def __init__(
        self,
        name: str = "qtc",
        policy: CachePolicy | None = None,
        spec: CacheSpec = SPEC,
        **more: Any,
    ) -> None:
        policy = CachePolicy(span_tokens=10**6) if policy is None else policy
        self.cache = KVCache(spec, make_format(name, **more), policy, dtype=torch.float32)
        self.exact: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(spec.layers)]
        self.queries: list[Tensor] = []

    def run(
        self,
        source: Source,
        chunks: int,
        keep_mask: Tensor | None = None,
        edit: Any = None,
        queries: bool = True,
    ) -> Lane:
        spec = self.cache.spec
        for _ in range(chunks):
            first = self.cache.next_frame or 0
            self.cache.begin_chunk(first, spec.frames_per_chunk)
            for layer in range(spec.layers):
                q, k, v = source.chunk(first, spec.frames_per_chunk)
                if edit is not None:
                    q, k, v = edit(q, k, v)
                if queries:
                    self.cache.attend(layer, q, k, v, clean=True)
                else:
                    self.cache.gather(layer, k, v, clean=True)
                kept = slice(None) if keep_mask is None else keep_mask
                self.exact[layer].append((k[:, kept], v[:, kept]))
                self.queries.append(q)
            self.cache.finalize_chunk(keep_mask)
        return self

    def errors(self, layer: int = 0, last: int | None = None) -> tuple[float, float]:
        """Relative squared error of keys and of values over the last tokens."""
        found = self.cache.history(layer)
        errors = []
        for role in range(2):
            exact = torch.cat([pair[role] for pair in self.exact[layer]], dim=1)
            got = found[role]
            assert torch.isfinite(got).all()
            exact = exact[:, -got.shape[1] :]
            if last is not None:
                exact, got = exact[:, -last:], got[:, -last:]
            errors.append(float((got - exact).square().sum() / exact.square().sum()))
        return errors[0], errors[1]

    def logit_error(self, source: Source, last: int | None = None) -> float:
        """Mean squared error of q.k of the next chunk's queries, each query's mean taken out."""
        q, _, _ = source.chunk(self.cache.next_frame or 0, 4)
        exact = torch.cat([pair[0] for pair in self.exact[0]], dim=1)
        error = self.cache.history(0)[0] - exact
        change = q @ (error if last is None else error[:, -last:]).mT
        return float((change - change.mean(-1, keepdim=True)).square().mean())

    @property
    def generation(self) -> int:
        lesson = self.cache._span.lesson
        return 0 if lesson is None else lesson.generation


def learner_of(lane: Lane) -> QtcLearner:
    learner = lane.cache._learner
    assert isinstance(learner, QtcLearner)
    return learner

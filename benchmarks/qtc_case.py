"""What the benchmark and check of `qtc` encode: correlated tokens, a learner that saw a chunk."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from benchmarks.timing import device_named
from quantwm.cache import make_format
from quantwm.cache.formats import QueryGuide
from quantwm.cache.formats.qtc import QtcFormat
from quantwm.cache.formats.qtc_learner import QtcLearner
from quantwm.cache.formats.qtc_lesson import SlotGuide
from quantwm.cache.formats.qtc_span import QtcSpan
from quantwm.cache.positions import TokenPositions
from quantwm.cache.spec import RopeLayout

ROPE = RopeLayout((44, 42, 42), (30, 52))  # LingBot's 480p: 1,560 tokens a frame


class Case:
    """Correlated keys, queries, values of LingBot's size; a learner that has seen a chunk."""

    def __init__(self, options: argparse.Namespace, preset: str) -> None:
        self.device = device_named(options.device)
        self.format: QtcFormat = make_format("qtc", preset=preset)
        self.heads, self.tokens = options.heads, options.frames * 1560
        generator = torch.Generator(self.device).manual_seed(0)

        def draw() -> Tensor:
            size = (self.heads, 128, 128)
            mix = torch.randn(size, generator=generator, device=self.device) / 11
            mix *= torch.logspace(1, -1, 128, device=self.device)
            noise = torch.randn(
                (self.heads, self.tokens, 128), generator=generator, device=self.device
            )
            return (noise @ mix + 1).to(torch.bfloat16)

        self.q, self.k, self.v = draw(), draw(), draw()
        self.positions = TokenPositions(0, self.tokens)
        self.layers = options.layers
        learner = self.format.learner(self.layers, self.heads, 128, ROPE, None, 1560, self.device)
        seen = learner.observe(0, self.k, self.v, self.q, self.positions, None)
        self.learner: QtcLearner = learner.with_chunk(dict.fromkeys(range(self.layers), seen))
        self.lesson = self.learner.lesson(None)
        self.learned = self.learner.guide(self.lesson, self.positions)

    @property
    def slot(self) -> SlotGuide:
        return self.learned.of_slot(0)

    def encode(self, role: str, layer: int = 0) -> QtcSpan:
        """With metric and projection of its run of layers at hand."""
        x = self.k if role == "keys" else self.v
        guide = QueryGuide(learned=self.learned.of_slot(layer))
        return self.format.encode(x, None, role, guide)  # type: ignore[arg-type]

    def encode_all(self) -> None:
        """Keys and values of all layers, from nothing at hand, as a clean pass does."""
        self.learned.forget()
        for layer in range(self.layers):
            for role in ("keys", "values"):
                self.encode(role, layer)

    def span(self, role: str, chunks: int) -> QtcSpan:
        span = joined = self.encode(role)
        for _ in range(chunks - 1):
            joined = self.format.join(joined, span)
        return joined

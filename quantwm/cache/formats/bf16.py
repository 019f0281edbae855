"""The `bf16` format: nothing is compressed; the reference that every other format is held to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Generator, Tensor

from kernels.format import Side
from quantwm.cache.dispatch import Decode, ops_for
from quantwm.cache.formats.base import Codebook, QueryGuide, Role, shape_of


@dataclass(frozen=True)
class Bf16Config:
    """exact: hold what comes in the attention's own dtype (FP32 parity checks), not in BF16.
    second_kernel: read by another attention kernel (cache/second_kernel.py), the noise floor."""

    exact: bool = False
    second_kernel: bool = False


PRESETS = {"default": Bf16Config(), "floor": Bf16Config(second_kernel=True)}


@dataclass(frozen=True)
class Bf16Span:
    """values: bfloat16 [H, N, D]; float32 where the config is exact."""

    values: Tensor

    @cached_property
    def decode(self) -> Decode:
        return ops_for(self.values.device).prepare_copy(self.values)


class Bf16Format:
    """Keys and values as they came, rounded to BF16."""

    name = "bf16"
    compresses = False
    uses_queries = False
    full_moment = False
    rank = 0

    def __init__(self, config: Bf16Config | None = None) -> None:
        self.config = config or Bf16Config()
        self.exact = self.config.exact

    def check(self, head_dim: int) -> None:
        """Every head size will do."""

    def fit(self, x: Tensor, generator: Generator, warm: Codebook | None) -> Codebook | None:
        return None

    def encode(
        self, x: Tensor, codebook: Codebook | None, role: Role, guide: QueryGuide
    ) -> Bf16Span:
        return self.hold(x)

    def hold(self, x: Tensor) -> Bf16Span:
        """x [H, N, D] in storage of its own."""
        return Bf16Span(torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x))

    def join(self, first: Bf16Span, second: Bf16Span) -> Bf16Span:
        return Bf16Span(torch.cat((first.values, second.values), dim=1))

    def select(self, span: Bf16Span, keep: slice | Tensor) -> Bf16Span:
        if isinstance(keep, Tensor):
            keep = keep.to(span.values.device)
        return Bf16Span(span.values[:, keep].clone(memory_format=torch.contiguous_format))

    def settle(self, spans: Sequence[Bf16Span]) -> list[Bf16Span]:
        return list(spans)

    def decode_into(self, span: Bf16Span, out: Tensor, offset: int, start: int, stop: int) -> None:
        span.decode(out, offset, start, stop)

    def decode_heads_into(
        self, span: Bf16Span, out: Tensor, offset: int, start: int, stop: int, first_head: int
    ) -> None:
        span.decode(out, offset, start, stop, first_head)

    def prepared(self, span: Bf16Span) -> Decode:
        return span.decode

    def read_from(self, span: Bf16Span) -> tuple[Any, Sequence[Tensor]]:
        tensors = (span.values,)
        return shape_of(tensors), tensors

    def side(self, span: Bf16Span) -> Side:
        return Side("plain", values=span.values)

    def tokens(self, span: Bf16Span) -> int:
        return span.values.shape[1]

    def parts(self, span: Bf16Span) -> Mapping[str, Sequence[Tensor]]:
        return {"bf16": (span.values,)}

    def nominal_bytes(self, span: Bf16Span) -> int:
        return span.values.numel() * span.values.element_size()

    def packed_bytes(
        self, tokens: int, chunks: int, heads: int, head_dim: int, role: Role
    ) -> dict[str, int]:
        return {"bf16": tokens * heads * head_dim * 2}

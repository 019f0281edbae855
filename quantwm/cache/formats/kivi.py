"""The `kivi` format: keys per channel over groups of tokens, values per token; real zeros.

KIVI (arXiv 2402.02750). A group of keys holds `group_size` tokens of one chunk; where the chunk is
no multiple of that, its last group is shorter. (4,680 tokens of a 480p chunk are 146 groups of 32
and one of 8.) Groups never cross chunks, so a token is quantized once. Scales and zeros are FP16
and both are counted: 3 bits an element at 2 bits and groups of 32, 5.33x; published 6.40x leaves
the zeros out. Published KIVI keeps recent tokens in full precision: that is `recent_chunks`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TypeGuard

import torch
from torch import Generator, Tensor

from quantwm.cache.dispatch import Decode, ops_for
from quantwm.cache.formats.base import Codebook, QueryGuide, Role, storage_bytes
from quantwm.cache.formats.rows import cut_rows, join_rows, pick_rows, pick_runs
from quantwm.cache.formats.rtn import (
    TokenGroups,
    check_bits,
    check_token_groups,
    cut_tokens,
    encode_tokens,
    join_tokens,
    token_bytes,
)
from quantwm.cache.pack import packed_bytes as bytes_of_codes
from quantwm.errors import UserError


@dataclass(frozen=True)
class KiviConfig:
    """bits: of a code, 2 or 4; group_size: tokens of a key group, channels of a value group."""

    bits: int = 2
    group_size: int = 32

    def __post_init__(self) -> None:
        check_bits(self.bits)
        if self.group_size < 1:
            raise UserError(f"group_size must be at least 1, got {self.group_size}")


PRESETS = {"int2": KiviConfig(), "int4": KiviConfig(bits=4)}


@dataclass(frozen=True)
class ChannelGroups:
    """N tokens of H heads in C groups of tokens; each group has a scale and a zero a channel.

    Attributes:
        codes: uint8 [H, N, D * bits / 8], a row a token, packed as in quantwm/cache/pack.py.
        scales, zeros: float16 [H, C, D].
        group_stops: int32 [C], the token of the span at which each group ends.
        group_tokens: the tokens of each group, on the host.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group_stops: Tensor
    group_tokens: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return self.codes.shape[1]

    @cached_property
    def decode(self) -> Decode:
        """Made at the first reading; it holds this span's own tensors and nothing beside them."""
        bits = self.codes.shape[2] * 8 // self.scales.shape[2]
        packed = (self.codes, self.scales, self.zeros, self.group_stops)
        prepare = ops_for(self.codes.device).prepare_channel_groups
        return prepare(*packed, self.group_tokens, bits)


KiviSpan = ChannelGroups | TokenGroups


class KiviFormat:
    """x = zero + code * scale; keys per channel and token group, values per token."""

    name = "kivi"
    compresses = True
    uses_queries = False
    full_moment = False
    rank = 0
    exact = False

    def __init__(self, config: KiviConfig | None = None) -> None:
        self.config = config or KiviConfig()

    def check(self, head_dim: int) -> None:
        check_token_groups(self.name, self.config.group_size, self.config.bits, head_dim)

    def fit(self, x: Tensor, generator: Generator, warm: Codebook | None) -> Codebook | None:
        return None

    def encode(
        self, x: Tensor, codebook: Codebook | None, role: Role, guide: QueryGuide
    ) -> KiviSpan:
        size, bits, tokens = self.config.group_size, self.config.bits, x.shape[1]
        if role == "values":
            return encode_tokens(x, bits, size)
        rest = (tokens % size,) if tokens % size else ()
        packed = ops_for(x.device).encode_channel_groups(x, size, bits)
        return ChannelGroups(*packed, (size,) * (tokens // size) + rest)

    def join(self, first: KiviSpan, second: KiviSpan) -> KiviSpan:
        return self.join_all([first], [second])[0]

    def join_all(self, firsts: Sequence[KiviSpan], seconds: Sequence[KiviSpan]) -> list[KiviSpan]:
        if not (_keys(firsts) and _keys(seconds)):
            return list(join_tokens(firsts, seconds))  # type: ignore[arg-type]
        before = firsts[0].tokens
        later = (torch.stack([s.group_stops for s in seconds]) + before).split(1)
        stops = join_rows([f.group_stops.unsqueeze(0) for f in firsts], later, anywhere=True)
        parts = (
            join_rows([f.codes for f in firsts], [s.codes for s in seconds]),
            join_rows([f.scales for f in firsts], [s.scales for s in seconds]),
            join_rows([f.zeros for f in firsts], [s.zeros for s in seconds]),
            [joined.squeeze(0) for joined in stops],
            [f.group_tokens + s.group_tokens for f, s in zip(firsts, seconds, strict=True)],
        )
        return [ChannelGroups(*span) for span in zip(*parts, strict=True)]

    def cut_all(self, spans: Sequence[KiviSpan], start: int, stop: int) -> list[KiviSpan]:
        if not _keys(spans):
            return list(cut_tokens(spans, start, stop))  # type: ignore[arg-type]
        if start >= stop:
            return [self._pick(span, torch.arange(start, stop)) for span in spans]
        stops = list(accumulate(spans[0].group_tokens))
        groups = slice(bisect_right(stops, start), bisect_left(stops, stop) + 1)
        ends = [min(end, stop) - start for end in stops[groups]]
        moved_stops = torch.stack([s.group_stops for s in spans])[:, groups] - start
        parts = (
            cut_rows([s.codes for s in spans], start, stop),
            cut_rows([s.scales for s in spans], groups.start, groups.stop),
            cut_rows([s.zeros for s in spans], groups.start, groups.stop),
            list(moved_stops.clamp_(max=stop - start).unbind(0)),
            [tuple(b - a for a, b in pairwise((0, *ends)))] * len(spans),
        )
        return [ChannelGroups(*span) for span in zip(*parts, strict=True)]

    def select(self, span: KiviSpan, keep: slice | Tensor) -> KiviSpan:
        if isinstance(keep, slice):
            start, stop, _ = keep.indices(span.tokens)
            return self.cut_all([span], start, stop)[0]
        return span.select(keep) if isinstance(span, TokenGroups) else self._pick(span, keep)

    def _pick(self, span: ChannelGroups, kept: Tensor) -> ChannelGroups:
        groups, lengths = pick_runs(span.group_tokens, kept)
        stops = torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return ChannelGroups(
            pick_rows(span.codes, kept),
            pick_rows(span.scales, groups),
            pick_rows(span.zeros, groups),
            stops.to(span.codes.device, non_blocking=True),
            lengths,
        )

    def settle(self, spans: Sequence[KiviSpan]) -> list[KiviSpan]:
        return list(spans)

    def decode_into(self, span: KiviSpan, out: Tensor, offset: int, start: int, stop: int) -> None:
        self.decode_heads_into(span, out, offset, start, stop, 0)

    def decode_heads_into(
        self, span: KiviSpan, out: Tensor, offset: int, start: int, stop: int, first_head: int
    ) -> None:
        if isinstance(span, TokenGroups):
            span.decode_into(self.config.bits, out, offset, start, stop, first_head)
        else:
            span.decode(out, offset, start, stop, first_head)

    def tokens(self, span: KiviSpan) -> int:
        return span.tokens

    def parts(self, span: KiviSpan) -> Mapping[str, Sequence[Tensor]]:
        scales = (
            (span.scales,) if isinstance(span, TokenGroups) else (span.scales, span.group_stops)
        )
        return {"codes": (span.codes,), "scales": scales, "zeros": (span.zeros,)}

    def nominal_bytes(self, span: KiviSpan) -> int:
        return sum(storage_bytes(tensors) for tensors in self.parts(span).values())

    def packed_bytes(
        self, tokens: int, chunks: int, heads: int, head_dim: int, role: Role
    ) -> dict[str, int]:
        bits, size = self.config.bits, self.config.group_size
        if role == "values":
            return token_bytes(tokens, heads, head_dim, bits, size)
        per_chunk = -(-tokens // max(chunks, 1))
        whole, rest = divmod(tokens, max(per_chunk, 1))
        groups = whole * -(-per_chunk // size) + -(-rest // size)
        numbers = groups * heads * head_dim * 2
        return {
            "codes": tokens * heads * bytes_of_codes(head_dim, bits),
            "scales": numbers + 4 * groups,
            "zeros": numbers,
        }


def _keys(spans: Sequence[KiviSpan]) -> TypeGuard[Sequence[ChannelGroups]]:
    return all(isinstance(span, ChannelGroups) for span in spans)

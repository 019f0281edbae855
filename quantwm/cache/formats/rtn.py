"""The `rtn` format: round to nearest, per token and group of channels; the baseline of the papers.

x = zero + code * scale with 2 or 4 bits a code, FP16 scales and FP16 zeros (the group's least
value). At D = 128 and groups of 64: 2.5 bits an element with INT2 (6.40x), 4.5 with INT4 (3.56x),
which is what QVG (arXiv 2602.02958, Table 1) prints for RTN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Generator, Tensor

from quantwm.cache.dispatch import Decode, ops_for
from quantwm.cache.formats.base import Codebook, QueryGuide, Role, storage_bytes
from quantwm.cache.formats.rows import cut_rows, join_rows, pick_rows
from quantwm.cache.pack import packed_bytes as bytes_of_codes
from quantwm.errors import UserError


def check_bits(bits: int) -> None:
    if bits not in (2, 4):
        raise UserError(f"bits must be 2 or 4, got {bits}")


@dataclass(frozen=True)
class RtnConfig:
    """bits: of a code, 2 or 4; group_size: channels of a token that share a scale and a zero."""

    bits: int = 2
    group_size: int = 64

    def __post_init__(self) -> None:
        check_bits(self.bits)
        if self.group_size < 1:
            raise UserError(f"group_size must be at least 1, got {self.group_size}")


PRESETS = {"int2": RtnConfig(), "int4": RtnConfig(bits=4)}


@dataclass(frozen=True)
class TokenGroups:
    """N tokens of H heads, each in groups of G channels.

    Attributes:
        codes: uint8 [H, N, D * bits / 8], packed as in quantwm/cache/pack.py.
        scales, zeros: float16 [H, N, D / G].
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor

    @cached_property
    def decoders(self) -> dict[int, Decode]:
        """By the bits of a code; made at the first reading, they hold nothing but these tensors."""
        return {}

    def decode_into(
        self, bits: int, out: Tensor, offset: int, start: int, stop: int, first_head: int
    ) -> None:
        """Tokens [start, stop) of the heads from first_head on to out[:, offset : ...]."""
        if bits not in self.decoders:
            prepare = ops_for(self.codes.device).prepare_token_groups
            self.decoders[bits] = prepare(self.codes, self.scales, self.zeros, bits)
        self.decoders[bits](out, offset, start, stop, first_head)

    @property
    def tokens(self) -> int:
        return self.codes.shape[1]

    def select(self, kept: Tensor) -> TokenGroups:
        """The tokens at these ascending positions (a CPU tensor), in storage of their own."""
        return TokenGroups(*(pick_rows(t, kept) for t in (self.codes, self.scales, self.zeros)))


def encode_tokens(x: Tensor, bits: int, group_size: int) -> TokenGroups:
    """x: [H, N, D]."""
    return TokenGroups(*ops_for(x.device).encode_token_groups(x, group_size, bits))


def join_tokens(firsts: Sequence[TokenGroups], seconds: Sequence[TokenGroups]) -> list[TokenGroups]:
    parts = (
        join_rows([f.codes for f in firsts], [s.codes for s in seconds]),
        join_rows([f.scales for f in firsts], [s.scales for s in seconds]),
        join_rows([f.zeros for f in firsts], [s.zeros for s in seconds]),
    )
    return [TokenGroups(*span) for span in zip(*parts, strict=True)]


def cut_tokens(spans: Sequence[TokenGroups], start: int, stop: int) -> list[TokenGroups]:
    parts = (
        cut_rows([s.codes for s in spans], start, stop),
        cut_rows([s.scales for s in spans], start, stop),
        cut_rows([s.zeros for s in spans], start, stop),
    )
    return [TokenGroups(*span) for span in zip(*parts, strict=True)]


def token_bytes(
    tokens: int, heads: int, head_dim: int, bits: int, group_size: int
) -> dict[str, int]:
    """Bytes of TokenGroups by ledger part."""
    numbers = tokens * heads * (head_dim // group_size) * 2
    codes = tokens * heads * bytes_of_codes(head_dim, bits)
    return {"codes": codes, "scales": numbers, "zeros": numbers}


class RtnFormat:
    """x = zero + code * scale, per token and group of channels."""

    name = "rtn"
    compresses = True
    uses_queries = False
    full_moment = False
    rank = 0
    exact = False

    def __init__(self, config: RtnConfig | None = None) -> None:
        self.config = config or RtnConfig()

    def check(self, head_dim: int) -> None:
        check_token_groups(self.name, self.config.group_size, self.config.bits, head_dim)

    def fit(self, x: Tensor, generator: Generator, warm: Codebook | None) -> Codebook | None:
        return None

    def encode(
        self, x: Tensor, codebook: Codebook | None, role: Role, guide: QueryGuide
    ) -> TokenGroups:
        return encode_tokens(x, self.config.bits, self.config.group_size)

    def join(self, first: TokenGroups, second: TokenGroups) -> TokenGroups:
        return join_tokens([first], [second])[0]

    def join_all(
        self, firsts: Sequence[TokenGroups], seconds: Sequence[TokenGroups]
    ) -> list[TokenGroups]:
        return join_tokens(firsts, seconds)

    def cut_all(self, spans: Sequence[TokenGroups], start: int, stop: int) -> list[TokenGroups]:
        return cut_tokens(spans, start, stop)

    def select(self, span: TokenGroups, keep: slice | Tensor) -> TokenGroups:
        if isinstance(keep, slice):
            start, stop, _ = keep.indices(span.tokens)
            return cut_tokens([span], start, stop)[0]
        return span.select(keep)

    def settle(self, spans: Sequence[TokenGroups]) -> list[TokenGroups]:
        return list(spans)

    def decode_into(
        self, span: TokenGroups, out: Tensor, offset: int, start: int, stop: int
    ) -> None:
        self.decode_heads_into(span, out, offset, start, stop, 0)

    def decode_heads_into(
        self, span: TokenGroups, out: Tensor, offset: int, start: int, stop: int, first_head: int
    ) -> None:
        span.decode_into(self.config.bits, out, offset, start, stop, first_head)

    def tokens(self, span: TokenGroups) -> int:
        return span.tokens

    def parts(self, span: TokenGroups) -> Mapping[str, Sequence[Tensor]]:
        return {"codes": (span.codes,), "scales": (span.scales,), "zeros": (span.zeros,)}

    def nominal_bytes(self, span: TokenGroups) -> int:
        return storage_bytes([span.codes, span.scales, span.zeros])

    def packed_bytes(
        self, tokens: int, chunks: int, heads: int, head_dim: int, role: Role
    ) -> dict[str, int]:
        return token_bytes(tokens, heads, head_dim, self.config.bits, self.config.group_size)


def check_token_groups(name: str, group_size: int, bits: int, head_dim: int) -> None:
    if head_dim % group_size:
        raise UserError(f"{name}: group_size {group_size} does not divide head_dim {head_dim}")
    if head_dim * bits % 8:
        raise UserError(f"{name}: {bits}-bit codes of head_dim {head_dim} do not fill whole bytes")

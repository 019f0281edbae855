"""What a cache format is: the protocol, its packed span, and the shared checks of settings.

Formats are pure: keys or values in, packed span out, decode into a buffer that the caller owns. A
packed span is a frozen value; joining and selecting tokens give new spans that share no storage
with the old ones except the codebook and the basis, and never quantize anything again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

import torch
from torch import Generator, Tensor

from kernels.format import Side
from quantwm.cache.codebook import Codebook
from quantwm.cache.kmeans import MAX_CENTROIDS
from quantwm.cache.positions import TokenPositions
from quantwm.cache.spec import RopeLayout
from quantwm.errors import UserError

Role = Literal["keys", "values"]

SpanT = TypeVar("SpanT")


@dataclass(frozen=True)
class QueryGuide:
    """What past queries say about the keys of one layer. Never of the chunk that is encoded.

    Attributes:
        weights: float32 [H, D], mean 1, or [H, D, D] with a trace of D where the format wants the
            whole moment; None before any query was seen (unit weights).
        basis: bfloat16 [H, D, r], the span's PSAC directions, or None without PSAC.
        eigenvalues: float32 [H, r], the query moment along the basis.
        learned: what a `Learns` format's own learner says about this slot and chunk.
    """

    weights: Tensor | None = None
    basis: Tensor | None = None
    eigenvalues: Tensor | None = None
    learned: Any = None


class Format(Protocol, Generic[SpanT]):
    """One cache format. Methods take one layer's keys or values, x: bfloat16 [H, N, D]."""

    name: str
    compresses: bool
    """Whether a span is anything but BF16."""
    uses_queries: bool
    """Whether encoding keys wants the query moment."""
    full_moment: bool
    """Whether it wants the whole moment rather than its diagonal."""
    rank: int
    """PSAC directions of a span; 0 without."""
    exact: bool
    """Whether spans hold what comes in the attention's own dtype, for parity checks in FP32."""

    def check(self, head_dim: int) -> None:
        """UserError when the settings do not suit this head size."""
        ...

    def fit(self, x: Tensor, generator: Generator, warm: Codebook | None) -> Codebook | None:
        """The codebook of a new span, from its first chunk."""
        ...

    def encode(self, x: Tensor, codebook: Codebook | None, role: Role, guide: QueryGuide) -> SpanT:
        """Encode one chunk against its span's codebook."""
        ...

    def join(self, first: SpanT, second: SpanT) -> SpanT:
        """The span with a later chunk's tokens behind its own."""
        ...

    def select(self, span: SpanT, keep: slice | Tensor) -> SpanT:
        """The span's tokens in a range, or at ascending int64 positions (a CPU tensor)."""
        ...

    def settle(self, spans: Sequence[SpanT]) -> list[SpanT]:
        """Each span in the smallest of its equivalent forms; at most one host sync for all."""
        ...

    def decode_into(self, span: SpanT, out: Tensor, offset: int, start: int, stop: int) -> None:
        """Tokens [start, stop) to out[:, offset : offset + stop - start], [H, capacity, D]."""
        ...

    def tokens(self, span: SpanT) -> int: ...

    def parts(self, span: SpanT) -> Mapping[str, Sequence[Tensor]]:
        """Every tensor that the span holds, by ledger part."""
        ...

    def nominal_bytes(self, span: SpanT) -> int:
        """Packed bytes as papers count them: codebook and basis in, every PSAC row dense."""
        ...

    def packed_bytes(
        self, tokens: int, chunks: int, heads: int, head_dim: int, role: Role
    ) -> dict[str, int]:
        """The same parts before anything is allocated: one span, all of it corrected by PSAC."""
        ...


@runtime_checkable
class Batched(Protocol):
    """A format that joins and cuts the spans of many slots, of as many tokens each, at once."""

    def join_all(self, firsts: Sequence[Any], seconds: Sequence[Any]) -> list[Any]:
        """`join` of every pair."""
        ...

    def cut_all(self, spans: Sequence[Any], start: int, stop: int) -> list[Any]:
        """`select` of a range of tokens of every span."""
        ...


@runtime_checkable
class Parted(Protocol):
    """A format that encodes every head by itself, so that many slots may come as heads of one."""

    def for_parting(self, span: Any, count: int) -> Any:
        """A span of so many slots with all that `parted` makes views of."""
        ...

    def parted(
        self, span: Any, books: Sequence[Codebook], guides: Sequence[QueryGuide]
    ) -> list[Any]:
        """The spans of as many slots, whose heads lie behind each other in `span`, which comes from
        `for_parting`: each with its own codebook and basis, the other tensors parts of the span's.
        """
        ...


@runtime_checkable
class HeadRanges(Protocol):
    """A format that decodes some of a span's heads, so that a scratch need not hold all."""

    def decode_heads_into(
        self, span: Any, out: Tensor, offset: int, start: int, stop: int, first_head: int
    ) -> None:
        """`decode_into` of the heads from first_head on; out: [heads wanted, capacity, D]."""
        ...


@runtime_checkable
class Prepared(Protocol):
    """A format whose spans have decoders that last, which one launch may stand for."""

    def prepared(self, span: Any) -> Any:
        """The span's `dispatch.Decode`; None where a reading needs more than that."""
        ...


@runtime_checkable
class Spreads(Protocol):
    """A format whose spans may hold rows that a reading spreads first."""

    def decode_spread(
        self, span: Any, out: Tensor, offset: int, start: int, stop: int, room: Any
    ) -> bool:
        """`decode_into` by two launches of what lasts and of a room (`correction.Room`); False, and
        nothing done, where a reading of this span is something else."""
        ...


@runtime_checkable
class Movable(Protocol):
    """A format that says what a reading of a span is made from."""

    def read_from(self, span: Any) -> tuple[Any, Sequence[Tensor]] | None:
        """Tensors, in an order, and what else a reading depends on: spans of which that is equal
        are read by the same launches but for where the tensors are. None where that is not so."""
        ...


@runtime_checkable
class Fusible(Protocol):
    """A format whose spans the fused attention decodes inside its kernel."""

    def side(self, span: Any) -> Side:
        """The span's tensors as the kernel reads them."""
        ...


@runtime_checkable
class Counts(Protocol):
    """A format whose `settle` goes by numbers on the device; a caller may read them with others."""

    def dense(self, spans: Sequence[Any]) -> list[Any]:
        """Each span in the form that is counted."""
        ...

    def counts(self, dense: Sequence[Any]) -> tuple[list[Tensor], Any]:
        """Whole numbers on the device, in tensors of any shape, and what can be made without
        knowing them; both for `settled`."""
        ...

    def settled(self, dense: Sequence[Any], counts: Sequence[int], ahead: Any) -> list[Any]:
        """`settle`, the numbers of `counts` being known, flat and in order."""
        ...


class Learner(Protocol):
    """What a format learns from past chunks beside the query moment; an immutable value."""

    def observe(
        self,
        slot: int,
        k: Tensor,
        v: Tensor,
        q: Tensor | None,
        positions: TokenPositions,
        encoded: tuple[Any, Any] | None,
    ) -> Any:
        """One slot's share of a chunk: k, v [H, N, D] at these positions, q [H, Nq, D].

        encoded: key and value span of the chunk's last tokens; None while they stay BF16.
        The result has a method `tensors`, as the learner has.
        """
        ...

    def with_chunk(self, observed: Mapping[int, Any]) -> Learner:
        """The learner after a chunk. observed: by slot."""
        ...

    def begin(self, current: Any) -> None:
        """Start on what `lesson(current)` will be, beside the stream; it need not be asked for."""
        ...

    def lesson(self, current: Any) -> Any:
        """What the next chunk's span shares; `current` itself while that lasts, None for nothing.

        Its `key` tells lessons apart: chunks of one span have one key.
        """
        ...

    def guide(self, lesson: Any, positions: TokenPositions) -> Any:
        """Of one chunk: `of_slot(slot)` for QueryGuide.learned, `select(keep)`, `places()` of its
        tokens, and `tensors()` that it holds beside those and the lesson."""
        ...

    def in_work(self) -> tuple[Sequence[Tensor], int]:
        """What `begin` has started: tensors that are made, bytes of those that are to come."""
        ...

    def tensors(self) -> Sequence[Tensor]: ...


@runtime_checkable
class Learns(Protocol):
    """A format with a learner of its own, whose spans share what was learned."""

    def learner(
        self,
        slots: int,
        heads: int,
        head_dim: int,
        rope: RopeLayout | None,
        window_frames: int | None,
        tokens_per_frame: int,
        device: torch.device,
    ) -> Learner: ...

    def shared(self, span: Any) -> Sequence[Tensor]:
        """Tensors that a span shares with others; nominal_bytes leaves them out."""
        ...

    def shared_bytes(self, heads: int, head_dim: int, role: Role) -> dict[str, int]:
        """The same before anything is allocated, of one layer; packed_bytes leaves them out."""
        ...

    def learned_bytes(self, heads: int, head_dim: int, waiting: int) -> int:
        """Of the learner's statistics, one slot, and of the guides of `waiting` recent chunks."""
        ...


def shape_of(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """All of them but where they are and what they hold."""
    return tuple((t.shape, t.stride(), t.dtype) for t in tensors)


def storage_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def check_group(group_size: int, head_dim: int) -> None:
    if head_dim % group_size:
        raise UserError(f"group_size {group_size} does not divide head_dim {head_dim}")
    if head_dim % 4:
        raise UserError(f"head_dim must be a multiple of 4 to pack 2-bit codes, got {head_dim}")


def check_clustering(centroids: int, group_size: int, iterations: int) -> None:
    if not 1 <= centroids <= MAX_CENTROIDS:
        raise UserError(f"centroids must be 1 to {MAX_CENTROIDS}, got {centroids}")
    if group_size < 4 or group_size % 4:
        raise UserError(f"group_size must be a positive multiple of 4, got {group_size}")
    if not 0 <= iterations <= 1000:
        raise UserError(f"iterations must be 0 to 1,000, got {iterations}")

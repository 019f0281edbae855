"""A format that quantizes keys or values only: the paper's K2V16 and K16V2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Generator, Tensor

from quantwm.cache.formats import Codebook, Format, QueryGuide, Role
from quantwm.cache.formats.bf16 import Bf16Format, Bf16Span


class OneRoleFormat:
    """One role of a format's spans; the other role stays BF16. A span tells by its type."""

    exact = False

    def __init__(self, inner: Format[Any], role: Role) -> None:
        self._inner, self._role, self._plain = inner, role, Bf16Format()
        self.name = f"{inner.name}-{role}"
        self.compresses = inner.compresses
        keys = role == "keys"
        self.uses_queries = inner.uses_queries and keys
        self.rank = inner.rank if keys else 0
        self.full_moment = getattr(inner, "full_moment", False)

    def check(self, head_dim: int) -> None:
        self._inner.check(head_dim)

    def fit(self, x: Tensor, generator: Generator, warm: Codebook | None) -> Codebook | None:
        return self._inner.fit(x, generator, warm)

    def encode(self, x: Tensor, codebook: Codebook | None, role: Role, guide: QueryGuide) -> Any:
        owner = self._inner if role == self._role else self._plain
        return owner.encode(x, codebook, role, guide)

    def join(self, first: Any, second: Any) -> Any:
        return self._owner(first).join(first, second)

    def select(self, span: Any, keep: slice | Tensor) -> Any:
        return self._owner(span).select(span, keep)

    def settle(self, spans: Sequence[Any]) -> list[Any]:
        settled = iter(self._inner.settle([s for s in spans if not isinstance(s, Bf16Span)]))
        return [span if isinstance(span, Bf16Span) else next(settled) for span in spans]

    def decode_into(self, span: Any, out: Tensor, offset: int, start: int, stop: int) -> None:
        self._owner(span).decode_into(span, out, offset, start, stop)

    def tokens(self, span: Any) -> int:
        return self._owner(span).tokens(span)

    def parts(self, span: Any) -> Mapping[str, Sequence[Tensor]]:
        return self._owner(span).parts(span)

    def nominal_bytes(self, span: Any) -> int:
        return self._owner(span).nominal_bytes(span)

    def packed_bytes(
        self, tokens: int, chunks: int, heads: int, head_dim: int, role: Role
    ) -> dict[str, int]:
        owner = self._inner if role == self._role else self._plain
        return owner.packed_bytes(tokens, chunks, heads, head_dim, role)

    def _owner(self, span: Any) -> Format[Any]:
        return self._plain if isinstance(span, Bf16Span) else self._inner

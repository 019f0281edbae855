"""How long codebooks and bases last: settings, what is known of their fit, which are fitted again.

Published formats fit a codebook with every span. With `book_bits` a codebook is kept over spans
while it fits: when the residual's power has grown past a bound, and only as far as the bits allow,
those of the neediest layers are fitted again, from where they were. What decides was measured when
chunks were encoded and reached the host in finalize_chunk's one read, so that nothing waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from quantwm.errors import UserError

Place = int
"""A codebook's: twice the slot (layer and stream), and 1 more for values."""

AHEAD = 4

BASIS_DRIFT = 0.05
"""A basis is made anew when the share of the queries' energy along it has fallen by this part."""


@dataclass(frozen=True)
class CodebookLife:
    """Settings of a format with codebooks; the defaults are the published ones.

    Attributes:
        centroid_bits: of a stored centroid entry, 16 (BF16) or 8 (with a scale a centroid).
        book_bits: bits a token and head that codebooks and bases, keys and values together, may
            take; the first ones are made in any case. 0 fits all of them with every span.
        refit_above: a codebook is fitted again when the power of its residuals, over that of the
            tokens, exceeds this multiple of what it was on the chunk that it was fitted on.
        refit_after: tokens that a span holds before fitting again may end it, so that spans, each
            decoded by a call of its own, do not become many. Half of the tokens seen so far, where
            that is less: the first chunks' codebooks are fitted on little.
        book_ahead: tokens whose bits may be spent before they have come, at the beginning; paid
            back evenly until `AHEAD` times as many have.
    """

    centroid_bits: int = 16
    book_bits: float = 0.0
    refit_above: float = 1.2
    refit_after: int = 1024
    book_ahead: int = 0

    def check_life(self) -> None:
        """UserError on a bad setting."""
        if self.centroid_bits not in (8, 16):
            raise UserError(f"centroid_bits must be 8 or 16, got {self.centroid_bits}")
        if not 0.0 <= self.book_bits < float("inf"):
            raise UserError(f"book_bits must be 0 or more, got {self.book_bits}")
        if not self.refit_above > 0.0:
            raise UserError(f"refit_above must be above 0, got {self.refit_above}")
        if self.refit_after < 1:
            raise UserError(f"refit_after must be at least 1, got {self.refit_after}")
        if self.book_ahead < 0:
            raise UserError(f"book_ahead must be 0 or more, got {self.book_ahead}")

    def allowed_bits(self, held: int, seen: int) -> float:
        """Of codebooks and bases, a head. held, seen: compressed tokens held now and ever."""
        ahead = max(self.book_ahead - seen / AHEAD, 0.0)
        return self.book_bits * (held + ahead)


@runtime_checkable
class Lasting(Protocol):
    """A format whose codebooks, and bases where it has some, may outlive a span."""

    @property
    def life(self) -> CodebookLife: ...

    def power(self, span: Any) -> Tensor:
        """Of a chunk's residuals, as their scales say: the mean squared one, a float32 scalar."""
        ...

    def shared(self, span: Any) -> Sequence[Tensor]:
        """The codebook's tensors, and the basis, that other spans may hold too."""
        ...

    def book_bytes(self, heads: int, head_dim: int) -> int:
        """Of one layer's codebook, of keys or of values."""
        ...


def outliving(fmt: Any) -> CodebookLife | None:
    """The settings of a format whose codebooks outlive their span; None where none does.

    Asked in every layer: `isinstance(fmt, Lasting)` takes 21 us.
    """
    life = getattr(fmt, "life", None)
    return life if isinstance(life, CodebookLife) and life.book_bits > 0 else None


@dataclass(frozen=True)
class BookFit:
    """How well codebooks and the basis fit, as far as the host knows.

    Attributes:
        newest: power of the newest chunk's residuals over that of its tokens, by place.
        fitted: the same of the chunk that the codebook was fitted on.
        basis: number of the span that `share` is of; -1 before any.
        share, share_then: of the queries' energy along the basis, now and when it was made.
    """

    newest: Mapping[Place, float] = field(default_factory=dict)
    fitted: Mapping[Place, float] = field(default_factory=dict)
    basis: int = -1
    share: float = 1.0
    share_then: float = 1.0

    def after(self, powers: Mapping[Place, float], fitted: Iterable[Place]) -> BookFit:
        """With a chunk's powers; fitted: places whose codebooks were fitted on that chunk."""
        anew = {place: powers[place] for place in fitted}
        return replace(self, newest={**self.newest, **powers}, fitted={**self.fitted, **anew})

    def with_share(self, share: float, basis: int) -> BookFit:
        """basis: number of the span in which it was made."""
        then = self.share_then if basis == self.basis else share
        return replace(self, basis=basis, share=share, share_then=then)

    def basis_moved(self) -> bool:
        return self.share < self.share_then * (1.0 - BASIS_DRIFT)

    def wanted(self, above: float, room: int) -> tuple[Place, ...]:
        """At most `room` places whose residuals have grown past the bound: the neediest."""
        grown = {p: self.newest[p] / power for p, power in self.fitted.items() if power > 0}
        needy = sorted((p for p in grown if grown[p] > above), key=lambda p: (-grown[p], p))
        return tuple(sorted(needy[: max(room, 0)]))


def shared_bytes(fmt: Lasting, spans: Iterable[Any]) -> int:
    """Of codebooks and bases of these spans, each counted once."""
    held = {(t.data_ptr(), t.shape): t.nbytes for span in spans for t in fmt.shared(span)}
    return sum(held.values())

"""The `qtc` format: a query-weighted transform code on un-rotated keys.

Keys are read only through queries, and queries see them at every relative position. A key is stored
un-rotated, in the basis in which the mean squared logit error over past queries and all relative
positions is a plain sum of squares; 0 to 6 bits a channel go where they lower that sum most. Values
are coded the same way, without rotation and with the plain squared error. docs/beyond.md has the
formulas and what each piece is worth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from quantwm.cache.dispatch import note_fallback
from quantwm.cache.formats import qtc_gain
from quantwm.cache.formats.base import Codebook, QueryGuide, Role, storage_bytes
from quantwm.cache.formats.qtc_basis import Basis, basis_bytes
from quantwm.cache.formats.qtc_correlations import correlation_bytes
from quantwm.cache.formats.qtc_learner import (
    Coding,
    OutputMetric,
    QtcLearner,
    weighed_by,
)
from quantwm.cache.formats.qtc_lesson import SlotGuide
from quantwm.cache.formats.qtc_levels import MAX_WIDTH
from quantwm.cache.formats.qtc_planes import BLOCK, WORD
from quantwm.cache.formats.qtc_span import QtcSpan, cut_all, join_all
from quantwm.cache.formats.qtc_statistics import SlotStatistics, statistics_bytes
from quantwm.cache.formats.qtc_tokens import Tokens
from quantwm.cache.spec import RopeLayout
from quantwm.errors import UserError

KEY_METRICS = ("queries", "identity")
VALUE_METRICS = ("identity", "attention", "output")


@dataclass(frozen=True)
class QtcConfig:
    """Settings.

    Attributes:
        key_bits, value_bits: bits of codes per element once there is a basis; gains, means and the
            basis come on top (0.35 at 3,072 tokens a basis and chunks of 192, 0.1 at large ones).
        key_rows, value_rows: part of the channels that may have a code; the others are dropped and
            take no row of the basis.
        key_width, value_width: most bits of a channel.
        basis_after: tokens, per channel of a head, seen before the first basis; they are coded
            without, since fewer do not determine a covariance.
        plain_bits: of an element of those first tokens, which are read to the end.
        horizon_frames: over which relative positions a query may read, in latent frames; at most
            the cache's window.
        key_metric: what an error of a key costs: "queries" (what past queries make of it) or
            "identity" (its square).
        value_metric: of a value: "identity"; "attention" (squares, tokens counted by what their own
            chunk's queries give them); "output" (what the layer's output weights make of it, where
            the world gives them).
        unrotate, average, token_gains, chunk_means: to measure what each is worth: keys un-rotated,
            queries averaged over relative positions, a gain for each token, a mean for each chunk.
    """

    key_bits: float = 2.0
    value_bits: float = 2.0
    key_rows: float = 0.75
    value_rows: float = 0.75
    key_width: int = 6
    value_width: int = 5
    basis_after: float = 3.0
    plain_bits: int = 2
    horizon_frames: int = 64
    key_metric: str = "queries"
    value_metric: str = "identity"
    unrotate: bool = True
    average: bool = True
    token_gains: bool = True
    chunk_means: bool = True

    def __post_init__(self) -> None:
        for role in ("key", "value"):
            bits, rows = getattr(self, f"{role}_bits"), getattr(self, f"{role}_rows")
            width = getattr(self, f"{role}_width")
            if not 1 <= width <= MAX_WIDTH:
                raise UserError(f"{role}_width must be 1 to {MAX_WIDTH}, got {width}")
            if not 0.0 < rows <= 1.0:
                raise UserError(f"{role}_rows must be above 0 and at most 1, got {rows}")
            if not 0.0 < bits <= rows * width:
                raise UserError(
                    f"{role}_bits must be above 0 and at most {rows * width:g}, "
                    f"{role}_rows * {role}_width; got {bits}"
                )
        for name, known in (("key_metric", KEY_METRICS), ("value_metric", VALUE_METRICS)):
            if getattr(self, name) not in known:
                raise UserError(
                    f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}"
                )
        if not 1 <= self.plain_bits <= MAX_WIDTH:
            raise UserError(f"plain_bits must be 1 to {MAX_WIDTH}, got {self.plain_bits}")
        if not 0 < self.basis_after < math.inf:
            raise UserError(f"basis_after must be finite and above 0, got {self.basis_after}")
        if self.horizon_frames < 1:
            raise UserError(f"horizon_frames must be at least 1, got {self.horizon_frames}")


PRESETS = {
    "small": QtcConfig(key_bits=1.5, value_bits=1.25, key_rows=0.625, value_rows=0.625),
    "medium": QtcConfig(),
    "large": QtcConfig(key_bits=2.75, value_bits=2.25),
    "without-unrotation": QtcConfig(unrotate=False),
    "without-queries": QtcConfig(key_metric="identity"),
    "without-averaging": QtcConfig(average=False),
    "without-gains": QtcConfig(token_gains=False),
    "without-means": QtcConfig(chunk_means=False),
    "without-bases": QtcConfig(basis_after=1e9),
    "by-attention": QtcConfig(value_metric="attention"),
    "by-output": QtcConfig(value_metric="output"),
}
"""small, medium, large: about 1.70, 2.36 and 2.87 bits per element with everything counted, at
3,072 tokens a basis. The others are medium without one ingredient, for docs/beyond.md."""


class QtcFormat:
    """x = R_p (chunk mean + gain * levels @ rows)."""

    name = "qtc"
    compresses = True
    uses_queries = False
    """The learner keeps the query moment itself, un-rotated."""
    full_moment = False
    rank = 0
    exact = False

    def __init__(self, config: QtcConfig | None = None) -> None:
        self.config = config or QtcConfig()
        self.output_metric: OutputMetric | None = None
        """Of a slot's values, set by whoever knows the model before the cache is made."""

    def check(self, head_dim: int) -> None:
        if head_dim % BLOCK:
            raise UserError(f"qtc needs head_dim to be a multiple of {BLOCK}, got {head_dim}")

    def learner(
        self,
        slots: int,
        heads: int,
        head_dim: int,
        rope: RopeLayout | None,
        window_frames: int | None,
        tokens_per_frame: int,
        device: torch.device,
    ) -> QtcLearner:
        config, window = self.config, window_frames or 0
        horizon = min(config.horizon_frames, window) if window else config.horizon_frames
        coding = Coding(
            budgets=(self._budget("keys", head_dim), self._budget("values", head_dim)),
            rows=(self._rows("keys", head_dim), self._rows("values", head_dim)),
            max_widths=(config.key_width, config.value_width),
            horizon_frames=horizon if config.average else 0,
            weigh=config.key_metric == "queries",
            value_metric=config.value_metric,
            first_tokens=math.ceil(config.basis_after * head_dim),
        )
        empty = SlotStatistics.empty(device)
        rope = rope if config.unrotate else None
        output = self.output_metric if config.value_metric == "output" else None
        if config.value_metric == "output" and output is None:
            note_fallback("qtc counts plain errors of values: this world gives no output weights")
        return QtcLearner(coding, rope, (empty,) * slots, window * tokens_per_frame, output)

    def _rows(self, role: Role, head_dim: int) -> int:
        part = self.config.key_rows if role == "keys" else self.config.value_rows
        return max(round(part * head_dim / BLOCK), 1) * BLOCK

    def _budget(self, role: Role, head_dim: int) -> int:
        """Code bits of a token: whole words of 32, and no more than the widths can take."""
        config = self.config
        bits = config.key_bits if role == "keys" else config.value_bits
        width = config.key_width if role == "keys" else config.value_width
        words = max(round(bits * head_dim / WORD), 1)
        return min(words, width * self._rows(role, head_dim) // WORD) * WORD

    def fit(self, x: Tensor, generator: Generator, warm: Codebook | None) -> Codebook | None:
        return None

    def encode(
        self, x: Tensor, codebook: Codebook | None, role: Role, guide: QueryGuide
    ) -> QtcSpan:
        heads, tokens, head_dim = x.shape
        known, config = guide.learned, self.config
        if not isinstance(known, SlotGuide):
            known = SlotGuide.unknown(tokens, x.device)
        basis = known.keys if role == "keys" else known.values
        metric = known.metric() if role == "keys" else self._value_metric(known, basis)
        positions = known.positions
        tokens_in = Tokens.of(x, known.rope if role == "keys" else None, positions)
        about = torch.zeros(heads, head_dim, device=x.device)
        if basis is not None:
            about = basis.mean.float()
        if config.chunk_means or basis is None:
            mean_codes, mean_scales, mean = tokens_in.coded_mean(about)
        else:
            (mean_codes, mean_scales), mean = qtc_gain.mean_codes(about, about), about
        # Made at hand for keys in the queries' metric and values in the plain one, no other.
        plain = role == "keys" or config.value_metric != "output"
        projection = known.projection(role) if plain else None
        codes, gains = tokens_in.encoded(
            mean, basis, metric, config.plain_bits, config.token_gains, projection
        )
        rope = tokens_in.rope
        return QtcSpan(
            codes=codes,
            gains=gains,
            mean_codes=mean_codes,
            mean_scales=mean_scales,
            # Filled on the device: a copy from the host would wait for all that is queued.
            chunk_stops=torch.full((1,), tokens, dtype=torch.int32, device=x.device),
            chunk_tokens=(tokens,),
            positions=None if rope is None else positions,
            rope=rope,
            basis=basis,
            asked_at=known.asked_at,
        )

    def _value_metric(self, known: SlotGuide, basis: Basis | None) -> Tensor | None:
        """Codes without a basis are plain ones: their feedback is for the metric of queries."""
        if self.config.value_metric != "output" or basis is None:
            return None
        return None if self.output_metric is None else weighed_by(self.output_metric(known.slot))

    def join(self, first: QtcSpan, second: QtcSpan) -> QtcSpan:
        return join_all([first], [second])[0]

    def join_all(self, firsts: Sequence[QtcSpan], seconds: Sequence[QtcSpan]) -> list[QtcSpan]:
        return join_all(firsts, seconds)

    def cut_all(self, spans: Sequence[QtcSpan], start: int, stop: int) -> list[QtcSpan]:
        return cut_all(spans, start, stop)

    def select(self, span: QtcSpan, keep: slice | Tensor) -> QtcSpan:
        if isinstance(keep, slice):
            start, stop, _ = keep.indices(span.tokens)
            return cut_all([span], start, stop)[0]
        return span.picked(keep)

    def settle(self, spans: Sequence[QtcSpan]) -> list[QtcSpan]:
        return list(spans)

    def decode_into(self, span: QtcSpan, out: Tensor, offset: int, start: int, stop: int) -> None:
        span.decode(out, offset, start, stop)

    def decode_heads_into(
        self, span: QtcSpan, out: Tensor, offset: int, start: int, stop: int, first_head: int
    ) -> None:
        span.decode(out, offset, start, stop, first_head)

    def tokens(self, span: QtcSpan) -> int:
        return span.tokens

    def parts(self, span: QtcSpan) -> Mapping[str, Sequence[Tensor]]:
        parts: dict[str, Sequence[Tensor]] = {
            "codes": (span.codes,),
            "gains": (span.gains,),
            "means": (span.mean_codes, span.mean_scales, span.chunk_stops),
        }
        if span.basis is not None:
            parts["bases"] = span.basis.tensors()
        if span.positions is not None and span.positions.places is not None:
            parts["positions"] = (span.positions.places,)
        return parts

    def nominal_bytes(self, span: QtcSpan) -> int:
        """Without the basis, which spans share: `shared` names it, for the ledger to count once."""
        parts = self.parts(span)
        return sum(storage_bytes(parts[part]) for part in parts if part != "bases")

    def shared(self, span: QtcSpan) -> Sequence[Tensor]:
        return () if span.basis is None else span.basis.tensors()

    def packed_bytes(
        self, tokens: int, chunks: int, heads: int, head_dim: int, role: Role
    ) -> dict[str, int]:
        """Of tokens that are coded in a basis; the basis itself is in `shared_bytes`."""
        return {
            "codes": tokens * heads * self._budget(role, head_dim) // 8,
            "gains": tokens * heads,
            "means": chunks * (heads * (head_dim + 2) + 4),
        }

    def shared_bytes(self, heads: int, head_dim: int, role: Role) -> dict[str, int]:
        return {"bases": heads * basis_bytes(self._rows(role, head_dim), head_dim)}

    def learned_bytes(self, heads: int, head_dim: int, waiting: int) -> int:
        """Statistics of one slot; a waiting chunk holds the query moment that it came with."""
        own = statistics_bytes(heads, head_dim)
        return own + waiting * correlation_bytes(heads, head_dim)

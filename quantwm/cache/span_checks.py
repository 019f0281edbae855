"""What the tensors of each packed span must be: shapes, types, and values that decode safely.

For spans that come from a file. A decoder trusts ids to lie in the codebook and stops to ascend;
here is where that trust is earned. A new format adds one function and one line in `SPANS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from quantwm.cache.formats import qtc_coder
from quantwm.cache.formats.base import Codebook, Format, Role
from quantwm.cache.formats.bf16 import Bf16Span
from quantwm.cache.formats.correction import Correction, row_bytes
from quantwm.cache.formats.kivi import ChannelGroups
from quantwm.cache.formats.qtc_basis import Basis
from quantwm.cache.formats.qtc_levels import MAX_WIDTH
from quantwm.cache.formats.qtc_planes import BLOCK
from quantwm.cache.formats.qtc_span import QtcSpan
from quantwm.cache.formats.quantwm import QuantWMSpan
from quantwm.cache.formats.qvg import QvgSpan
from quantwm.cache.formats.qvg_pro import QvgProSpan
from quantwm.cache.formats.rtn import TokenGroups
from quantwm.cache.pack import packed_bytes
from quantwm.cache.positions import TokenPositions
from quantwm.cache.spec import CacheSpec
from quantwm.cache.unrotation import KeyTurns, wants_unrotated

Check = Callable[[Tensor], bool]
_U8, _I8, _I32 = torch.uint8, torch.int8, torch.int32
_F16, _BF16 = torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Wanted:
    """One tensor, what it must be, and what its values must satisfy beside being finite."""

    what: str
    tensor: Tensor
    dtype: torch.dtype
    shape: tuple[int, ...]
    right: Check | None = None

    def check_kind(self) -> None:
        """ValueError when type or shape is another; looks at no value."""
        found = tuple(self.tensor.shape), self.tensor.dtype
        if found != (self.shape, self.dtype):
            raise ValueError(
                f"{self.what} is {found[1]} {list(found[0])} and not {self.dtype} "
                f"{list(self.shape)}"
            )

    def check_values(self) -> None:
        """ValueError when a value is not finite or not right."""
        tensor = self.tensor
        if tensor.is_floating_point():
            # E4M3 has no isfinite of its own.
            plain = tensor.float() if tensor.element_size() == 1 else tensor
            if not bool(plain.isfinite().all()):
                raise ValueError(f"{self.what} holds NaN or infinity")
        if self.right is not None and not self.right(tensor):
            raise ValueError(f"{self.what} holds numbers that no cache writes")


@dataclass(frozen=True)
class Place:
    """Of one span: its format, what it holds, how many tokens of which frames; and the cache's
    geometry."""

    fmt: Format[Any]
    role: Role
    tokens: int
    spec: CacheSpec
    frames: range = range(0)

    @property
    def size(self) -> tuple[int, int, int]:
        """Heads, tokens, channels."""
        return self.spec.heads, self.tokens, self.spec.head_dim

    @property
    def config(self) -> Any:
        return self.fmt.config  # type: ignore[attr-defined]


def span_tensors(span: Any, place: Place) -> list[Wanted]:
    """Every tensor of a span with what it must be. ValueError where a plain field is wrong."""
    kinds = SPANS.get(place.fmt.name, {})
    if kinds.get(place.role) is not type(span):
        raise ValueError(f"{place.role} of {place.fmt.name} in a {type(span).__name__}")
    return _TENSORS[type(span)](span, place)


def below(limit: int) -> Check:
    return lambda tensor: not tensor.numel() or int(tensor.max()) < limit


def not_negative(tensor: Tensor) -> bool:
    return bool((tensor.float() >= 0).all())


def equals(numbers: Sequence[int]) -> Check:
    return lambda tensor: tensor.tolist() == list(numbers)


def _runs(what: str, lengths: tuple[int, ...], stops: Tensor, tokens: int) -> Wanted:
    """The stops of consecutive runs of tokens. ValueError unless their lengths make `tokens`."""
    if any(length < 1 for length in lengths) or sum(lengths) != tokens:
        raise ValueError(f"{what} that do not hold {tokens} tokens")
    return Wanted(what, stops, _I32, (len(lengths),), equals(list(accumulate(lengths))))


def _bf16(span: Bf16Span, place: Place) -> list[Wanted]:
    # In an exact cache what is held has the attention's type, FP32 or BF16.
    exact = place.fmt.exact and span.values.dtype == torch.float32
    return [Wanted("values", span.values, torch.float32 if exact else _BF16, place.size)]


def _token_groups(span: TokenGroups, place: Place) -> list[Wanted]:
    heads, tokens, dim = place.size
    groups = (heads, tokens, dim // place.config.group_size)
    codes = (heads, tokens, packed_bytes(dim, place.config.bits))
    return [
        Wanted("codes", span.codes, _U8, codes),
        Wanted("scales", span.scales, _F16, groups, not_negative),
        Wanted("zeros", span.zeros, _F16, groups),
    ]


def _channel_groups(span: ChannelGroups, place: Place) -> list[Wanted]:
    heads, tokens, dim = place.size
    groups = (heads, len(span.group_tokens), dim)
    codes = (heads, tokens, packed_bytes(dim, place.config.bits))
    return [
        _runs("group_stops", span.group_tokens, span.group_stops, tokens),
        Wanted("codes", span.codes, _U8, codes),
        Wanted("scales", span.scales, _F16, groups, not_negative),
        Wanted("zeros", span.zeros, _F16, groups),
    ]


def codebook_tensors(book: Codebook, place: Place) -> list[Wanted]:
    heads, _, dim = place.size
    count = place.config.centroids * getattr(place.config, "stages", 1)
    if getattr(place.config, "centroid_bits", 16) == 16:
        if book.scales is not None:
            raise ValueError("scales of BF16 centroids")
        return [Wanted("centroids", book.centroids, _BF16, (heads, count, dim))]
    if book.scales is None:
        raise ValueError("INT8 centroids without scales")
    return [
        Wanted("centroids", book.centroids, _I8, (heads, count, dim)),
        Wanted("centroid scales", book.scales, _BF16, (heads, count), not_negative),
    ]


def _qvg(span: QvgSpan, place: Place) -> list[Wanted]:
    heads, tokens, dim = place.size
    groups = (heads, tokens, dim // place.config.group_size)
    return [
        Wanted("codes", span.codes, _U8, (heads, tokens, packed_bytes(dim))),
        Wanted("ids", span.ids, _U8, (heads, tokens), below(place.config.centroids)),
        Wanted("scales", span.scales, torch.float8_e4m3fn, groups, not_negative),
        *codebook_tensors(span.codebook, place),
    ]


def _qvg_pro(span: QvgProSpan, place: Place) -> list[Wanted]:
    heads, tokens, dim = place.size
    ids = (heads, tokens, place.config.stages)
    groups = (heads, tokens, dim // place.config.group_size)
    return [
        Wanted("codes", span.codes, _U8, (heads, tokens, packed_bytes(dim))),
        Wanted("ids", span.ids, _U8, ids, below(place.config.centroids)),
        Wanted("scales", span.scales, torch.float8_e4m3fn, groups, not_negative),
        *codebook_tensors(span.codebook, place),
    ]


def _quantwm(span: QuantWMSpan, place: Place) -> list[Wanted]:
    heads, tokens, dim = place.size
    groups = dim // place.config.group_size
    chunks = len(span.chunk_tokens)
    wanted = [
        _runs("chunk_stops", span.chunk_tokens, span.chunk_stops, tokens),
        Wanted("codes", span.codes, _U8, (heads, tokens, packed_bytes(dim))),
        Wanted("ids", span.ids, _U8, (heads, tokens), below(place.config.centroids)),
        Wanted("scales", span.scales, _U8, (heads, tokens, groups)),
        Wanted("secondary", span.secondary, _F16, (heads, chunks), not_negative),
        Wanted("zeros", span.zeros, _U8, (heads, packed_bytes(tokens * groups))),
        *codebook_tensors(span.codebook, place),
    ]
    if span.correction is not None:
        wanted += _correction(span.correction, place)
    unrotated = place.role == "keys" and wants_unrotated(place.fmt)
    return wanted + turn_tensors(span.turns, place, unrotated)


def turn_tensors(turns: Any, place: Place, unrotated: bool) -> list[Wanted]:
    """Of the rotation of keys that are to be un-rotated, or are not."""
    asked = KeyTurns.of(place.spec.rope, TokenPositions(0, 0)) if unrotated else None
    if asked is None and turns is None:
        return []
    if asked is None or not isinstance(turns, KeyTurns) or turns.rope != asked.rope:
        raise ValueError("keys turned in another way than the cache's")
    return position_tensors(turns.positions, place)


def _correction(rows: Correction, place: Place) -> list[Wanted]:
    heads, tokens, dim = place.size
    rank, first, count = place.fmt.rank, rows.first, rows.count
    if place.role != "keys" or not rank or first < 0 or count < 1 or first + count > tokens:
        raise ValueError("a correction of tokens that its span does not hold")
    kind = place.config.coefficients
    wanted = [Wanted("basis", rows.basis, _BF16, (heads, dim, rank))]
    shape: tuple[int, ...] = (heads, count)
    if rows.mask is not None:
        shape = (rows.coefficients.shape[0],)
        mask = (heads, -(-count // 8))
        wanted.append(Wanted("mask", rows.mask, _U8, mask, _marks(shape[0], count)))
    return [
        *wanted,
        Wanted(
            "coefficients",
            rows.coefficients,
            _U8 if kind == "int4" else _I8,
            (*shape, row_bytes(rank, kind)),
        ),
        Wanted("row_scales", rows.row_scales, _F16, shape, not_negative),
    ]


def _marks(rows: int, count: int) -> Check:
    """A bit mask of as many rows, with no bit behind the last token."""

    def check(mask: Tensor) -> bool:
        bits = (mask.unsqueeze(-1) >> torch.arange(8, device=mask.device)) & 1
        bits = bits.flatten(1)
        return int(bits.sum()) == rows and not bool(bits[:, count:].any())

    return check


def _qtc(span: QtcSpan, place: Place) -> list[Wanted]:
    heads, tokens, dim = place.size
    chunks = len(span.chunk_tokens)
    if span.basis is None:
        bits = 8 * span.codes.shape[-1] // dim if span.codes.dim() else 0
        if not 1 <= bits <= MAX_WIDTH:
            raise ValueError(f"codes of {bits} bits without a basis")
        wanted, widths = [], qtc_coder.plain_widths(dim, bits)
    else:
        wanted, widths = basis_tensors(span.basis, place), span.basis.host_widths[0]
    if span.rope not in (None, place.spec.rope) or (span.rope is None) != (span.positions is None):
        raise ValueError("keys turned in another way than the cache's")
    if span.positions is not None:
        wanted += position_tensors(span.positions, place)
    return [
        *wanted,
        _runs("chunk_stops", span.chunk_tokens, span.chunk_stops, tokens),
        Wanted("codes", span.codes, _U8, (heads, tokens, sum(widths) * BLOCK // 8)),
        Wanted("gains", span.gains, _U8, (heads, tokens)),
        Wanted("mean_codes", span.mean_codes, _I8, (heads, chunks, dim)),
        Wanted("mean_scales", span.mean_scales, _BF16, (heads, chunks)),
    ]


def basis_tensors(basis: Basis, place: Place) -> list[Wanted]:
    heads, _, dim = place.size
    blocks = basis.widths.shape[-1] if basis.widths.dim() else 0
    rows = blocks * BLOCK
    alike = len({sum(widths) for widths in basis.host_widths}) == 1
    for widths in basis.host_widths:
        falling = list(widths) == sorted(widths, reverse=True)
        if len(widths) != blocks or not falling or not all(0 <= w <= MAX_WIDTH for w in widths):
            raise ValueError("bits of a basis that are not one falling row a head")
    if len(basis.host_widths) != heads or not alike or not 0 < rows <= dim:
        raise ValueError("a basis of other heads or rows")
    flat = [width for widths in basis.host_widths for width in widths]
    return [
        Wanted("rows", basis.rows, _I8, (heads, rows, dim)),
        Wanted("row_scales", basis.row_scales, _BF16, (heads, rows), _rows_finite),
        Wanted("mean", basis.mean, _BF16, (heads, dim)),
        Wanted(
            "widths", basis.widths, _U8, (heads, blocks), lambda t: t.flatten().tolist() == flat
        ),
    ]


def _rows_finite(scales: Tensor) -> bool:
    return bool((scales.float() * 127).isfinite().all())


def position_tensors(positions: TokenPositions, place: Place) -> list[Wanted]:
    """Of tokens that stand in the frames of their span."""
    tokens, per_frame = place.tokens, place.spec.tokens_per_frame
    first, stop = (frame * per_frame for frame in (place.frames.start, place.frames.stop))
    gap = positions.places is not None
    last = positions.first + (0 if gap else max(tokens - 1, 0))
    if positions.count != tokens or not first <= positions.first <= last < stop:
        raise ValueError(f"positions that are not of {tokens} tokens in their frames")
    if positions.places is None:
        return []

    def ascending(places: Tensor) -> bool:
        ends = int(places[0]) == positions.first and int(places[-1]) < stop
        return ends and bool((places.diff() > 0).all())

    return [Wanted("places", positions.places, _I32, (tokens,), ascending)]


SPANS: dict[str, dict[Role, type]] = {
    "bf16": {"keys": Bf16Span, "values": Bf16Span},
    "rtn": {"keys": TokenGroups, "values": TokenGroups},
    "kivi": {"keys": ChannelGroups, "values": TokenGroups},
    "qvg": {"keys": QvgSpan, "values": QvgSpan},
    "qvg-pro": {"keys": QvgProSpan, "values": QvgProSpan},
    "quantwm": {"keys": QuantWMSpan, "values": QuantWMSpan},
    "qtc": {"keys": QtcSpan, "values": QtcSpan},
}

_TENSORS: dict[type, Callable[[Any, Place], list[Wanted]]] = {
    Bf16Span: _bf16,
    TokenGroups: _token_groups,
    ChannelGroups: _channel_groups,
    QvgSpan: _qvg,
    QvgProSpan: _qvg_pro,
    QuantWMSpan: _quantwm,
    QtcSpan: _qtc,
}

"""The bytes of a cache before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from quantwm.cache.batch import batch_bytes
from quantwm.cache.codebook_life import CodebookLife, Lasting, outliving
from quantwm.cache.formats import make_format, split_method
from quantwm.cache.formats.base import Format, Learns, Role
from quantwm.cache.ledger import PARTS
from quantwm.cache.plan_scratch import scratch_bytes
from quantwm.cache.spec import CachePolicy, CacheSpec
from quantwm.cache.statistics import moment_bytes
from quantwm.cache.unrotation import wants_unrotated
from quantwm.cache.workload import CUBLAS_BYTES, Workload, companion_loads

ROLES: tuple[Role, Role] = ("keys", "values")
LASTING = ("codebooks", "bases", "statistics")
"""What outlives the tokens that it was made of."""


@dataclass(frozen=True)
class MethodPlan:
    """Bytes of one method; the fields are those of the `plan` command's last line.

    Attributes:
        ratio: nominal; None when nothing is compressed.
        resident_ratio: BF16 bytes of the whole history over everything held.
        bytes: by ledger part; bytes_total is their sum.
        bytes_packed: of the compressed tokens alone, what `ratio` divides by.
        bytes_bf16: of the whole history in BF16.
        scratch_bytes: of one layer's decoded history and current chunk, in as many heads at a time
            as its limit allows; with what an open history reserves to grow. In BF16 also what many
            small layers wait in and are encoded in together (see batch.py).
        pending_bytes: while a chunk is committed: what it becomes, its query moments, the open
            span that is rebuilt with it, and the oldest one that a window cuts.
        transient_bytes: of one layer's clean pass, until its share of the chunk is packed: the
            attention's output, in BF16 the copies that are encoded beside the model, where layers
            are encoded one by one, and queries in FP32 where their moment is wanted of such. What
            kernels take beside one is small and not in it.
        peak_bytes: what is stored, the scratch, and the larger of the last two: a commit comes
            when the clean passes are done, but what they packed is held by then. (A history that
            is made anew is dropped before.) On a GPU also what cuBLAS keeps for a stream of the
            cache's own.
    """

    method: str
    ratio: float | None
    resident_ratio: float
    bytes: Mapping[str, int]
    bytes_total: int
    bytes_packed: int
    bytes_bf16: int
    scratch_bytes: int
    pending_bytes: int
    transient_bytes: int
    peak_bytes: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def plan_method(name: str, fmt: Format[Any], load: Workload) -> MethodPlan:
    """The bytes that a KVCache holds for this workload once its first span has been evicted.

    (In the first span of a rollout the first chunk has no PSAC rows, so it holds a little less.)
    """
    fmt.check(load.head_dim)
    held = dict.fromkeys(PARTS, 0)
    spans = load.spans()
    for tokens, chunks, count in spans:
        parts = _span_parts(fmt, load, tokens, chunks)
        _add(held, {part: held_bytes * count for part, held_bytes in parts.items()})
    if isinstance(fmt, Learns) and spans:
        for role in ROLES:
            shared = fmt.shared_bytes(load.heads, load.head_dim, role)
            _add(held, {part: count * load.layers for part, count in shared.items()})
    life = outliving(fmt)
    if life is not None and spans:
        _add(held, _shared_books(fmt, life, load, held))
    packed = sum(held.values())
    bf16 = load.bf16_bytes_per_token
    sink = min(load.sink_tokens, load.tokens)
    held["bf16_sink"] = sink * bf16
    held["bf16_recent"] = min(load.recent_tokens, load.tokens - sink) * bf16
    if fmt.uses_queries and load.tokens:
        held["statistics"] = _statistics_bytes(fmt, load)
    if fmt.rank and life is None:
        # Recent chunks wait with the bases of spans that nothing is encoded in yet.
        held["bases"] += load.waiting_spans() * load.layers * _basis_bytes(fmt, load)
    if isinstance(fmt, Learns) and load.tokens:
        learned = fmt.learned_bytes(load.heads, load.head_dim, load.waiting_chunks)
        held["statistics"] = load.layers * learned
    whole = load.tokens * bf16
    packing, rebuilding = _packing_bytes(fmt, load), _rebuilding_bytes(fmt, load, spans)
    together = _together_bytes(fmt, load)
    scratch, transient = _scratch_bytes(load), _transient_bytes(fmt, load, not together)
    for stream in load.companions:
        beside = plan_method("bf16", make_format("bf16"), stream)
        _add(held, beside.bytes)
        whole += beside.bytes_bf16
        packing += beside.pending_bytes
        scratch = max(scratch, beside.scratch_bytes)
    scratch += together
    parts = {part: count for part, count in held.items() if count}
    total = sum(parts.values())
    passing = packing + max(rebuilding, transient)
    if load.remade:
        dropped = (count for part, count in parts.items() if part not in LASTING)
        passing = max(passing - sum(dropped), 0)
    passing += _library_bytes(fmt, load, not together)
    return MethodPlan(
        method=name,
        ratio=load.compressed_tokens * bf16 / packed if packed else None,
        resident_ratio=whole / total if total else 1.0,
        bytes=parts,
        bytes_total=total,
        bytes_packed=packed,
        bytes_bf16=whole,
        scratch_bytes=scratch,
        pending_bytes=packing + rebuilding,
        transient_bytes=transient,
        peak_bytes=total + scratch + passing,
    )


def _basis_bytes(fmt: Format[Any], load: Workload) -> int:
    """Of one layer."""
    return load.heads * load.head_dim * fmt.rank * 2


def _statistics_bytes(fmt: Format[Any], load: Workload) -> int:
    """The moment, the eigenvalues of the spans that chunks come to or wait for, and the weights
    that recent chunks wait with."""
    weights = load.head_dim ** (2 if fmt.full_moment else 1)
    numbers = load.known_spans() * fmt.rank + load.waiting_chunks * weights
    per_head = moment_bytes(load.head_dim, getattr(fmt, "compact_statistics", False))
    return load.layers * load.heads * (per_head + numbers * 4)


def _scratch_bytes(load: Workload) -> int:
    chunk = load.current_tokens and (load.chunk_tokens or load.current_tokens)
    tokens = load.tokens + load.current_tokens
    size = (load.heads, load.head_dim, tokens)
    return scratch_bytes(*size, chunk, load.windowed, load.scratch_itemsize)


def _shared_books(
    fmt: Lasting, life: CodebookLife, load: Workload, held: Mapping[str, int]
) -> dict[str, int]:
    """What codebooks and bases that outlive spans take instead of what is in `held`.

    As much as the settings allow, and one of each at least: a history that changes little has less.
    """
    one = _span_parts(fmt, load, load.chunk_tokens or load.span_tokens, 1)
    bases, book = one.get("bases", 0), fmt.book_bytes(load.heads, load.head_dim)
    tokens = load.compressed_tokens
    allowed = int(life.allowed_bits(tokens, tokens) * load.layers * load.heads / 8)
    count = max(2 * load.layers, (allowed - bases) // book)
    spans = sum(count for _, _, count in load.spans())
    count = min(count, 2 * load.layers * spans)
    return {
        "codebooks": count * book - held.get("codebooks", 0),
        "bases": bases - held.get("bases", 0),
    }


def _span_parts(fmt: Format[Any], load: Workload, tokens: int, chunks: int) -> dict[str, int]:
    """All layers, keys and values."""
    parts: dict[str, int] = {}
    for role in ROLES:
        one = fmt.packed_bytes(tokens, chunks, load.heads, load.head_dim, role)
        _add(parts, {part: count * load.layers for part, count in one.items()})
    return parts


def _add(into: dict[str, int], parts: Mapping[str, int]) -> None:
    for part, count in parts.items():
        into[part] = into.get(part, 0) + count


def _packing_bytes(fmt: Format[Any], load: Workload) -> int:
    """What a chunk's clean passes have made when the last one is done."""
    encoded = load.written_tokens
    if not encoded:
        return 0
    plain = encoded if load.recent_tokens else 0  # and an older chunk is encoded
    if load.remade:
        plain = min(load.sink_tokens + load.recent_tokens, encoded)
        encoded -= plain
    pending = plain * load.bf16_bytes_per_token
    pending += sum(_span_parts(fmt, load, encoded, 1).values()) if encoded else 0
    if fmt.uses_queries:
        pending += load.layers * load.heads * load.head_dim**2 * 4
    if isinstance(fmt, Learns):
        pending += load.layers * fmt.learned_bytes(load.heads, load.head_dim, 0)
    return pending


def _rebuilding_bytes(
    fmt: Format[Any], load: Workload, spans: Sequence[tuple[int, int, int]]
) -> int:
    """What a commit makes anew: the open span with the chunk in it, the oldest one when a window
    begins inside it. (Spans of one chunk are dropped whole where chunks divide the window.)"""
    if not load.current_tokens or not spans or load.remade:
        return 0
    rebuilt = 0
    if spans[0][1] > 1:
        open_span = _span_parts(fmt, load, *spans[-1][:2])
        rebuilt += sum(n for part, n in open_span.items() if part not in LASTING)
    chunk = load.chunk_tokens or load.span_tokens
    if load.windowed and (spans[0][1] > 1 or load.compressed_tokens % chunk):
        rebuilt += sum(_span_parts(fmt, load, *spans[0][:2]).values())
    return rebuilt


def _together_bytes(fmt: Format[Any], load: Workload) -> int:
    """Of what small layers wait and are encoded in together."""
    if not load.on_gpu or not load.written_tokens or load.recent_tokens:
        return 0
    return batch_bytes(fmt, load.layers, load.heads, load.written_tokens, load.head_dim)


def _transient_bytes(fmt: Format[Any], load: Workload, alone: bool) -> int:
    """alone: whether each layer is encoded by itself."""
    each = load.scratch_itemsize
    share = load.heads, load.written_tokens, load.head_dim
    if isinstance(fmt, Learns):
        each += 4
    elif fmt.compresses and load.on_gpu and alone:
        each += 4 + load.scratch_itemsize * fmt.uses_queries
    as_they_are = load.on_gpu and load.scratch_itemsize == 2 and not wants_unrotated(fmt)
    if fmt.uses_queries and not as_they_are:
        each += 4
    return math.prod(share) * each


def _library_bytes(fmt: Format[Any], load: Workload, alone: bool) -> int:
    """Moments of queries are products beside the model where layers are encoded one by one, and
    bases are learnt on a stream of their own."""
    own = isinstance(fmt, Learns) or (fmt.uses_queries and fmt.compresses and alone)
    return CUBLAS_BYTES if own and load.on_gpu and load.written_tokens else 0


class LaneLike(Protocol):
    """What a plan reads of an engine's LaneConfig."""

    @property
    def name(self) -> str: ...

    @property
    def method(self) -> str: ...

    @property
    def settings(self) -> Mapping[str, object]: ...

    @property
    def policy(self) -> CachePolicy: ...


@dataclass(frozen=True)
class Plan:
    """Methods that run side by side, lane after lane, in one scratch."""

    lanes: tuple[tuple[str, Format[Any], Workload], ...]

    @property
    def methods(self) -> tuple[MethodPlan, ...]:
        return tuple(plan_method(name, fmt, load) for name, fmt, load in self.lanes)

    @property
    def peak_bytes(self) -> int:
        """Every lane's cache, and the largest scratch and pending write among them."""
        found = self.methods
        held = (m.bytes_total + m.scratch_bytes for m in found)
        passing = (m.peak_bytes - beside for m, beside in zip(found, held, strict=True))
        return (
            sum(m.bytes_total for m in found)
            + max((m.scratch_bytes for m in found), default=0)
            + max(passing, default=0)
        )

    def with_tokens(self, tokens: int) -> Plan:
        """The same with a history of at most this many tokens."""
        return Plan(tuple((name, fmt, load.shortened(tokens)) for name, fmt, load in self.lanes))

    def as_json(self) -> dict[str, Any]:
        return {"methods": [m.as_json() for m in self.methods], "peak_bytes": self.peak_bytes}


def plan(methods: Mapping[str, Mapping[str, object]], load: Workload) -> Plan:
    """One workload in several formats. methods: format name, or format:preset as a label of its
    own, -> settings of `make_format`."""
    return Plan(
        tuple(
            (method, make_format(split_method(method)[0], **dict(settings)), load)
            for method, settings in methods.items()
        )
    )


def plan_lanes(
    spec: CacheSpec, lanes: Sequence[LaneLike], itemsize: int = 2, on_gpu: bool | None = None,
    remade: bool = False,
) -> Plan:  # fmt: skip
    """The caches of an engine's lanes, each with its own policy; the rest as `of_policy` has it."""
    known = {"itemsize": itemsize, "on_gpu": on_gpu, "remade": remade}
    return Plan(
        tuple(
            (
                lane.name,
                make_format(lane.method, **dict(lane.settings)),
                Workload.of_policy(spec, lane.policy, **known),
            )
            for lane in lanes
        )
    )


__all__ = [
    "LaneLike",
    "MethodPlan",
    "Plan",
    "Workload",
    "companion_loads",
    "plan",
    "plan_lanes",
    "plan_method",
]

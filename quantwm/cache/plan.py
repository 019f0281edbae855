"""The bytes of a cache before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from quantwm.cache.codebook_life import CodebookLife, Lasting, outliving
from quantwm.cache.formats import make_format, split_method
from quantwm.cache.formats.base import Format, Learns, Role
from quantwm.cache.ledger import PARTS
from quantwm.cache.plan_scratch import scratch_bytes
from quantwm.cache.spec import CachePolicy, CacheSpec
from quantwm.cache.statistics import moment_bytes
from quantwm.errors import UserError

ROLES: tuple[Role, Role] = ("keys", "values")


@dataclass(frozen=True)
class Workload:
    """What a cache is to hold.

    Attributes:
        layers, heads, head_dim: of the attention.
        tokens: of history, those that policy keeps in BF16 included.
        span_tokens: that share one codebook.
        chunk_tokens: of one chunk; None takes a span for one chunk, as at full size.
        sink_tokens, recent_tokens: of the history, kept in BF16.
        current_tokens: of the chunk being denoised: scratch, and its pending packed form.
        scratch_itemsize: bytes of an element of the scratch, 2 (BF16) or 4.
        windowed: whether a window slides over the history; it may then cut one span more.
        companions: BF16 streams of another geometry, cached beside these frame by frame.
    """

    layers: int
    heads: int
    head_dim: int
    tokens: int
    span_tokens: int
    chunk_tokens: int | None = None
    sink_tokens: int = 0
    recent_tokens: int = 0
    current_tokens: int = 0
    scratch_itemsize: int = 2
    windowed: bool = False
    companions: tuple[Workload, ...] = ()

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "head_dim", "span_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.chunk_tokens is not None and self.chunk_tokens < 1:
            raise UserError(f"chunk_tokens must be at least 1, got {self.chunk_tokens}")
        for name in ("tokens", "sink_tokens", "recent_tokens", "current_tokens"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} must be 0 or more, got {getattr(self, name)}")

    @classmethod
    def of_policy(
        cls, spec: CacheSpec, policy: CachePolicy, tokens: int | None = None, itemsize: int = 2
    ) -> Workload:
        """What a KVCache holds when its window is full, between two chunks.

        tokens: of history; without it the window's or, with no window either, one codebook span
        beside what policy keeps in BF16.
        """
        chunk, sink = spec.tokens_per_chunk, policy.sink_frames * spec.tokens_per_frame
        sink = 0 if policy.compress_sink else sink
        recent = policy.recent_chunks * chunk
        if tokens is None and policy.window_frames is None:
            tokens = sink + recent + max(policy.span_tokens, chunk)
        elif tokens is None:
            tokens = max(policy.window_frames * spec.tokens_per_frame - chunk, 0)
        return cls(
            layers=spec.layers * len(spec.streams),
            heads=spec.heads,
            head_dim=spec.head_dim,
            tokens=tokens,
            span_tokens=policy.span_tokens,
            chunk_tokens=chunk,
            sink_tokens=sink,
            recent_tokens=recent,
            current_tokens=chunk,
            scratch_itemsize=itemsize,
            windowed=policy.window_frames is not None,
            companions=companion_loads(
                spec,
                frames=tokens // spec.tokens_per_frame,
                sink_frames=policy.sink_frames,
                recent_frames=policy.recent_chunks * spec.frames_per_chunk,
                current_frames=spec.frames_per_chunk,
                itemsize=itemsize,
                windowed=policy.window_frames is not None,
            ),
        )

    def shortened(self, tokens: int) -> Workload:
        """With a history of at most this many tokens, companions cut at the same frame."""
        kept = min(self.tokens, tokens)
        cut = (replace(c, tokens=c.tokens * kept // max(self.tokens, 1)) for c in self.companions)
        return replace(self, tokens=kept, companions=tuple(cut))

    @property
    def bf16_bytes_per_token(self) -> int:
        return self.layers * self.heads * self.head_dim * 2 * 2

    @property
    def compressed_tokens(self) -> int:
        return max(self.tokens - self.sink_tokens - self.recent_tokens, 0)

    @property
    def waiting_chunks(self) -> int:
        """Recent chunks, which wait with their guides to be encoded."""
        return -(-self.recent_tokens // (self.chunk_tokens or self.span_tokens))

    def _chunks(self) -> tuple[int, int]:
        """Compressed chunks, and chunks of a full span."""
        chunk = self.chunk_tokens or self.span_tokens
        return -(-self.compressed_tokens // chunk), max(self.span_tokens // chunk, 1)

    def waiting_spans(self) -> int:
        """Spans that only recent chunks belong to so far."""
        done, of_span = self._chunks()
        return -(-(done + self.waiting_chunks) // of_span) - -(-done // of_span)

    def known_spans(self) -> int:
        """Spans of the recent chunks, or the open one."""
        done, of_span = self._chunks()
        if not self.waiting_chunks:
            return min(done, 1)
        return -(-(done + self.waiting_chunks) // of_span) - done // of_span

    def spans(self) -> list[tuple[int, int, int]]:
        """(tokens, chunks, how many) of the codebook spans: the full ones, then the open one.

        A span holds whole chunks. Counted, not listed: a history may have 2**40 spans.
        """
        chunk = self.chunk_tokens or self.span_tokens
        full = max(self.span_tokens // chunk, 1) * chunk
        count, rest = divmod(self.compressed_tokens, full)
        spans = [(full, full // chunk, count)] if count else []
        return [*spans, (rest, -(-rest // chunk), 1)] if rest else spans


def companion_loads(
    spec: CacheSpec,
    frames: int,
    sink_frames: int = 0,
    recent_frames: int = 0,
    current_frames: int = 0,
    itemsize: int = 2,
    windowed: bool = False,
) -> tuple[Workload, ...]:
    """What the companion streams of a geometry hold beside `frames` latent frames of history."""
    return tuple(
        Workload(
            layers=stream.layers * len(stream.streams),
            heads=stream.heads,
            head_dim=stream.head_dim,
            tokens=frames * stream.tokens_per_frame,
            span_tokens=max(frames, 1) * stream.tokens_per_frame,
            chunk_tokens=stream.tokens_per_chunk,
            sink_tokens=sink_frames * stream.tokens_per_frame,
            recent_tokens=recent_frames * stream.tokens_per_frame,
            current_tokens=current_frames * stream.tokens_per_frame,
            scratch_itemsize=itemsize,
            windowed=windowed,
        )
        for _, stream in spec.companions
    )


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
            as its limit allows; with what an open history reserves to grow.
        pending_bytes: while a chunk is committed: its packed form and query moments, the open
            span that is rebuilt with it, and the oldest one that a window cuts.
        peak_bytes: all three.
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
    pending, scratch = _pending_bytes(fmt, load, spans), _scratch_bytes(load)
    for stream in load.companions:
        beside = plan_method("bf16", make_format("bf16"), stream)
        _add(held, beside.bytes)
        whole += beside.bytes_bf16
        pending += beside.pending_bytes
        scratch = max(scratch, beside.scratch_bytes)
    parts = {part: count for part, count in held.items() if count}
    total = sum(parts.values())
    return MethodPlan(
        method=name,
        ratio=load.compressed_tokens * bf16 / packed if packed else None,
        resident_ratio=whole / total if total else 1.0,
        bytes=parts,
        bytes_total=total,
        bytes_packed=packed,
        bytes_bf16=whole,
        scratch_bytes=scratch,
        pending_bytes=pending,
        peak_bytes=total + scratch + pending,
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
    allowed = int(life.book_bits * load.compressed_tokens * load.layers * load.heads / 8)
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


def _pending_bytes(fmt: Format[Any], load: Workload, spans: Sequence[tuple[int, int, int]]) -> int:
    if not load.current_tokens:
        return 0
    pending = sum(_span_parts(fmt, load, load.current_tokens, 1).values())
    if fmt.uses_queries:
        pending += load.layers * load.heads * load.head_dim**2 * 4
    if isinstance(fmt, Learns):
        pending += load.layers * fmt.learned_bytes(load.heads, load.head_dim, 0)
    if spans and spans[0][1] > 1:
        open_span = _span_parts(fmt, load, *spans[-1][:2])
        pending += sum(n for part, n in open_span.items() if part not in ("codebooks", "bases"))
    if spans and load.windowed:
        pending += sum(_span_parts(fmt, load, *spans[0][:2]).values())
    return pending


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
        return (
            sum(m.bytes_total for m in found)
            + max((m.scratch_bytes for m in found), default=0)
            + max((m.pending_bytes for m in found), default=0)
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


def plan_lanes(spec: CacheSpec, lanes: Sequence[LaneLike], itemsize: int = 2) -> Plan:
    """The caches of an engine's lanes, each with its own policy."""
    return Plan(
        tuple(
            (
                lane.name,
                make_format(lane.method, **dict(lane.settings)),
                Workload.of_policy(spec, lane.policy, itemsize=itemsize),
            )
            for lane in lanes
        )
    )

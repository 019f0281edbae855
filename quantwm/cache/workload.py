"""What a cache is to hold, in numbers that `plan` turns into bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quantwm.cache.spec import CachePolicy, CacheSpec
from quantwm.errors import UserError

CUBLAS_BYTES = 32 << 20
"""What cuBLAS keeps on Hopper for every stream that multiplies, by PyTorch's default."""


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
        on_gpu: where clean passes are encoded beside the model, on streams of the cache's own.
        remade: whether all history is written anew for every chunk, as one chunk.
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
    on_gpu: bool = True
    remade: bool = False

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
        cls, spec: CacheSpec, policy: CachePolicy, tokens: int | None = None, itemsize: int = 2,
        on_gpu: bool | None = None, remade: bool = False,
    ) -> Workload:  # fmt: skip
        """What a KVCache holds when its window is full, between two chunks.

        tokens: of history; without it the window's or, with no window either, one codebook span
        beside what policy keeps in BF16. on_gpu: as itemsize says without, 2 on a GPU.
        """
        chunk, sink = spec.tokens_per_chunk, policy.sink_frames * spec.tokens_per_frame
        sink = 0 if policy.compress_sink else sink
        recent = policy.recent_chunks * chunk
        if tokens is None and policy.window_frames is None:
            tokens = sink + recent + max(policy.span_tokens, chunk)
        elif tokens is None:
            tokens = max(policy.window_frames * spec.tokens_per_frame - chunk, 0)
        if remade and recent:
            recent = tokens
        return cls(
            layers=spec.layers * len(spec.streams),
            heads=spec.heads,
            head_dim=spec.head_dim,
            tokens=tokens,
            span_tokens=policy.span_tokens,
            chunk_tokens=max(tokens, 1) if remade else chunk,
            sink_tokens=sink,
            recent_tokens=recent,
            current_tokens=chunk,
            scratch_itemsize=itemsize,
            windowed=policy.window_frames is not None,
            companions=companion_loads(
                spec,
                frames=tokens // spec.tokens_per_frame,
                recent_frames=policy.recent_chunks * spec.frames_per_chunk,
                current_frames=spec.frames_per_chunk,
                itemsize=itemsize,
                windowed=policy.window_frames is not None,
            ),
            on_gpu=itemsize == 2 if on_gpu is None else on_gpu,
            remade=remade,
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
    def written_tokens(self) -> int:
        """Of the chunk whose clean passes are encoded; 0 where none is planned."""
        return self.tokens if self.remade and self.current_tokens else self.current_tokens

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
    recent_frames: int = 0,
    current_frames: int = 0,
    itemsize: int = 2,
    windowed: bool = False,
) -> tuple[Workload, ...]:
    """What the companion streams of a geometry hold beside `frames` latent frames: no sink."""
    return tuple(
        Workload(
            layers=stream.layers * len(stream.streams),
            heads=stream.heads,
            head_dim=stream.head_dim,
            tokens=frames * stream.tokens_per_frame,
            span_tokens=max(frames, 1) * stream.tokens_per_frame,
            chunk_tokens=stream.tokens_per_chunk,
            recent_tokens=recent_frames * stream.tokens_per_frame,
            current_tokens=current_frames * stream.tokens_per_frame,
            scratch_itemsize=itemsize,
            windowed=windowed,
        )
        for _, stream in spec.companions
    )

"""What a cache is told about the model it serves and what it may keep: geometry and policy."""

from __future__ import annotations

from dataclasses import dataclass

from quantwm.errors import UserError


@dataclass(frozen=True)
class RopeLayout:
    """How positions are in the keys of a stream. Formats that undo rotation read it.

    RoPE turns interleaved pairs (2j, 2j+1): first the pairs of time, then of the row, then of the
    column, each pair by position * theta**(-2j/d) with d the channels of its axis, as in Wan.
    Channels behind the split are not turned.

    Attributes:
        split: channels for (frame, row, column), even; together at most head_dim.
        grid: rows and columns of tokens of a latent frame.
        theta: base of the frequencies.
        baked: keys and queries come turned by their absolute position; False when a world caches
            them before RoPE and turns them at read.
    """

    split: tuple[int, int, int]
    grid: tuple[int, int]
    theta: float = 10000.0
    baked: bool = True

    def __post_init__(self) -> None:
        if len(self.split) != 3 or any(size < 0 or size % 2 for size in self.split):
            raise UserError(f"a RoPE split is three even channel counts, got {self.split}")
        if len(self.grid) != 2 or min(self.grid) < 1:
            raise UserError(f"a RoPE grid is rows and columns of at least 1, got {self.grid}")
        if not 1.0 < self.theta < float("inf"):
            raise UserError(f"RoPE theta must be above 1, got {self.theta}")


@dataclass(frozen=True)
class CacheSpec:
    """Geometry of the attention that a cache serves.

    Attributes:
        layers, heads, head_dim: of the transformer (heads are those local to this rank).
        tokens_per_frame: tokens of one latent frame.
        frames_per_chunk: latent frames denoised together.
        streams: names of the cached key/value streams of this geometry.
        companions: streams of another geometry, (name, CacheSpec), cached frame by frame beside
            these in BF16 (Matrix-Game-2's "mouse" and "keyboard"). Their layers are those that
            have one, counted from 0.
        rope: how positions are in the keys, for formats that undo it; None when that is unknown
            or the keys carry no position.
    """

    layers: int
    heads: int
    head_dim: int
    tokens_per_frame: int
    frames_per_chunk: int
    streams: tuple[str, ...] = ("self",)
    companions: tuple[tuple[str, CacheSpec], ...] = ()
    rope: RopeLayout | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "head_dim", "tokens_per_frame", "frames_per_chunk"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.streams or len(set(self.streams)) != len(self.streams):
            raise UserError(f"streams must be distinct names, got {self.streams}")
        names = [*self.streams, *(name for name, _ in self.companions)]
        if len(set(names)) != len(names):
            raise UserError(f"companion streams must have names of their own, got {names}")
        if self.rope is not None:
            self._check_rope(self.rope)

    def _check_rope(self, rope: RopeLayout) -> None:
        if sum(rope.split) > self.head_dim:
            raise UserError(f"RoPE split {rope.split} is above head_dim {self.head_dim}")
        if rope.grid[0] * rope.grid[1] != self.tokens_per_frame:
            raise UserError(
                f"RoPE grid {rope.grid} does not hold the {self.tokens_per_frame} tokens of a frame"
            )

    @property
    def tokens_per_chunk(self) -> int:
        return self.tokens_per_frame * self.frames_per_chunk

    @property
    def bf16_bytes_per_token(self) -> int:
        """Bytes that one token costs over all layers when keys and values are BF16."""
        return self.layers * self.heads * self.head_dim * 2 * 2


@dataclass(frozen=True)
class CachePolicy:
    """What is kept, and what of it stays BF16; the same for every format.

    Attributes:
        sink_frames: leading latent frames that stay BF16 and are never evicted.
        recent_chunks: newest finished chunks that stay BF16 before they are encoded.
        window_frames: latent frames attended, the sink counted; None keeps everything.
        span_tokens: tokens that share one codebook (a codebook span). A chunk longer than this
            opens a span of its own.
        compress_sink: the sink is encoded like other frames, and still never evicted. A window of
            18 with a sink of 6 holds 43 % of its history in the sink, which in BF16 caps the
            resident ratio near 2.
    """

    sink_frames: int = 0
    recent_chunks: int = 0
    window_frames: int | None = None
    span_tokens: int = 4680
    compress_sink: bool = False

    def __post_init__(self) -> None:
        if self.sink_frames < 0 or self.recent_chunks < 0:
            raise UserError(
                "sink_frames and recent_chunks must be 0 or more, "
                f"got {self.sink_frames} and {self.recent_chunks}"
            )
        if self.compress_sink and self.recent_chunks:
            raise UserError("compress_sink needs recent_chunks 0: a sink is encoded when it comes")
        if self.span_tokens < 1:
            raise UserError(f"span_tokens must be at least 1, got {self.span_tokens}")
        if self.window_frames is not None and self.window_frames <= self.sink_frames:
            raise UserError(
                f"window_frames counts the sink and must exceed it: window {self.window_frames}, "
                f"sink {self.sink_frames}"
            )

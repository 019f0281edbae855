"""What a cache is told about the model it serves and what it may keep: geometry and policy."""

from __future__ import annotations

from dataclasses import dataclass

from quantwm.errors import UserError


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
    """

    layers: int
    heads: int
    head_dim: int
    tokens_per_frame: int
    frames_per_chunk: int
    streams: tuple[str, ...] = ("self",)
    companions: tuple[tuple[str, CacheSpec], ...] = ()

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "head_dim", "tokens_per_frame", "frames_per_chunk"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.streams or len(set(self.streams)) != len(self.streams):
            raise UserError(f"streams must be distinct names, got {self.streams}")
        names = [*self.streams, *(name for name, _ in self.companions)]
        if len(set(names)) != len(names):
            raise UserError(f"companion streams must have names of their own, got {names}")

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
    """

    sink_frames: int = 0
    recent_chunks: int = 0
    window_frames: int | None = None
    span_tokens: int = 4680

    def __post_init__(self) -> None:
        if self.sink_frames < 0 or self.recent_chunks < 0:
            raise UserError(
                "sink_frames and recent_chunks must be 0 or more, "
                f"got {self.sink_frames} and {self.recent_chunks}"
            )
        if self.span_tokens < 1:
            raise UserError(f"span_tokens must be at least 1, got {self.span_tokens}")
        if self.window_frames is not None and self.window_frames <= self.sink_frames:
            raise UserError(
                f"window_frames counts the sink and must exceed it: window {self.window_frames}, "
                f"sink {self.sink_frames}"
            )

"""What a cache holds between chunks: frames in segments, and what past chunks taught; its bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from quantwm.cache import checks
from quantwm.cache.chunk import BF16, Codebooks, OpenChunk
from quantwm.cache.codebook_life import BookFit
from quantwm.cache.dispatch import note_fallback
from quantwm.cache.formats.base import Format, Learner, Learns
from quantwm.cache.growth import Past
from quantwm.cache.ledger import Ledger, beside_spans, take_stock, with_companions
from quantwm.cache.reading import decode_visible
from quantwm.cache.remedy import saying_what_fits
from quantwm.cache.replays import Replays
from quantwm.cache.segments import Segment, SpanPlan, evict
from quantwm.cache.settling import settled
from quantwm.cache.spec import CachePolicy, CacheSpec
from quantwm.cache.statistics import QueryStatistics
from quantwm.cache.unrotation import wants_unrotated
from quantwm.cache.workspace import Workspace
from quantwm.errors import UserError


class Held:
    """A cache but for the chunk cycle, which `KVCache` adds: made, forked, evicted, counted."""

    def __init__(
        self,
        spec: CacheSpec,
        fmt: Format[Any],
        policy: CachePolicy,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        workspace: Workspace | None = None,
        seed: int = 0,
    ) -> None:
        """dtype: of the attention, float32 or bfloat16; what is stored is BF16 either way, except
        in the `bf16` format with exact=True.

        workspace: the scratch that the lanes of an engine share; one of its own without.
        seed: of k-means, whose generator is the cache's own.
        """
        if dtype not in (torch.float32, torch.bfloat16):
            raise UserError(f"dtype must be torch.float32 or torch.bfloat16, got {dtype}")
        fmt.check(spec.head_dim)
        self.spec, self.fmt, self.policy = spec, fmt, policy
        self.device = torch.empty(0, device=device).device
        self.dtype = dtype
        self.workspace = Workspace() if workspace is None else workspace
        self.seed = seed
        self._stored = dtype if fmt.exact else torch.bfloat16
        plain = fmt if self._stored == torch.float32 else BF16
        shared = {"device": device, "dtype": dtype, "workspace": self.workspace, "seed": seed}
        beside = replace(policy, sink_frames=0)  # as Matrix-Game-2's action caches
        self._companions = {
            name: type(self)(companion, plain, beside, **shared)
            for name, companion in spec.companions
        }
        self._generator = torch.Generator()
        self._open: OpenChunk | None = None
        self._replays = Replays()
        if wants_unrotated(fmt) and spec.rope is None:
            note_fallback(
                f"{fmt.name} keeps keys as they come: this world does not say how positions are in "
                "them"
            )
        self._begin()

    # What is held.

    @property
    def _segments(self) -> list[Segment]:
        return self._history

    @_segments.setter
    def _segments(self, segments: list[Segment]) -> None:
        self._history = segments
        self._replays.forget()

    @property
    def tokens(self) -> int:
        """Tokens of history held; the open chunk is not history yet."""
        return sum(segment.tokens for segment in self._segments)

    @property
    def frames(self) -> int:
        """Latent frames of history held."""
        return sum(len(segment.frame_tokens) for segment in self._segments)

    def frame_tokens(self) -> list[tuple[int, int]]:
        """(latent frame, tokens held of it) of every frame of the history, in its order."""
        return [
            (segment.first_frame + index, tokens)
            for segment in self._segments
            for index, tokens in enumerate(segment.frame_tokens)
        ]

    @property
    def next_frame(self) -> int | None:
        """Where the next chunk must begin; None while the cache is new and takes any."""
        return self._next_frame

    def ledger(self) -> Ledger:
        """Every byte held, by part."""
        extra = beside_spans(
            self._segments, self._span, self._books, self._statistics, self._learner
        )
        scratch = self.workspace.tensors()
        own = take_stock(self.spec, self._segments, extra, self._pending(), self._learner, scratch)
        own = replace(own, scratch_bytes=own.scratch_bytes + self.workspace.hidden_bytes)
        return with_companions(own, [cache.ledger() for cache in self._companions.values()])

    @saying_what_fits
    def history(self, layer: int, stream: str = "self") -> tuple[Tensor, Tensor]:
        """One layer's decoded history in buffers of the caller's own: k, v [H, tokens, D]."""
        if stream in self._companions:
            return self._companions[stream].history(layer)
        slot = checks.slot_of(self.spec, layer, stream)
        shape = (self.spec.heads, self.tokens, self.spec.head_dim)
        keys = torch.empty(shape, dtype=self.dtype, device=self.device)
        values = torch.empty_like(keys)
        decode_visible(self._segments, slot, keys, values, first=0)
        return keys, values

    # The whole cache.

    @saying_what_fits
    def evict(self, before_frame: int) -> None:
        """Drop every frame before this one, the sink excepted."""
        self._require_idle("evict")
        caches = (self, *self._companions.values())
        # All that memory can fail for comes first.
        kept = [settled(evict(c._segments, before_frame), c._segments) for c in caches]
        for cache, segments in zip(caches, kept, strict=True):
            cache._segments = segments

    def clear(self) -> None:
        """Forget the frames, not what past queries and codebooks taught; takes any frame next.

        For worlds that rebuild their memory per chunk. An open chunk is forgotten.
        """
        self.abort_chunk()
        self.remade = True
        self._segments, self._origin, self._next_frame = [], None, None
        if self._span.number >= 0:
            # A full span, so that the next chunk opens one of its own.
            self._span = replace(self._span, tokens=self.policy.span_tokens)
        for companion in self._companions.values():
            companion.clear()

    @saying_what_fits
    def reset(self) -> None:
        """Empty, as newly made; an open chunk is forgotten. The same input gives the same bytes."""
        self._begin()

    def _begin(self) -> None:
        slots = self.spec.layers * len(self.spec.streams)
        shape = (slots, self.spec.heads, self.spec.head_dim)
        compact = getattr(self.fmt, "compact_statistics", False)
        # All that memory can fail for comes first.
        statistics, learner = QueryStatistics(*shape, self.device, compact), None
        if isinstance(self.fmt, Learns):
            window, frame = self.policy.window_frames, self.spec.tokens_per_frame
            learner = self.fmt.learner(*shape, self.spec.rope, window, frame, self.device)
        for companion in self._companions.values():
            companion.reset()
        if self._open is not None:
            self._open.give_up()
        self._open = None
        self.remade = False  # whether the history is, for every chunk, as after `clear`
        self._segments = []
        self._books, self._fit = Codebooks(), BookFit()
        self._span = SpanPlan(number=-1, tokens=0)
        self._origin: int | None = None
        self._next_frame: int | None = None
        self._generator.manual_seed(self.seed)
        self._statistics = statistics
        self._learner: Learner | None = learner

    @saying_what_fits
    def fork(self) -> Self:
        """An independent cache with the same history; packed tensors are shared until they grow."""
        self._require_idle("fork")
        shared = {"device": self.device, "dtype": self.dtype, "workspace": self.workspace}
        other = type(self)(self.spec, self.fmt, self.policy, seed=self.seed, **shared)
        other._segments = list(self._segments)
        other._books, other._span, other._fit = self._books, self._span, self._fit
        other._origin, other._next_frame = self._origin, self._next_frame
        other._generator.set_state(self._generator.get_state())
        other._statistics = self._statistics.copy()
        other._learner, other.remade = self._learner, self.remade
        other._companions = {name: cache.fork() for name, cache in self._companions.items()}
        return other

    def abort_chunk(self) -> None:
        """Forget the open chunk, if there is one: the cache is as it was before begin_chunk."""
        if self._open is not None:
            self._open.give_up()
            self._generator.set_state(self._open.generator_state)
            self._open = None
        for companion in self._companions.values():
            companion.abort_chunk()

    def _require_open(self, call: str) -> OpenChunk:
        if self._open is None:
            raise RuntimeError(f"{call} needs an open chunk; begin_chunk comes first")
        return self._open

    def _require_idle(self, call: str) -> None:
        if self._open is not None:
            raise RuntimeError(
                f"{call} while the chunk at frame {self._open.first_frame} is open; "
                "finalize_chunk or abort_chunk comes first"
            )

    def _window_tokens(self) -> int:
        return (self.policy.window_frames or 0) * self.spec.tokens_per_frame

    def _pending(self) -> list[Tensor]:
        fmt = BF16 if self.policy.recent_chunks else self.fmt
        return [] if self._open is None else self._open.pending(fmt)

    def _past(self) -> Past:
        return Past(self._segments, self._books, self._span, self._fit, self._learner)

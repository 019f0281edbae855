"""`KVCache`: the frames, chunks and spans of one lane; the state machine of the cache.

A chunk goes: begin_chunk, attend in every layer and denoising pass, attend(clean=True) once in
every layer, finalize_chunk. The chunk's own keys and values live in one layer's scratch; in the
clean pass they are encoded right after that layer's attention, held as pending, and committed
together. What finalize_chunk builds is built before anything is replaced: all of it or nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quantwm.cache import checks
from quantwm.cache.attention import ScoreBias, attend
from quantwm.cache.chunk import BF16, Codebooks, Encoder, LayerWrite, OpenChunk
from quantwm.cache.codebook_life import BookFit
from quantwm.cache.commit import Built, build, finish_all
from quantwm.cache.formats.base import Format, Learner, Learns
from quantwm.cache.growth import Past, guide_for
from quantwm.cache.ledger import Ledger, beside_spans, take_stock, with_companions
from quantwm.cache.reading import Reading, decode_visible, first_visible, visible_tokens
from quantwm.cache.segments import ChunkGuide, Segment, SpanPlan, evict
from quantwm.cache.settling import settled
from quantwm.cache.spec import CachePolicy, CacheSpec
from quantwm.cache.statistics import QueryStatistics, moment
from quantwm.cache.storage import Savable
from quantwm.cache.workspace import Workspace
from quantwm.errors import UserError


class KVCache(Savable):
    """Keys and values of past latent frames of one lane, frame-indexed, in one format.

    Frames follow each other without a gap. A window counts the current chunk, as the models do:
    a chunk sees the sink and the newest `window_frames - sink_frames` frames, its own among them.
    finalize_chunk evicts what the next chunk of `frames_per_chunk` frames cannot see.
    """

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
        self._companions = {
            name: KVCache(companion, plain, policy, **shared) for name, companion in spec.companions
        }
        self._generator = torch.Generator()
        self.reset()

    # What is held.

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
        own = take_stock(
            self.spec, self._segments, extra, self._pending(), self.workspace.tensors()
        )
        return with_companions(own, [cache.ledger() for cache in self._companions.values()])

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

    # One chunk.

    def begin_chunk(self, first_frame: int, frames: int) -> None:
        """Open a chunk of latent frames first_frame .. first_frame + frames - 1.

        Raises RuntimeError when one is open already, UserError when it does not follow the last.
        """
        self._require_idle("begin_chunk")
        if frames < 1 or first_frame < 0:
            raise UserError(
                f"a chunk needs at least 1 frame from frame 0 on, got {frames} at {first_frame}"
            )
        if self._next_frame is not None and first_frame != self._next_frame:
            raise UserError(
                f"the next chunk must begin at frame {self._next_frame}, got {first_frame}"
            )
        origin = first_frame if self._origin is None else self._origin
        sink_frames = min(max(origin + self.policy.sink_frames - first_frame, 0), frames)
        self._open = OpenChunk(
            first_frame,
            frames,
            frames * self.spec.tokens_per_frame,
            0 if self.policy.compress_sink else sink_frames * self.spec.tokens_per_frame,
            sink_frames * self.spec.tokens_per_frame,
            self._generator.get_state(),
        )
        for companion in self._companions.values():
            companion.begin_chunk(first_frame, frames)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        clean: bool = False,
        stream: str = "self",
        score_bias: ScoreBias | None = None,
    ) -> Tensor:
        """Attention of the open chunk over the visible history and itself.

        q: [H, Nq, D]; k, v: [H, tokens of the chunk, D]. Returns [H, Nq, D] in the cache's dtype.
        clean: also encode keys and values, once per layer and stream, and hold them as pending.
        Raises RuntimeError outside a chunk or on a second clean pass, UserError on a bad shape,
        layer or stream, and on NaN or infinity in a clean pass (on CUDA finalize_chunk does).
        """
        write = LayerWrite(layer, k, v, q, stream)
        seen = self.reading(write, clean)
        q = q.to(self.dtype)
        wanted = score_bias is not None and seen.past
        bias = score_bias(layer, stream, q, seen.past) if wanted else None
        out = attend(seen, q, self.workspace, bias)
        if clean:
            self._write(write)
        return out

    def gather(
        self,
        layer: int,
        k: Tensor,
        v: Tensor,
        *,
        clean: bool = False,
        stream: str = "self",
        q: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Keys and values that the open chunk sees, history first, then its own: [H, tokens, D].

        For worlds whose attention is not one softmax over what is cached (keys turned at read,
        two branches, attention per latent cell). The views are of the shared scratch and hold
        until the next call. q: for the query statistics only. Raises as `attend` does.
        """
        if stream in self._companions:
            return self._companions[stream].gather(layer, k, v, clean=clean, q=q)
        write = LayerWrite(layer, k, v, q, stream)
        keys, values = self.reading(write, clean).staged(self.workspace, self.dtype)
        if clean:
            self._write(write)
        return keys, values

    def finalize_chunk(self, keep_mask: Tensor | None = None) -> None:
        """Commit the open chunk; every layer and stream must have had its clean pass.

        keep_mask: bool [tokens of the chunk]; tokens that are False are dropped in every layer.
        On any error the history is as before and the chunk still open. Raises RuntimeError when
        a layer is missing, UserError on a bad mask or when a CUDA write was not finite.
        """
        caches = [self, *self._companions.values()]
        state = self._generator.get_state()
        try:
            built = [self._built(keep_mask), *(other._built(None) for other in caches[1:])]
            becomes = finish_all(built)
            adds = [cache._added_queries() for cache in caches]
        except BaseException:
            self._generator.set_state(state)
            raise
        # Nothing from here on allocates, so it is all or nothing.
        for cache, past, add_queries in zip(caches, becomes, adds, strict=True):
            add_queries()
            cache._commit(past)

    def abort_chunk(self) -> None:
        """Forget the open chunk, if there is one: the cache is as it was before begin_chunk."""
        if self._open is not None:
            self._generator.set_state(self._open.generator_state)
            self._open = None
        for companion in self._companions.values():
            companion.abort_chunk()

    def prefill(
        self,
        first_frame: int,
        frames: int,
        writes: Iterable[LayerWrite],
        keep_mask: Tensor | None = None,
    ) -> None:
        """Write a whole chunk whose keys and values are known, without attention.

        The writes are taken one at a time, so a generator holds one layer in memory only. Queries,
        where given, join the statistics. On any error the cache is as it was.
        """
        self.begin_chunk(first_frame, frames)
        chunk = self._require_open("prefill")
        try:
            for write in writes:
                checks.check_shapes(self.spec, chunk.tokens, write)
                if checks.slot_of(self.spec, write.layer, write.stream) in chunk.writes:
                    raise UserError(f"layer {write.layer} stream {write.stream} is given twice")
                self._write(write)
            self.finalize_chunk(keep_mask)
        finally:
            self.abort_chunk()

    # The whole cache.

    def evict(self, before_frame: int) -> None:
        """Drop every frame before this one, the sink excepted."""
        self._require_idle("evict")
        self._segments = settled(evict(self._segments, before_frame), self._segments)
        for companion in self._companions.values():
            companion.evict(before_frame)

    def clear(self) -> None:
        """Forget the frames, not what past queries and codebooks taught; takes any frame next.

        For worlds that rebuild their memory per chunk. An open chunk is forgotten.
        """
        self.abort_chunk()
        self._segments, self._origin, self._next_frame = [], None, None
        if self._span.number >= 0:
            # A full span, so that the next chunk opens one of its own.
            self._span = replace(self._span, tokens=self.policy.span_tokens)
        for companion in self._companions.values():
            companion.clear()

    def reset(self) -> None:
        """Empty, as newly made; an open chunk is forgotten. The same input gives the same bytes."""
        for companion in self._companions.values():
            companion.reset()
        self._open: OpenChunk | None = None
        self._segments: list[Segment] = []
        self._books, self._fit = Codebooks(), BookFit()
        self._span = SpanPlan(number=-1, tokens=0)
        self._origin: int | None = None
        self._next_frame: int | None = None
        self._generator.manual_seed(self.seed)
        slots = self.spec.layers * len(self.spec.streams)
        shape = (slots, self.spec.heads, self.spec.head_dim)
        compact = getattr(self.fmt, "compact_statistics", False)
        self._statistics = QueryStatistics(*shape, self.device, compact)
        self._learner: Learner | None = None
        if isinstance(self.fmt, Learns):
            window, frame = self.policy.window_frames, self.spec.tokens_per_frame
            self._learner = self.fmt.learner(*shape, self.spec.rope, window, frame, self.device)

    def fork(self) -> KVCache:
        """An independent cache with the same history; packed tensors are shared until they grow."""
        self._require_idle("fork")
        shared = {"device": self.device, "dtype": self.dtype, "workspace": self.workspace}
        other = KVCache(self.spec, self.fmt, self.policy, seed=self.seed, **shared)
        other._segments = list(self._segments)
        other._books, other._span, other._fit = self._books, self._span, self._fit
        other._origin, other._next_frame = self._origin, self._next_frame
        other._generator.set_state(self._generator.get_state())
        other._statistics = self._statistics.copy()
        other._learner = self._learner
        other._companions = {name: cache.fork() for name, cache in self._companions.items()}
        return other

    # Reading.

    def reading(self, write: LayerWrite, clean: bool = False) -> Reading:
        """What the open chunk sees of one layer."""
        chunk = self._require_open("attend")
        slot = checks.slot_of(self.spec, write.layer, write.stream)
        checks.check_shapes(self.spec, chunk.tokens, write)
        if clean and slot in chunk.writes:
            raise RuntimeError(
                f"layer {write.layer} stream {write.stream} had its clean pass already"
            )
        first = first_visible(self.policy, chunk.stop_frame)
        past = visible_tokens(self._segments, first)
        history = (self._segments, slot, first)
        return Reading(*history, write.k, write.v, past, self._window_tokens())

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

    # Writing.

    def _past(self) -> Past:
        return Past(self._segments, self._books, self._span, self._fit, self._learner)

    def _built(self, keep_mask: Tensor | None) -> Built:
        """Check the open chunk and build what is to be."""
        chunk = self._require_open("finalize_chunk")
        checks.check_complete(self.spec, chunk)
        keep = checks.mask_on_host(chunk.tokens, keep_mask)
        known = self._statistics, self.spec, self.fmt, self.policy
        return build(chunk, self._past(), self._guide(chunk), *known, self._generator, keep)

    def _added_queries(self) -> Callable[[], None]:
        """What adds the open chunk's queries to the statistics; see `QueryStatistics.prepared`."""
        writes = self._require_open("finalize_chunk").writes
        moments = {slot: w.moment for slot, w in writes.items() if w.moment is not None}
        return self._statistics.prepared(moments, max(w.queries for w in writes.values()))

    def _commit(self, past: Past) -> None:
        """Put in place what the open chunk made of the past."""
        chunk = self._require_open("finalize_chunk")
        self._segments, self._books = list(past.segments), past.books
        self._span, self._fit, self._learner = past.span, past.fit, past.learner
        if self._origin is None:
            self._origin = chunk.first_frame
        self._next_frame = chunk.stop_frame
        self._open = None

    def _guide(self, chunk: OpenChunk) -> ChunkGuide:
        if chunk.guide is None:
            known = self._statistics, self.spec, self.fmt, self.policy
            chunk.guide = guide_for(chunk, self._past(), *known)
        return chunk.guide

    def _write(self, write: LayerWrite) -> None:
        """Encode one slot's share of the open chunk and hold it as pending."""
        chunk = self._require_open("a clean pass")
        slot = checks.slot_of(self.spec, write.layer, write.stream)
        q = write.q if self.fmt.uses_queries else None
        checks.check_finite(chunk, write, queries=q is not None or self._learner is not None)
        k, v = (t.to(self.device, self._stored) for t in (write.k, write.v))
        guide = self._guide(chunk) if chunk.sink_tokens < chunk.tokens else None
        encoder = Encoder(self.fmt, self._generator, guide, self._books)
        stay_recent = self.policy.recent_chunks > 0
        written = encoder.written(slot, k, v, chunk.sink_tokens, stay_recent)
        if q is not None:
            written = replace(written, moment=moment(q), queries=q.shape[1])
        if self._learner is not None:
            positions = chunk.positions(self.spec.tokens_per_frame)
            seen = encoder.spans_for_learning(slot, k, v, chunk.sink_tokens, written)
            learned = self._learner.observe(slot, k, v, write.q, positions, seen)
            written = replace(written, learned=learned)
        chunk.writes[slot] = written

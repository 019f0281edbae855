"""`KVCache`: the frames, chunks and spans of one lane; the state machine of the cache.

A chunk goes: begin_chunk, attend in every layer and denoising pass, attend(clean=True) once in
every layer, finalize_chunk. The chunk's own keys and values live in one layer's scratch; in the
clean pass they are encoded right after that layer's attention (on a GPU small layers wait for each
other), held as pending, and committed together. What finalize_chunk builds is built before anything
is replaced: all of it or nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from quantwm.cache import checks
from quantwm.cache.attention import ScoreBias, attend
from quantwm.cache.batch import Batch, are_warm, encode_slots, slots_together
from quantwm.cache.beside import Staging, streams_for
from quantwm.cache.chunk import Encoder, LayerWrite, OpenChunk, PendingWrite
from quantwm.cache.commit import Built, build, finish_all
from quantwm.cache.growth import Past, guide_for
from quantwm.cache.held import Held
from quantwm.cache.reading import Reading, first_visible, visible_tokens
from quantwm.cache.remedy import saying_what_fits
from quantwm.cache.segments import ChunkGuide
from quantwm.cache.statistics import moment
from quantwm.cache.storage import Savable
from quantwm.cache.unrotation import query_moment, wants_unrotated
from quantwm.errors import UserError


class KVCache(Held, Savable):
    """Keys and values of past latent frames of one lane, frame-indexed, in one format.

    Frames follow each other without a gap. A window counts the current chunk, as the models do:
    a chunk sees the sink and the newest `window_frames - sink_frames` frames, its own among them.
    finalize_chunk evicts what the next chunk of `frames_per_chunk` frames cannot see.
    """

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
        try:
            for companion in self._companions.values():
                companion.begin_chunk(first_frame, frames)
        except (RuntimeError, MemoryError, UserError):
            self.abort_chunk()
            raise

    @saying_what_fits
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
        lasting: bool = False,
    ) -> Tensor:
        """Attention of the open chunk over the visible history and itself.

        q: [H, Nq, D]; k, v: [H, tokens of the chunk, D]. Returns [H, Nq, D] in the cache's dtype.
        clean: also encode keys and values, once per layer and stream, and hold them as pending.
        lasting: q, k and v lie where those of earlier chunks did, as the outputs of a world's CUDA
        graphs do; copying them may be recorded.
        Raises RuntimeError outside a chunk or on a second clean pass, UserError on a bad shape,
        layer or stream, and on NaN or infinity in a clean pass (on CUDA finalize_chunk does).
        """
        write = LayerWrite(layer, k, v, q, stream, lasting)
        seen = self.reading(write, clean)
        q = q.to(self.dtype)
        bias = None
        if score_bias is not None and seen.past:
            bias = score_bias(layer, stream, q, seen.past).expand(*q.shape[:2], seen.past)
        out = attend(seen, q, self.workspace, bias)
        if clean:
            self._write(write)
        return out

    @saying_what_fits
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

    @saying_what_fits
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
            adds = [cache._added_queries() for cache in caches]
            becomes = finish_all(built)  # the device has nothing to do from its read on
        except BaseException:
            self._generator.set_state(state)
            raise
        # Nothing from here on allocates, so it is all or nothing.
        for cache, past, add_queries in zip(caches, becomes, adds, strict=True):
            add_queries()
            cache._commit(past)

    @saying_what_fits
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
                if chunk.written(checks.slot_of(self.spec, write.layer, write.stream)):
                    raise UserError(f"layer {write.layer} stream {write.stream} is given twice")
                self._write(write)
            self.finalize_chunk(keep_mask)
        finally:
            self.abort_chunk()

    # Reading.

    def reading(self, write: LayerWrite, clean: bool = False) -> Reading:
        """What the open chunk sees of one layer."""
        chunk = self._require_open("attend")
        slot = checks.slot_of(self.spec, write.layer, write.stream)
        checks.check_shapes(self.spec, chunk.tokens, write)
        if clean and chunk.written(slot):
            raise RuntimeError(
                f"layer {write.layer} stream {write.stream} had its clean pass already"
            )
        first = first_visible(self.policy, chunk.stop_frame)
        past = visible_tokens(self._segments, first)
        history = (self._segments, slot, first)
        own = (write.k, write.v, past, self._window_tokens())
        return Reading(*history, *own, self._replays)

    def pending_keys(self, layer: int, stream: str = "self") -> Tensor | None:
        """The open chunk's keys as they will be read, [H, n, D], once their clean pass was.

        Those of its last n tokens that are encoded with it; None where it stays BF16.
        """
        chunk = self._require_open("pending_keys")
        slot = checks.slot_of(self.spec, layer, stream)
        if chunk.batch is not None and slot in chunk.batch.waiting:
            self._encode_batch(chunk, chunk.batch)
        write = chunk.writes.get(slot)
        if write is None or write.rest is None or self.policy.recent_chunks:
            return None
        chunk.join()
        keys, tokens = write.rest[0], chunk.tokens - chunk.sink_tokens
        shape = (self.spec.heads, tokens, self.spec.head_dim)
        out = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.fmt.decode_into(keys, out, 0, 0, tokens)
        return out

    # Writing.

    def _built(self, keep_mask: Tensor | None) -> Built:
        """Check the open chunk and build what is to be."""
        chunk = self._require_open("finalize_chunk")
        checks.check_complete(self.spec, chunk)
        if chunk.batch is not None and chunk.batch.waiting:
            self._encode_batch(chunk, chunk.batch)
        chunk.join()
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
        """Encode one slot's share of the open chunk and hold it as pending.

        On failure, at whatever point, k-means' generator is as it was and the call can be made
        again.
        """
        chunk = self._require_open("a clean pass")
        state = self._generator.get_state()
        try:
            staging = self._staging(chunk, write)
            batch = None if staging is None else self._batch(chunk, staging, write)
            if batch is not None:
                self._wait_in(batch, chunk, write)
            elif staging is None:
                self._encode(chunk, write)
            else:
                q = write.q if self.fmt.uses_queries else None
                with staging.staged(write.k, write.v, q) as (k, v, q):
                    self._encode(chunk, replace(write, k=k, v=v, q=q))
        except BaseException:
            self._generator.set_state(state)
            raise

    def _staging(self, chunk: OpenChunk, write: LayerWrite) -> Staging | None:
        """Where the write is encoded from, beside the model; None for doing it in its turn.

        A format that learns has a worker of its own, and BF16 is a copy already.
        """
        if not self.fmt.compresses or self._learner is not None or write.k.device != self.device:
            return None
        if chunk.staging is None and (streams := streams_for(self.device)) is not None:
            chunk.staging = Staging(streams)
        return chunk.staging

    def _batch(self, chunk: OpenChunk, staging: Staging, write: LayerWrite) -> Batch | None:
        """Where the write waits for others that are encoded with it; None for doing it at once.

        Only from warm codebooks: cold ones are drawn layer by layer.
        """
        if chunk.sink_tokens or self.policy.recent_chunks:
            return None
        if chunk.batch is None:
            slots = self.spec.layers * len(self.spec.streams)
            most = slots_together(self.fmt, slots, *write.k.shape)
            pairs = list(self._books.pairs.values())
            if most > 1 and len(pairs) == slots and are_warm(pairs):
                chunk.batch = Batch.of(staging.streams, most, write.k, self.workspace)
        return chunk.batch

    def _wait_in(self, batch: Batch, chunk: OpenChunk, write: LayerWrite) -> None:
        """Put a slot with those that wait; encode them when they are enough, or the last ones."""
        slot = checks.slot_of(self.spec, write.layer, write.stream)
        q = write.q if self.fmt.uses_queries else None
        checks.check_finite(chunk, write, queries=q is not None, batched=True)
        batch.put(slot, write.k, write.v, q, write.lasting)
        slots = self.spec.layers * len(self.spec.streams)
        if not batch.full(slots - len(chunk.writes) - len(batch.waiting), slots):
            return
        try:
            self._encode_batch(chunk, batch)
        except BaseException:
            batch.waiting.pop(slot, None)
            raise

    def _encode_batch(self, chunk: OpenChunk, batch: Batch) -> None:
        """Encode the slots that wait and hold them as pending."""
        slots, queries = list(batch.waiting), list(batch.waiting.values())
        books = [self._books.pairs[slot] for slot in slots]
        with batch.staged() as (k, v, moments):
            guide = self._guide(chunk)  # its bases too are found beside the model
            opens = self._books.span != guide.span.number
            run = batch.recorded(self.fmt.name, self.fmt.config, opens, moments is None)
            given = (self.fmt, self._generator, slots, k, v, guide, books, opens, moments, run)
            found = encode_slots(*given)
        if self.device.type == "cuda":
            checks.keep_extremes(chunk, self.spec, slots, found.ends)
        for slot, count, seen, (spans, fitted) in zip(
            slots, queries, found.moments, found.slots, strict=True
        ):
            asked = seen if count else None
            chunk.writes[slot] = PendingWrite(None, spans, fitted, None, asked, count)

    def _encode(self, chunk: OpenChunk, write: LayerWrite) -> None:
        slot = checks.slot_of(self.spec, write.layer, write.stream)
        q = write.q if self.fmt.uses_queries else None
        checks.check_finite(chunk, write, queries=q is not None or self._learner is not None)
        k, v = (t.to(self.device, self._stored) for t in (write.k, write.v))
        guide = self._guide(chunk) if chunk.sink_tokens < chunk.tokens else None
        encoder = Encoder(self.fmt, self._generator, guide, self._books)
        stay_recent = self.policy.recent_chunks > 0
        written = encoder.written(slot, k, v, chunk.sink_tokens, stay_recent)
        positions = chunk.positions(self.spec.tokens_per_frame)
        if q is not None and not wants_unrotated(self.fmt):
            written = replace(written, moment=moment(q), queries=q.shape[1])
        elif q is not None:
            seen = query_moment(q, self.spec.rope, positions, self.policy.window_frames)
            written = replace(written, moment=seen, queries=0 if seen is None else q.shape[1])
        if self._learner is not None:
            seen = encoder.spans_for_learning(slot, k, v, chunk.sink_tokens, written)
            learned = self._learner.observe(slot, k, v, write.q, positions, seen)
            written = replace(written, learned=learned)
        chunk.writes[slot] = written

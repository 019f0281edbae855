"""One layer's history in a format, filled with clustered random keys and values for timing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from quantwm.cache import CachePolicy, CacheSpec, KVCache, LayerWrite, make_format
from quantwm.cache.dispatch import AttentionMode
from quantwm.cache.workspace import SCRATCH_LIMIT, Workspace

FRAME_TOKENS = 40  # divides 1,560-token frames and lets a history end anywhere near
CLUSTERS = 256


def clustered(
    shape: tuple[int, int, int], generator: Generator, clusters: int = CLUSTERS
) -> Tensor:
    """[H, N, D] around random means, with some wide channels; BF16 on the generator's device."""
    heads, tokens, dim = shape
    device = generator.device
    means = torch.randn(heads, clusters, dim, generator=generator, device=device)
    pick = torch.randint(0, clusters, (tokens,), generator=generator, device=device)
    wide = 0.5 + 2 * (torch.rand(heads, 1, dim, generator=generator, device=device) > 0.9)
    out = torch.empty(shape, dtype=torch.bfloat16, device=device)
    for head in range(heads):  # one at a time: the noise is float32
        noise = torch.randn(tokens, dim, generator=generator, device=device)
        out[head] = means[head, pick] + noise * wide[head]
    return out


@dataclass(frozen=True)
class LayerHistory:
    """A cache of one layer with a chunk open behind its history."""

    cache: KVCache

    @classmethod
    def prefilled(
        cls, method: str, keys: Tensor, values: Tensor, chunk_tokens: int, **settings: object
    ) -> LayerHistory:
        """keys, values: [H, N, D], written chunk by chunk, a codebook span each; then a chunk of
        chunk_tokens is opened."""
        heads, tokens, dim = keys.shape
        size = min(FRAME_TOKENS, chunk_tokens)
        spec = CacheSpec(
            layers=1, heads=heads, head_dim=dim, tokens_per_frame=size,
            frames_per_chunk=max(chunk_tokens // size, 1),
        )  # fmt: skip
        cache = KVCache(
            spec, make_format(method, **settings), CachePolicy(span_tokens=chunk_tokens),
            device=keys.device, dtype=keys.dtype,
        )  # fmt: skip
        for first in range(0, tokens // size * size, chunk_tokens):
            part = slice(first, min(first + chunk_tokens, tokens // size * size))
            frames = (part.stop - part.start) // size
            write = LayerWrite(0, keys[:, part], values[:, part], keys[:, part])
            cache.prefill(first // size, frames, [write])
        cache.begin_chunk(cache.next_frame or 0, spec.frames_per_chunk)
        return cls(cache)

    def with_workspace(
        self, scratch_limit: int = SCRATCH_LIMIT, mode: AttentionMode = "staged", **slab: int
    ) -> LayerHistory:
        """The same history read through another scratch; slab: as in `Workspace`."""
        self.cache.abort_chunk()
        other = self.cache.fork()
        other.workspace = Workspace(scratch_limit, mode, **slab)
        for cache in (self.cache, other):
            cache.begin_chunk(cache.next_frame or 0, cache.spec.frames_per_chunk)
        return LayerHistory(other)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As a denoising pass does; k, v: the open chunk's own."""
        return self.cache.attend(0, q, k, v)

    def decode(self, k: Tensor, v: Tensor) -> Tensor:
        """Keys as an attention reads them, in the same turns; all of them are decoded."""
        reading = self.cache.reading(LayerWrite(0, k, v))
        workspace, dtype, heads = self.cache.workspace, self.cache.dtype, k.shape[0]
        group = reading.heads_at_once(workspace, dtype)
        if group == heads:
            return reading.staged(workspace, dtype)[0]
        keys, values = reading.room(workspace, dtype, group)
        for first in range(0, heads, group):
            some = slice(first, min(first + group, heads))
            count = some.stop - first
            reading.decode_heads(keys[:count], values[:count], some)
        return keys

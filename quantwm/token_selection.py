"""Token selection: which token of the past a query picks by each lane's keys (the paper's Fig. 2).

The queries are the reference lane's, from the clean pass of its newest chunk; the keys are each
lane's own history, decoded. A pick is the token of highest score among all earlier chunks, the
definition of `study`'s top-1 token shift.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantwm.cache.spec import CacheSpec
from quantwm.errors import UserError

WATCHED_BYTES = 64 * 2**20
"""Queries of one chunk that are kept: all 10 layers of the embedded world take 1.5 MB; of the large
worlds (100 MB a layer at 720p) as many layers, evenly spread, as fit."""


def watched_layers(spec: CacheSpec) -> tuple[int, ...]:
    """Layers whose queries may be kept, evenly spread from the first to the last; at least two."""
    one = spec.heads * spec.tokens_per_chunk * spec.head_dim * 2
    count = max(min(spec.layers, WATCHED_BYTES // one), min(spec.layers, 2))
    if count == 1:
        return (0,)
    return tuple(round(i * (spec.layers - 1) / (count - 1)) for i in range(count))


class QueryWatch:
    """Keeps the queries of the newest clean pass of one cache, BF16 [heads, tokens, head_dim]."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self.first_frame = 0
        self.queries: dict[int, Tensor] = {}

    def attach(self, cache: Any) -> WatchingCache:
        """The cache with its clean queries kept."""
        self.queries.clear()
        return WatchingCache(cache, self)


class WatchingCache:
    """A KVCache whose clean queries are kept by a watch; everything else passes through."""

    def __init__(self, cache: Any, watch: QueryWatch) -> None:
        self._cache = cache
        self._watch = watch

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **options: Any
    ) -> Tensor:
        """KVCache.attend; the queries of a clean pass on the first stream are kept."""
        first = options.get("stream") in (None, self._cache.spec.streams[0])
        if options.get("clean") and first and layer in self._watch.layers:
            # A copy: captured graphs write the next layer's queries to the same memory.
            self._watch.queries[layer] = q.detach().to(torch.bfloat16, copy=True)
        return self._cache.attend(layer, q, k, v, *arguments, **options)

    def begin_chunk(self, first_frame: int, frames: int) -> None:
        """KVCache.begin_chunk; the newest chunk's first frame is noted."""
        self._watch.first_frame = first_frame
        self._cache.begin_chunk(first_frame, frames)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


@dataclass(frozen=True)
class Pick:
    """One head's choice: a latent frame, the cell in its grid, and the lead of its score over the
    second best, in logits."""

    frame: int
    row: int
    column: int
    lead: float


@dataclass(frozen=True)
class LayerPicks:
    """What every lane's keys make one query pick in one layer: lane -> a pick per head."""

    layer: int
    lanes: Mapping[str, tuple[Pick, ...]]


def picks(
    watch: QueryWatch, caches: Mapping[str, Any], frame: int, row: int, column: int
) -> list[LayerPicks]:
    """What the query of one patch picks, per watched layer and lane.

    frame: latent frame of the newest chunk; row, column: its cell in the grid of tokens.

    Raises:
        UserError: keys that carry no position as they are cached, no chunk yet, or a patch that is
            not of the newest chunk.
    """
    spec: CacheSpec = next(iter(caches.values())).spec
    rows, columns = grid_of(spec)
    if not watch.queries:
        raise UserError("no chunk has been generated yet; drive one first")
    last = watch.first_frame + spec.frames_per_chunk - 1
    if not watch.first_frame <= frame <= last:
        raise UserError(
            f"queries are kept of the newest chunk only, latent frames {watch.first_frame} to "
            f"{last}; click one of its pictures"
        )
    if not (0 <= row < rows and 0 <= column < columns):
        raise UserError(f"a patch lies in {rows} rows and {columns} columns, got {row}, {column}")
    token = (frame - watch.first_frame) * spec.tokens_per_frame + row * columns + column
    return [
        LayerPicks(
            layer,
            {
                name: _of_lane(cache, layer, queries[:, token], watch.first_frame)
                for name, cache in caches.items()
            },
        )
        for layer, queries in sorted(watch.queries.items())
    ]


def grid_of(spec: CacheSpec) -> tuple[int, int]:
    """Rows and columns of tokens of a frame.

    Raises:
        UserError: the world does not say how its tokens lie, or caches keys without their position.
    """
    if spec.rope is None or not spec.rope.baked:
        raise UserError(
            "this world caches keys without their position, so a key alone does not say what a "
            "query would pick"
        )
    return spec.rope.grid


def _of_lane(cache: Any, layer: int, query: Tensor, before: int) -> tuple[Pick, ...]:
    """query [H, D] against the keys of all frames before this one."""
    spec: CacheSpec = cache.spec
    frames = torch.tensor(
        [frame for frame, tokens in cache.frame_tokens() for _ in range(tokens)], dtype=torch.long
    )
    past = int((frames < before).sum())
    if past == 0:
        raise UserError("the cache holds no earlier chunk; drive a few more chunks first")
    if past % spec.tokens_per_frame:
        raise UserError("tokens were dropped from this history; patches cannot be told any more")
    keys = cache.history(layer)[0][:, :past]
    scores = torch.einsum("hd,hnd->hn", query.float(), keys.float()) * spec.head_dim**-0.5
    best = scores.topk(min(2, past), dim=1)
    columns = grid_of(spec)[1]
    found = []
    for index, values in zip(best.indices[:, 0].tolist(), best.values.tolist(), strict=True):
        cell = index % spec.tokens_per_frame
        lead = values[0] - values[-1]
        found.append(Pick(int(frames[index]), cell // columns, cell % columns, lead))
    return tuple(found)

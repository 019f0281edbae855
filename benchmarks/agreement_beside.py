"""Encoding beside the model against encoding in its turn: the same bits, whatever else runs."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from benchmarks.agreement import require
from quantwm.cache import CachePolicy, CacheSpec, KVCache, make_format
from quantwm.cache.beside import in_turn
from quantwm.cache.formats import split_method
from quantwm.cache.spec import RopeLayout

SPEC = CacheSpec(
    layers=6,
    heads=12,
    head_dim=128,
    tokens_per_frame=880,
    frames_per_chunk=3,
    rope=RopeLayout((44, 42, 42), (22, 40)),
)
POLICY = CachePolicy(window_frames=9, span_tokens=5280)
"""Matrix-Game-2's chunk, whose layers are encoded together; spans of two, so that they grow and are
cut."""
CHUNKS = 8


def agree_beside(method: str, device: torch.device) -> None:
    """Disagreement unless both caches hold the same after chunks of a model that overwrites."""
    held = []
    for beside in (True, False, True):
        with nullcontext() if beside else in_turn():
            held.append(_history(method, device))
    for other in held[1:]:
        for one, two in zip(held[0], other, strict=True):
            require(torch.equal(one, two), f"{method}: encoded beside the model, a cache differs")


def agree_replays(method: str, device: torch.device) -> None:
    """Disagreement unless launches that are made again give what a reading anew gives."""
    generator = torch.Generator(device).manual_seed(4)
    name, settings = split_method(method)
    cache = KVCache(SPEC, make_format(name, **settings), POLICY, device=device)
    shape = (SPEC.heads, SPEC.tokens_per_chunk, SPEC.head_dim)
    q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device=device) for _ in range(3))
    for number in range(4):
        cache.begin_chunk(number * SPEC.frames_per_chunk, SPEC.frames_per_chunk)
        for clean in (False, False, True):
            for layer in range(SPEC.layers):
                for tensor in (q, k, v):
                    tensor.normal_(generator=generator)
                if clean:
                    cache.attend(layer, q, k, v, clean=True)
                    continue
                again = cache.attend(layer, q, k, v)
                cache._replays.forget()
                same = torch.equal(again, cache.attend(layer, q, k, v))
                require(same, f"{method}: a reading that is launched again differs")
        cache.finalize_chunk()


def _history(method: str, device: torch.device) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(3)
    name, settings = split_method(method)
    cache = KVCache(SPEC, make_format(name, **settings), POLICY, device=device)
    shape = (SPEC.heads, SPEC.tokens_per_chunk, SPEC.head_dim)
    q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device=device) for _ in range(3))
    weights = torch.randn(1536, 1536, dtype=torch.bfloat16, device=device, generator=generator)
    rows = torch.randn(2640, 1536, dtype=torch.bfloat16, device=device, generator=generator)
    for number in range(CHUNKS):
        cache.begin_chunk(number * SPEC.frames_per_chunk, SPEC.frames_per_chunk)
        for clean in (False, True):
            for layer in range(SPEC.layers):
                for tensor in (q, k, v):  # in place, as the outputs of a replayed graph are
                    tensor.normal_(generator=generator)
                cache.attend(layer, q, k, v, clean=clean)
                rows = torch.nn.functional.normalize(rows @ weights)
        cache.finalize_chunk()
    return [t for layer in range(SPEC.layers) for t in cache.history(layer)]

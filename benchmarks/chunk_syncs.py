"""How often a chunk makes the host wait for the GPU: counted by PyTorch's own debug mode."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.agreement import require
from quantwm.cache import CachePolicy, CacheSpec, KVCache, make_format
from quantwm.cache.formats import split_method

METHODS = (
    "bf16", "rtn", "kivi", "qvg", "qvg-pro:stages=2", "quantwm", "quantwm:compact,book_bits=200",
)  # fmt: skip
SPEC = CacheSpec(layers=4, heads=8, head_dim=128, tokens_per_frame=520, frames_per_chunk=3)
POLICIES = (
    CachePolicy(span_tokens=3200),
    CachePolicy(span_tokens=3200, window_frames=14, sink_frames=2, recent_chunks=1),
)
WARM, CHUNKS = 5, 9


def check_one_sync_a_chunk(device: torch.device) -> None:
    """At most one for all layers together, in every format, window and all."""
    for method in METHODS:
        name, settings = split_method(method)
        for number, policy in enumerate(POLICIES):
            cache = KVCache(SPEC, make_format(name, **settings), policy, device=device)
            counts = [_syncs(cache, device) for _ in range(CHUNKS)][WARM:]
            print(f"    {method}, policy {number}: {counts} host syncs in {len(counts)} chunks")
            require(max(counts) <= 1, f"{method} waits for the device {max(counts)} times a chunk")


def _syncs(cache: KVCache, device: torch.device) -> int:
    """Of one chunk with a denoising and a clean pass; its tensors are made before."""
    first = cache.next_frame or 0
    shape = (SPEC.heads, SPEC.tokens_per_chunk, SPEC.head_dim)
    layers = [
        [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3)]
        for _ in range(SPEC.layers)
    ]
    torch.cuda.synchronize()
    with counted_syncs() as seen:
        cache.begin_chunk(first, SPEC.frames_per_chunk)
        for clean in (False, True):
            for layer, (q, k, v) in enumerate(layers):
                cache.attend(layer, q, k, v, clean=clean)
        cache.finalize_chunk()
    return len(seen)


@contextmanager
def counted_syncs() -> Iterator[list[str]]:
    """Where this thread waits for a GPU inside, each as "file:line", in a list that grows.

    What a worker waits for on a stream of its own (qtc's bases) keeps nobody else waiting.
    """
    seen: list[str] = []
    own = threading.get_ident()

    def note(message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
        if threading.get_ident() == own and "synchronizing" in str(message):
            seen.append(f"{filename}:{lineno}")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield seen
        finally:
            torch.cuda.set_sync_debug_mode("default")

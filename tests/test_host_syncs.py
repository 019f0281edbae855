"""A chunk waits for the device once: all layers, streams and companions together.

The CUDA path with CPU tensors that say that they are on CUDA; `python -m benchmarks gpu-check`
counts the same on a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from quantwm.cache import CachePolicy, CacheSpec, KVCache
from quantwm.cache.formats import FORMATS
from tests.cache_helpers import LASTING, SPEC, make_cache, qkv
from tests.host_syncs import HostSyncs

POLICIES = {
    "spans": CachePolicy(span_tokens=12),
    "window": CachePolicy(span_tokens=12, window_frames=8),
    "sink, recent": CachePolicy(span_tokens=12, sink_frames=2, recent_chunks=1, window_frames=10),
}


def _chunk(cache: KVCache) -> list[str]:
    """Reads of one chunk with a denoising pass and a clean one."""
    first = cache.next_frame or 0
    with (
        mock.patch("torch.Tensor.is_cuda", new_callable=mock.PropertyMock, return_value=True),
        HostSyncs() as seen,
    ):
        cache.begin_chunk(first, 2)
        for clean in (False, True):
            for layer in range(cache.spec.layers):
                cache.attend(layer, *qkv(first * 10 + layer, 6), clean=clean)
                for name, spec in cache.spec.companions:
                    q, k, v = qkv(first + layer, 2, spec)
                    if layer < spec.layers:
                        cache.gather(layer, k, v, q=q, clean=clean, stream=name)
        cache.finalize_chunk()
    return seen.names


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", [*FORMATS, "lasting"])
def test_one_read_a_chunk(name: str, policy: str) -> None:
    settings = LASTING if name == "lasting" else None
    spec = replace(SPEC, layers=3)
    fmt = "quantwm" if name == "lasting" else name
    cache = make_cache(fmt, POLICIES[policy], spec=spec, settings=settings)
    for _ in range(9):  # spans open, join, are cut by the window, and bases are made anew
        assert _chunk(cache) == ["tolist"]


def test_companions_share_the_read() -> None:
    mouse = CacheSpec(layers=1, heads=4, head_dim=8, tokens_per_frame=1, frames_per_chunk=2)
    cache = make_cache("quantwm", spec=replace(SPEC, companions=(("mouse", mouse),)))
    for _ in range(3):
        assert _chunk(cache) == ["tolist"]


def test_a_read_is_seen() -> None:
    """The counter counts what it should: each of these makes a host wait."""
    x = torch.tensor([1.0, 0.0])
    reads = (
        lambda: x.sum().item(), lambda: bool(x.any()), lambda: x.tolist(), lambda: x.nonzero(),
        lambda: x[x > 0], lambda: torch.linalg.eigh(torch.eye(2)), lambda: float(x[0]),
    )  # fmt: skip
    for read in reads:
        with HostSyncs() as seen:
            read()
        assert len(seen.names) == 1
    with HostSyncs() as seen:
        (x * 2).cumsum(0).argsort()
    assert seen.names == []

"""Small caches for tests: geometry, random layers, one chunk through a cache."""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quantwm.cache import CachePolicy, CacheSpec, KVCache, make_format
from quantwm.cache.spec import RopeLayout

SPEC = CacheSpec(layers=2, heads=2, head_dim=16, tokens_per_frame=3, frames_per_chunk=2)
SETTINGS: dict[str, dict[str, object]] = {
    "bf16": {},
    "rtn": {"group_size": 8},
    "kivi": {"group_size": 8},
    "qvg": {"centroids": 4, "group_size": 8},
    "qvg-pro": {"stages": 2, "centroids": 4, "group_size": 8},
    "quantwm": {"centroids": 4, "group_size": 8, "rank": 2},
    "qtc": {"basis_after": 1.0},
}
ROPE = RopeLayout((8, 4, 4), (1, 3))
"""How positions may be in the keys of `SPEC`."""
HALF_MEASURES: dict[str, object] = {
    **SETTINGS["quantwm"],
    "keys": "unrotated",
    "clip": 0.8,
    "coefficients": "int4",
}
LASTING: dict[str, object] = {
    **SETTINGS["quantwm"],
    "centroid_bits": 8,
    "book_bits": 150.0,
    "refit_above": 1.01,
    "refit_after": 6,
    "compact_statistics": True,
}
"""quantwm whose codebooks outlive spans. One of 4 centroids in 16 channels takes 72 bytes a head,
a basis 64: 150 bits hold one of each at 12 tokens and allow some more as the history grows."""


def make_cache(
    name: str,
    policy: CachePolicy | None = None,
    spec: CacheSpec = SPEC,
    settings: Mapping[str, object] | None = None,
    seed: int = 0,
) -> KVCache:
    fmt = make_format(name, **(SETTINGS[name] if settings is None else settings))
    policy = CachePolicy(span_tokens=12) if policy is None else policy
    return KVCache(spec, fmt, policy, dtype=torch.float32, seed=seed)


def qkv(seed: int, tokens: int, spec: CacheSpec = SPEC) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k, v [H, tokens, D] in float32; queries with a direction of their own."""
    generator = torch.Generator().manual_seed(seed)
    shape = (spec.heads, tokens, spec.head_dim)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    q[..., 0] *= 4.0
    return q, k, v


def chunk_seed(first_frame: int, slot: int, salt: int = 0) -> int:
    return (salt * 1000 + first_frame) * 100 + slot


def run_chunk(
    cache: KVCache,
    frames: int | None = None,
    salt: int = 0,
    keep_mask: Tensor | None = None,
    passes: int = 1,
) -> list[Tensor]:
    """Denoise and commit one chunk of data that depends on its frame; the clean outputs."""
    first = cache.next_frame or 0
    frames = cache.spec.frames_per_chunk if frames is None else frames
    cache.begin_chunk(first, frames)
    outputs = []
    for number in range(passes + 1):
        clean = number == passes
        for layer in range(cache.spec.layers):
            seed = chunk_seed(first, layer, salt) + (0 if clean else 50)
            q, k, v = qkv(seed, frames * cache.spec.tokens_per_frame, cache.spec)
            out = cache.attend(layer, q, k, v, clean=clean)
            if clean:
                outputs.append(out)
    cache.finalize_chunk(keep_mask)
    return outputs


def packed_tensors(cache: KVCache) -> list[Tensor]:
    """Every tensor of the history, in a fixed order."""
    return [tensor for segment in cache._segments for _, tensor in segment.parts()]


def same_bytes(first: KVCache, second: KVCache) -> bool:
    ours, theirs = packed_tensors(first), packed_tensors(second)
    return len(ours) == len(theirs) and all(
        a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(ours, theirs, strict=True)
    )


def finish_work(cache: KVCache) -> None:
    """Wait for what a worker makes for the cache, which stays where it is."""
    job = getattr(cache._learner, "_job", None)
    if job is not None:
        job[1]._future.exception()


def live_bytes(cache: KVCache) -> int:
    """Bytes of every tensor reachable from the cache; scratch and k-means' generator aside.

    What a worker has made, asked for or not, is in reach; `finish_work` comes first.
    """
    pending: list[object] = [cache]
    seen: set[int] = set()
    storages: dict[int, int] = {}
    skipped = {id(cache.workspace), id(cache._generator), id(cache.fmt)}
    if cache._open is not None:
        skipped.add(id(cache._open.generator_state))
    while pending:
        found = pending.pop()
        if id(found) in seen or id(found) in skipped:
            continue
        seen.add(id(found))
        if isinstance(found, Tensor):
            storages[found.untyped_storage().data_ptr()] = found.untyped_storage().nbytes()
        elif isinstance(found, dict):
            pending.extend(found.values())
        elif isinstance(found, (list, tuple, set)):
            pending.extend(found)
        elif isinstance(found, FunctionType):  # a reference decoder keeps its tensors there
            pending.extend(cell.cell_contents for cell in found.__closure__ or ())
        elif hasattr(found, "__dict__") and not isinstance(found, type):
            pending.extend(vars(found).values())
    return sum(storages.values())


class MadeBytes(TorchDispatchMode):
    """Bytes of the tensors that PyTorch makes inside: tracing Python's memory does not see them."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and isinstance(out, Tensor) and out.device.type != "meta":
            self.total += out.nbytes
        return out

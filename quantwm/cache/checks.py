"""What a cache refuses to take, and the one line that says so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from quantwm.cache.chunk import LayerWrite, OpenChunk
from quantwm.cache.spec import CacheSpec
from quantwm.errors import UserError


def slot_of(spec: CacheSpec, layer: int, stream: str) -> int:
    """Index of a layer's stream in per-slot tuples."""
    if stream not in spec.streams:
        raise UserError(f"unknown stream {stream!r}; this cache has: {', '.join(spec.streams)}")
    if not 0 <= layer < spec.layers:
        raise UserError(f"layer must be 0 to {spec.layers - 1}, got {layer}")
    return spec.streams.index(stream) * spec.layers + layer


def slot_name(spec: CacheSpec, slot: int) -> str:
    stream, layer = divmod(slot, spec.layers)
    return f"layer {layer} stream {spec.streams[stream]}"


def check_shapes(spec: CacheSpec, tokens: int, write: LayerWrite) -> None:
    """k and v must be [H, tokens, D], q [H, any, D]."""
    _check_shape(spec, write.layer, "k", write.k, tokens)
    _check_shape(spec, write.layer, "v", write.v, tokens)
    if write.q is not None:
        _check_shape(spec, write.layer, "q", write.q, None)


def _check_shape(spec: CacheSpec, layer: int, name: str, x: Tensor, tokens: int | None) -> None:
    shape = tuple(x.shape)
    geometry = len(shape) == 3 and (shape[0], shape[2]) == (spec.heads, spec.head_dim)
    if not geometry or tokens not in (None, shape[1]):
        shown = "any" if tokens is None else tokens
        raise UserError(
            f"layer {layer} {name} must be [{spec.heads}, {shown}, {spec.head_dim}] "
            f"(heads, tokens, head_dim), got {list(shape)}"
        )


def check_finite(chunk: OpenChunk, write: LayerWrite, queries: bool, batched: bool = False) -> None:
    """UserError when a tensor holds NaN or infinity; on CUDA the extremes are kept for later.

    Reading them stops the CUDA stream, so one layer's check must not cost one. batched: on CUDA
    `keep_extremes` is to follow.
    """
    if batched and write.k.is_cuda:
        return
    checked = [("keys", write.k), ("values", write.v)]
    if queries and write.q is not None:
        checked.append(("queries", write.q))
    for role, tensor in checked:
        name = f"layer {write.layer} {role} (stream {write.stream})"
        if tensor.is_cuda:
            # One launch; isfinite().all() is five. Both are NaN where anything is.
            chunk.extremes.append(([name], *torch.aminmax(tensor)))
        elif not torch.isfinite(tensor).all():
            raise UserError(_not_finite(name))


def keep_extremes(chunk: OpenChunk, spec: CacheSpec, slots: Sequence[int], ends: Tensor) -> None:
    """The extremes of many slots' keys, values and, where they are wanted, queries, for later.

    ends: see `batch.Encoded`.
    """
    places = [divmod(slot, spec.layers) for slot in slots]
    roles = ("keys", "values", "queries")[: ends.shape[1] // len(slots)]
    names = [
        f"layer {at} {role} (stream {spec.streams[stream]})"
        for role in roles
        for stream, at in places
    ]
    chunk.extremes.append((names, *ends))


def flags(chunk: OpenChunk) -> list[Tensor]:
    """Whether each CUDA write of the chunk was finite, on the device: for `check_flags`."""
    if not chunk.extremes:
        return []
    _, lows, highs = zip(*_in_order(chunk), strict=True)
    least, largest = _joined(lows), _joined(highs)
    return [least.isfinite() & largest.isfinite()]


def _in_order(chunk: OpenChunk) -> list[tuple[list[str], Tensor, Tensor]]:
    """Single extremes before those of many slots."""
    return sorted(chunk.extremes, key=lambda found: found[1].dim())


def _joined(found: Sequence[Tensor]) -> Tensor:
    """Numbers, then vectors, as one vector; a view of each number would take 1 us of the host."""
    single = sum(tensor.dim() == 0 for tensor in found)
    numbers = [torch.stack(found[:single])] if single else []
    return torch.cat([*numbers, *found[single:]])


def check_flags(chunk: OpenChunk, found: Iterable[float]) -> None:
    """found: what `flags` holds, read."""
    names = [name for some, _, _ in _in_order(chunk) for name in some]
    for name, finite in zip(names, found, strict=True):
        if not finite:
            raise UserError(_not_finite(name))


def _not_finite(name: str) -> str:
    return f"{name} hold NaN or infinity; a cache takes finite numbers only"


def check_complete(spec: CacheSpec, chunk: OpenChunk) -> None:
    slots = range(spec.layers * len(spec.streams))
    missing = [slot for slot in slots if not chunk.written(slot)]
    if missing:
        raise RuntimeError(
            f"finalize_chunk before the clean pass of {_names(spec, missing)}; "
            "every layer and stream needs attend(clean=True) once"
        )


def _names(spec: CacheSpec, slots: Iterable[int]) -> str:
    named = [slot_name(spec, slot) for slot in slots]
    return ", ".join(named[:3]) + (f" and {len(named) - 3} more" if len(named) > 3 else "")


def mask_on_host(tokens: int, keep_mask: Tensor | None) -> Tensor | None:
    """The mask on the CPU, or None when it keeps all."""
    if keep_mask is None:
        return None
    if keep_mask.dtype != torch.bool or tuple(keep_mask.shape) != (tokens,):
        raise UserError(
            f"keep_mask must be bool [{tokens}], one per token of the chunk, "
            f"got {keep_mask.dtype} {list(keep_mask.shape)}"
        )
    mask = keep_mask.cpu()
    return None if bool(mask.all()) else mask

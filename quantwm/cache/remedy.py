"""What to say when memory does not suffice: which setting would fit, before a run and in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from quantwm.cache.formats import make_format, split_method
from quantwm.cache.formats.base import Format
from quantwm.cache.plan import Plan, Workload
from quantwm.cache.spec import CachePolicy
from quantwm.errors import UserError

P = ParamSpec("P")
R = TypeVar("R")

SMALLER = ("quantwm", "qvg", "qtc:small")
"""Methods that are proposed instead of a larger one, best quality first."""


class CacheMemoryError(torch.OutOfMemoryError):
    """Memory ran out inside a cache, which is as it was. `remedy` says which setting would fit."""

    def __init__(self, tokens: int, remedy: str) -> None:
        super().__init__(
            f"out of memory in a cache that holds {tokens:,} tokens and is as it was; {remedy}"
        )
        self.remedy = remedy


OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "alloc_failed")
"""In lower case, as a plain RuntimeError says it: the CPU's allocator; the CUDA driver, where
Triton loads a kernel; cuBLAS and cuDNN, where they find no room for what they work in."""


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(s in str(error).lower() for s in OUT_OF_MEMORY)
    )


def saying_what_fits(
    call: Callable[Concatenate[Any, P], R],
) -> Callable[Concatenate[Any, P], R]:
    """A KVCache's method whose running out of memory says which setting would fit."""

    @wraps(call)
    def guarded(cache: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(cache, *args, **kwargs)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or isinstance(error, CacheMemoryError):
                raise
            raise CacheMemoryError(cache.tokens, remedy(cache)) from error

    return guarded


def remedy(cache: Any, free: int | None = None) -> str:
    """The least change of a cache's settings whose planned peak fits what it holds and is free.

    free: bytes beside what the cache holds; as the device says without.
    """
    # Imported here: the gauge belongs to the room outside, which imports this one.
    from quantwm.memory import free_bytes

    ledger = cache.ledger()
    held = ledger.total + ledger.pending_bytes + ledger.making_bytes + ledger.scratch_bytes
    free = free_bytes(cache.device) if free is None else free
    of_run = cache.dtype.itemsize, cache.device.type == "cuda", cache.remade
    tokens = None if cache.policy.window_frames else max(cache.tokens, cache.spec.tokens_per_chunk)

    def planned(fmt: Format[Any], policy: CachePolicy) -> Plan:
        load = Workload.of_policy(cache.spec, policy, tokens, *of_run)
        return Plan(((fmt.name, fmt, load),))

    now = planned(cache.fmt, cache.policy)
    room = now.peak_bytes - 1 if free is None else min(held + free, now.peak_bytes - 1)
    for text, fmt, policy in _alternatives(cache):
        peak = planned(fmt, policy).peak_bytes
        if peak <= room:
            return (
                f"{text} would fit: {gib(peak)} at its peak instead of {gib(now.peak_bytes)}, "
                f"{gib(room)} can be had"
            )
    kept = longest_that_fits(now, now.lanes[0][2].tokens, room)
    frames = (kept + cache.spec.tokens_per_chunk) // cache.spec.tokens_per_frame
    if kept and frames > cache.policy.sink_frames:
        return f"window_frames={frames} would fit: {kept:,} tokens of history"
    return "no setting of this cache fits; free memory or use fewer lanes"


def _alternatives(cache: Any) -> Iterator[tuple[str, Format[Any], CachePolicy]]:
    """Changes of policy first, then of format; each with the words that name it."""
    policy, fmt = cache.policy, cache.fmt
    if policy.recent_chunks:
        policy = replace(policy, recent_chunks=0)
        yield "recent_chunks=0", fmt, policy
    if policy.sink_frames and not policy.compress_sink and fmt.compresses:
        policy = replace(policy, compress_sink=True)
        words = "compress_sink=True"
        words += " with recent_chunks=0" if cache.policy.recent_chunks else ""
        yield words, fmt, policy
    for method in SMALLER:
        name, settings = split_method(method)
        try:
            other = make_format(name, **settings)
            other.check(cache.spec.head_dim)
        except UserError:
            continue
        if name != fmt.name:
            yield f"the format {method}", other, cache.policy


def require_memory(planned: Plan, free_bytes: int) -> None:
    """UserError when the plan does not fit: bytes needed, bytes free, the longest that does."""
    needed = planned.peak_bytes
    if needed <= free_bytes:
        return
    tokens = max((load.tokens for _, _, load in planned.lanes), default=0)
    fits = longest_that_fits(planned, tokens, free_bytes)
    instead = (
        f"a history of {fits:,} tokens instead of {tokens:,} fits"
        if fits
        else "not even one chunk of history fits; use fewer lanes or free memory"
    )
    names = ", ".join(name for name, _, _ in planned.lanes)
    raise UserError(
        f"too little memory: the caches ({names}) need {gib(needed)} at their peak "
        f"({needed:,} bytes) and {gib(free_bytes)} ({free_bytes:,} bytes) is free; {instead}"
    )


def longest_that_fits(planned: Plan, tokens: int, free_bytes: int) -> int:
    """In whole chunks of the first lane, 0 when one chunk is too much."""
    chunk = min((load.chunk_tokens or load.span_tokens for _, _, load in planned.lanes), default=1)
    low, high = 0, max(tokens - 1, 0) // chunk
    while low < high:
        middle = (low + high + 1) // 2
        if planned.with_tokens(middle * chunk).peak_bytes <= free_bytes:
            low = middle
        else:
            high = middle - 1
    return low * chunk


def gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**28 else f"{count / 2**20:.2f} MiB"

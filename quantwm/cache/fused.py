"""Attention with little memory: fused, where the kernel decodes packed spans, or in slabs."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.format import Side
from quantwm.cache.dispatch import fused_kernel, note_fallback
from quantwm.cache.formats.base import Fusible
from quantwm.cache.reading import Reading
from quantwm.cache.slabs import attend_slabs
from quantwm.cache.unrotation import wants_unrotated
from quantwm.cache.workspace import Workspace

Shown = tuple[Side, Side, int, int]
"""Keys and values of a segment, and the tokens of it that are seen."""


def low_memory_attention(
    reading: Reading, q: Tensor, workspace: Workspace, bias: Tensor | None
) -> Tensor | None:
    """q [H, Nq, D] over all that the reading shows -> [H, Nq, D], fused or in slabs.

    None where neither can be had, and attention is staged; `explain` names what was done without.
    """
    wanted = "fused" if workspace.mode == "fused" else "in slabs"
    kernel = fused_kernel(q.device)
    reason = kernel if isinstance(kernel, str) else kernel.unsupported_queries(q)
    if bias is not None:
        reason = "a score bias is added to the scores of staged keys"
    if reason:
        note_fallback(f"attention is staged where it was to be {wanted}: {reason}")
        return None
    scale = q.shape[2] ** -0.5
    if workspace.mode == "fused":
        segments = _segments(reading, q)
        if not isinstance(segments, str):
            if reason := kernel.not_by_hopper(q, segments):
                note_fallback(f"fused attention by flash_kernel: {reason}")
            return kernel.fused(q, segments, scale)
        note_fallback(
            f"attention goes in slabs of at most {workspace.slab_bytes:,} bytes where it was to be "
            f"fused: {segments}"
        )
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    attend_slabs(
        reading, workspace, out,
        lambda heads: kernel.Running(q[heads], scale, out=out[heads]),
    )  # fmt: skip
    return out


def _segments(reading: Reading, q: Tensor) -> list[Shown] | str:
    """What the kernel reads, or the reason why it cannot."""
    shown: list[Shown] = []
    for segment in reading.segments:
        fmt, start, stop = segment.fmt, segment.hidden_tokens(reading.first), segment.tokens
        if start == stop:
            continue
        if not isinstance(fmt, Fusible):
            return f"the format {fmt.name} has no fused form"
        if wants_unrotated(fmt):
            return f"{fmt.name} turns un-rotated keys once it has decoded them"
        keys, values = segment.keys[reading.slot], segment.values[reading.slot]
        shown.append((fmt.side(keys), fmt.side(values), start, stop))
    own = (Side("plain", t.to(q.dtype)) for t in (reading.k, reading.v))
    return [*shown, (*own, 0, reading.k.shape[1])]

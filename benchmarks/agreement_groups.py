"""Do the kernels of rtn, kivi and qvg-pro agree with the reference: bit for bit, in all they do."""

from __future__ import annotations

from itertools import accumulate, product
from typing import Any

import torch
from torch import Tensor

from benchmarks.agreement import (
    Case,
    agree_assign,
    in_range,
    launches_of,
    require,
    same_bytes,
    same_values,
)
from quantwm.cache import reference
from quantwm.cache.dispatch import Ops
from quantwm.cache.formats import make_format
from quantwm.cache.formats.kivi import ChannelGroups

CPU = torch.device("cpu")
STAGES = 4


def agree_groups(ops: Ops, case: Case, bits: int, truncates: bool = False) -> None:
    """Every primitive of these formats on one case; truncates: as in `agreement.agree_decode`."""
    agree_token_groups(ops, case, bits, truncates)
    agree_channel_groups(ops, case, bits, truncates)
    agree_stages(ops, case, truncates)


def agree_token_groups(ops: Ops, case: Any, bits: int, truncates: bool = False) -> None:
    mine = ops.encode_token_groups(case.x, case.group_size, bits)
    wanted = reference.encode_token_groups(case.x.cpu(), case.group_size, bits)
    _same_parts("token groups", mine, wanted)
    agree_decoders("token groups", ops, "prepare_token_groups", mine, (bits,), truncates)


def agree_channel_groups(ops: Ops, case: Any, bits: int, truncates: bool = False) -> None:
    """Of one chunk, and of a span of three chunks that were joined, thinned and cut."""
    size, tokens = case.group_size, case.x.shape[1]
    mine = ops.encode_channel_groups(case.x, size, bits)
    wanted = reference.encode_channel_groups(case.x.cpu(), size, bits)
    _same_parts("channel groups", mine, wanted)
    fmt = make_format("kivi", bits=bits, group_size=size)
    stops = wanted[3].tolist()
    span = ChannelGroups(*mine, tuple(b - a for a, b in zip((0, *stops), stops, strict=False)))
    joined = fmt.join(fmt.join(span, span), span)
    thinned = fmt.select(joined, torch.arange(3 * tokens)[torch.arange(3 * tokens) % 5 != 2])
    cut = fmt.select(thinned, slice(tokens // 4, thinned.tokens - tokens // 9))
    for held in (span, joined, thinned, cut):
        packed = (held.codes, held.scales, held.zeros, held.group_stops)
        ends = list(accumulate(held.group_tokens))
        require(ends == held.group_stops.tolist(), "group stops on the host and the device differ")
        given = (held.group_tokens, bits)
        agree_decoders("channel groups", ops, "prepare_channel_groups", packed, given, truncates)


def agree_stages(ops: Ops, case: Case, truncates: bool = False) -> None:
    ids = agree_assign(ops, case)
    left = ops.residual(case.x, ids, case.centroids)
    wanted = reference.residual(case.x.cpu(), ids.cpu(), case.centroids.cpu())
    same_bytes("residual", left.view(torch.int16), wanted.view(torch.int16))
    again = ops.residual(left.clone(), ids, case.centroids)
    own = left.clone()
    require(ops.residual(own, ids, case.centroids, own) is own, "another tensor than was given")
    require(torch.equal(own.view(torch.int16), again.view(torch.int16)), "a residual in place")
    codes, scales = ops.encode_qvg(left, ids, case.centroids, case.group_size)
    books = torch.cat([case.centroids * 0.5**stage for stage in range(STAGES)], dim=1)
    others = [(ids.long() * 7 + stage) % case.centroids.shape[1] for stage in range(STAGES)]
    span = (codes, torch.stack(others, dim=-1).to(torch.uint8), books, scales)
    agree_decoders("stages", ops, "prepare_stages", span, (case.group_size,), truncates)


def agree_decoders(
    label: str, ops: Ops, prepare: str, packed: tuple[Tensor, ...], given: tuple[Any, ...],
    truncates: bool,
) -> None:  # fmt: skip
    """Ranges of all heads and of the last one into a longer buffer, in both types."""
    heads, tokens = packed[0].shape[:2]
    # What a byte of codes holds is told by the other tensors, so the reference says the head dim.
    dim = _head_dim(packed, given, prepare)
    start, stop, offset = tokens // 5, tokens - tokens // 7, 3
    dtypes, first_heads = (torch.float32, torch.bfloat16), sorted({0, heads - 1})
    for dtype, first_head in product(dtypes, first_heads):
        outs = []
        for target, device in ((ops, packed[0].device), (reference, CPU)):
            shape = (heads - first_head, tokens + 5, dim)
            out = torch.full(shape, torch.nan, dtype=dtype, device=device)
            decode = getattr(target, prepare)(*(t.to(device) for t in packed), *given)
            for _ in range(launches_of(truncates)):
                decode(out, offset, start, stop, first_head)
            outs.append(out.cpu())
        name = f"decode {label}, {dtype}"
        mine, wanted = in_range(name, *outs, offset, stop - start)
        exact = dtype == torch.float32 or not truncates
        same_values(name, mine, wanted, exact, dtype == torch.bfloat16)


def _head_dim(packed: tuple[Tensor, ...], given: tuple[Any, ...], prepare: str) -> int:
    bits = 2 if prepare == "prepare_stages" else given[-1]
    return packed[0].shape[2] * 8 // bits


def _same_parts(label: str, mine: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    names = ("codes", "scales", "zeros", "stops")
    for name, one, other in zip(names, mine, wanted, strict=False):
        raw = (
            (one, other)
            if name in ("codes", "stops")
            else (one.view(torch.int16), other.view(torch.int16))
        )
        same_bytes(f"{label}: {name}", *raw)

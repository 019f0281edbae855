"""The primitives of `dispatch.Ops` in PyTorch: what they mean, and what runs on a CPU.

Decoding happens for every layer in every denoising pass, so it is lean: a byte of four codes is
one 16-byte row of a table (moved as one complex128), each block of tokens stays in the L2 cache,
and everything after the table is in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from quantwm.cache.affine import (
    affine_scales,
    quantize_affine,
    quantize_ternary,
    round_half_up,
)
from quantwm.cache.kmeans import _gather, assign, assign_qsac, update
from quantwm.cache.pack import CODES_PER_BYTE, LEVELS, pack, unpack, unpack_range
from quantwm.cache.reference_groups import (
    DECODE_BLOCK,
    encode_channel_groups,
    encode_token_groups,
    prepare_channel_groups,
    prepare_stages,
    prepare_token_groups,
    residual,
)

__all__ = [
    "assign",
    "assign_qsac",
    "copy_pair",
    "decode_quantwm_into",
    "decode_qvg_into",
    "encode_channel_groups",
    "encode_quantwm",
    "encode_qvg",
    "encode_token_groups",
    "prepare_channel_groups",
    "prepare_copy",
    "prepare_quantwm",
    "prepare_qvg",
    "prepare_stages",
    "prepare_token_groups",
    "residual",
    "update",
]

COEFFICIENT_MAX = 127


def encode_qvg(x: Tensor, ids: Tensor, centroids: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """See `dispatch.Ops.encode_qvg`."""
    codes, scales = quantize_ternary(x.float() - _gather(centroids, ids), group_size)
    return pack(codes), scales


def encode_quantwm(
    x: Tensor,
    ids: Tensor,
    centroids: Tensor,
    group_size: int,
    clip: float,
    basis: Tensor | None,
    eigenvalues: Tensor | None,
    coefficient_max: int = COEFFICIENT_MAX,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """See `dispatch.Ops.encode_quantwm`."""
    residual = x.float() - _gather(centroids, ids)
    codes, scale_codes, secondary, zeros = quantize_affine(residual, group_size, clip)
    coefficients = row_scales = None
    if basis is not None and eigenvalues is not None:
        scale = affine_scales(scale_codes, secondary[:, None]).unsqueeze(-1)
        levels = codes.unflatten(-1, (-1, group_size)).float() - zeros.unsqueeze(-1)
        error = residual - (levels * scale).flatten(-2)
        projected = torch.bmm(error, basis.float())
        coefficients, row_scales = _encode_rows(projected, eigenvalues, coefficient_max)
    return pack(codes), scale_codes, secondary, pack(zeros.flatten(1)), coefficients, row_scales


def _encode_rows(projected: Tensor, eigenvalues: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """INT8 rows of -limit..limit with an FP16 scale each, and the gate of QuantWM App. D.1.

    In the eigenbasis a row lowers the query-weighted error exactly when
    sum_j lambda_j (c_j^2 - (c_j - stored_j)^2) > 0; otherwise the row is set to zero.
    """
    row_scales = (projected.abs().amax(-1) / limit).to(torch.float16)
    scale = row_scales.float().unsqueeze(-1)
    codes = round_half_up(torch.where(scale > 0, projected / scale, 0.0))
    codes = codes.clamp(-limit, limit)
    gain = projected.square() - (projected - codes * scale).square()
    kept = (gain * eigenvalues.unsqueeze(1)).sum(-1) > 0
    codes = torch.where(kept.unsqueeze(-1), codes, 0.0).to(torch.int8)
    return codes, torch.where(kept, row_scales, torch.zeros_like(row_scales))


@lru_cache(maxsize=8)
def _level_table(zeros: tuple[int, ...], device: torch.device) -> Tensor:
    """complex128 [len(zeros) * 256]: entry z * 256 + byte holds four float32 (code - zero)."""
    codes = unpack(torch.arange(256, dtype=torch.uint8).unsqueeze(-1), CODES_PER_BYTE).float()
    levels = torch.stack([codes - zero for zero in zeros])
    return levels.view(torch.complex128).flatten().to(device)


def decode_qvg_into(
    out: Tensor,
    offset: int,
    codes: Tensor,
    ids: Tensor,
    centroids: Tensor,
    scales: Tensor,
    group_size: int,
    start: int,
    stop: int,
) -> None:
    """Tokens [start, stop) to out[:, offset : offset + stop - start]; see `dispatch.Decode`."""
    table = _level_table((1,), codes.device)
    scale = scales[:, start:stop].float().unsqueeze(-1)
    means = centroids.float()
    for head in range(codes.shape[0]):
        for first in range(start, stop, DECODE_BLOCK):
            last = min(first + DECODE_BLOCK, stop)
            rows = slice(first - start, last - start)
            levels = table.index_select(0, codes[head, first:last].int().flatten())
            values = levels.view(torch.float32).view(last - first, -1, group_size)
            values = values.mul_(scale[head, rows]).flatten(1)
            values += means[head].index_select(0, ids[head, first:last].int())
            out[head, offset + first - start : offset + last - start] = values


def decode_quantwm_into(
    out: Tensor,
    offset: int,
    codes: Tensor,
    ids: Tensor,
    centroids: Tensor,
    scales: Tensor,
    secondary: Tensor,
    chunk_stops: Tensor,
    zeros: Tensor,
    group_size: int,
    coefficients: Tensor | None,
    coefficient_scales: Tensor | None,
    basis: Tensor | None,
    first_corrected: int,
    start: int,
    stop: int,
) -> None:
    """As decode_qvg_into; arguments as in `dispatch.Ops.prepare_quantwm`."""
    heads, groups = scales.shape[0], scales.shape[2]
    table = _level_table(tuple(range(LEVELS)), codes.device)
    lengths = chunk_stops.diff(prepend=chunk_stops.new_zeros(1))
    per_token = secondary.repeat_interleave(lengths, dim=1)[:, start:stop]
    scale = affine_scales(scales[:, start:stop], per_token).unsqueeze(-1)
    zero = unpack_range(zeros, start * groups, stop * groups).view(heads, -1, groups, 1).int() << 8
    means = centroids.float()
    correct_from = stop
    if coefficients is not None and coefficient_scales is not None and basis is not None:
        correct_from = max(start, first_corrected)
        corrected = slice(correct_from - first_corrected, stop - first_corrected)
        rows_psac = coefficients[:, corrected].float()
        rows_psac *= coefficient_scales[:, corrected].float().unsqueeze(-1)
        directions = basis.float().transpose(1, 2).contiguous()
    for head in range(heads):
        for first in range(start, stop, DECODE_BLOCK):
            last = min(first + DECODE_BLOCK, stop)
            rows = slice(first - start, last - start)
            index = codes[head, first:last].view(last - first, groups, -1).int() + zero[head, rows]
            levels = table.index_select(0, index.flatten()).view(torch.float32)
            values = levels.view(last - first, groups, group_size)
            values = values.mul_(scale[head, rows]).flatten(1)
            values += means[head].index_select(0, ids[head, first:last].int())
            if last > correct_from:
                begin = max(first, correct_from)
                values[begin - first :].addmm_(
                    rows_psac[head, begin - correct_from : last - correct_from], directions[head]
                )
            out[head, offset + first - start : offset + last - start] = values


def copy_pair(k_out: Tensor, v_out: Tensor, offset: int, k: Tensor, v: Tensor) -> None:
    """See `dispatch.Ops.copy_pair`."""
    tokens = slice(offset, offset + k.shape[1])
    k_out[:, tokens], v_out[:, tokens] = k, v


def decode_spans(
    sides: tuple[Sequence[Any], Sequence[Any]], outs: tuple[Tensor, Tensor], first_head: int = 0
) -> int:
    """See `dispatch.Ops.decode_spans`."""
    for parts, out in zip(sides, outs, strict=True):
        for decode, offset, start, stop in parts:
            decode(out, offset, start, stop, first_head)
    return len(sides[0]) + len(sides[1])


def prepare_copy(x: Tensor) -> Callable[..., None]:
    """See `dispatch.Ops.prepare_copy`."""

    def copy(out: Tensor, offset: int, start: int, stop: int, first_head: int = 0) -> None:
        heads = slice(first_head, first_head + out.shape[0])
        out[:, offset : offset + stop - start] = x[heads, start:stop]

    return copy


def prepare_qvg(*span: Any) -> Callable[..., None]:
    """See `dispatch.Ops.prepare_qvg`."""
    return _by_head(decode_qvg_into, span)


def prepare_quantwm(*span: Any) -> Callable[..., None]:
    """See `dispatch.Ops.prepare_quantwm`."""
    return _by_head(decode_quantwm_into, span)


def _by_head(decode_into: Callable[..., None], span: tuple[Any, ...]) -> Callable[..., None]:
    """A decoder of the span; what it holds per head has two dimensions or more."""
    count = span[0].shape[0]

    def decode(out: Tensor, offset: int, start: int, stop: int, first_head: int = 0) -> None:
        part = span
        if out.shape[0] != count:
            heads = slice(first_head, first_head + out.shape[0])
            part = tuple(t[heads] if isinstance(t, Tensor) and t.dim() > 1 else t for t in span)
        decode_into(out, offset, *part, start, stop)

    return decode

"""Does fused attention agree with attention over decoded keys and values, and INT8 nearly so."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.agreement import Case, make_case, relative_error, require
from kernels import fused, fused_hopper
from kernels.format import Side
from quantwm.cache import reference

# Relative errors. BF16 weights and values round at 2^-9, packed BF16 decoding a little more.
FLOAT32_ERROR, BF16_ERROR, INT8_ERROR = 1e-5, 1e-2, 3e-2

Encoded = tuple[Side, Tensor]
"""A side, and what it decodes to: float32 [H, N, D]."""


def ternary_side(case: Case) -> Encoded:
    ids = reference.assign(case.x, case.centroids)
    codes, scales = reference.encode_qvg(case.x, ids, case.centroids, case.group_size)
    packed = (codes, ids, case.centroids, scales)
    return Side("ternary", None, *packed), _decoded(
        case, reference.prepare_qvg(*packed, case.group_size)
    )


def affine_side(case: Case, corrected: bool) -> Encoded:
    """Two chunks, the second of half the scale; corrected: PSAC rows from a third on."""
    tokens, device = case.x.shape[1], case.x.device
    ids = reference.assign(case.x, case.centroids)
    codes, scales, secondary, zeros, coefficients, row_scales = reference.encode_quantwm(
        case.x, ids, case.centroids, case.group_size, 1.0, case.basis, case.eigenvalues
    )
    stops = torch.tensor([tokens // 2, tokens], dtype=torch.int32, device=device)
    secondary = torch.stack((secondary, secondary / 2), dim=1)
    packed = (codes, ids, case.centroids, scales, secondary, stops, zeros)
    first = tokens // 3
    rows: tuple[Tensor | None, ...] = (None, None, None)
    if corrected and coefficients is not None and row_scales is not None:
        rows = (coefficients[:, first:].contiguous(), row_scales[:, first:].contiguous(),
                case.basis)  # fmt: skip
    held = (*packed[:5], tuple(stops.tolist()), zeros)
    side = Side("affine", None, *held, *rows, first if corrected else 0)
    decode = reference.prepare_quantwm(*packed, case.group_size, *rows, first if corrected else 0)
    return side, _decoded(case, decode)


def plain_side(case: Case) -> Encoded:
    return Side("plain", case.x), case.x.float()


def _decoded(case: Case, decode: Callable[..., None]) -> Tensor:
    out = torch.empty(case.x.shape, dtype=torch.float32, device=case.x.device)
    decode(out, 0, 0, case.x.shape[1])
    return out


def agree_fused(
    device: torch.device | str, heads: int = 2, tokens: int = 70, queries: int = 40,
    head_dim: int = 128, group_size: int = 64, rank: int = 4, centroids: int = 16,
) -> None:  # fmt: skip
    """Every kind of side alone and all behind one another, ranges cut at both ends."""
    shape = (heads, tokens, head_dim, centroids, group_size, rank)
    k_case, v_case = (make_case(*shape, device, seed, extremes=False) for seed in (1, 2))
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(queries, heads, head_dim, generator=generator).transpose(0, 1) * 0.2
    bf16 = torch.device(device).type == "cuda"
    if bf16:
        q = q.to(device, torch.bfloat16)
    else:  # in the interpreter all sides are as wide as the queries
        k_case, v_case = (_widened(case) for case in (k_case, v_case))
    pairs = {
        "plain": (plain_side(k_case), plain_side(v_case)),
        "ternary": (ternary_side(k_case), ternary_side(v_case)),
        "affine": (affine_side(k_case, False), affine_side(v_case, False)),
        "corrected": (affine_side(k_case, True), affine_side(v_case, False)),
        "mixed": (ternary_side(k_case), plain_side(v_case)),
    }
    ranges = [(0, tokens), (min(5, tokens - 1), tokens), (0, 1), (tokens // 2, tokens), (0, tokens)]
    bound = BF16_ERROR if bf16 else FLOAT32_ERROR
    for place, (name, pair) in enumerate(pairs.items()):
        # In the interpreter, which is slow, each kind has two ranges, the next kind one of these.
        for span in sorted(set(ranges if bf16 else ranges[place : place + 2])):
            _agree_both(f"{name} {span}", q, [(*pair, *span)], bound)
    every = [(*p, *span) for p, span in zip(pairs.values(), ranges, strict=True)]
    _agree_both("all", q, every, bound)
    keys, values = (pairs["plain"][side][1].to(q.dtype) for side in (0, 1))
    scored = fused.attend_int8(q, keys, values, head_dim**-0.5)
    error = relative_error(scored, staged(q, keys.float(), values.float()))
    require(error < INT8_ERROR, f"attention with INT8 scores is off by {error:.4f}")


def _widened(case: Case) -> Case:
    return Case(
        case.x.float(), case.centroids, case.weights, case.basis, case.eigenvalues, case.group_size
    )


def _agree_both(
    name: str, q: Tensor, segments: list[tuple[Encoded, Encoded, int, int]], bound: float
) -> None:
    """By kernels.flash_hopper too, where it runs."""
    with fused_hopper.switched_off():
        _agree(name, q, segments, bound)
    if fused_hopper.unsupported(q) is None:
        _agree(f"{name}, flash_hopper", q, segments, bound)


def _agree(
    name: str, q: Tensor, segments: list[tuple[Encoded, Encoded, int, int]], bound: float
) -> None:
    shown = [(k[0], v[0], start, stop) for k, v, start, stop in segments]
    mine = fused.fused(q, shown, q.shape[2] ** -0.5)
    if q.is_cuda:
        again = fused.fused(q, shown, q.shape[2] ** -0.5)
        require(torch.equal(mine, again), f"fused {name}: two runs differ")
    keys = torch.cat([k[1][:, start:stop] for k, _, start, stop in segments], dim=1)
    values = torch.cat([v[1][:, start:stop] for _, v, start, stop in segments], dim=1)
    error = relative_error(mine, staged(q, keys, values))
    require(error < bound, f"fused {name}: off by {error:.6f} of the output")


def staged(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention in float64."""
    scores = torch.bmm(q.double(), keys.double().transpose(1, 2)) * q.shape[2] ** -0.5
    return torch.bmm(scores.softmax(-1), values.double())

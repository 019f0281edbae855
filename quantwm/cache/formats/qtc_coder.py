"""Tokens to codes and gains and back, in one basis or in none; tensors in, tensors out."""

from __future__ import annotations

import torch
from torch import Tensor

from quantwm.cache.formats import qtc_fallback, qtc_gain, qtc_levels, qtc_planes
from quantwm.cache.formats.qtc_basis import Basis, analysis
from quantwm.cache.formats.qtc_planes import BLOCK, Widths


def encode_in_basis(x: Tensor, basis: Basis, metric: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes uint8 [H, N, B / 8] and gains uint8 [H, N] of x: float32 [H, N, D], mean removed.

    The gain is the root mean square of the coded channels in units of their deviations, or one
    step beside it where that costs less (10 % of the logit error on recorded keys).
    """
    coordinates = torch.bmm(x, analysis(basis, metric))
    rows = basis.matrix()
    weighted = rows if metric is None else torch.bmm(rows, metric.float())
    costs = (weighted * rows).sum(-1)
    found = [
        _encode_head(z, widths, cost)
        for z, widths, cost in zip(coordinates, basis.host_widths, costs, strict=True)
    ]
    return torch.stack([codes for codes, _ in found]), torch.stack([gain for _, gain in found])


def _encode_head(z: Tensor, widths: Widths, costs: Tensor) -> tuple[Tensor, Tensor]:
    """z: float32 [N, u]; costs: float32 [u], of a unit error in each channel."""
    coded = BLOCK * qtc_planes.blocks_in_plane(widths, 0)
    z, costs = z[:, :coded], costs[:coded]
    centre = qtc_gain.gain_codes(z.square().mean(-1).sqrt())
    best = best_gain = least = None
    for step in (0, -1, 1):
        gain = torch.where(centre > 0, (centre + step).clamp(1, 255), 0)
        codes, values = _quantize(z, qtc_gain.gains(gain).unsqueeze(-1), widths)
        cost = ((values - z).square() * costs).sum(-1)
        if best is None:
            best, best_gain, least = codes, gain, cost
        else:
            better = cost < least
            best = torch.where(better.unsqueeze(-1), codes, best)
            best_gain = torch.where(better, gain, best_gain)
            least = torch.minimum(cost, least)
    return qtc_planes.pack(best, widths), best_gain.to(torch.uint8)


def _quantize(z: Tensor, gain: Tensor, widths: Widths) -> tuple[Tensor, Tensor]:
    """Codes and the values they stand for. z: [N, 16 n], gain: [N, 1]."""
    table = qtc_levels.table(z.device)
    scaled = z / torch.where(gain > 0, gain, torch.ones_like(gain))
    codes, values = [], []
    start = 0
    for width in sorted({w for w in widths if w}, reverse=True):
        stop = start + BLOCK * widths.count(width)
        code = qtc_levels.quantize(scaled[:, start:stop], width)
        codes.append(code)
        values.append(table[2**width + code.long()])
        start = stop
    return torch.cat(codes, dim=1), torch.cat(values, dim=1) * gain


def decode_in_basis(codes: Tensor, gain: Tensor, basis: Basis) -> Tensor:
    """Without the mean: float32 [H, N, D]."""
    rows = basis.matrix()
    table = qtc_levels.table(codes.device)
    out = torch.empty(*codes.shape[:2], rows.shape[2], device=codes.device)
    for head, widths in enumerate(basis.host_widths):
        levels = _levels(codes[head], widths, table) * qtc_gain.gains(gain[head]).unsqueeze(-1)
        torch.mm(levels, rows[head, : levels.shape[1]], out=out[head])
    return out


def _levels(packed: Tensor, widths: Widths, table: Tensor) -> Tensor:
    """Levels of one head's codes, float32 [N, 16 n], n the blocks that have bits."""
    widths = tuple(width for width in widths if width)
    codes = qtc_planes.unpack(packed, widths)
    first = torch.tensor([2**width for width in widths], dtype=torch.uint8, device=codes.device)
    codes += first.repeat_interleave(BLOCK)
    return table.index_select(0, codes.flatten().int()).view(codes.shape)


def encode_plain(x: Tensor, metric: Tensor | None) -> tuple[Tensor, Tensor]:
    """Without a basis. x: float32 [H, N, D], mean removed; metric: float64 [H, D, D] or None."""
    heads, tokens, head_dim = x.shape
    turn = qtc_fallback.rotation(head_dim, x.device)
    rotated = x @ turn
    widths = plain_widths(head_dim)
    flat, unit = rotated.flatten(0, 1), torch.ones(head_dim, device=x.device)
    packed, gain = _encode_head(flat, widths, unit)
    packed, gain = packed.unflatten(0, (heads, tokens)), gain.view(heads, tokens)
    if metric is None:
        return packed, gain
    turned = turn.t() @ metric.float() @ turn
    scale = qtc_gain.gains(gain).unsqueeze(-1)
    z = rotated / torch.where(scale > 0, scale, torch.ones_like(scale))
    codes = qtc_fallback.feedback_codes(z, turned)
    return qtc_planes.pack(codes.flatten(0, 1), widths).unflatten(0, (heads, tokens)), gain


def decode_plain(codes: Tensor, gain: Tensor, head_dim: int) -> Tensor:
    """Without the mean: float32 [H, N, D]."""
    levels = _levels(codes.flatten(0, 1), plain_widths(head_dim), qtc_levels.table(codes.device))
    levels = levels.view(*gain.shape, head_dim) * qtc_gain.gains(gain).unsqueeze(-1)
    return levels @ qtc_fallback.rotation(head_dim, codes.device).t()


def plain_widths(head_dim: int) -> Widths:
    return (qtc_fallback.BITS,) * (head_dim // BLOCK)

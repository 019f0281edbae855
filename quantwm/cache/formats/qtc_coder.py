"""Tokens to codes and gains and back, in one basis or in none; tensors in, tensors out."""

from __future__ import annotations

import torch
from torch import Tensor

from quantwm.cache.formats import qtc_fallback, qtc_gain, qtc_levels, qtc_planes
from quantwm.cache.formats.qtc_basis import Basis, analysis, channel_costs
from quantwm.cache.formats.qtc_planes import BLOCK, Widths


def encode_in_basis(
    x: Tensor, basis: Basis, metric: Tensor | None, token_gains: bool = True
) -> tuple[Tensor, Tensor]:
    """Codes uint8 [H, N, B / 8] and gains uint8 [H, N] of x: float32 [H, N, D], mean removed.

    The gain is the root mean square of the coded channels in units of their deviations, or one
    step beside it where that costs less (10 % of the logit error on recorded keys).
    """
    coordinates = torch.bmm(x, analysis(basis, metric))
    costs = channel_costs(basis, metric)
    found = [
        _encode_head(z, widths, cost, token_gains)
        for z, widths, cost in zip(coordinates, basis.host_widths, costs, strict=True)
    ]
    return torch.stack([codes for codes, _ in found]), torch.stack([gain for _, gain in found])


def _encode_head(
    z: Tensor, widths: Widths, costs: Tensor, token_gains: bool = True
) -> tuple[Tensor, Tensor]:
    """z: float32 [N, u]; costs: float32 [u], of a unit error in each channel."""
    coded = BLOCK * qtc_planes.coded_blocks(widths)
    z, costs = z[:, :coded], costs[:coded]
    power = z.square().mean(-1)
    if not token_gains:
        power = power.mean().expand_as(power)
    centre = qtc_gain.gain_codes(power.sqrt())
    steps = torch.tensor([[0], [-1], [1]], dtype=torch.int32, device=z.device)
    tried = torch.where(centre > 0, (centre + steps).clamp(1, 255), 0)  # [3, N]
    gains = qtc_gain.gains(tried).view(-1, 1)
    codes, values = _quantize(z.repeat(len(steps), 1), gains, widths)
    codes, values = (t.unflatten(0, tried.shape) for t in (codes, values))
    best = ((values - z).square() @ costs).argmin(0)
    tokens = torch.arange(len(z), device=z.device)
    return qtc_planes.pack(codes[best, tokens], widths), tried[best, tokens].to(torch.uint8)


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


def decode_in_basis(
    codes: Tensor, gain: Tensor, basis: Basis, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Without the mean: float32 [H, N, D].

    dtype: of the product with the rows. BF16, where the output is BF16 anyway, takes half the time
    on a CPU that has it; its rounding is 2**-9 of a token's distance from the mean.
    """
    rows = basis.matrix().to(dtype)
    out = torch.empty(*codes.shape[:2], rows.shape[2], dtype=dtype, device=codes.device)
    for head, widths in enumerate(basis.host_widths):
        levels = _levels(codes[head], widths).to(dtype)
        torch.mm(levels, rows[head, : levels.shape[1]], out=out[head])
    return out.float().mul_(qtc_gain.gains(gain).unsqueeze(-1))


def _levels(packed: Tensor, widths: Widths) -> Tensor:
    """Levels of one head's codes, float32 [N, 16 n], n the blocks that have bits."""
    return qtc_levels.look_up(qtc_planes.unpack(packed, widths, first=1))


def encode_plain(x: Tensor, metric: Tensor | None, bits: int) -> tuple[Tensor, Tensor]:
    """Without a basis. x: float32 [H, N, D], mean removed; metric: float64 [H, D, D] or None."""
    heads, tokens, head_dim = x.shape
    turn = qtc_fallback.rotation(head_dim, x.device)
    rotated = x @ turn
    widths = plain_widths(head_dim, bits)
    flat, unit = rotated.flatten(0, 1), torch.ones(head_dim, device=x.device)
    packed, gain = _encode_head(flat, widths, unit)
    packed, gain = packed.unflatten(0, (heads, tokens)), gain.view(heads, tokens)
    if metric is None:
        return packed, gain
    turned = turn.t() @ metric.float() @ turn
    scale = qtc_gain.gains(gain).unsqueeze(-1)
    z = rotated / torch.where(scale > 0, scale, torch.ones_like(scale))
    codes = qtc_fallback.feedback_codes(z, turned, bits)
    return qtc_planes.pack(codes.flatten(0, 1), widths).unflatten(0, (heads, tokens)), gain


def decode_plain(codes: Tensor, gain: Tensor, head_dim: int) -> Tensor:
    """Without the mean: float32 [H, N, D]."""
    widths = plain_widths(head_dim, 8 * codes.shape[2] // head_dim)
    levels = _levels(codes.flatten(0, 1), widths).view(*gain.shape, head_dim)
    out = levels @ qtc_fallback.rotation(head_dim, codes.device).t()
    return out.mul_(qtc_gain.gains(gain).unsqueeze(-1))


def plain_widths(head_dim: int, bits: int) -> Widths:
    return (bits,) * (head_dim // BLOCK)

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
    coordinates, costs = torch.bmm(x, analysis(basis, metric)), channel_costs(basis, metric)
    codes, gain = _encode(coordinates, basis.widths, costs, token_gains)
    packed = map(qtc_planes.pack, codes, basis.host_widths)
    return torch.stack(list(packed)), gain


def _encode(
    z: Tensor, widths: Tensor, costs: Tensor, token_gains: bool = True
) -> tuple[Tensor, Tensor]:
    """Codes uint8 [H, N, u] and gains uint8 [H, N].

    z: float32 [H, N, u]; widths: uint8 [H, u / 16]; costs: float32 [H, u], of a unit error in each
    channel.
    """
    width = widths.int().repeat_interleave(BLOCK, dim=1).unsqueeze(1)
    coded = (width > 0).float()
    z, costs = z * coded, (costs.unsqueeze(1) * coded).transpose(1, 2)
    power = z.square().sum(-1) / coded.sum(-1)
    if not token_gains:
        power = power.mean(1, keepdim=True).expand_as(power)
    centre = qtc_gain.gain_codes(power.sqrt())
    size, gain, least = z.abs(), centre, None
    for step in (0, -1, 1):  # the middle one wins where they cost the same
        tried = torch.where(centre > 0, (centre + step).clamp(1, 255), 0)
        left = (_errors(size, tried, width).square_() @ costs).squeeze(-1)
        better = torch.ones_like(tried, dtype=torch.bool) if least is None else left < least
        gain = torch.where(better, tried, gain)
        least = left if least is None else torch.minimum(left, least)
    level, half = _nearest(size * qtc_gain.inverses(gain).unsqueeze(-1), width), (1 << width) >> 1
    codes = torch.where(z > 0, half + level, half - 1 - level).clamp_(min=0)
    return codes.to(torch.uint8), gain.to(torch.uint8)


def _errors(size: Tensor, gain: Tensor, width: Tensor) -> Tensor:
    """Of magnitudes float32 [H, N, u] once coded with gain codes [H, N]; width: [H, 1, u]."""
    level = _nearest(size * qtc_gain.inverses(gain).unsqueeze(-1), width)
    level += (3 << width) >> 1  # where the upper half of a width's levels begins
    levels = qtc_levels.table(size.device).index_select(0, level.flatten()).view(size.shape)
    return levels.mul_(qtc_gain.gains(gain).unsqueeze(-1)).sub_(size)


def _nearest(size: Tensor, width: Tensor) -> Tensor:
    """Level of every magnitude, counted from the least, int32; by one look-up and no search.

    size: [H, N, u], in units of the gain; width: [H, 1, u].
    """
    cell = size.clamp(max=qtc_levels.LAST_CELL).mul_(16).int().clamp_(min=0)  # NaN is below 0
    cell += width * qtc_levels.CELLS
    table = qtc_levels.cell_table(size.device).view(-1)
    word = table.index_select(0, cell.flatten()).view(size.shape)
    return (word & 31).add_(size > word.view(torch.float32))


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
    width = torch.full((1, head_dim // BLOCK), bits, dtype=torch.uint8, device=x.device)
    codes, gain = _encode(
        rotated, width.expand(heads, -1), torch.ones(heads, head_dim, device=x.device)
    )
    packed = qtc_planes.pack(codes.flatten(0, 1), widths).unflatten(0, (heads, tokens))
    if metric is None:
        return packed, gain
    turned = turn.t() @ metric.float() @ turn
    z = rotated * qtc_gain.inverses(gain.int()).unsqueeze(-1)
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

"""The kernel that puts sparse PSAC rows at their tokens, against the rows as they were before."""

from __future__ import annotations

from types import ModuleType

import torch

from benchmarks.agreement import require
from quantwm.cache.formats.correction import Correction, kept_rows, sparse_all

SHARES = (0.3, 0.96, 0.0)
"""Of the rows that correct anything, by layer; on recorded tensors 0.95 to 1.0 do."""


def agree_rows(
    kernel: ModuleType, heads: int, tokens: int, stored: int, device: torch.device | str
) -> None:
    """Disagreement unless every layer's rows come back, bit for bit; layers share a storage."""
    generator = torch.Generator(device).manual_seed(tokens)
    basis = torch.zeros(heads, 64, stored, dtype=torch.bfloat16, device=device)
    shape = (heads, tokens, stored)
    dense = []
    for share in SHARES:
        kept = torch.rand(shape[:2], generator=generator, device=device) < share
        rows = torch.randint(1, 99, shape, generator=generator, device=device).to(torch.int8)
        scales = torch.rand(shape[:2], generator=generator, device=device).to(torch.float16) + 0.1
        dense.append(Correction(0, tokens, basis, rows * kept[..., None], scales * kept, None))
    counts = torch.cat(kept_rows(dense)).tolist()
    for share, sparse, whole in zip(SHARES, sparse_all(dense, counts), dense, strict=True):
        held = (sparse.mask, sparse.coefficients, sparse.row_scales)
        rows, scales = kernel.spread_rows(*held, tokens)
        same = torch.equal(rows, whole.coefficients) and torch.equal(scales, whole.row_scales)
        into = torch.empty_like(whole.coefficients), torch.empty_like(whole.row_scales)
        kernel.spread_rows(*held, tokens, into)
        same &= torch.equal(into[0], rows) and torch.equal(into[1], scales)
        require(same, f"rows of {heads} x {tokens}, {share:.0%} of them, do not come back")

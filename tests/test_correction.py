"""PSAC rows: dense and sparse forms of several layers at once, and the kernel that spreads them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantwm.cache.formats import correction
from quantwm.cache.formats.correction import (
    Correction,
    counted,
    dense_all,
    kept_rows,
    settled_corrections,
)

HEADS, CHANNELS, RANK = 2, 32, 4


def _made(seed: int, count: int, share: float) -> Correction:
    """Rows of which about this share correct anything."""
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(HEADS, count, generator=generator) < share
    scales = torch.rand(HEADS, count, generator=generator).to(torch.float16) + 0.1
    codes = torch.randint(-127, 128, (HEADS, count, RANK), generator=generator, dtype=torch.int8)
    basis = torch.zeros(HEADS, CHANNELS, RANK, dtype=torch.bfloat16)
    return Correction(0, count, basis, codes * kept.unsqueeze(-1), scales * kept, None)


def _settled(dense: Sequence[Correction]) -> tuple[list[Correction], list[int]]:
    """Made ahead of the counts, which is the same as after them."""
    counts = [int(n) for part in kept_rows(dense) for n in part]
    found, ahead = counted(dense)
    assert [int(n) for part in found for n in part] == counts
    settled = list(settled_corrections(dense, counts, ahead))
    for one, other in zip(settled, settled_corrections(dense, counts), strict=True):
        for mine, wanted in zip(one.row_tensors(), other.row_tensors(), strict=True):
            assert torch.equal(mine, wanted) and mine.dtype == wanted.dtype
            assert mine.untyped_storage().nbytes() == wanted.untyped_storage().nbytes()
    return settled, counts


def _same_rows(one: Correction, other: Correction) -> bool:
    rows = torch.equal(one.coefficients, other.coefficients)
    return rows and torch.equal(one.row_scales, other.row_scales)


@given(
    st.integers(0, 2**20),
    st.lists(st.sampled_from([1, 8, 24, 25]), min_size=1, max_size=5),
    st.lists(st.floats(0, 1), min_size=5, max_size=5),
    st.booleans(),
)
def test_sparse_rows_hold_what_dense_ones_hold(
    seed: int, counts: list[int], shares: list[float], alike: bool
) -> None:
    lengths = [counts[0]] * len(counts) if alike else counts
    given_rows = zip(lengths, shares, strict=False)
    dense = [_made(seed + n, count, share) for n, (count, share) in enumerate(given_rows)]
    smallest, kept = _settled(dense)
    for one, before, rows in zip(smallest, dense, kept, strict=True):
        assert one.nbytes() <= before.nbytes() == before.dense_bytes()
        sparse = rows * (RANK + 2) + HEADS * -(-before.count // 8) < before.dense_bytes()
        assert (one.mask is not None) == sparse
        assert one.coefficients.shape[0] == (rows if sparse else HEADS)
        assert _same_rows(one.dense(), before)
    for one, before in zip(dense_all(smallest), dense, strict=True):
        assert one.mask is None and _same_rows(one, before)


def test_only_so_many_rows_are_put_in_together(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = [_made(seed, 24, 0.5) for seed in range(5)]
    together, _ = _settled(dense)
    monkeypatch.setattr(correction, "TOGETHER", 2 * 24 * HEADS)
    apart, _ = _settled(dense)
    storages = [{c.coefficients.untyped_storage().data_ptr() for c in s} for s in (together, apart)]
    assert [len(found) for found in storages] == [1, 3]
    for one, other, whole in zip(together, apart, dense, strict=True):
        assert _same_rows(one, other) and torch.equal(one.mask, other.mask)
        assert _same_rows(one.dense(), whole)


def test_dense_rows_among_sparse_ones_hold_nothing_of_their_neighbours() -> None:
    shared = torch.stack([_made(0, 24, 0.2).coefficients, _made(1, 24, 1.0).coefficients])
    dense = [_made(0, 24, 0.2), _made(1, 24, 1.0)]
    dense = [
        Correction(0, 24, c.basis, rows, c.row_scales, None)
        for c, rows in zip(dense, shared.unbind(0), strict=True)
    ]
    sparse, kept_dense = _settled(dense)[0]
    assert sparse.mask is not None and kept_dense.mask is None
    held = kept_dense.coefficients
    assert held.untyped_storage().nbytes() == held.nbytes


def test_no_row_at_all() -> None:
    dense = [_made(0, 24, 0.0), _made(1, 24, 0.0)]
    smallest, kept = _settled(dense)
    assert kept == [0, 0] and [c.coefficients.shape[0] for c in smallest] == [0, 0]
    for one, before in zip(dense_all(smallest), dense, strict=True):
        assert _same_rows(one, before)

"""The kernels of PSAC's bases and rows in Triton's interpreter; test_subspace_kernel.py runs it.

Not collected by name: TRITON_INTERPRET=1 must be set before triton is imported, so this runs in
a process of its own.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from memory_guard import guarded_launches  # noqa: F401  (a fixture of every test here)

from benchmarks.agreement import Disagreement
from benchmarks.agreement_rows import agree_rows
from benchmarks.agreement_subspace import agree_subspace, made_moments
from benchmarks.guards import guarded_allocations
from kernels import decode, rows, subspace
from quantwm.cache import dispatch, make_format
from quantwm.cache.formats import QueryGuide


def test_interpreting() -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.parametrize(("head_dim", "rank"), [(64, 3), (128, 8), (64, 9)])
def test_agrees_with_an_eigensolver(head_dim: int, rank: int) -> None:
    with guarded_allocations():
        agree_subspace(subspace, 2, head_dim, rank, "cpu", runs=1)


def test_wrong_directions_are_noticed() -> None:
    def stale(moments: torch.Tensor, rank: int, *given: object) -> tuple[torch.Tensor, ...]:
        vectors, values = subspace.leading(moments, rank, *given)
        return vectors.roll(1, 1), values

    with pytest.raises(Disagreement):
        agree_subspace(SimpleNamespace(leading=stale), 2, 64, 2, "cpu", runs=1)


def test_what_it_does_not_cover_is_refused() -> None:
    moments = made_moments(1, 64, "cpu")
    limits = (4, 3, 1e-3, 1e-30, 1e-6)
    with pytest.raises(ValueError, match="no kernel: 24 directions"):
        subspace.leading(moments, 8, None, torch.zeros(64, 24), *limits)
    with pytest.raises(ValueError, match="17 known ones"):
        subspace.leading(moments, 8, torch.zeros(1, 64, 17), torch.zeros(64, 16), *limits)
    with pytest.raises(ValueError, match="must be contiguous"):
        subspace.leading(moments.transpose(1, 2), 8, None, torch.zeros(64, 16), *limits)


@pytest.mark.parametrize(("heads", "tokens", "stored"), [(2, 40, 8), (3, 1030, 3), (1, 513, 4)])
def test_rows_are_spread_to_their_tokens(heads: int, tokens: int, stored: int) -> None:
    with guarded_allocations():
        agree_rows(rows, heads, tokens, stored, "cpu")


def test_rows_at_the_wrong_tokens_are_noticed() -> None:
    def moved(*given: Any) -> tuple[torch.Tensor, ...]:
        spread, scales = rows.spread_rows(*given)
        return spread.roll(1, 1), scales

    with pytest.raises(Disagreement, match="30% of them"):
        agree_rows(SimpleNamespace(spread_rows=moved), 2, 40, 8, "cpu")


def test_a_sparse_span_is_read_again_without_a_decoder_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ops = object.__new__(dispatch.TritonOps)
    ops._decode, ops.fallbacks, prepared = decode, [], []
    fmt = make_format("quantwm", centroids=4, group_size=32, rank=3, centroid_bits=8)
    x = torch.randn(2, 40, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    book = fmt.fit(x, torch.Generator().manual_seed(1), None)
    basis = torch.eye(64)[None, :, :3].expand(2, -1, -1).to(torch.bfloat16).contiguous()
    span = fmt.encode(x, book, "keys", QueryGuide(torch.ones(2, 64), basis, torch.ones(2, 3)))
    span.correction.row_scales[:, ::2] = 0
    span.correction.coefficients[:, ::2] = 0
    wanted = torch.empty(x.shape)
    span.decode_into(wanted, 0, 0, 40)
    (sparse,) = fmt.settle([span])
    monkeypatch.setattr(dispatch, "_choose", lambda *_: (ops, ""))
    genuine = decode.prepare_quantwm
    monkeypatch.setattr(
        decode, "prepare_quantwm", lambda *given: prepared.append(given) or genuine(*given)
    )
    for _ in range(3):
        out = torch.full(x.shape, torch.nan)
        sparse.decode_into(out, 0, 0, 40)
        torch.testing.assert_close(out, wanted, rtol=0, atol=1e-6)
    assert len(prepared) == 1 and not ops.fallbacks
    held = sparse.frame._launch._fixed
    assert [held[place] for place in decode.AffineDecoder.PLACES.values()] == [None] * 3

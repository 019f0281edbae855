"""The kernels of PSAC's bases and rows: in the interpreter, compiled for sm_90, on a GPU, taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from compiling import compile_launch, compiled_rows, record
from interpreter import INTERPRETABLE, passes_interpreted

from benchmarks.agreement_rows import agree_rows
from benchmarks.agreement_subspace import agree_subspace
from kernels import rows, tuning
from kernels import subspace as kernel
from quantwm.cache import dispatch, subspace


@INTERPRETABLE
def test_in_the_interpreter() -> None:
    passes_interpreted("interpret_subspace.py")


@pytest.mark.parametrize(("head_dim", "rank"), [(64, 4), (128, 8), (256, 8), (128, 24)])
def test_compiles_without_spills(monkeypatch: pytest.MonkeyPatch, head_dim: int, rank: int) -> None:
    launches = record(monkeypatch, kernel)
    moments, fixed = (
        torch.zeros(2, head_dim, head_dim),
        torch.zeros(head_dim, subspace.directions_for(rank)),
    )
    start = torch.zeros(2, head_dim, rank, dtype=torch.bfloat16)
    kernel.leading(moments, rank, start, fixed, 4, 3, 1e-3, 1e-30, 1e-6)
    [(_, _, used, label)] = compiled_rows(launches)
    assert used["STACK"] == 0, label
    assert "steps" in {p.name for p in launches[0].kernel.params if p.do_not_specialize}


def test_spreading_rows_compiles_for_rows_that_begin_anywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launches = record(monkeypatch, rows)
    mask, scales = torch.zeros(2, 5, dtype=torch.uint8), torch.zeros(9, dtype=torch.float16)
    rows.spread_rows(mask, torch.zeros(9, 8, dtype=torch.int8), scales, 40)
    _, used = compile_launch(launches[0])
    assert used["STACK"] == used["LOCAL"] == 0, used
    fixed = {p.name for p in launches[0].kernel.params if p.do_not_specialize}
    assert {"mask_ptr", "rows_ptr", "scales_ptr", "n_tokens", "mask_bytes"} <= fixed


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rank", [4, 8, 24])
def test_on_a_gpu(rank: int) -> None:
    agree_subspace(kernel, 360, 128, rank, torch.device("cuda"))
    agree_rows(rows, 12, 2640, rank, torch.device("cuda"))


def test_is_taken_where_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """And where it is not to be had, `explain` says so."""
    asked: list[Any] = []

    def leading(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(given)
        return subspace._iterated(*given[:5])

    monkeypatch.setattr(dispatch, "_notes", {})
    monkeypatch.setattr(dispatch, "_choose", lambda *_: (object.__new__(dispatch.TritonOps), ""))
    monkeypatch.setattr(kernel, "leading", leading)
    moments = torch.diag_embed(torch.arange(64.0)).expand(3, 2, 64, 64)
    vectors, values = subspace.leading(moments, 4)
    assert vectors.shape == (3, 2, 64, 4) and values[2, 1].tolist() == pytest.approx(
        [63, 62, 61, 60], rel=0.01
    )
    assert asked[0][0].is_contiguous() and asked[0][2] is None
    subspace.leading(moments, 4, vectors.to(torch.bfloat16))
    assert asked[1][2].shape == (6, 64, 4) and asked[1][4] == subspace.WARM_STEPS
    subspace.leading(moments, 40)
    assert len(asked) == 2
    assert dispatch._notes == {"no kernel finds PSAC's bases of rank 40 at head dim 64": None}


def test_every_row_is_of_a_block_that_is_iterated() -> None:
    assert {block for _, block in tuning.SUBSPACE} == set(subspace.BLOCKS)

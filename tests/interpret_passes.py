"""The kernels between a Wan pass's products in Triton's interpreter; see test_kernels_passes.py."""

from __future__ import annotations

import os

import pytest
import torch
from memory_guard import guarded_launches  # noqa: F401  (a fixture of every test here)

from benchmarks.passes import CUT_ERROR, SIZES, Sizes, agree, pairs
from kernels import passes

# frames, rows, columns, heads, head dim, action heads, action dim, frames seen
CASES = (SIZES["odd"], Sizes(3, 2, 3, 2, 32, 1, 16, 1), Sizes(1, 1, 17, 3, 128, 2, 64, 7))


def test_interpreting() -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.parametrize("sizes", CASES, ids=str)
def test_every_kernel_agrees_with_its_operations(sizes: Sizes) -> None:
    agree(sizes, "cpu", CUT_ERROR)


def test_float32_rows_are_turned_exactly() -> None:
    """Without roundings what is left is the arithmetic itself."""
    x, cos = torch.randn(2, 5, 16), torch.rand(5, 8)
    sin = (1 - cos**2).sqrt()
    mine = passes.turn(x, None, (cos, sin), 1e-6)
    even, odd = x[..., ::2], x[..., 1::2]
    wanted = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    torch.testing.assert_close(mine, wanted)


def test_results_lie_as_the_next_product_wants_them() -> None:
    found = {name: kernel() for name, (kernel, _) in pairs(SIZES["odd"], "cpu").items()}
    assert found["norm and turn"].is_contiguous()
    assert found["cells over time"].transpose(0, 1).is_contiguous()


@pytest.mark.parametrize(
    "call",
    [
        lambda x: passes.turn(x.transpose(1, 2), None, None, 1e-6),
        lambda x: passes.turn(x, None, (torch.ones(4, 8).double(),) * 2, 1e-6),
        lambda x: passes.cell_attention(x, x[:, :3], x, 2),
        lambda x: passes.gated(x[0], x[0], torch.ones(2, 16)),
    ],
)
def test_what_a_kernel_would_misread_is_refused(call) -> None:
    with pytest.raises(ValueError, match=r"must be|multiple"):
        call(torch.randn(2, 4, 16))

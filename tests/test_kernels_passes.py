"""The kernels between a Wan pass's products: interpreted, compiled for sm_90, and chosen."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from compiling import Launched, compiled_rows, record, specialised
from interpreter import INTERPRETABLE, passes_interpreted

from benchmarks.passes import SIZES, pairs
from kernels import passes
from quantwm.cache import dispatch
from quantwm.worlds.wan.layers import kernels_for


@INTERPRETABLE
def test_kernels_in_the_interpreter() -> None:
    passes_interpreted("interpret_passes.py")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launched]:
    return record(monkeypatch, passes)


@pytest.mark.parametrize("size", ["matrix_game2", "lingbot_14b"])
def test_every_launch_compiles_without_spills(launches: list[Launched], size: str) -> None:
    for kernel, _ in pairs(SIZES[size], "cpu").values():
        kernel()
    assert len({launched.kernel.__name__ for launched in launches}) == 5
    for _, compiled, used, label in compiled_rows(launches):
        assert used["STACK"] == 0 and compiled.metadata.shared <= 16 * 1024, label


def test_lengths_are_not_specialised() -> None:
    """A longer history or chunk never makes a new kernel."""
    growing = {"n_tokens", "per_frame", "cells", "frames", "seen", "vector_stride", "gate_stride"}
    assert specialised(growing, passes) == (5, [])


def test_a_cpu_and_float32_keep_pytorch_s_operations() -> None:
    assert kernels_for(torch.zeros(2, 256, dtype=torch.bfloat16), 256, 128) is None
    assert dispatch.pass_kernels(torch.device("cpu")) is None
    assert passes.covers(5120, 128)
    assert not passes.covers(96, 24) and not passes.covers(16384, 128)

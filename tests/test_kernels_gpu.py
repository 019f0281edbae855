"""The GPU checks of benchmarks/gpu_check.py, one test each; skipped where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu_check import CHECKS

pytest.importorskip("triton")


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHECKS)
def test_kernels_on_the_gpu(cuda: torch.device, name: str) -> None:
    CHECKS[name](cuda)

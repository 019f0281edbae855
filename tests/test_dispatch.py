"""dispatch: the override, and that every choice is explained."""

from __future__ import annotations

import pytest
import torch

from quantwm.cache import dispatch, reference
from quantwm.errors import UserError


@pytest.mark.parametrize("value", ["auto", "reference"])
def test_a_cpu_runs_the_reference(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("QUANTWM_KERNELS", value)
    assert dispatch.ops_for(torch.device("cpu")) is reference
    assert dispatch.explain("cpu").startswith("PyTorch reference (")
    assert "\n" not in dispatch.explain("cpu")


def test_triton_is_refused_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTWM_KERNELS", "triton")
    with pytest.raises(UserError, match="needs a CUDA device, this is cpu"):
        dispatch.ops_for(torch.device("cpu"))


def test_an_unknown_override_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTWM_KERNELS", "fast")
    with pytest.raises(UserError, match="must be one of auto, reference, triton, got 'fast'"):
        dispatch.explain("cpu")


def test_the_reference_can_be_forced_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_notes", {})
    monkeypatch.setenv("QUANTWM_KERNELS", "reference")
    assert dispatch.ops_for(torch.device("cuda")) is reference
    assert dispatch.explain("cuda") == "PyTorch reference (QUANTWM_KERNELS=reference)"


@pytest.mark.gpu
def test_cuda_runs_triton(cuda: torch.device) -> None:
    assert dispatch.explain(cuda).startswith("Triton kernels")

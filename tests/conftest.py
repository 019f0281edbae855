"""Shared fixtures: deterministic hypothesis, optional recorded tensors, GPU skipping."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch is imported, as quantwm does
if "PYTEST_XDIST_WORKER" in os.environ:  # workers and what they start share the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent

settings.register_profile(
    "quantwm",
    derandomize=True,
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("quantwm")


@pytest.fixture(scope="module", autouse=True)
def settled() -> None:
    """What was imported and what earlier files keep is no garbage: collections, which every engine
    asks for and a soak counts by, pass it over (engines and Wan worlds: 48 s to 27, soaks 17 to 2).
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or libraries report at the end what they think was leaked


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Folder of recorded tensors and golden files; tests that need it are skipped without it."""
    folder = Path(os.environ.get("QUANTWM_SHARED", ROOT.parent / "shared"))
    if not (folder / "tensors").is_dir():
        pytest.skip(f"recorded tensors not found in {folder} (set QUANTWM_SHARED)")
    return folder


@pytest.fixture
def two_threads() -> Iterator[None]:
    """As in a user's process: workers of the whole suite have one thread each."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda")

"""Runs a file of tests under TRITON_INTERPRET=1, in a process of its own, and says when it can."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
numpy = pytest.importorskip("numpy")

ROOT = Path(__file__).resolve().parent.parent


def _versions(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


INTERPRETABLE = pytest.mark.skipif(
    _versions(triton.__version__) < (3, 7) and _versions(numpy.__version__) >= (2, 4),
    reason=f"the interpreter of triton {triton.__version__} cannot loop to a runtime bound with "
    f"numpy {numpy.__version__} (2.4 or newer)",
)


def passes_interpreted(name: str) -> None:
    """Every test of tests/<name> passes there, and there are some."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [*command, f"tests/{name}"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout, run.stdout[-2000:]

"""Runs tests/interpret_kernels.py under TRITON_INTERPRET=1."""

from __future__ import annotations

from interpreter import INTERPRETABLE, passes_interpreted


@INTERPRETABLE
def test_kernels_in_the_interpreter() -> None:
    passes_interpreted("interpret_kernels.py")

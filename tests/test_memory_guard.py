"""Runs tests/interpret_memory.py under TRITON_INTERPRET=1."""

from __future__ import annotations

from interpreter import INTERPRETABLE, passes_interpreted


@INTERPRETABLE
def test_broken_kernels_are_caught() -> None:
    passes_interpreted("interpret_memory.py")

"""Poisoned and fenced memory: an element left unwritten or written out of bounds is seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

FENCE_BYTES = 512  # keeps the 256-byte alignment that the allocator gives
FENCE_VALUE = 0xA5
POISON_BYTE = 0x5A


@contextmanager
def altered_empty(alter: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """While it lasts, torch.empty returns what `alter` makes of what it gave."""
    genuine = torch.empty

    def empty(*shape: Any, **options: Any) -> Tensor:
        return alter(genuine(*shape, **options))

    torch.empty = empty
    try:
        yield
    finally:
        torch.empty = genuine


@contextmanager
def guarded_allocations() -> Iterator[None]:
    """While it lasts, torch.empty returns poisoned memory between two fences.

    Floats are NaN, integers 0x5A bytes. RuntimeError at the end when a fence was touched.
    """
    fenced: list[tuple[Tensor, int]] = []

    def fence(plain: Tensor) -> Tensor:
        length = plain.numel() * plain.element_size()
        size = length + (-length) % FENCE_BYTES + 2 * FENCE_BYTES
        storage = torch.full((size,), FENCE_VALUE, dtype=torch.uint8, device=plain.device)
        inner = storage[FENCE_BYTES : FENCE_BYTES + length]
        tensor = inner.view(plain.dtype).view(plain.shape)
        if plain.dtype.is_floating_point:
            tensor.fill_(float("nan"))
        else:
            inner.fill_(POISON_BYTE)
        fenced.append((storage, length))
        return tensor

    with altered_empty(fence):
        yield
    for storage, length in fenced:
        outside = torch.cat((storage[:FENCE_BYTES], storage[FENCE_BYTES + length :]))
        if not bool((outside == FENCE_VALUE).all()):
            raise RuntimeError(f"memory beside an output of {length} bytes was written")

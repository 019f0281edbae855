"""See, measure and shrink the KV cache of video world models."""

from __future__ import annotations

import os

# torch's OpenMP reads this once. By default a thread that waits for another spins for up to 16 ms
# before it sleeps, also where a busy machine runs both on one core: 15.6 ms for a product of 73,728
# numbers that takes 8 us alone. With this it spins for 65 us, longer than the gap between two ops.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from quantwm.cache import (
    FORMATS,
    CachePolicy,
    CacheSpec,
    KVCache,
    LayerWrite,
    Ledger,
    Workspace,
    explain,
    make_format,
)
from quantwm.errors import UserError

__version__ = "0.1.0"

__all__ = [
    "FORMATS",
    "CachePolicy",
    "CacheSpec",
    "KVCache",
    "LayerWrite",
    "Ledger",
    "UserError",
    "Workspace",
    "explain",
    "make_format",
]

"""See, measure and shrink the KV cache of video world models."""

from __future__ import annotations

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

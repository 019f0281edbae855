"""The cache backend: formats, spans, policies, bytes, attention."""

from __future__ import annotations

from quantwm.cache.chunk import LayerWrite
from quantwm.cache.dispatch import explain
from quantwm.cache.formats import FORMATS, make_format
from quantwm.cache.kv_cache import KVCache
from quantwm.cache.ledger import Ledger
from quantwm.cache.spec import CachePolicy, CacheSpec
from quantwm.cache.workspace import Workspace

__all__ = [
    "FORMATS",
    "CachePolicy",
    "CacheSpec",
    "KVCache",
    "LayerWrite",
    "Ledger",
    "Workspace",
    "explain",
    "make_format",
]

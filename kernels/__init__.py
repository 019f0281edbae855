"""Triton kernels of the packed KV cache: tensors in, tensors out; this file needs no triton."""

from __future__ import annotations

"""Triton kernels of the packed KV cache: tensors in, tensors out; importing this needs no triton."""

from __future__ import annotations

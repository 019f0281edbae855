"""Which implementation of the cache's primitives runs, and why: the only door to `kernels`.

Environment variables of the library (all of them):

| variable | values | meaning |
|---|---|---|
| QUANTWM_KERNELS | auto (default), reference, triton | which primitives run on a CUDA device |
"""

from __future__ import annotations

import logging
import os
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from quantwm.cache import reference
from quantwm.errors import UserError

logger = logging.getLogger(__name__)

CHOICES = ("auto", "reference", "triton")


class Ops(Protocol):
    """The primitive operations. `quantwm/cache/reference.py` defines what they mean.

    H heads, N tokens, D channels, K <= 256 centroids, G = group_size, r = rank, C chunks.
    x: [H, N, D] float32 or bfloat16, D contiguous. centroids: [H, K, D] bfloat16 when a chunk is
    encoded or decoded, float32 or bfloat16 inside k-means. ids: uint8 [H, N]. All arithmetic is
    float32. Packed tensors are as in docs/architecture.md and contiguous.
    """

    def assign(self, x: Tensor, centroids: Tensor) -> Tensor:
        """Nearest centroid, ties to the smaller index. Returns ids uint8 [H, N]."""
        ...

    def assign_qsac(
        self, x: Tensor, centroids: Tensor, weights: Tensor, group_size: int, candidates: int
    ) -> Tensor:
        """QSAC (QuantWM Eq. 6-14). weights: float32 [H, D], mean 1. Returns ids uint8 [H, N].

        The `candidates` nearest by sum_c w_c (x_c - mu_c)^2 (ties to the smaller index), of these
        the one with the least sum_g (sum_{c in g} w_c) (max_g(x - mu) - min_g(x - mu))^2, ties to
        the nearer candidate.
        """
        ...

    def update(self, x: Tensor, ids: Tensor, centroids: Tensor) -> Tensor:
        """Mean of each cluster's tokens, an empty cluster keeps its centroid. float32 [H, K, D]."""
        ...

    def encode_qvg(
        self, x: Tensor, ids: Tensor, centroids: Tensor, group_size: int
    ) -> tuple[Tensor, Tensor]:
        """Ternary residual. Returns codes uint8 [H, N, D/4], scales float8_e4m3fn [H, N, D/G]."""
        ...

    def encode_quantwm(
        self,
        x: Tensor,
        ids: Tensor,
        centroids: Tensor,
        group_size: int,
        clip: float,
        basis: Tensor | None,
        eigenvalues: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """4-level affine residual, and the PSAC rows when a basis is given.

        basis: bfloat16 [H, D, r]; eigenvalues: float32 [H, r].
        Returns codes uint8 [H, N, D/4], scales uint8 [H, N, D/G], secondary float16 [H],
        zeros uint8 [H, ceil(N * D/G / 4)], coefficients int8 [H, N, r] | None,
        coefficient_scales float16 [H, N] | None. A row that the gate refuses is all zero with
        scale 0.
        """
        ...

    def decode_qvg_into(
        self,
        out: Tensor,
        offset: int,
        codes: Tensor,
        ids: Tensor,
        centroids: Tensor,
        scales: Tensor,
        group_size: int,
        start: int,
        stop: int,
    ) -> None:
        """Write tokens [start, stop) of a span to out[:, offset : offset + stop - start].

        out: [H, capacity, D] float32 or bfloat16, D contiguous, the other strides free.
        """
        ...

    def decode_quantwm_into(
        self,
        out: Tensor,
        offset: int,
        codes: Tensor,
        ids: Tensor,
        centroids: Tensor,
        scales: Tensor,
        secondary: Tensor,
        chunk_stops: Tensor,
        zeros: Tensor,
        group_size: int,
        coefficients: Tensor | None,
        coefficient_scales: Tensor | None,
        basis: Tensor | None,
        first_corrected: int,
        start: int,
        stop: int,
    ) -> None:
        """As decode_qvg_into, for QuantWM spans.

        secondary: float16 [H, C], one per chunk of the span; chunk_stops: int32 [C], the token
        of the span at which each chunk ends. scale = scale_code * (secondary / 255).
        coefficients: int8 [H, N - first_corrected, r] (row i belongs to token
        first_corrected + i; tokens before have no correction), coefficient_scales: float16
        [H, N - first_corrected], basis: bfloat16 [H, D, r]; None where there is no correction.
        """
        ...


def ops_for(device: torch.device) -> Ops:
    """The primitives that run on this device."""
    return _choose(torch.device(device).type, os.environ.get("QUANTWM_KERNELS", "auto"))[0]


def explain(device: torch.device | str) -> str:
    """One line: which primitives run on this device, and why."""
    return _choose(torch.device(device).type, os.environ.get("QUANTWM_KERNELS", "auto"))[1]


@lru_cache(maxsize=16)
def _choose(device_type: str, override: str) -> tuple[Ops, str]:
    if override not in CHOICES:
        raise UserError(f"QUANTWM_KERNELS must be one of {', '.join(CHOICES)}, got {override!r}")
    if override == "reference":
        return reference, "PyTorch reference (QUANTWM_KERNELS=reference)"
    if device_type != "cuda":
        if override == "triton":
            raise UserError(
                f"QUANTWM_KERNELS=triton needs a CUDA device, this is {device_type}; "
                "set it to auto or reference"
            )
        return reference, f"PyTorch reference (Triton needs a CUDA device, this is {device_type})"
    try:
        ops = _load_triton()
    except ImportError as failure:
        if override == "triton":
            raise UserError(
                f"QUANTWM_KERNELS=triton, but the kernels do not load: {failure}"
            ) from None
        reason = f"PyTorch reference on CUDA, slow: the Triton kernels do not load ({failure})"
        logger.warning(reason)
        return reference, reason
    return ops, "Triton kernels (CUDA device)"


# --- Triton wiring: the one place that imports `kernels` ---------------------------------------


def _load_triton() -> Ops:
    """The launchers behind the signatures of `Ops`. ImportError when triton is absent."""
    from kernels import ops

    return ops

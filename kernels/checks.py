"""What the launchers check before a kernel runs: kernels trust their arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.format import unsupported


def geometry(
    head_dim: int, group_size: int | None = None, centroids: int | None = None, rank: int = 0
) -> None:
    """ValueError when the kernels do not cover this geometry."""
    reason = unsupported(head_dim, group_size, centroids, rank)
    if reason:
        raise ValueError(f"no kernel: {reason}")


def rows(name: str, x: Tensor) -> None:
    """x must be a float [H, N, D] tensor whose channels are adjacent; other strides are free."""
    if x.ndim != 3 or x.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"{name} must be float32 or bfloat16 [H, N, D], got {x.dtype} {tuple(x.shape)}"
        )
    if x.stride(2) != 1:
        raise ValueError(f"{name} must have adjacent channels, got strides {x.stride()}")


def packed(
    name: str, tensor: Tensor, dtype: torch.dtype | tuple[torch.dtype, ...], shape: tuple[int, ...]
) -> None:
    """tensor must be contiguous with this dtype (or one of these) and shape."""
    fits = tensor.dtype in dtype if isinstance(dtype, tuple) else tensor.dtype == dtype
    if not fits or tensor.shape != shape:
        dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
        wanted = " or ".join(str(d) for d in dtypes)
        raise ValueError(
            f"{name} must be {wanted} {shape}, got {tensor.dtype} {tuple(tensor.shape)}"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")


def together(*tensors: Tensor | None) -> None:
    """All tensors must be on the device of the first."""
    present = [t for t in tensors if t is not None]
    first = present[0].device
    if any(t.device != first for t in present):
        devices = {t.device for t in present}
        raise ValueError(f"all tensors must be on one device, got {sorted(map(str, devices))}")

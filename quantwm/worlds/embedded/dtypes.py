"""What the embedded world computes in: which dtypes there are, and which is faster on a CPU."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F

from quantwm.errors import UserError


def check_dtype(dtype: torch.dtype) -> None:
    """UserError unless the embedded world computes in it."""
    if dtype not in (torch.float32, torch.bfloat16):
        raise UserError(f"dtype of the embedded world is float32 or bfloat16, got {dtype}")


def pick_cpu_dtype(seconds: float = 0.05) -> torch.dtype:
    """BF16 or float32, whichever multiplies this model's matrices faster on this CPU.

    Without avx512_bf16 or AMX a BF16 pass takes 3.4 times as long as a float32 one (169 against
    49 ms), with them a third (18 ms); the flags of a CPU do not say what PyTorch makes of them.
    The fastest call's time on the CPU decides, on one thread: other processes must not turn the
    choice, or the same seed and keys would not give the same frames. (By the clock on two threads
    a machine under load took float32 for the faster one, which BF16 beats by 2.4.)
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        fastest = {dtype: _fastest(dtype, seconds / 2) for dtype in (torch.float32, torch.bfloat16)}
    finally:
        torch.set_num_threads(threads)
    return min(fastest, key=lambda dtype: fastest[dtype])


def _fastest(dtype: torch.dtype, seconds: float) -> float:
    """CPU seconds of the fastest of many products of the model's size."""
    x, w = torch.ones(192, 384, dtype=dtype), torch.ones(1408, 384, dtype=dtype)
    F.linear(x, w)  # the first call builds what later ones reuse
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < 10 or time.perf_counter() - start < seconds:
        began = time.thread_time()
        F.linear(x, w)
        times.append(time.thread_time() - began)
    return min(times)

"""How a thing is timed: events on a GPU with a cold L2, a clock on a CPU; median, p20 and p80."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from quantwm.errors import UserError

FLUSH_BYTES = 256 << 20  # five times the 50 MB L2 of an H200
SLOW_MS = 500.0  # of one thing's repetitions
LEAD_CYCLES = 8_000_000  # about 4 ms of a busy device, in which the host queues what is timed


@dataclass(frozen=True)
class Timing:
    """Milliseconds over the repetitions, and the peak of device memory that one run took.

    median, p20, p80: of the device's own time, the host being ahead; eager: median with the host
    launching as it goes. On a CPU there is only one kind.
    """

    median: float
    p20: float
    p80: float
    eager: float
    repeats: int
    peak_bytes: int | None

    def row(self) -> dict[str, object]:
        return {key: round(v, 4) if isinstance(v, float) else v for key, v in asdict(self).items()}


def measure(
    run: Callable[[], object], device: torch.device, repeats: int, keep_bytes: int = 0
) -> Timing:
    """Time run() `repeats` times after three warm-up runs; a slow one fewer times, half a second.

    On a GPU each run starts with a flushed L2 and is timed by events. keep_bytes: bytes of run's
    own outputs that it allocates; the peak is what it took beyond these (GPU only).
    """
    for _ in range(3):
        run()
    if device.type == "cuda":
        slow = int(SLOW_MS / max(_time_cuda(run, 0), 1e-3))
        repeats = min(repeats, max(slow, 5))
    peak = _peak(run, device, keep_bytes)
    if device.type == "cuda":
        spent = sorted(_time_cuda(run, LEAD_CYCLES) for _ in range(repeats))
        eager = sorted(_time_cuda(run, 0) for _ in range(repeats))
    else:
        spent = eager = sorted(_time_host(run) for _ in range(repeats))
    return Timing(
        median=spent[len(spent) // 2],
        p20=spent[len(spent) // 5],
        p80=spent[min(len(spent) - 1, len(spent) * 4 // 5)],
        eager=eager[len(eager) // 2],
        repeats=repeats,
        peak_bytes=peak,
    )


def _time_cuda(run: Callable[[], object], lead_cycles: int) -> float:
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    flush.zero_()
    torch.cuda.synchronize()
    if lead_cycles:
        torch.cuda._sleep(lead_cycles)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _time_host(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return (time.perf_counter() - began) * 1e3


def _peak(run: Callable[[], object], device: torch.device, keep_bytes: int) -> int | None:
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - keep_bytes


def device_named(name: str) -> torch.device:
    """UserError when this machine has no such device."""
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("this benchmark needs a CUDA device and there is none; try --device cpu")
    return device


def copy_ceiling(device: torch.device) -> dict[str, float]:
    """GB/s of a plain copy (read + written) and of a plain fill (written), the ceilings."""
    size = 1 << 30 if device.type == "cuda" else 1 << 27
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = measure(lambda: target.copy_(source), device, 20)
    fill = measure(lambda: target.fill_(7), device, 20)
    return {
        "copy_gb_s": round(2 * size / copy.median / 1e6, 1),
        "fill_gb_s": round(size / fill.median / 1e6, 1),
    }


def hardware(device: torch.device) -> dict[str, str]:
    """Names and versions that a number is meaningless without."""
    import os
    import platform

    cpu = f"{platform.machine()} CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    facts = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else cpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    try:
        import triton
    except ImportError:
        return facts | {"triton": "absent"}
    return facts | {"triton": triton.__version__}

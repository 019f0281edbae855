"""How a thing is timed: events on a GPU with a cold L2, a clock on a CPU; median, p20 and p80."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
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
    return measure_in_turn([run], device, repeats, keep_bytes)[0]


def measure_in_turn(
    runs: Sequence[Callable[[], object]], device: torch.device, repeats: int, keep_bytes: int = 0
) -> list[Timing]:
    """As `measure`, one run of each after the other, again and again: what is to be compared meets
    the same clocks. One call of 25.6 ms took 25.3 to 26.0 (p20, p80) on an H200 of 2026-11-30."""
    for run in [*runs] * 3:
        run()
    if device.type == "cuda":
        slow = int(SLOW_MS / max(*(_time_cuda(run, 0) for run in runs), 1e-3))
        repeats = min(repeats, max(slow, 5))
    peaks = [_peak(run, device, keep_bytes) for run in runs]
    if device.type == "cuda":
        spent = _rounds(lambda run: _time_cuda(run, LEAD_CYCLES), runs, repeats)
        eager = _rounds(lambda run: _time_cuda(run, 0), runs, repeats)
    else:
        spent = eager = _rounds(_time_host, runs, repeats)
    return [
        Timing(
            median=mine[len(mine) // 2],
            p20=mine[len(mine) // 5],
            p80=mine[min(len(mine) - 1, len(mine) * 4 // 5)],
            eager=launched[len(launched) // 2],
            repeats=repeats,
            peak_bytes=peak,
        )
        for mine, launched, peak in zip(spent, eager, peaks, strict=True)
    ]


def _rounds(
    clock: Callable[[Callable[[], object]], float], runs: Sequence[Callable[[], object]],
    repeats: int,
) -> list[list[float]]:  # fmt: skip
    """Of every run, its times in order of length."""
    rounds = [[clock(run) for run in runs] for _ in range(repeats)]
    return [sorted(times) for times in zip(*rounds, strict=True)]


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


def device_named(name: str, cpu: bool = True) -> torch.device:
    """UserError when this machine has no such device. cpu: whether one would do."""
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        hint = "; try --device cpu" if cpu else ""
        raise UserError(f"this benchmark needs a CUDA device and there is none{hint}")
    if device.type != "cuda" and not cpu:
        import triton

        if not triton.knobs.runtime.interpret:
            raise UserError(f"this benchmark needs a CUDA device, got {name}")
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

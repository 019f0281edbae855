"""The memory gauge: bytes on the device by part, and where each number comes from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from quantwm.engine_types import MemoryReading


def read_memory(device: torch.device, parts: Mapping[str, int]) -> MemoryReading:
    """Read the memory of `device` and split it.

    parts: bytes the caller knows exactly, in order ("weights", "kv:<lane>", "scratch"). Added are
    "other torch", "allocator slack", "non-torch", "free" on a GPU, "process other" and "free" on
    a CPU. Never raises for a missing library or driver: it falls back from NVML to
    torch.cuda.mem_get_info, and from psutil to /proc, and the source says which it was.
    """
    if device.type == "cuda":
        return _read_cuda(device, parts)
    return _read_process(parts)


def free_bytes(device: torch.device) -> int | None:
    """Bytes that a new allocation on `device` may take; None where nothing says so."""
    reading = read_memory(device, {})
    if reading.total == 0:
        return None
    # slack is reserved by torch already, and the first that an allocation takes
    return reading.parts["free"] + reading.parts.get("allocator slack", 0)


def _read_cuda(device: torch.device, parts: Mapping[str, int]) -> MemoryReading:
    allocated = torch.cuda.memory_allocated(device)
    reserved = torch.cuda.memory_reserved(device)
    nvml = _read_nvml(device)
    if nvml is None:
        free, total = torch.cuda.mem_get_info(device)
        source = "torch.cuda.mem_get_info"
    else:
        free, total = nvml
        source = "NVML"
    used = total - free
    split = dict(parts)
    # A clamp at 0: the numbers are read one after the other while the device works.
    split["other torch"] = max(0, allocated - sum(parts.values()))
    split["allocator slack"] = max(0, reserved - allocated)
    split["non-torch"] = max(0, used - reserved)
    split["free"] = free
    return MemoryReading(f"{source}, torch allocator", split, used, total)


def _read_nvml(device: torch.device) -> tuple[int, int] | None:
    """(free, total) of the device that torch means, or None where NVML does not answer."""
    # the pid is part of the key: a forked worker has to initialise NVML for itself
    index = torch.cuda.current_device() if device.index is None else device.index
    found = _nvml_handle(os.getpid(), index)
    if found is None:
        return None
    pynvml, handle = found
    try:
        # version 2 keeps the driver's reserve out of "used"
        info = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except (pynvml.NVMLError, AttributeError, ValueError):
        return None
    return int(info.free), int(info.total)


@lru_cache(maxsize=32)
def _nvml_handle(pid: int, index: int) -> tuple[Any, Any] | None:
    """NVML and its handle of a torch device, once per process: initialising takes milliseconds."""
    try:
        import pynvml
    except (ImportError, OSError):
        return None
    try:
        pynvml.nvmlInit()
        # NVML numbers all devices and ignores CUDA_VISIBLE_DEVICES: the UUID is what both know
        uuid = str(torch.cuda.get_device_properties(index).uuid)
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(name.encode())
    except (pynvml.NVMLError, AttributeError, ValueError):
        return None


def _read_process(parts: Mapping[str, int]) -> MemoryReading:
    try:
        import psutil
    except ImportError:
        resident, available, total, source = _read_proc()
    else:
        memory = psutil.virtual_memory()
        resident = psutil.Process().memory_info().rss
        available, total, source = memory.available, memory.total, "process memory (psutil)"
    split = dict(parts)
    split["process other"] = max(0, resident - sum(parts.values()))
    split["free"] = available
    return MemoryReading(source, split, resident, total)


def _read_proc() -> tuple[int, int, int, str]:
    """(resident, available, total, source) from /proc, zeros where there is none."""
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * page
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        kilobytes = {words[0]: int(words[1]) for words in lines}
    except (OSError, ValueError, IndexError):
        return 0, 0, 0, "unknown (install psutil to see process memory)"
    available, total = kilobytes["MemAvailable:"] * 1024, kilobytes["MemTotal:"] * 1024
    return resident, available, total, "process memory (/proc)"

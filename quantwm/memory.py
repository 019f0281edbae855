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


def _read_process(parts: Mapping[str, int], root: Path = Path("/")) -> MemoryReading:
    """root: where /proc and /sys are, for the limit of a container."""
    try:
        import psutil
    except ImportError:
        resident, available, total, source = _read_proc()
    else:
        memory = psutil.virtual_memory()
        resident = psutil.Process().memory_info().rss
        available, total, source = memory.available, memory.total, "process memory (psutil)"
    limit = _cgroup_limit(root)
    if limit is not None and limit[0] < available:
        available, total = limit[0], min(total, limit[1])
        source += ", free by the cgroup limit"
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


_CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Limit, usage and the cache that the kernel drops first, of cgroup v2 and v1."""


def _cgroup_limit(root: Path) -> tuple[int, int] | None:
    """(bytes left, limit) of the cgroup with the least left, this process's or one above it.

    None where no cgroup says anything. In v1 "no limit" is a number near 2^63, more than is free.
    """
    found = []
    for mount, group, names in _cgroups(root):
        for folder in (mount / group, *(mount / parent for parent in Path(group).parents)):
            try:
                limit, used = (int((folder / name).read_text()) for name in names[:2])
            except (OSError, ValueError):  # not there, or "max"
                continue
            # inactive file pages count as used, but an allocation takes them
            found.append((max(0, limit - used + _statistic(folder, names[2])), limit))
    return min(found, default=None)


def _cgroups(root: Path) -> list[tuple[Path, str, tuple[str, str, str]]]:
    """(mount point, this process's group below it, file names) of the memory hierarchies."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    groups = {"": ".", "memory": "."}  # a container may see its own group as the root
    for number, controllers, group in (line.split(":", 2) for line in lines if line.count(":") > 1):
        name = "memory" if "memory" in controllers.split(",") else controllers
        if name == "memory" or number == "0":
            groups[name] = group.lstrip("/") or "."
    mount, (second, first) = root / "sys/fs/cgroup", _CGROUP_FILES
    return [(mount, groups[""], second), (mount / "memory", groups["memory"], first)]


def _statistic(folder: Path, name: str) -> int:
    """One line of a cgroup's memory.stat, 0 where it is not there."""
    try:
        lines = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return next((int(words[1]) for words in lines if words[0] == name), 0)
    except (OSError, ValueError, IndexError):
        return 0

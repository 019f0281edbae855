"""The gauge adds up, names its source and never raises for a missing library."""

from __future__ import annotations

import sys
import types

import pytest
import torch

import quantwm.memory as memory

PARTS = {"weights": 3_000, "kv:bf16": 500}


def test_process_reading_adds_up():
    reading = memory.read_memory(torch.device("cpu"), PARTS)
    assert list(reading.parts)[:2] == ["weights", "kv:bf16"]
    assert reading.used == sum(v for k, v in reading.parts.items() if k != "free")
    assert 0 < reading.used < reading.total
    assert "process memory" in reading.source


def test_without_psutil(monkeypatch):
    with_psutil = memory.read_memory(torch.device("cpu"), {}).used
    monkeypatch.setitem(sys.modules, "psutil", None)
    reading = memory.read_memory(torch.device("cpu"), {})
    assert "/proc" in reading.source or "unknown" in reading.source
    if "/proc" in reading.source:
        assert reading.used == pytest.approx(with_psutil, rel=0.1)


def fake_cuda(monkeypatch, allocated=10_000, reserved=12_000, free=70_000, total=100_000):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    memory._nvml_handle.cache_clear()
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    properties = types.SimpleNamespace(uuid="1234")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def test_cuda_without_pynvml(monkeypatch):
    fake_cuda(monkeypatch)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    reading = memory.read_memory(torch.device("cuda"), PARTS)
    assert reading.source.startswith("torch.cuda.mem_get_info")
    assert reading.parts == {
        "weights": 3_000,
        "kv:bf16": 500,
        "other torch": 6_500,
        "allocator slack": 2_000,
        "non-torch": 18_000,
        "free": 70_000,
    }
    assert (reading.used, reading.total) == (30_000, 100_000)


class NVMLError(Exception):
    pass


def fake_nvml(monkeypatch, failing: bool):
    asked = []

    def handle(uuid):
        asked.append(uuid)
        if failing:
            raise NVMLError("not found")
        return "handle"

    module = types.SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: asked.append("init"),
        nvmlDeviceGetHandleByUUID=handle,
        nvmlMemory_v2=2,
        nvmlDeviceGetMemoryInfo=lambda h, version: types.SimpleNamespace(free=60_000, total=99_000),
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return asked


def test_nvml_is_asked_by_uuid(monkeypatch):
    fake_cuda(monkeypatch)
    asked = fake_nvml(monkeypatch, failing=False)
    reading = memory.read_memory(torch.device("cuda"), PARTS)
    assert reading.source.startswith("NVML")
    assert (reading.used, reading.total) == (39_000, 99_000)
    memory.read_memory(torch.device("cuda", 0), PARTS)
    assert asked == ["init", b"GPU-1234"]  # once for both readings


def test_nvml_failure_falls_back(monkeypatch):
    fake_cuda(monkeypatch)
    fake_nvml(monkeypatch, failing=True)
    assert memory.read_memory(torch.device("cuda"), {}).total == 100_000


def test_free_bytes_counts_what_torch_holds_back(monkeypatch):
    fake_cuda(monkeypatch)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert memory.free_bytes(torch.device("cuda")) == 72_000
    assert memory.free_bytes(torch.device("cpu")) > 0
    monkeypatch.setitem(sys.modules, "psutil", None)
    monkeypatch.setattr(memory, "_read_proc", lambda: (0, 0, 0, "unknown"))
    assert memory.free_bytes(torch.device("cpu")) is None


V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def fake_cgroup(folder, names, limit, used, dropped=None):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    if dropped is not None:
        (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {dropped}\n")


@pytest.mark.parametrize(("version", "names"), [("v2", V2), ("v1", V1)])
def test_a_containers_limit_decides_what_is_free(tmp_path, version, names):
    mount = tmp_path / "sys/fs/cgroup"
    fake_cgroup(mount if version == "v2" else mount / "memory", names, 900_000, 300_000)
    reading = memory._read_process({}, tmp_path)
    assert (reading.parts["free"], reading.total) == (600_000, 900_000)
    assert reading.source.endswith("free by the cgroup limit")


def test_the_groups_own_limit_and_those_above_it_count(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("1:cpu,memory:/a/b\n0::/c/d\n")
    mount = tmp_path / "sys/fs/cgroup"
    fake_cgroup(mount / "c", V2, 800_000, 500_000, dropped=100_000)
    fake_cgroup(mount / "c/d", V2, "max", 200_000)
    assert memory._cgroup_limit(tmp_path) == (400_000, 800_000)
    fake_cgroup(mount / "memory/a/b", V1, 700_000, 650_000, dropped=20_000)
    assert memory._cgroup_limit(tmp_path) == (70_000, 700_000)
    fake_cgroup(mount / "memory/a", V1, 750_000, 760_000)
    assert memory._cgroup_limit(tmp_path) == (0, 750_000)


def test_no_limit_changes_nothing(tmp_path):
    assert memory._cgroup_limit(tmp_path) is None
    mount = tmp_path / "sys/fs/cgroup"
    fake_cgroup(mount, V2, "max", 200_000)
    fake_cgroup(mount / "memory", V1, 2**63 - 4096, 200_000)
    reading = memory._read_process({}, tmp_path)
    assert "cgroup" not in reading.source
    assert reading.total == memory._read_process({}, tmp_path / "none").total


@pytest.fixture(autouse=True)
def no_handles_left():
    yield
    memory._nvml_handle.cache_clear()

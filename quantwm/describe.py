"""What a run was made with: versions, hardware and the engine's settings, for session.json."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import torch

import quantwm
from quantwm.engine import Engine
from quantwm.session import SessionInfo

_PACKAGES = ("torch", "triton", "numpy", "imageio", "av")


def versions() -> dict[str, str]:
    """Versions of Python, QuantWM and the packages that decide a result, if installed."""
    found = {"python": platform.python_version(), "quantwm": quantwm.__version__}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    found["torch"] = torch.__version__  # with its build, "2.11.0+cu128"
    return found


def hardware(device: torch.device) -> dict[str, object]:
    """Processor, cores and, for a GPU, its name, capability and memory."""
    found: dict[str, object] = {
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["gpu"] = properties.name
        found["gpu_capability"] = f"{properties.major}.{properties.minor}"
        found["gpu_memory_bytes"] = properties.total_memory
        found["cuda"] = torch.version.cuda or ""
    return found


def session_info(engine: Engine, actions: str | None = None) -> SessionInfo:
    """What session.json holds of a run of this engine."""
    world = engine.world
    spec = world.spec
    return SessionInfo(
        world=spec.name,
        weights_sha256=world.weights_sha256(),
        seed=engine.seed,
        scene=engine.scene,
        prompt=engine.prompt,
        start_picture=engine.image is not None,
        mode=engine.mode,
        steps=engine.steps,
        max_tokens=engine.max_tokens,
        lanes=engine.lanes,
        keys=tuple(spec.keys),
        frames_per_chunk=spec.cache.frames_per_chunk,
        fps=spec.fps,
        size=spec.video_size,
        device=str(world.device),
        hardware=hardware(world.device),
        versions=versions(),
        kernels=engine.explain(),
        actions=actions,
        dtype=str(world.dtype).removeprefix("torch."),
    )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())

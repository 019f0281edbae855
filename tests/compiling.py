"""Launches noted on CPU tensors in place of run, and compiled for sm_90 without a GPU."""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from sass import listing, unwritten_reads  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.language import target_info  # noqa: E402

from kernels import tuning  # noqa: E402

TYPES = {
    torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float16: "*fp16", torch.uint8: "*u8",
    torch.int8: "*i8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip
SHARED_LIMIT = 227 * 1024  # bytes a block may have on sm_90


@dataclass
class Launched:
    """One launch that a launcher asked for: the kernel and its bound arguments."""

    kernel: Any
    arguments: dict[str, Any]


@dataclass
class Recorder:
    """Stands where a kernel stood and notes what it was launched with."""

    kernel: Any
    launches: list[Launched]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            bound = dict(zip(self.kernel.arg_names, args, strict=False)) | kwargs
            self.launches.append(Launched(self.kernel, bound))

        return launch


@functools.cache
def _compiled() -> tempfile.TemporaryDirectory[str]:
    """Triton's cache of this process: empty at first, and what two tests launch compiles once."""
    return tempfile.TemporaryDirectory(prefix="compiled-")


def record(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> list[Launched]:
    """The modules' launchers run on CPU tensors as if on a GPU; nothing is executed, launches are
    noted in the list."""
    noted: list[Launched] = []
    monkeypatch.setenv("TRITON_CACHE_DIR", _compiled().name)
    monkeypatch.setattr(tuning, "dot_mode", lambda x: (torch.bfloat16, triton.language.bfloat16))
    note(monkeypatch, noted, *modules)
    return noted


def note(monkeypatch: pytest.MonkeyPatch, noted: list[Launched], *modules: ModuleType) -> None:
    """Launches of these modules too are noted in that list."""
    for module in modules:
        for name in [n for n in vars(module) if n.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Recorder(getattr(module, name), noted))


def compile_launch(launched: Launched, arch: int = 90) -> tuple[Any, dict[str, int]]:
    """The compiled kernel as the runtime would specialise it, and ptxas' resource usage."""
    kernel, options = launched.kernel, {}
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    fixed = {p.name for p in kernel.params if p.do_not_specialize}
    constexprs = {p.name for p in kernel.params if p.is_constexpr}
    for name, value in launched.arguments.items():
        if name not in kernel.arg_names:
            options[name] = value
            continue
        place = (kernel.arg_names.index(name),)
        if isinstance(value, Tensor):
            signature[name] = TYPES[value.dtype]
            if name not in fixed:
                attributes[place] = [["tt.divisibility", 16]]
        elif name in constexprs or value is None or (value == 1 and name not in fixed):
            signature[name] = "constexpr"
            constants[name] = value
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if name not in fixed and isinstance(value, int) and value % 16 == 0:
                attributes[place] = [["tt.divisibility", 16]]
    signature = {name: signature[name] for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constants, attributes)
    target = GPUTarget("cuda", arch, 32)
    with pytest.MonkeyPatch.context() as patch:
        active = SimpleNamespace(get_current_target=lambda: target)
        patch.setattr(target_info, "driver", SimpleNamespace(active=active))
        compiled = triton.compile(source, target=target, options=options)
    if "wgmma" in compiled.asm["ptx"]:
        lost = unwritten_reads(listing(cubin_of(compiled)))
        assert not lost, f"reads what nothing wrote: {lost} {describe(launched)}"
    return compiled, resources(compiled)


def cubin_of(compiled: Any) -> Path:
    return Path(compiled.metadata_group[f"{compiled.metadata.name}.cubin"])


def resources(compiled: Any) -> dict[str, int]:
    """REG, STACK, LOCAL and SHARED of the cubin, by the cuobjdump in Triton's wheel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    text = subprocess.run(
        [str(tool), "--dump-resource-usage", str(cubin_of(compiled))],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    return {key: int(value) for key, value in re.findall(r"([A-Z]+):(\d+)", text)}


def compiled_rows(
    launches: Iterable[Launched],
) -> Iterator[tuple[Launched, Any, dict[str, int], str]]:
    """Each different launch, what compile_launch gives, and both in words; all fit in a block."""
    for launched in {describe(launched): launched for launched in launches}.values():
        compiled, used = compile_launch(launched)
        label = f"{used} {describe(launched)}"
        assert used["LOCAL"] == 0 and compiled.metadata.shared <= SHARED_LIMIT, label
        yield launched, compiled, used, label


def specialised(names: set[str], *modules: ModuleType) -> tuple[int, list[str]]:
    """How many kernels the modules have, and which arguments so named make new ones of them."""
    named = (item for module in modules for item in vars(module).items())
    kernels = {id(kernel): kernel for name, kernel in named if name.endswith("_kernel")}.values()
    found = ((kernel.__name__, p) for kernel in kernels for p in kernel.params if p.name in names)
    return len(kernels), [f"{name}: {p.name}" for name, p in found if not p.do_not_specialize]


def describe(launched: Launched) -> str:
    plain = {k: v for k, v in launched.arguments.items() if not isinstance(v, Tensor)}
    return f"{launched.kernel.__name__} {plain}"

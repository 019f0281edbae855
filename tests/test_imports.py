"""The one-way doors between rooms (docs/architecture.md) by their source, and lean imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("app", "benchmarks", "kernels", "quantwm", "tests", "training")
OPTIONAL = (
    "triton", "gradio", "diffusers", "av", "pynvml", "psutil", "vizdoom", "cv2", "skimage",
    "torchmetrics",
)  # fmt: skip
DISPATCH = "quantwm.cache.dispatch"


@dataclass(frozen=True)
class Import:
    """One import statement: who, what, and whether it runs when the importer is imported."""

    importer: str
    imported: str
    at_import: bool
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"

    def of(self, *packages: str) -> bool:
        return any(self.imported == p or self.imported.startswith(f"{p}.") for p in packages)

    def by(self, *packages: str) -> bool:
        return any(self.importer == p or self.importer.startswith(f"{p}.") for p in packages)


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _sources() -> Iterator[Path]:
    yield from ROOT.glob("app.py")
    for room in ROOMS:
        yield from sorted((ROOT / room).rglob("*.py"))


def _walk(node: ast.AST, deferred: bool) -> Iterator[tuple[ast.AST, bool]]:
    yield node, deferred
    inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    checking = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, deferred or inside or checking)


def _imports_of(path: Path) -> list[Import]:
    importer = "app.py" if path == ROOT / "app.py" else _module(path)
    package = importer if path.name == "__init__.py" else importer.rpartition(".")[0]
    found = []
    for node, deferred in _walk(ast.parse(path.read_text(encoding="utf-8")), False):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            # `from a import b` may mean the module a.b: both are named.
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        found.extend(Import(importer, name, not deferred, node.lineno) for name in names)
    return found


IMPORTS = [found for path in _sources() for found in _imports_of(path)]


def _refuse(broken: list[Import]) -> None:
    assert not broken, "\n".join(str(found) for found in broken)


def test_the_walk_sees_imports() -> None:
    assert any(i.by("quantwm.cache.formats") and i.of("quantwm.cache.dispatch") for i in IMPORTS)
    assert any(i.by("kernels") and i.of("triton") for i in IMPORTS)


@pytest.mark.parametrize(
    ("room", "closed"),
    [
        ("kernels", ("quantwm", "app", "training", "benchmarks", "tests", "numpy")),
        ("quantwm", ("app", "gradio", "triton", "training", "benchmarks", "tests")),
        ("quantwm.cache", ("quantwm.worlds", "quantwm.engine", "quantwm.cli")),
        ("app", ("kernels", "triton", "training", "benchmarks", "tests")),
        ("training", ("app", "kernels", "benchmarks", "tests")),
        ("benchmarks", ("app", "training", "tests")),
    ],
)
def test_closed_doors(room: str, closed: tuple[str, ...]) -> None:
    _refuse([i for i in IMPORTS if i.by(room) and i.of(*closed)])


def test_app_py_opens_the_app_only() -> None:
    _refuse(
        [i for i in IMPORTS if i.importer == "app.py" and i.of("kernels", "triton", "training")]
    )


def test_only_dispatch_opens_the_kernels() -> None:
    """`kernels.format` is free of triton and open to all."""
    _refuse([
        i
        for i in IMPORTS
        if i.by("quantwm", "app", "training")
        and i.of("kernels")
        and not i.by(DISPATCH)
        and not i.of("kernels.format")
        and i.imported != "kernels"
    ])  # fmt: skip


def test_the_format_constants_are_free_of_triton() -> None:
    _refuse([i for i in IMPORTS if i.by("kernels.format") and i.of("triton")])


def test_kernels_import_nothing_but_torch_triton_and_the_standard_library() -> None:
    allowed = ("torch", "triton", "kernels", *sys.stdlib_module_names)
    _refuse([i for i in IMPORTS if i.by("kernels") and not i.of(*allowed)])


def test_optional_libraries_are_imported_inside_functions() -> None:
    _refuse([i for i in IMPORTS if i.by("quantwm") and i.of(*OPTIONAL) and i.at_import])


def test_world_adapters_do_not_import_each_other() -> None:
    worlds = ROOT / "quantwm" / "worlds"
    names = [p.name for p in worlds.iterdir() if p.is_dir() and (p / "__init__.py").is_file()]
    broken = []
    for own in names:
        others = [f"quantwm.worlds.{name}" for name in names if name != own]
        broken += [i for i in IMPORTS if i.by(f"quantwm.worlds.{own}") and i.of(*others)]
    _refuse(broken)


def test_environment_variables_are_read_at_the_two_doors_only() -> None:
    """dispatch (which kernels) and app.py (how to serve); the page may ask Gradio's own.

    quantwm itself may set, not ask, how long OpenMP's threads spin: torch reads it when imported.
    """
    readers = []
    for path in _sources():
        module = _module(path)
        if module.startswith(("tests", "benchmarks", "training")) or path == ROOT / "app.py":
            continue
        for line in path.read_text(encoding="utf-8").splitlines():
            gradio = module.startswith("app.") and "GRADIO_" in line
            spin = module == "quantwm" and line.startswith('os.environ.setdefault("GOMP_SPINCOUNT"')
            if ("os.environ" in line or "os.getenv" in line) and not (gradio or spin):
                readers.append(module)
    assert set(readers) == {DISPATCH}


def _run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_library_imports_without_optional_packages_and_leaves_cuda_alone() -> None:
    _run(f"""
import importlib.abc, pkgutil, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {OPTIONAL!r}:
            raise ModuleNotFoundError("absent: " + name, name=name)

sys.meta_path.insert(0, Absent())
import torch
import quantwm
for found in pkgutil.walk_packages(quantwm.__path__, "quantwm."):
    if not found.name.endswith("__main__"):
        __import__(found.name)
from quantwm.cache import KVCache, explain, make_format
assert explain("cpu").startswith("PyTorch reference")
assert not torch.cuda.is_initialized()
assert not any(name.split(".")[0] in {OPTIONAL!r} for name in sys.modules)
""")


def test_a_cuda_device_without_triton_says_so() -> None:
    out = _run("""
import logging, sys
sys.modules["triton"] = None
logging.basicConfig(stream=sys.stdout, format="logged: %(message)s")
from quantwm.cache import explain
print(explain("cuda")); print(explain("cuda"))
""")
    assert out.count("logged: ") == 1
    assert out.count("PyTorch reference on CUDA, slow: the Triton kernels do not load") == 3

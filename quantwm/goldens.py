"""Golden tensors: what a family must reproduce, compared tensor by tensor within its tolerance."""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file

from quantwm.errors import UserError

Runner = Callable[["GoldenSet", "Comparison"], None]

# family -> "module:function"; a name ending in "*" stands for all families that begin so.
_WAN = "quantwm.worlds.wan.golden"
ADAPTERS = {
    "causal_forcing": f"{_WAN}_causal_forcing:causal_forcing",
    "causal_forcing_long": f"{_WAN}_causal_forcing:causal_forcing_long",
    "lingbot_world_v2": f"{_WAN}_conditioned:lingbot",
    "matrix_game2_*": f"{_WAN}_conditioned:matrix_game2",
    "hy_worldplay_wan5b": f"{_WAN}_memory:hy_worldplay",
    "umt5": f"{_WAN}_parts:umt5",
    "wan21_vae": f"{_WAN}_parts:vae",
    "wan22_vae": f"{_WAN}_parts:vae",
    "actions_matrix_game2": f"{_WAN}_parts:matrix_game2_actions",
    "actions_hy_worldplay": f"{_WAN}_parts:hy_worldplay_actions",
    "actions_lingbot_world": f"{_WAN}_parts:lingbot_world_actions",
}
MAX_UNPACKED_BYTES = 64 * 2**20
"""Of a compressed golden file, and of what its decompressor may hold; the largest has 1.5 MB."""

DEFAULT_TOLERANCE = {"max_abs": 1e-4, "relative_rms": 2e-5}  # FP32, where a sidecar names none


@dataclass(frozen=True)
class GoldenSet:
    """One sidecar and the tensors that it describes. `name` is the sidecar's file name."""

    name: str
    folder: Path
    info: Mapping[str, Any]

    @property
    def family(self) -> str:
        return str(self.info.get("family", self.name))

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        return self._load(f"{self.name}.safetensors")

    @cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        return self._load(self.info["config"].get("weights", f"{self.name}.weights.safetensors"))

    def _load(self, file: str) -> dict[str, torch.Tensor]:
        return load_tensors(self.folder / file)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.tensors:
            raise UserError(f"{self.name}.safetensors lacks the tensor {name}")
        return self.tensors[name]


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of NAME.safetensors, or of NAME.safetensors.xz where only that is there.

    Raises:
        UserError: the file is missing, broken, or unpacks to more than MAX_UNPACKED_BYTES.
    """
    packed = path.with_name(path.name + ".xz")
    if not path.is_file() and not packed.is_file():
        raise UserError(f"no golden file {path.name} (or {packed.name}) in {path.parent}")
    try:
        return load_file(path) if path.is_file() else load(_unpack(packed))
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path.name} is not a whole safetensors file ({error})") from None


def _unpack(packed: Path) -> bytes:
    """The bytes of an xz file; memory stays within a few times MAX_UNPACKED_BYTES."""
    if packed.stat().st_size > MAX_UNPACKED_BYTES:
        raise UserError(f"{packed.name} is too large; unpack it with xz --decompress")
    unpacker = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MAX_UNPACKED_BYTES)
    try:
        data = unpacker.decompress(packed.read_bytes(), max_length=MAX_UNPACKED_BYTES + 1)
    except lzma.LZMAError as error:
        raise UserError(f"{packed.name} is not a readable xz file ({error})") from None
    if len(data) > MAX_UNPACKED_BYTES:
        limit = MAX_UNPACKED_BYTES // 2**20
        raise UserError(
            f"{packed.name} holds more than {limit} MiB; unpack it with xz --decompress"
        )
    if not unpacker.eof:
        raise UserError(f"{packed.name} is cut off; fetch it again")
    return data


@dataclass
class _Group:
    tolerance: Mapping[str, float]
    max_abs: float = 0.0
    squared: float = 0.0
    reference: float = 0.0

    @property
    def relative_rms(self) -> float:
        return (self.squared / self.reference) ** 0.5 if self.reference else self.squared**0.5

    @property
    def ok(self) -> bool:
        # "not above" also fails a NaN, which no comparison would find above a tolerance
        return (
            self.max_abs <= self.tolerance["max_abs"]
            and self.relative_rms <= self.tolerance["relative_rms"]
        )


@dataclass
class Comparison:
    """Produced tensors held against the golden ones; every stored output must be produced."""

    golden: GoldenSet
    max_abs: dict[str, float] = field(default_factory=dict)
    groups: dict[str, _Group] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def wants(self, name: str) -> bool:
        return name in self.golden.tensors

    def check(self, name: str, produced: torch.Tensor | float) -> None:
        """Compare one tensor with the stored one of that name; nothing when none is stored.

        A leading batch axis of 1 may be missing on either side.
        """
        if name not in self.golden.tensors:
            return
        stored = self.golden.tensors[name]
        produced = torch.as_tensor(produced).detach().cpu()
        if stored.numel() != produced.numel() or _core(stored) != _core(produced):
            shapes = f"{list(produced.shape)}, stored {list(stored.shape)}"
            self._problem(name, f"{name} has shape {shapes}")
            return
        produced = produced.reshape(stored.shape).double()
        stored = stored.double()
        difference = (produced - stored).abs()
        worst = float(difference.max()) if difference.numel() else 0.0
        if worst != worst:
            self._problem(name, f"{name} holds NaN")
            return
        self.max_abs[name] = max(self.max_abs.get(name, 0.0), worst)
        group = self._group(name)
        group.max_abs = max(group.max_abs, worst)
        group.squared += float(difference.square().sum())
        group.reference += float(stored.square().sum())

    def require_equal(self, name: str, derived: torch.Tensor) -> None:
        """An input that the adapter can derive by itself must come out as stored."""
        stored = self.golden[name].double()
        if stored.shape != derived.shape or not torch.allclose(
            stored, derived.double(), rtol=0, atol=DEFAULT_TOLERANCE["max_abs"]
        ):
            self.problems.append(f"{name} comes out different from what is stored")

    def _problem(self, name: str, text: str) -> None:
        self.max_abs[name] = float("inf")
        self.problems.append(text)

    def _group(self, name: str) -> _Group:
        key = ".".join(name.split(".")[:2])
        if key not in self.groups:
            tolerances = self.golden.info.get("suggested_tolerance", {})
            self.groups[key] = _Group(tolerances.get(key, DEFAULT_TOLERANCE))
        return self.groups[key]

    def missing(self) -> list[str]:
        """Stored outputs that were not produced; inputs have a part named `in`."""
        return [
            name
            for name in self.golden.tensors
            if name not in self.max_abs and "in" not in name.split(".")
        ]

    def result(self) -> FamilyResult:
        absent = self.missing()
        problems = list(self.problems)
        if absent and not problems:
            problems.append(f"{len(absent)} outputs not produced, first {absent[0]}")
        bad = [f"{key} above its tolerance" for key, group in self.groups.items() if not group.ok]
        worst = max(self.max_abs, key=lambda name: self._share(name), default="")
        return FamilyResult(
            family=self.golden.name,
            ok=not problems and not bad and bool(self.max_abs),
            max_abs=max((group.max_abs for group in self.groups.values()), default=0.0),
            max_rel=max((group.relative_rms for group in self.groups.values()), default=0.0),
            worst="; ".join((problems + bad)[:3]) or worst,
            tensors=dict(self.max_abs),
        )

    def _share(self, name: str) -> float:
        """A tensor's difference as a share of what its group is allowed."""
        return self.max_abs[name] / self._group(name).tolerance["max_abs"]


def _core(tensor: torch.Tensor) -> list[int]:
    shape = list(tensor.shape)
    while shape and shape[0] == 1:
        shape = shape[1:]
    return shape


@dataclass(frozen=True)
class FamilyResult:
    """One family's outcome. max_rel: largest relative RMS of a group of tensors; worst: what is
    wrong, or the tensor nearest its tolerance; tensors: largest difference by tensor."""

    family: str
    ok: bool
    max_abs: float
    max_rel: float
    worst: str
    tensors: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        finite = self.max_abs < float("inf")
        return {
            "family": self.family,
            "ok": self.ok,
            "max_abs": self.max_abs if finite else None,
            "max_rel": self.max_rel,
            "worst": self.worst,
        }

    def by_chunk(self) -> dict[str, float]:
        """Largest difference by rollout, run, chunk and kind: "window.fp32.c2 flow"."""
        out: dict[str, float] = {}
        for name, worst in self.tensors.items():
            parts = [part for part in name.split(".") if not re.fullmatch(r"s\d+", part)]
            key = f"{'.'.join(parts[:-1])} {parts[-1]}"
            out[key] = max(out.get(key, 0.0), worst)
        return out


def find_sets(folder: Path, families: Sequence[str] | None = None) -> list[GoldenSet]:
    """The golden sets of a folder, by sidecar; UserError on an unreadable or absent one."""
    if not folder.is_dir():
        raise UserError(f"no folder {folder}; give the folder that holds the golden files")
    sets = []
    for path in sorted(folder.glob("*.json")):
        try:
            info = json.loads(path.read_text())
        except (ValueError, OSError, RecursionError):
            raise UserError(f"{path.name} is not a JSON sidecar") from None
        if isinstance(info, dict) and "config" in info:
            sets.append(GoldenSet(path.stem, folder, info))
    if not sets:
        raise UserError(f"no golden files (NAME.json beside NAME.safetensors) in {folder}")
    if families is None or list(families) == ["all"]:
        return sets
    if not families:
        raise UserError("name at least one family, or all")
    known = {name for one in sets for name in (one.name, one.family)}
    unknown = [name for name in families if name not in known]
    if unknown:
        raise UserError(
            f"no golden files of {unknown[0]} in {folder}; there are: {', '.join(sorted(known))}"
        )
    return [one for one in sets if one.name in families or one.family in families]


def adapter_for(family: str) -> Runner | None:
    """The function that runs a family, imported when asked for; None without an adapter."""
    for pattern, target in ADAPTERS.items():
        if family == pattern or (pattern.endswith("*") and family.startswith(pattern[:-1])):
            module, function = target.split(":")
            return getattr(import_module(module), function)
    return None


def check_set(golden: GoldenSet) -> FamilyResult:
    """Run one golden set through its adapter."""
    runner = adapter_for(golden.family)
    if runner is None:
        return FamilyResult(golden.name, False, 0.0, 0.0, "no adapter")
    comparison = Comparison(golden)
    try:
        with torch.inference_mode():
            runner(golden, comparison)
    except UserError as error:
        comparison.problems.append(str(error))
    except KeyError as error:
        comparison.problems.append(f"the sidecar or its tensors lack {error}")
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        # Sizes that contradict each other; the other families still run.
        reason = str(error).splitlines()[0] if str(error) else "no reason given"
        comparison.problems.append(f"it does not run: {type(error).__name__}, {reason[:160]}")
    return comparison.result()


def check_folder(
    folder: Path | str,
    families: Sequence[str] | None = None,
    report: Callable[[FamilyResult], None] | None = None,
) -> dict[str, object]:
    """design.md's check-golden document; `report` sees each result as it comes."""
    results = []
    for golden in find_sets(Path(folder), families):
        result = check_set(golden)
        results.append(result)
        if report is not None:
            report(result)
    return {
        "ok": all(result.ok for result in results),
        "families": [result.to_json() for result in results],
    }

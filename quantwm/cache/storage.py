"""A cache on disk: saved whole, loaded only into a cache of the same settings, bit for bit.

One safetensors file. Its metadata names the geometry, the format with its settings and the policy,
and says how spans, codebooks and statistics are made of the tensors. A file may come from anybody:
its structure is checked on tensors without data, then the data is read, then values are checked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from quantwm.cache.chunk import Codebooks
from quantwm.cache.codebook_life import BookFit
from quantwm.cache.formats.base import Format, Learns
from quantwm.cache.formats.qtc_statistics import SlotStatistics
from quantwm.cache.remedy import is_out_of_memory
from quantwm.cache.segments import Segment, SpanPlan
from quantwm.cache.span_checks import Wanted
from quantwm.cache.spec import CachePolicy, CacheSpec
from quantwm.cache.state_checks import state_tensors
from quantwm.cache.state_tree import SAVED, TreeReader, TreeWriter
from quantwm.cache.tensor_store import parse_json, printable, read_header, read_tensors, write
from quantwm.cache.workspace import Workspace
from quantwm.errors import UserError

FORMAT, VERSION, LEARNED = "quantwm-cache", "1", "2"
"""LEARNED: of formats that learn, whose statistics had 32 bits an entry in version 1."""


@dataclass(frozen=True)
class SavedState:
    """What a KVCache is, between two chunks.

    Attributes:
        segments, books, span, fit, origin, next_frame: the cache's own.
        generator: uint8, the state of k-means' generator.
        statistics: of queries, by name.
        learner: of a format that learns, one a slot.
        companions: by stream.
    """

    segments: tuple[Segment, ...]
    books: Codebooks
    span: SpanPlan
    fit: BookFit
    origin: int | None
    next_frame: int | None
    generator: Tensor
    statistics: Mapping[str, Any]
    learner: tuple[SlotStatistics, ...] | None
    companions: Mapping[str, Any]


SAVED[SavedState.__name__] = SavedState


class Savable:
    """`save` and `load` of a KVCache."""

    def save(self, path: Path | str) -> None:
        """Write the cache to a safetensors file, one tensor at a time; it appears whole or not.

        Raises RuntimeError while a chunk is open, UserError when the file cannot be written.
        """
        cache: Any = self
        cache._require_idle("save")
        tree = TreeWriter(cache.fmt)
        state = tree.node(_state_of(cache))
        tensors = {f"t{i}": tensor for i, tensor in enumerate(tree.tensors())}
        metadata = {
            "format": FORMAT,
            "version": _version(cache.fmt),
            "cache": json.dumps(_settings(cache)),
            "state": json.dumps(state, separators=(",", ":"), allow_nan=False),
        }
        write(Path(path), tensors, metadata)

    @classmethod
    def load(
        cls,
        path: Path | str,
        spec: CacheSpec,
        fmt: Format[Any],
        policy: CachePolicy,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        workspace: Workspace | None = None,
    ) -> Self:
        """The cache that `save` wrote, which goes on as the saved one would have.

        Raises UserError when the file is broken, of another version, or of a cache with another
        geometry, format, setting or policy, and when memory does not suffice for it.
        """
        path = Path(path)
        if not path.is_file():
            raise UserError(f"no such file: {path}")
        with open(path, "rb") as file:
            entries, metadata = read_header(file, path.name)
            seed = _seed(path.name, metadata)
            shared = {"device": device, "dtype": dtype, "workspace": workspace, "seed": seed}
            cache = cls(spec, fmt, policy, **shared)
            _require_same(path.name, metadata, cache)
            node = parse_json(metadata.get("state", ""), path.name)
            try:
                reader = TreeReader([entry.empty() for entry in entries], fmt)
                for wanted in _checked(reader, node, cache):
                    wanted.check_kind()
                tensors = read_tensors(file, path.name, entries, cache.device)
                state_reader = TreeReader(tensors, fmt)
                state = state_reader.value(node)
                for wanted in state_tensors(state, cache):
                    wanted.check_values()
                _restore(cache, state)
            except (ValueError, RecursionError) as broken:
                reason = printable(broken, 160)
                raise UserError(f"{path.name} is not a whole cache: {reason}") from broken
            except (RuntimeError, MemoryError) as failed:
                if not is_out_of_memory(failed):
                    raise
                size = sum(entry.nbytes for entry in entries)
                raise UserError(
                    f"{path.name} holds {size:,} bytes of tensors and {device} has no room for "
                    "them; free memory there or load it on another device"
                ) from failed
        return cache


def _state_of(cache: Any) -> SavedState:
    learner = cache._learner
    return SavedState(
        segments=tuple(cache._segments),
        books=cache._books,
        span=cache._span,
        fit=cache._fit,
        origin=cache._origin,
        next_frame=cache._next_frame,
        generator=cache._generator.get_state(),
        statistics=_public(cache._statistics),
        learner=None if learner is None else tuple(learner.statistics),
        companions={name: _state_of(other) for name, other in cache._companions.items()},
    )


def _public(statistics: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(statistics).items() if not name.startswith("_")}


def _restore(cache: Any, state: SavedState) -> None:
    """Put a checked state in place. ValueError when the generator does not take its own."""
    cache._segments, cache._books, cache._span = list(state.segments), state.books, state.span
    cache._fit = state.fit
    cache._origin, cache._next_frame = state.origin, state.next_frame
    try:
        cache._generator.set_state(state.generator.cpu())
    except RuntimeError as refused:
        raise ValueError("a generator's state that is none") from refused
    for name, value in state.statistics.items():
        setattr(cache._statistics, name, value)
    if state.learner is not None:
        cache._learner = cache._learner.restored(state.learner)
    for name, companion in state.companions.items():
        _restore(cache._companions[name], companion)


def _checked(reader: TreeReader, node: Any, cache: Any) -> list[Wanted]:
    """What every tensor of a state must be. ValueError when one of the file's is not in it."""
    state = reader.value(node)
    if not isinstance(state, SavedState):
        raise ValueError("it holds no state of a cache")
    wanted = state_tensors(state, cache)
    covered = {id(one.tensor) for one in wanted}
    if reader.used != set(range(len(reader.tensors))) or not reader.made <= covered:
        raise ValueError("it holds tensors that belong to nothing")
    return wanted


def _settings(cache: Any) -> dict[str, Any]:
    """What a loaded cache must have in common with the saved one."""
    config = cache.fmt.config
    return json.loads(
        json.dumps(
            {
                "geometry": asdict(cache.spec),
                "format": cache.fmt.name,
                "settings": asdict(config),
                "policy": asdict(cache.policy),
                "dtype": str(cache.dtype).removeprefix("torch."),
                "seed": cache.seed,
            }
        )
    )


def _seed(name: str, metadata: Mapping[str, str]) -> int:
    """Of k-means, from the metadata, once the file is known to be of this kind and version."""
    if metadata.get("format") != FORMAT:
        raise UserError(f"{name} is no saved cache: its metadata does not say {FORMAT}")
    if metadata.get("version") not in (VERSION, LEARNED):
        found = printable(metadata.get("version", "none"), 20)
        raise UserError(
            f"{name} is of version {found}; this program reads version {VERSION} and {LEARNED}"
        )
    settings = parse_json(metadata.get("cache", ""), name)
    seed = settings.get("seed") if isinstance(settings, dict) else None
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise UserError(f"{name}: the seed is a whole number from 0")
    return seed


def _version(fmt: Format[Any]) -> str:
    return LEARNED if isinstance(fmt, Learns) else VERSION


def _require_same(name: str, metadata: Mapping[str, str], cache: Any) -> None:
    saved, ours = parse_json(metadata["cache"], name), _settings(cache)
    if set(saved) != set(ours):
        raise UserError(f"{name}: the settings of a cache are {', '.join(ours)}")
    for part, wanted in ours.items():
        found = saved[part]
        if found == wanted:
            continue
        if isinstance(found, dict) and isinstance(wanted, dict) and set(found) == set(wanted):
            field = next(key for key in wanted if found[key] != wanted[key])
            found, wanted, part = found[field], wanted[field], f"{part}: {field}"
        raise UserError(
            f"{name} was saved with {part} {printable(found)}, this cache has {printable(wanted)}"
        )
    if metadata["version"] != _version(cache.fmt):
        raise UserError(
            f"{name} is of version {metadata['version']}; this program reads version "
            f"{_version(cache.fmt)} of a cache of {cache.fmt.name}"
        )

"""Nested dataclasses, tuples, mappings and tensors as JSON beside a list of tensors, and back.

Generic over the dataclasses of packed spans: a new format names its classes in `SAVED` and nothing
else here knows them. Reading builds only those classes, with exactly their fields, each of the type
that the class declares.
"""

from __future__ import annotations

import collections.abc
import types
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from quantwm.cache.chunk import BF16, Codebooks
from quantwm.cache.codebook_life import BookFit
from quantwm.cache.formats import (
    kivi,
    qtc_basis,
    qtc_correlations,
    qtc_lesson,
    qtc_span,
    qtc_statistics,
    rtn,
)
from quantwm.cache.formats.base import Codebook, Format
from quantwm.cache.formats.bf16 import Bf16Span
from quantwm.cache.formats.correction import Correction
from quantwm.cache.formats.quantwm import QuantWMSpan
from quantwm.cache.formats.qvg import QvgSpan
from quantwm.cache.formats.qvg_pro import QvgProSpan
from quantwm.cache.positions import TokenPositions
from quantwm.cache.segments import ChunkGuide, Segment, SpanPlan
from quantwm.cache.spec import RopeLayout
from quantwm.cache.tensor_store import is_counts
from quantwm.cache.unrotation import KeyTurns
from quantwm.errors import UserError

SAVED: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        Segment, SpanPlan, ChunkGuide, Codebooks, Codebook, BookFit, TokenPositions, RopeLayout,
        KeyTurns,
        Bf16Span, rtn.TokenGroups, kivi.ChannelGroups, QvgSpan, QvgProSpan, QuantWMSpan, Correction,
        qtc_span.QtcSpan, qtc_basis.Basis, qtc_lesson.Lesson, qtc_lesson.LearnedGuide,
        qtc_statistics.SlotStatistics, qtc_statistics.Moments, qtc_statistics.QueryMoment,
        qtc_correlations.Correlations,
    )
}  # fmt: skip
"""Classes that a saved cache may hold."""


MAX_NUMBER = 2**53
"""Numbers stay below it, so that those that come from a file can be added and divided."""


class TreeWriter:
    """Turns values into JSON nodes and collects their tensors, each storage once."""

    def __init__(self, fmt: Format[Any]) -> None:
        self._fmt = fmt
        self._found: dict[tuple[Any, ...], tuple[Tensor, dict[str, Any]]] = {}

    def node(self, value: Any) -> Any:
        """The JSON of a value; complete once `tensors` was called."""
        if isinstance(value, Tensor):
            return self._tensor_node(value)
        if isinstance(value, tuple | list):
            return [self.node(item) for item in value]
        if isinstance(value, collections.abc.Mapping):
            return {"map": [[self.node(k), self.node(v)] for k, v in value.items()]}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if is_dataclass(value) and SAVED.get(type(value).__name__) is type(value):
            named = {field.name: self.node(getattr(value, field.name)) for field in fields(value)}
            return {"is": type(value).__name__, "fields": named}
        if value is BF16 or value is self._fmt:
            return {"format": "bf16" if value is BF16 else "own"}
        raise TypeError(f"a saved cache holds no {type(value).__name__}")

    def _tensor_node(self, tensor: Tensor) -> dict[str, Any]:
        where = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.dtype)
        key = (*where, tuple(tensor.shape), tensor.stride())
        if not tensor.numel():
            key = (id(tensor),)
        if key not in self._found:
            self._found[key] = tensor, {}
        return self._found[key][1]

    def tensors(self) -> list[Tensor]:
        """The tensors to write, contiguous; nodes that name them are filled in.

        A tensor that covers its storage is written, and views of it name their place in it, so
        that what was one storage is one again. (A basis of all layers, and each layer's in it.)
        """
        owners = {
            _storage(tensor): tensor for tensor, _ in self._found.values() if _is_whole(tensor)
        }
        written: list[Tensor] = []
        places: dict[int, int] = {}
        for tensor, node in self._found.values():
            owner = owners.get(_storage(tensor), tensor)
            if not _is_view_of(tensor, owner):
                owner = tensor
            if id(owner) not in places:
                places[id(owner)] = len(written)
                written.append(owner.contiguous())
            if owner is tensor:
                node["tensor"] = places[id(owner)]
            else:
                node["view"] = [places[id(owner)], tensor.storage_offset(), list(tensor.shape)]
        return written


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_whole(tensor: Tensor) -> bool:
    nbytes = tensor.numel() * tensor.element_size()
    return tensor.is_contiguous() and 0 < nbytes == tensor.untyped_storage().nbytes()


def _is_view_of(tensor: Tensor, owner: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.dtype == owner.dtype and tensor.numel() > 0


class TreeReader:
    """Builds values from nodes. Raises ValueError, in a few words, on what is not a node."""

    def __init__(self, tensors: list[Tensor], fmt: Format[Any]) -> None:
        self.tensors = tensors
        self._formats = {"bf16": BF16, "own": fmt}
        self._views: dict[tuple[Any, ...], Tensor] = {}
        self.used: set[int] = set()
        self.made: set[int] = set()
        """Of every tensor that the values hold, its id."""

    def value(self, node: Any) -> Any:
        if isinstance(node, int | float) and not abs(node) < MAX_NUMBER:
            raise ValueError("a number that no cache counts to")
        if node is None or isinstance(node, bool | int | float | str):
            return node
        if isinstance(node, list):
            return tuple(self.value(item) for item in node)
        kind = next(iter(node), "")
        if kind in ("tensor", "view") and len(node) == 1:
            tensor = self._tensor(node[kind]) if kind == "tensor" else self._view(node[kind])
            self.made.add(id(tensor))
            return tensor
        if kind == "map" and len(node) == 1:
            return self._mapping(node["map"])
        if kind == "format" and len(node) == 1 and node["format"] in ("bf16", "own"):
            return self._formats[node["format"]]
        if list(node) == ["is", "fields"]:
            return self._built(node["is"], node["fields"])
        raise ValueError(f"an unknown entry {kind[:40]!r}")

    def _tensor(self, index: object) -> Tensor:
        if type(index) is not int or not 0 <= index < len(self.tensors):
            raise ValueError("a tensor that is not there")
        self.used.add(index)
        return self.tensors[index]

    def _view(self, node: object) -> Tensor:
        if not isinstance(node, list) or len(node) != 3 or not is_counts(node[2]):
            raise ValueError("a view that is not [tensor, offset, shape]")
        owner, offset, shape = self._tensor(node[0]), node[1], tuple(node[2])
        count = 1
        for size in shape:
            count = min(count * size, 2**62)
        if type(offset) is not int or offset < 0 or offset + count > owner.numel():
            raise ValueError("a view outside its tensor")
        key = (node[0], offset, shape)
        if key not in self._views:
            self._views[key] = owner.view(-1)[offset : offset + count].view(shape)
        return self._views[key]

    def _mapping(self, node: object) -> dict[Any, Any]:
        if not isinstance(node, list) or any(not isinstance(p, list) or len(p) != 2 for p in node):
            raise ValueError("a mapping that is not pairs")
        keys = [self.value(key) for key, _ in node]
        if any(not isinstance(key, int | str) for key in keys) or len(set(keys)) != len(keys):
            raise ValueError("keys of a mapping are distinct numbers or names")
        return {key: self.value(value) for key, (_, value) in zip(keys, node, strict=True)}

    def _built(self, name: object, node: object) -> Any:
        if not isinstance(name, str) or name not in SAVED:
            raise ValueError(f"an unknown class {str(name)[:40]!r}")
        wanted = _hints(SAVED[name])
        if not isinstance(node, dict) or set(node) != set(wanted):
            raise ValueError(f"{name} with other fields than {', '.join(wanted)}")
        values = {field: self.value(inner) for field, inner in node.items()}
        for field, hint in wanted.items():
            if not conforms(values[field], hint):
                raise ValueError(f"{name}.{field} of another type")
        try:
            return SAVED[name](**values)
        except UserError as refused:
            raise ValueError(str(refused)) from refused


@cache
def _hints(kind: type) -> dict[str, Any]:
    """Types of a dataclass's fields."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def conforms(value: Any, hint: Any) -> bool:
    """Whether a value is of a type as annotations write it."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if hint is None or hint is types.NoneType:
        return value is None
    if origin in (Union, types.UnionType):
        return any(conforms(value, option) for option in inner)
    if origin is Literal:
        return value in inner
    if origin is tuple:
        if len(inner) == 2 and inner[1] is Ellipsis:
            return isinstance(value, tuple) and all(conforms(item, inner[0]) for item in value)
        alike = isinstance(value, tuple) and len(value) == len(inner)
        return alike and all(conforms(v, h) for v, h in zip(value, inner, strict=True))
    if origin is collections.abc.Mapping:
        pairs = value.items() if isinstance(value, dict) else [(None, None)]
        return all(conforms(k, inner[0]) and conforms(v, inner[1]) for k, v in pairs)
    if origin is Format:
        return hasattr(value, "decode_into")
    if hint is float:
        return type(value) in (int, float)
    if hint in (int, bool, str):
        return type(value) is hint
    return isinstance(value, torch.Tensor if hint is Tensor else hint)

"""Files that no cache wrote: each is refused in one line, at once, and without large allocation."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quantwm.cache import CachePolicy, KVCache
from quantwm.cache import tensor_store as store
from quantwm.cache.spec import RopeLayout
from quantwm.errors import UserError
from tests.cache_helpers import SPEC, MadeBytes, make_cache, run_chunk

POLICY = CachePolicy(span_tokens=12, sink_frames=1, recent_chunks=1)
WITH_ROPE = replace(SPEC, rope=RopeLayout((8, 4, 4), (1, 3)))


class File:
    """A saved cache taken apart: its header, its state, its data; `write` puts them together."""

    def __init__(self, raw: bytes) -> None:
        length = int.from_bytes(raw[:8], "little")
        self.raw = raw
        self.header: dict[str, Any] = json.loads(raw[8 : 8 + length])
        self.meta: dict[str, Any] = self.header["__metadata__"]
        self.state: Any = json.loads(self.meta["state"])
        self.data = bytearray(raw[8 + length :])

    def bytes(self) -> bytes:
        self.meta["state"] = json.dumps(self.state)
        text = json.dumps(self.header).encode()
        return len(text).to_bytes(8, "little") + text + bytes(self.data)

    @property
    def fields(self) -> dict[str, Any]:
        return self.state["fields"]

    def segment(self, kind: str) -> dict[str, Any]:
        """The last one of a kind: of qtc's, one in a basis."""
        found = [s["fields"] for s in self.fields["segments"] if s["fields"]["kind"] == kind]
        return found[-1]

    def span(self, kind: str = "packed", role: str = "keys") -> dict[str, Any]:
        return self.segment(kind)[role][0]["fields"]

    def entry(self, node: dict[str, Any]) -> dict[str, Any]:
        return self.header[f"t{node['tensor']}"]

    def fill(self, node: dict[str, Any], value: float, kind: Any) -> None:
        """Put a number into every element of a tensor."""
        start, stop = self.entry(node)["data_offsets"]
        numbers = np.frombuffer(self.data, dtype=kind, count=(stop - start) // kind().itemsize,
                                offset=start)  # fmt: skip
        numbers[:] = value


def _saved(folder: Path, name: str) -> tuple[KVCache, bytes]:
    spec = WITH_ROPE if name == "qtc" else SPEC
    cache = make_cache(name, POLICY, spec=spec)
    for _ in range(5):
        run_chunk(cache)
    cache.save(folder / f"{name}.safetensors")
    return cache, (folder / f"{name}.safetensors").read_bytes()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[KVCache, bytes]]:
    folder = tmp_path_factory.mktemp("caches")
    names = ("bf16", "rtn", "kivi", "qvg", "qvg-pro", "quantwm", "qtc")
    return {name: _saved(folder, name) for name in names}


def _refusal(path: Path, raw: bytes, cache: KVCache) -> str:
    """What the loader says, which it must in a second and without much memory."""
    path.write_bytes(raw)
    with pytest.raises(UserError) as caught, MadeBytes() as made:
        torch.zeros(1)  # the first in such a mode imports for seconds
        tracemalloc.start()
        began = time.process_time()
        KVCache.load(path, cache.spec, cache.fmt, cache.policy, dtype=cache.dtype)
    seconds, peak = time.process_time() - began, tracemalloc.get_traced_memory()[1] + made.total
    tracemalloc.stop()
    said = str(caught.value)
    assert "\n" not in said and path.name in said and len(said) < 300, said
    assert seconds < 1.0 and peak < 16 * len(raw) + 2**22
    return said


def _set(name: str, value: Any) -> Callable[[File], None]:
    return lambda file: file.fields.update({name: value})


def _in_segment(of_kind: str, **change: Any) -> Callable[[File], None]:
    return lambda file: file.segment(of_kind).update(change)


def _huge_shape(file: File) -> None:
    file.entry(file.span()["ids"])["shape"] = [2**40, 2**40]


def _overlap(file: File) -> None:
    entry = file.entry(file.span()["codes"])
    entry["data_offsets"] = [n - 1 for n in entry["data_offsets"]]


def _other_dtype(file: File) -> None:
    file.entry(file.span()["scales"])["dtype"] = "I8"


def _other_shape(file: File) -> None:
    entry = file.entry(file.span()["codes"])
    entry["shape"].reverse()


def _longer(file: File) -> None:
    file.data += bytes(64)


def _spare_tensor(file: File) -> None:
    stop = len(file.data)
    file.header["extra"] = {"dtype": "U8", "shape": [64], "data_offsets": [stop, stop + 64]}
    file.data += bytes(64)


def _no_tensor(file: File) -> None:
    file.span()["codes"] = {"tensor": 10**6}


def _view_outside(file: File) -> None:
    file.span()["codes"] = {"view": [0, 10**9, [2, 12, 4]]}


def _view_negative(file: File) -> None:
    file.span()["codes"] = {"view": [0, 0, [-1, 12, 4]]}


def _missing_field(file: File) -> None:
    del file.span()["codes"]


def _class_of_another_kind(file: File) -> None:
    file.segment("packed")["keys"][0]["is"] = "Popen"


def _keys_of_another_format(file: File) -> None:
    file.segment("packed")["keys"][0] = file.segment("sink")["keys"][0]


def _one_slot_less(file: File) -> None:
    file.segment("packed")["keys"].pop()


def _segments_in_another_order(file: File) -> None:
    file.fields["segments"].reverse()


def _ids_outside(file: File) -> None:
    file.fill(file.span()["ids"], 250, np.uint8)


def _nan_secondary(file: File) -> None:
    file.fill(file.span()["secondary"], np.nan, np.float16)


def _negative_secondary(file: File) -> None:
    file.fill(file.span()["secondary"], -1.0, np.float16)


def _nan_centroids(file: File) -> None:
    file.fill(file.span()["codebook"]["fields"]["centroids"], 0x7FC0, np.uint16)


def _stops_outside(file: File) -> None:
    file.fill(file.span()["chunk_stops"], 2**30, np.int32)


def _correction_outside(file: File) -> None:
    file.span()["correction"]["fields"]["count"] = 1000


def _moments_of(file: File, number: float = np.inf) -> None:
    moments = next(v for k, v in file.fields["statistics"]["map"] if k == "moments")
    file.fill(moments, number, np.float32)


def _statistics_of_other_names(file: File) -> None:
    file.fields["statistics"]["map"][0][0] = "__class__"


def _generator_of_zeros(file: File) -> None:
    file.fill(file.fields["generator"], 255, np.uint8)


def _guide_without_segment(file: File) -> None:
    file.segment("packed")["guide"] = file.segment("recent")["guide"]


def _book_of_no_slot(file: File) -> None:
    file.fields["books"]["fields"]["pairs"]["map"][0][0] = 99


def _deep_state(file: File) -> None:
    file.meta["state"] = "[" * 10**5
    text = json.dumps(file.header).encode()
    file.raw = len(text).to_bytes(8, "little") + text + bytes(file.data)


BROKEN: dict[str, tuple[Callable[[File], None], str]] = {
    "a shape of 2**80 elements": (_huge_shape, "has other offsets"),
    "overlapping tensors": (_overlap, "does not begin where another ends"),
    "another dtype": (_other_dtype, "is torch.int8"),
    "another shape": (_other_shape, "and not torch.uint8"),
    "data behind the last tensor": (_longer, "bytes of data"),
    "a tensor of nothing": (_spare_tensor, "belong to nothing"),
    "a tensor that is not there": (_no_tensor, "a tensor that is not there"),
    "a view outside its tensor": (_view_outside, "a view outside its tensor"),
    "a view of negative size": (_view_negative, "a view that is not"),
    "a field less": (_missing_field, "with other fields than"),
    "a class of another kind": (_class_of_another_kind, "unknown class 'Popen'"),
    "a span of another format": (_keys_of_another_format, "in a Bf16Span"),
    "a slot less": (_one_slot_less, "1 spans of keys in 2 slots"),
    "segments in another order": (_segments_in_another_order, "not sink, packed, recent"),
    "an unknown kind of segment": (_in_segment("packed", kind="loose"), "Segment.kind"),
    "frames before the beginning": (_in_segment("sink", first_frame=-3), "out of order"),
    "frames that overlap": (_in_segment("packed", first_frame=0), "out of order"),
    "frames behind the end": (_in_segment("recent", first_frame=50), "that ends at"),
    "frames of 10**9 tokens": (_in_segment("packed", frame_tokens=[10**9] * 7), "1 to 3 tokens"),
    "frames of other tokens": (_in_segment("packed", frame_tokens=[1] * 7), "do not hold 7"),
    "text as a frame": (_in_segment("packed", first_frame="1"), "Segment.first_frame"),
    "true as a span": (_in_segment("packed", span=True), "Segment.span"),
    "a span that never was": (_in_segment("packed", span=10**6), "another format or span"),
    "a huge frame number": (_set("next_frame", 2**45), "frames from 0"),
    "no end": (_set("next_frame", None), "without a beginning or an end"),
    "ids outside the codebook": (_ids_outside, "ids holds numbers"),
    "scales that are NaN": (_nan_secondary, "secondary holds NaN"),
    "scales below 0": (_negative_secondary, "secondary holds numbers"),
    "centroids that are NaN": (_nan_centroids, "centroids holds NaN"),
    "stops outside the span": (_stops_outside, "chunk_stops holds numbers"),
    "chunks of other tokens": (
        lambda file: file.span().update(chunk_tokens=[10**9]),
        "do not hold",
    ),
    "a correction outside its span": (_correction_outside, "does not hold"),
    "an infinite moment": (_moments_of, "moments holds NaN or infinity"),
    "a moment that overflows": (lambda file: _moments_of(file, 1e30), "moments holds numbers"),
    "statistics of other names": (_statistics_of_other_names, "statistics other than"),
    "a generator's state that is none": (_generator_of_zeros, "generator's state"),
    "a guide of no recent chunk": (_guide_without_segment, "a guide that is not"),
    "a codebook of no slot": (_book_of_no_slot, "a codebook of slot 99"),
    "companions that are not": (_set("companions", {"map": [["x", 1]]}), "companion streams"),
    "a learner that is not": (_set("learner", []), "another learner"),
    "a state that is none": (lambda file: setattr(file, "state", 7), "no state of a cache"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused(case: str, saved: Any, tmp_path: Path) -> None:
    cache, raw = saved["quantwm"]
    file = File(raw)
    change, says = BROKEN[case]
    change(file)
    assert says in _refusal(tmp_path / "broken.safetensors", file.bytes(), cache)


RAW: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda raw: b"", "cut short"),
    "seven bytes": (lambda raw: raw[:7], "cut short"),
    "a header cut short": (lambda raw: raw[:500], "cut short"),
    "data cut short": (lambda raw: raw[:-1], "bytes of data"),
    "a header of 2**63 bytes": (lambda raw: b"\xff" * 8 + raw[8:], "cut short"),
    "a header of nothing": (lambda raw: bytes(8) + raw[8:], "not readable JSON"),
    "a header of noise": (lambda raw: raw[:8] + b"\x80" * 400 + raw[408:], "not readable JSON"),
    "a list as header": (lambda raw: b"\x02" + bytes(7) + b"[]", "not a JSON object"),
    "a key twice": (lambda raw: b"\x10" + bytes(7) + b'{"a": 1,"a": 2} ', "twice"),
    "NaN in the header": (lambda raw: b"\x0a" + bytes(7) + b'{"a": NaN}', "NaN is no number"),
    "text as a shape": (
        lambda raw: raw.replace(b'"shape":[', b'"shape":["', 1),
        "not readable JSON",
    ),
    "another program's file": (
        lambda raw: raw.replace(b"quantwm-cache", b"somebody-else"),
        "no saved cache",
    ),
    "another version": (
        lambda raw: raw.replace(b'"version":"1"', b'"version":"9"'),
        "of version 9; this program reads version 1",
    ),
    "another seed's kind": (lambda raw: raw.replace(b'\\"seed\\": 0', b'\\"seed\\":-1'), "seed"),
}


@pytest.mark.parametrize("case", RAW)
def test_broken_bytes_are_refused(case: str, saved: Any, tmp_path: Path) -> None:
    cache, raw = saved["quantwm"]
    change, says = RAW[case]
    assert says in _refusal(tmp_path / "broken.safetensors", change(raw), cache)


def test_a_state_nested_beyond_the_parser_is_refused(saved: Any, tmp_path: Path) -> None:
    cache, raw = saved["quantwm"]
    file = File(raw)
    _deep_state(file)
    assert "not readable JSON" in _refusal(tmp_path / "broken.safetensors", file.raw, cache)


def test_a_header_too_large_is_refused_unread(saved: Any, tmp_path: Path) -> None:
    """A sparse file: its size is there, its bytes are not."""
    cache, _ = saved["quantwm"]
    path = tmp_path / "broken.safetensors"
    with open(path, "wb") as file:
        file.write((2**33).to_bytes(8, "little"))
        file.truncate(2**34)
    began = time.process_time()
    with pytest.raises(UserError, match=f"more than {store.MAX_HEADER_BYTES:,}"):
        KVCache.load(path, cache.spec, cache.fmt, cache.policy, dtype=cache.dtype)
    assert time.process_time() - began < 1.0


FORMAT_CASES: dict[str, tuple[str, Callable[[File], None], str]] = {
    "bf16 that is NaN": ("bf16", lambda f: f.fill(f.span()["values"], 0x7FC0, np.uint16), "NaN"),
    "rtn scales that are infinite": (
        "rtn", lambda f: f.fill(f.span()["scales"], np.inf, np.float16), "scales holds NaN",
    ),
    "kivi groups that do not ascend": (
        "kivi", lambda f: f.fill(f.span()["group_stops"], 3, np.int32), "group_stops holds",
    ),
    "kivi groups of no token": (
        "kivi", lambda f: f.span().update(group_tokens=[0, *f.span()["group_tokens"]]), "that do",
    ),
    "kivi values as keys": (
        "kivi", lambda f: f.segment("packed").update(keys=f.segment("packed")["values"]),
        "keys of kivi in a TokenGroups",
    ),
    "qvg scales that are NaN": (
        "qvg", lambda f: f.fill(f.span()["scales"], 0x7F, np.uint8), "scales holds NaN",
    ),
    "qvg-pro ids outside": (
        "qvg-pro", lambda f: f.fill(f.span()["ids"], 4, np.uint8), "ids holds numbers",
    ),
    "qtc widths that no code has": (
        "qtc", lambda f: f.span()["basis"]["fields"].update(host_widths=[[200]] * 2), "bits of",
    ),
    "qtc rows that are too long": (
        "qtc", lambda f: f.fill(f.span()["basis"]["fields"]["row_scales"], 127, np.uint8), "row_sc",
    ),
    "qtc widths on the device that differ": (
        "qtc", lambda f: f.fill(f.span()["basis"]["fields"]["widths"], 6, np.uint8), "widths holds",
    ),
    "qtc in another rotation": (
        "qtc", lambda f: f.span()["rope"]["fields"].update(theta=2.0), "turned in another way",
    ),
    "qtc rope that is none":
        ("qtc", lambda f: f.span()["rope"]["fields"].update(grid=[0, 3]), "grid"),
    "qtc positions of other tokens": (
        "qtc", lambda f: f.span()["positions"]["fields"].update(count=1), "positions that are not",
    ),
    "qtc statistics of other counts": (
        "qtc",
        lambda f: f.fields["learner"][0]["fields"]["keys"]["fields"].update(count=-1),
        "another count",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FORMAT_CASES)
def test_a_broken_span_of_each_format_is_refused(case: str, saved: Any, tmp_path: Path) -> None:
    name, change, says = FORMAT_CASES[case]
    cache, raw = saved[name]
    file = File(raw)
    change(file)
    assert says in _refusal(tmp_path / "broken.safetensors", file.bytes(), cache)


@pytest.mark.parametrize("name", ["quantwm", "qtc"])
def test_no_single_broken_byte_of_the_header_does_more_than_refuse(
    name: str, saved: Any, tmp_path: Path
) -> None:
    """Any byte of the header: the file is refused in one line or still loads."""
    cache, raw = saved[name]
    length = int.from_bytes(raw[:8], "little")
    path = tmp_path / "broken.safetensors"
    refused = 0
    for place in torch.randint(8, 8 + length, (60,), generator=torch.Generator().manual_seed(3)):
        broken = bytearray(raw)
        broken[int(place)] ^= 1 << int(place) % 7
        path.write_bytes(broken)
        try:
            KVCache.load(path, cache.spec, cache.fmt, cache.policy, dtype=cache.dtype)
        except UserError as error:
            refused += "\n" not in str(error)
    assert refused > 40

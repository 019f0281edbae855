"""Files that cost a loader time, memory or its terminal, or that crash a cache later."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_storage_hostile import File, _saved

from quantwm.cache import KVCache
from quantwm.cache import tensor_store as store
from quantwm.cache.positions import TokenPositions, turns
from quantwm.cache.spec import RopeLayout
from quantwm.errors import UserError

PARTS = store.MAX_HEADER_PARTS


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[KVCache, bytes]]:
    folder = tmp_path_factory.mktemp("caches")
    return {name: _saved(folder, name) for name in ("kivi", "quantwm", "qtc")}


def refusal(path: Path, header: bytes, cache: KVCache, data: bytes = b"") -> str:
    """One printable line, in less than two seconds of a busy machine and little memory."""
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    before, began = peak_bytes(), time.process_time()
    with pytest.raises(UserError) as caught:
        KVCache.load(path, cache.spec, cache.fmt, cache.policy, dtype=cache.dtype)
    seconds, said = time.process_time() - began, str(caught.value)
    assert said.isprintable() and len(said) < 300, said
    assert seconds < 2.0, seconds
    assert peak_bytes() - before < 4 * len(header) + 2**26
    return said


def peak_bytes() -> int:
    """The most that this process has held; tracing allocations makes parsing 20 times as slow."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def with_meta(file: File, **change: str) -> bytes:
    return json.dumps({"__metadata__": {**file.meta, **change}}).encode()


SPAN = '{"is":"TokenPositions","fields":{"first":0,"count":0,"places":null}}'
STATES: dict[str, tuple[str, str]] = {
    "lists within lists": ("[" * 900 + "]" * 900, "recursion"),
    "mappings within mappings": ('{"map":[[1,' * 300 + "1" + "]]}" * 300, "no state"),
    "millions of empty lists": ("[" + "[]," * PARTS + "[]]", f"more than {PARTS:,} parts"),
    "millions of numbers": ("[" + "7," * 2 * PARTS + "7]", f"more than {PARTS:,} parts"),
    "brackets in disguise": ("[" + '"\\u005b",' * PARTS + '""]', f"more than {PARTS:,} parts"),
    "as many lists as are read": ("[" + "[]," * (PARTS // 2 - 99) + "[]]", "no state"),
    "as many spans as are read": ("[" + f"{SPAN}," * (PARTS // 6 - 99) + "7]", "no state"),
}


@pytest.mark.parametrize("case", STATES)
def test_a_state_that_is_a_bomb_is_refused(case: str, saved: Any, tmp_path: Path) -> None:
    cache, raw = saved["kivi"]
    state, says = STATES[case]
    header = with_meta(File(raw), state=state)
    assert says in refusal(tmp_path / "bomb.safetensors", header, cache)


def test_very_many_tensors_of_nothing_are_refused(saved: Any, tmp_path: Path) -> None:
    cache, raw = saved["kivi"]
    empty = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    for count, says in ((PARTS // 7, "parts"), (PARTS // 7 - 999, "belong to nothing")):
        tensors: dict[str, Any] = {f"{i:x}": empty for i in range(count)}
        tensors["__metadata__"] = File(raw).meta
        header = json.dumps(tensors, separators=(",", ":")).encode()
        assert says in refusal(tmp_path / "bomb.safetensors", header, cache)


@pytest.mark.parametrize(("name", "version"), [("qtc", "1"), ("kivi", "2")])
def test_a_file_of_the_other_version_says_so(
    name: str, version: str, saved: Any, tmp_path: Path
) -> None:
    cache, raw = saved[name]
    header = with_meta(File(raw), version=version)
    said = refusal(tmp_path / "old.safetensors", header, cache)
    assert f"is of version {version}; this program reads version" in said and name in said


LOUD: dict[str, tuple[dict[str, str], str]] = {
    "a version of two lines": ({"version": "9\nroot:"}, "of version 9?root:"),
    "a format that clears the screen": ({"format": "\x1b[2J"}, "no saved cache"),
    "settings that clear the screen": ({}, "saved with format ?[2J?x"),
}


@pytest.mark.parametrize("case", LOUD)
def test_a_message_is_one_printable_line(case: str, saved: Any, tmp_path: Path) -> None:
    cache, raw = saved["kivi"]
    change, says = LOUD[case]
    file = File(raw)
    settings = json.loads(file.meta["cache"])
    if not change:
        change = {"cache": json.dumps({**settings, "format": "\x1b[2J\nx"})}
    assert says in refusal(tmp_path / "loud.safetensors", with_meta(file, **change), cache)


def _count(file: File, value: object) -> None:
    file.fields["statistics"]["map"] = [
        [name, value if name == "count" else held]
        for name, held in file.fields["statistics"]["map"]
    ]


def _learned(file: File) -> dict[str, Any]:
    return file.fields["learner"][0]["fields"]


NUMBERS: dict[str, tuple[str, Callable[[File], None]]] = {
    "tokens of a moment": ("qtc", lambda f: _learned(f)["keys"]["fields"].update(count=10**60)),
    "tokens of a residual": ("qtc", lambda f: _learned(f).update(residual_count=10**60)),
    "an infinite fit": (
        "kivi", lambda f: f.fields["fit"]["fields"].update(newest={"map": [[0, 1e999]]}),
    ),
    "a fit of 400 digits": (
        "kivi", lambda f: f.fields["fit"]["fields"].update(newest={"map": [[0, 10**400]]}),
    ),
    "a frame of 4,000 digits": ("kivi", lambda f: f.fields.update(next_frame=10**4000)),
    "a slot of 4,000 digits": (
        "quantwm", lambda f: f.fields["books"]["fields"]["pairs"]["map"][0].insert(0, 10**4000),
    ),
    "queries by a text of two lines": ("quantwm", lambda f: _count(f, "a\nb")),
}  # fmt: skip


@pytest.mark.parametrize("case", NUMBERS)
def test_numbers_that_would_crash_a_later_chunk_are_refused(
    case: str, saved: Any, tmp_path: Path
) -> None:
    name, change = NUMBERS[case]
    cache, raw = saved[name]
    file = File(raw)
    change(file)
    whole = file.bytes()
    length = int.from_bytes(whole[:8], "little")
    header, data = whole[8 : 8 + length], whole[8 + length :]
    refusal(tmp_path / "number.safetensors", header, cache, data)


def _positions(file: File) -> dict[str, Any]:
    return file.span()["positions"]["fields"]


FRAMES: dict[str, tuple[Callable[[File], None], str]] = {
    "a next chunk 2**39 frames away": (lambda f: f.fields.update(next_frame=2**39), "a gap of"),
    "a recent chunk 2**30 frames away": (
        lambda f: (
            f.fields.update(next_frame=2**30 + 2), f.segment("recent").update(first_frame=2**30)
        ),
        "a gap of",
    ),
    "a guide that looks 2**50 frames ahead": (
        lambda f: f.segment("recent")["guide"]["fields"]["learned"]["fields"].update(
            horizon_frames=2**50
        ),
        "a guide of other positions",
    ),
    "tokens that stand 2**30 frames away": (
        lambda f: _positions(f).update(first=2**30), "in their frames",
    ),
    "tokens that stand before their frames": (
        lambda f: _positions(f).update(first=0), "in their frames",
    ),
}  # fmt: skip
"""Loaded, they would make lists and tables as long as the distance, at the next chunk."""


@pytest.mark.parametrize("case", FRAMES)
def test_frames_that_would_be_a_bomb_later_are_refused(
    case: str, saved: Any, tmp_path: Path
) -> None:
    cache, raw = saved["qtc"]
    change, says = FRAMES[case]
    file = File(raw)
    change(file)
    path = tmp_path / "far.safetensors"
    path.write_bytes(file.bytes())
    with pytest.raises(UserError, match=says):
        KVCache.load(path, cache.spec, cache.fmt, cache.policy, dtype=cache.dtype)


def test_turning_far_places_takes_a_table_of_those_frames_alone() -> None:
    layout = RopeLayout((8, 4, 4), (1, 3))
    near = TokenPositions(0, 4, torch.tensor([0, 1, 5, 8], dtype=torch.int32))
    far = TokenPositions(0, 4, torch.tensor([0, 1, 5, 3 * 2**29 + 2], dtype=torch.int32))
    before = peak_bytes()
    found = [turns(layout, positions, 0, 4, torch.device("cpu")) for positions in (near, far)]
    assert torch.equal(found[0][:3], found[1][:3])
    assert found[1].shape == found[0].shape and bool(found[1].abs().sub(1).abs().max() < 1e-6)
    assert peak_bytes() - before < 2**26


@pytest.mark.parametrize("costs", [[[[1.0], [1.0]]], [[[1.0] * 2, [-1.0] * 2]]])
def test_a_lesson_of_other_heads_is_refused(costs: Any, saved: Any, tmp_path: Path) -> None:
    cache, raw = saved["qtc"]
    file = File(raw)
    lesson = file.fields["span"]["fields"]["lesson"]["fields"]
    lesson["promised"] = costs * len(lesson["promised"])
    path = tmp_path / "lesson.safetensors"
    path.write_bytes(file.bytes())
    with pytest.raises(UserError, match="promises costs of other heads"):
        KVCache.load(path, cache.spec, cache.fmt, cache.policy, dtype=cache.dtype)


def test_a_cache_that_could_not_be_read_again_is_not_written(
    saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_HEADER_PARTS", 100)
    with pytest.raises(UserError, match="too many for one file"):
        saved["kivi"][0].save(tmp_path / "large.safetensors")
    assert not list(tmp_path.iterdir())

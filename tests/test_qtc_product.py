"""qtc as a fourth lane: the page and its gauge, `play`, `replay`, `study` and `plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_helpers import call, play, worlds  # noqa: F401  (the last is a fixture)

from app import library, offers, wire
from app.handlers import parse_settings
from app.library import LibraryBackend
from quantwm.worlds.base import ChunkAction
from quantwm.worlds.embedded.adapter import EmbeddedWorld

LANES = ("bf16", "qvg", "quantwm", "qtc")
EARLY = "qtc:basis_after=0.5"
"""A basis after 32 tokens of 64 channels: the small world's third chunk of 12 has one."""


def test_the_page_drives_it_as_a_fourth_lane_and_gauges_what_it_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiny = EmbeddedWorld.random("tiny")
    monkeypatch.setattr(offers, "world_spec", lambda name: tiny.spec)
    monkeypatch.setattr(library, "load_world", lambda name, device, progress, placement: tiny)
    backend = LibraryBackend("embedded", LANES, torch.device("cpu"))
    catalogue = backend.catalogue()
    words = {lane.name: lane for lane in catalogue.lanes}["qtc"]
    assert (words.title, words.note) == ("QTC", "2.4-bit, transform code")
    settings = parse_settings({"steps": 1, "lanes": list(LANES)}, catalogue)
    engine = backend.open(settings, np.zeros((10, 10, 3), np.uint8), lambda *_: None)
    still = ChunkAction((frozenset(),) * tiny.spec.cache.frames_per_chunk)
    try:
        engine.start()
        for _ in range(6):
            block = engine.step(still)
        shown = {lane.name: wire._lane(lane, None) for lane in block.lanes}
        ledgers = {name: cache.ledger() for name, cache in engine.inner.caches.items()}
    finally:
        engine.close()
    assert list(shown) == list(LANES)
    for name in LANES:
        assert shown[name]["kv"] == ledgers[name].total
    assert ledgers["qtc"].parts["bases"] > 0
    assert shown["qtc"]["ratio"] > 3 > shown["bf16"]["ratio"] == 1
    assert any("qtc" in name for name in block.memory.parts), list(block.memory.parts)


def test_a_session_with_it_is_played_again_bit_for_bit(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "s"
    status, played, _ = play(capsys, out, "--no-video", lanes=f"bf16,{EARLY}", actions="w-14")
    lane = played["lanes"][1]
    assert status == 0 and lane["lane"].startswith("qtc") and 15 < lane["psnr_to_bf16"] < 80
    status, again, _ = call(capsys, "replay", out)
    assert (status, again["bit_identical"]) == (0, True)


def test_recorded_tensors_are_studied_and_bytes_planned(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "qkv.safetensors"
    more = ("--no-video", "--record-tensors", file)
    play(capsys, tmp_path / "s", *more, lanes="bf16", actions="w-14")
    methods = "qtc:small,qtc,qtc:large"
    status, studied, _ = call(capsys, "study", file, "--span", 48, "--methods", methods)
    bits = [row["bits_per_element"] for row in studied["methods"]]
    shifts = [row["token_shift"] for row in studied["methods"]]
    assert status == 0 and bits == sorted(bits) and shifts[0] >= shifts[2] > 0
    arguments = ("plan", "--world", "small", "--frames", 64, "--resolution", "12x8")
    status, planned, _ = call(capsys, *arguments, "--methods", methods)
    sizes = [row["bytes_total"] for row in planned["methods"]]
    assert status == 0 and sizes == sorted(sizes) and "bases" in planned["methods"][0]["bytes"]

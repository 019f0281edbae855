"""The library behind the page: what it offers, its mistakes, and one thread for all its work."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from app import library, offers
from app.handlers import parse_settings
from app.library import LibraryBackend
from app.one_thread import OneThread
from quantwm.errors import UserError
from quantwm.session import SessionWriter
from quantwm.worlds.base import ChunkAction
from quantwm.worlds.embedded.adapter import EmbeddedWorld

CPU = torch.device("cpu")
NAMES = ("bf16", "qvg", "quantwm")


@pytest.fixture
def backend(monkeypatch) -> Iterator[SimpleNamespace]:
    """A backend on a tiny world with random weights; `threads` are those that ran the world."""
    tiny = EmbeddedWorld.random("tiny")
    threads: set[str] = set()
    decode = tiny.decode

    def traced(latents: torch.Tensor) -> np.ndarray:
        threads.add(threading.current_thread().name)
        return decode(latents)

    monkeypatch.setattr(tiny, "decode", traced)
    monkeypatch.setattr(offers, "world_spec", lambda name: tiny.spec)
    monkeypatch.setattr(library, "load_world", lambda name, device, progress, placement: tiny)
    made = LibraryBackend("embedded", NAMES, CPU)
    return SimpleNamespace(backend=made, threads=threads, world=tiny)


def test_a_run_is_driven_recorded_and_freed(backend, tmp_path: Path) -> None:
    catalogue = backend.backend.catalogue()
    settings = parse_settings({"steps": 1}, catalogue)
    stages: list[str] = []
    picture = np.full((60, 80, 3), 120, np.uint8)
    engine = backend.backend.open(settings, picture, lambda stage, share: stages.append(stage))
    try:
        first = engine.start()
        assert [lane.name for lane in first.lanes] == list(NAMES)
        recording = backend.backend.record(tmp_path / "run", settings, picture, engine)
        assert isinstance(recording, SessionWriter)
        for block in (first, engine.step(_still(backend.world))):
            recording.write(block)
        recording.close()
        assert recording.stopped is None
        assert (tmp_path / "run" / "start.png").exists()
    finally:
        engine.close()
    assert stages and all(stage and "\n" not in stage for stage in stages)
    with pytest.raises(UserError, match="closed"):
        engine.start()


def test_all_work_runs_on_one_thread(backend) -> None:
    settings = parse_settings({"steps": 1, "lanes": ["bf16"]}, backend.backend.catalogue())
    picture = np.zeros((10, 10, 3), np.uint8)
    engine = backend.backend.open(settings, picture, lambda *_: None)
    engine.start()
    for _ in range(3):
        worker = threading.Thread(target=lambda: engine.step(_still(backend.world)))
        worker.start()
        worker.join()
    engine.close()
    assert len(backend.threads) == 1
    assert not backend.threads & {threading.current_thread().name}


def test_a_patch_of_a_real_run_picks_the_highest_score_of_each_lanes_keys(backend) -> None:
    settings = parse_settings({"steps": 1}, backend.backend.catalogue())
    engine = backend.backend.open(settings, np.zeros((10, 10, 3), np.uint8), lambda *_: None)
    spec = backend.world.spec
    width, height = spec.video_size
    try:
        engine.start()
        for _ in range(3):
            block = engine.step(_still(backend.world))
        last = block.first_frame + spec.cache.frames_per_chunk - 1
        rows, columns, *size, found = engine.pick_tokens(last, width - 1, height - 1)
        assert size == [width, height] and rows * columns == spec.cache.tokens_per_frame
        assert [layer.layer for layer in found] == list(range(spec.cache.layers))
        past = block.first_frame * spec.cache.tokens_per_frame
        for layer in found:
            queries = engine.watch.queries[layer.layer][:, -1].float()  # of the last patch
            for name, cache in engine.inner.caches.items():
                keys = cache.history(layer.layer)[0][:, :past].float()
                best = torch.einsum("hd,hnd->hn", queries, keys).argmax(dim=1)
                got = [(p.frame * rows + p.row) * columns + p.column for p in layer.lanes[name]]
                assert got == best.tolist(), (layer.layer, name)
        first = engine.pick_tokens(block.first_frame, 0, 0)[-1]
        assert first != found, "another patch, another query"
        with pytest.raises(UserError, match="newest chunk only"):
            engine.pick_tokens(0, 0, 0)
    finally:
        engine.close()


def test_errors_pass_through_the_thread() -> None:
    def fail() -> None:
        raise UserError("one line")

    with pytest.raises(UserError, match="one line"):
        OneThread().run(fail)


@pytest.mark.parametrize(
    ("world", "lanes", "options", "says"),
    [
        ("atlantis", NAMES, {}, "unknown world"),
        ("embedded", ["zip"], {}, "unknown lane"),
        ("embedded", [], {}, "lane"),
        ("embedded", NAMES, {"scene": "moon"}, "unknown scene"),
    ],
)
def test_mistakes_are_found_before_anything_is_loaded(world, lanes, options, says) -> None:
    with pytest.raises(UserError, match=says):
        LibraryBackend(world, lanes, CPU, **options)


def _still(world: EmbeddedWorld) -> ChunkAction:
    return ChunkAction.held(frozenset(), world.spec.cache.frames_per_chunk)

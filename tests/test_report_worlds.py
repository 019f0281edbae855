"""The report on other worlds than the embedded one: a tiny checkpoint with a second resolution."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from wan_tiny import tiny  # a fixture

from quantwm.cli import main
from quantwm.errors import UserError
from quantwm.report.jobs import script
from quantwm.report.plan import larger_size
from quantwm.report.scale import CHUNK_SECONDS, PRESETS
from quantwm.worlds.registry import load_world
from quantwm.worlds.wan import catalog

__all__ = ["tiny"]


@pytest.fixture
def two_sizes(tiny: str, monkeypatch: pytest.MonkeyPatch) -> str:
    entry = replace(catalog.ENTRIES["tiny"], resolutions=((64, 48),))
    monkeypatch.setitem(catalog.ENTRIES, "tiny", entry)
    return tiny


@pytest.mark.parametrize("tiny", ["lingbot_v2_1p3b"], indirect=True)
def test_the_larger_resolution_is_run_where_a_world_has_two(two_sizes: str, tmp_path, capsys):
    flags = ["--world", "tiny", "--minimal", "--scenes", "1", "--device", "cpu"]
    status = main(["report", "--out", str(tmp_path), *flags])
    assert status == 0, capsys.readouterr().err
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["report"]["failures"] == [] and found["report"]["rollouts"]["larger"] == 1
    assert found["larger"]["size"] == [64, 48]
    assert {"bf16", "qvg", "quantwm"} <= set(found["larger"]["lanes"])
    # twice the tokens of a frame; either run is of one chunk
    small, large = (found[part]["lanes"]["bf16"]["kv_bytes"] for part in ("fidelity", "larger"))
    assert large == 2 * small > 0
    text = (tmp_path / "evidence.md").read_text()
    assert "All runs above are at 48 x 32; the last table is of runs at 64 x 48." in text
    assert "# The paper's evidence on tiny" in text and "Free runs at 64 x 48, 1 scene" in text


@pytest.mark.parametrize("tiny", ["lingbot_v2_1p3b"], indirect=True)
def test_a_world_at_another_size_shares_its_weights(two_sizes: str) -> None:
    world = load_world("tiny", "cpu")
    twin = world.at_size((64, 48))
    assert larger_size(world) == (64, 48) and larger_size(twin) is None
    assert twin.model is world.model and twin.vae is world.vae
    assert twin.start(None, None, "", 1).frames.shape == (1, 48, 64, 3)
    assert world.start(None, None, "", 1).frames.shape == (1, 32, 48, 3)
    with pytest.raises(UserError, match="runs at 48x32, 64x48, not at 20x10"):
        world.at_size((20, 10))


def test_keys_that_a_world_does_not_have_are_not_pressed() -> None:
    spec = SimpleNamespace(keys={"w": ""}, cache=SimpleNamespace(frames_per_chunk=2))
    first, second = script("w+left-2, right-2", 5, SimpleNamespace(spec=spec))
    assert first.frames == (frozenset("w"),) * 2 and second.frames == (frozenset(),) * 2


def test_longer_chunks_are_fewer() -> None:
    full = PRESETS["full"]
    assert full.at_pace(CHUNK_SECONDS) == full
    slower = full.at_pace(1.0)
    assert (slower.chunks, slower.minute_chunks, slower.units) == (10, 60, 32)
    assert replace(full, taught=0).at_pace(9.0).taught == 0 and full.at_pace(99.0).chunks == 1


def test_a_world_without_weights_is_one_line(tmp_path, capsys) -> None:
    flags = ["--world", "lingbot_v2_14b", "--device", "cpu"]
    assert main(["report", "--out", str(tmp_path), *flags]) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "loading" not in x]
    assert "lingbot" in line
    assert main(["report", "--out", str(tmp_path), "--random-weights", *flags]) == 2
    assert "leave --world out" in capsys.readouterr().err

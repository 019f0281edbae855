"""`python -m benchmarks wan` on a tiny world: the window is filled, every part is reported."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest
from wan_tiny import VAE_21, VAE_22, WORLDS

from benchmarks import wan
from quantwm.worlds.wan import catalog, memory_world
from quantwm.worlds.wan import world as world_module


def options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    wan.arguments(parser)
    return parser.parse_args(["--device", "cpu", "--frames", "29", "--chunks", "1", *given])


def take_tiny(name: str, monkeypatch: pytest.MonkeyPatch) -> catalog.Entry:
    """A tiny world under the name of a large one."""
    original = catalog.ENTRIES[name]
    vae = VAE_22 if original.kind == "memory" else VAE_21
    tiny = replace(original, config=WORLDS[name], vae=vae, latent=(4, 6))
    if tiny.config.context == "text":
        tiny = replace(tiny, config=replace(tiny.config, context_len=512))
    monkeypatch.setitem(catalog.ENTRIES, name, tiny)
    monkeypatch.setattr(memory_world, "POINTS", 200)
    monkeypatch.setattr(world_module, "CONDITION_LATENTS", 3)
    return original


@pytest.mark.parametrize("name", ["causal_forcing", "hy_worldplay_wan5b"])
@pytest.mark.parametrize("together", [False, True])
def test_rows_of_a_tiny_world(name: str, together: bool, monkeypatch, capsys) -> None:
    original = take_tiny(name, monkeypatch)
    given = ["--world", name, "--lanes", "bf16,qvg", *(["--together"] if together else [])]
    result = wan.run(options(*given))
    assert [row["lanes"] for row in result["rows"]] == (
        [["bf16", "qvg"]] if together else [["bf16"], ["qvg"]]
    )
    for row in result["rows"]:
        assert all(ms > 0 for ms in row["ms_per_chunk"].values())
        assert row["history_tokens"] > 0 and row["split_ms"]["attention"] > 0
        assert row["split_ms"]["autoencoder"] > 0
        for phases in row["host_ms"].values():
            commits = "clean pass" if original.kind == "text" else "denoising"  # memory: before
            for phase, spans in phases.items():
                assert spans["launching"] >= 0 and len(spans) == (4 if phase == commits else 2)
    assert name in wan.table(result)
    assert "ms a chunk" in capsys.readouterr().err, "a row is said as soon as it is measured"


def test_a_brief_run_times_and_watches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    take_tiny("causal_forcing", monkeypatch)
    watched = []
    monkeypatch.setattr(wan, "_split", lambda *given: watched.append(given))
    result = wan.run(options("--world", "causal_forcing", "--lanes", "qvg", "--brief"))
    (row,) = result["rows"]
    assert not watched and row["host_ms"] == row["split_ms"] == {}
    assert row["ms_per_chunk"]["qvg"] > 0 and row["kv_bytes"]["qvg"] > 0
    assert "ms a chunk" in wan.table(result)


def test_blocks_that_wait_on_the_cpu_are_a_run_of_their_own(monkeypatch) -> None:
    take_tiny("causal_forcing", monkeypatch)
    worlds = []
    made = wan.random_world
    monkeypatch.setattr(
        wan, "random_world", lambda *a, **k: worlds.append(made(*a, **k)) or worlds[0]
    )
    wan.run(options("--world", "causal_forcing", "--lanes", "bf16", "--brief", "--offload"))
    visits = worlds[0].model.visit
    # The context, the history's clean passes, and two chunks of four steps and a clean pass each.
    assert visits.count >= len(worlds[0].model.blocks) * 2 * 5

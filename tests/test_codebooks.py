"""What the issue of lasting codebooks asks for, in numbers: ratios at the published geometry."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import codebooks
from quantwm.cache.plan import Workload, plan

NATIVE = Workload(40, 40, 128, 28080, 4680, chunk_tokens=4680)
"""A history of six native chunks of 480p, a codebook each as published."""


def test_the_compact_preset_is_planned_at_6_2_over_28_080_tokens() -> None:
    published, compact = plan({"quantwm": {}, "quantwm:compact": {"preset": "compact"}},
                              NATIVE).methods  # fmt: skip
    assert round(published.ratio, 2) == 4.68
    assert compact.ratio >= 6.2 and compact.resident_ratio >= 6.1


def test_codebooks_of_a_scene_that_changes_with_every_chunk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The benchmark's own part: six chunks of 4,680 tokens of one head, encoded and held."""
    monkeypatch.setattr(codebooks, "NATIVE", ("quantwm:compact",))
    monkeypatch.setattr(codebooks, "NATIVE_HEADS", 1)
    parser = codebooks.argparse.ArgumentParser()
    codebooks.arguments(parser)
    words = ["--world", "none", "--device", "cpu", "--out", str(tmp_path)]
    result = codebooks.run(parser.parse_args(words))
    (rows,) = [native["rows"] for native in result["native"]]
    assert [tokens for tokens, _, _ in rows] == [4680 * n for n in range(1, 7)]
    assert rows[-1][1] >= 6.2 and rows[-1][2] >= 6.2
    assert "quantwm:compact" in (tmp_path / "codebooks.txt").read_text()
    assert json.loads((tmp_path / "codebooks.json").read_text())["native"][0]["rows"] == rows


def test_the_lowest_ratio_is_of_every_chunk_from_the_first_mark_on() -> None:
    nominal = {4: 2.0, 32: 5.0, 64: 6.0, 68: 5.5, 256: 6.3}
    chunks = {made: [ratio, ratio - 0.5, 48 * made] for made, ratio in nominal.items()}
    found = codebooks._ratios(chunks, 256)
    assert list(found["ratios"]) == [32, 64, 256] and found["lowest"] == 5.5
    early = codebooks._ratios({4: chunks[4], 32: chunks[32]}, 32)
    assert list(early["ratios"]) == [32] and early["lowest"] is None

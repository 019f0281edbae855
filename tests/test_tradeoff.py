"""The plot of bits against error: every method and span in it, from one small world's run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import __main__ as program
from benchmarks import tradeoff
from benchmarks.scatter import Axis, Panel, Series, to_svg
from quantwm.errors import UserError
from tests.small_world import SmallWorld


def _run(monkeypatch: pytest.MonkeyPatch, capsys: Any, folder: Path, *words: str) -> dict[str, Any]:
    monkeypatch.setattr(tradeoff, "load_world", lambda name, device: SmallWorld())
    monkeypatch.setattr(tradeoff, "ITEMS", "w-2, right-2")
    command = ["benchmarks", "tradeoff", "--device", "cpu", "--out", str(folder), *words]
    monkeypatch.setattr("sys.argv", command)
    assert program.main() == 0
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_all_methods_and_spans_are_plotted(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    words = ("--frames", "8", "--spans", "24,48", "--centroids", "6", "--layers", "1")
    result = _run(monkeypatch, capsys, tmp_path, *words)
    found = [(row["method"], row["span"]) for row in result["rows"]]
    assert [pair for pair in found if pair[0] == "quantwm"] == [("quantwm", 24), ("quantwm", 48)]
    assert [pair for pair in found if pair[0] == "kivi:int2"] == [("kivi:int2", 48)]
    assert {method for method, _ in found} == set(tradeoff.METHODS)
    assert result["tokens"] == 12 * (2 + 4) and result["layers"] == [1]
    svg = ElementTree.parse(tmp_path / "tradeoff.svg").getroot()
    texts = [node.text for node in svg.iter() if node.text]
    assert set(tradeoff.METHODS) <= set(texts) and tradeoff.BITS in texts
    assert "PSNR to BF16, taught, dB" not in texts  # not asked for
    marks = sum(node.tag.endswith(("circle", "polygon")) for node in svg.iter())
    assert marks == 3 * len(found) + len(tradeoff.METHODS)
    assert json.loads((tmp_path / "tradeoff.json").read_text()) == result
    assert "qtc:large" in (tmp_path / "tradeoff.txt").read_text()


def test_an_ablation_with_psnr(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    words = ("--frames", "6", "--spans", "48", "--centroids", "6", "--ablation", "parts", "--psnr")
    rows = _run(monkeypatch, capsys, tmp_path, *words)["rows"]
    assert [row["method"] for row in rows] == list(tradeoff.ABLATIONS["parts"])
    assert all(10 < row["psnr"] < 100 for row in rows)
    assert len({row["psnr"] for row in rows}) > 1
    assert "PSNR to BF16, taught, dB" in (tmp_path / "tradeoff.svg").read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [(("--spans", "many"), "--spans takes whole numbers"), (("--layers", "7"), "from 0 to 1")],
)
def test_mistakes_are_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    monkeypatch.setattr(tradeoff, "load_world", lambda name, device: SmallWorld())
    monkeypatch.setattr(tradeoff, "ITEMS", "w-2")
    options = tradeoff.argparse.ArgumentParser()
    tradeoff.arguments(options)
    command = ["--device", "cpu", "--out", str(tmp_path), "--frames", "4", *words]
    with pytest.raises(UserError, match=says):
        tradeoff.run(options.parse_args(command))


def test_axes_hold_all_points_and_round_numbers() -> None:
    axis = Axis(0.011, 3.0, 300.0, 20.0, log=True)
    assert axis.ticks() == pytest.approx([0.02, 0.05, 0.1, 0.2, 0.5, 1, 2])
    assert axis.place(0.011) == pytest.approx(300) and axis.place(3.0) == pytest.approx(20)
    assert axis.place(math.sqrt(0.011 * 3.0)) == pytest.approx(160)
    plain = Axis(1.9, 5.2, 0.0, 100.0, log=False)
    assert plain.ticks() == [2, 3, 4, 5]


def test_one_point_and_none_are_drawn() -> None:
    one = Panel("a <b>", "x", "y", [Series("one & only", [(2.0, 3.0)], [""])])
    none = Panel("none", "x", "y", [Series("nothing", [], [])])
    text = to_svg("title", [one, none], "note")
    ElementTree.fromstring(text)
    assert "one &amp; only" in text and "none" not in text

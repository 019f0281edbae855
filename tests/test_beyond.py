"""`benchmarks beyond`: small on a CPU, its tables, and the page that they are put into."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as program
from benchmarks import beyond, beyond_study, beyond_text
from quantwm.cache.formats import make_format, split_method
from quantwm.errors import UserError

SMALL = (
    "beyond --device cpu --random tiny --scenes 2 --chunks 2 --taught 2 --motion 1 --revisits 0 "
    "--recorded 3 --together 2 --methods quantwm,qtc,qtc:by-output,quantwm:keys=unrotated "
    "--few quantwm,quantwm-corrected,qtc --lanes quantwm,qtc-small,qtc"
)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("beyond")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["benchmarks", *SMALL.split(), "--out", str(folder)])
        assert program.main() == 0
    return folder


def _result(out: Path) -> dict[str, Any]:
    return json.loads((out / "beyond.json").read_text())


def test_everything_that_was_asked_for_was_done(out: Path) -> None:
    result = _result(out)
    assert result["not_begun"] == 0 and not result["missing_methods"]
    rows = result["study"][beyond.OWN]
    assert [row["method"] for row in rows] == [
        "quantwm", "qtc", "qtc:by-output", "quantwm:keys=unrotated",
    ]  # fmt: skip
    for row in rows:
        assert set(row["layers"]) == {"1"} and row["cold"]["logit_mse"] > 0
        assert row["resident_bits"][-1][1] == pytest.approx(row["resident_bits_per_element"])
    assert set(result["free"]) == {"quantwm", "qtc-small", "qtc"}
    assert all(lane["scenes"] == 2 for lane in result["free"].values())
    assert len(result["motions"]) == 3
    assert "over_quantwm" in result["taught"]["qtc"]
    plain, corrected = (result["taught"][lane] for lane in ("quantwm", "quantwm-corrected"))
    assert plain["whole"]["mean"] != corrected["whole"]["mean"]
    assert 0 < corrected["kv_bytes"] - plain["kv_bytes"] < 0.02 * plain["kv_bytes"]


def test_the_text_has_every_section(out: Path) -> None:
    text = (out / "beyond.md").read_text()
    for words in (
        "weights random", "Wanted against QuantWM", "every method at three budgets",
        "half-measures within", "without one ingredient", "Free-running, 2 scenes",
        "Teacher-forced, 2 scenes", "by layer and head", "by tokens held", "By motion",
    ):  # fmt: skip
        assert words in text, words
    assert "Not whole" not in text


def test_the_page_gets_the_tables_between_its_markers(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{beyond_text.BEGIN}\nold numbers\n{beyond_text.END}\nbehind\n")
    words = ["benchmarks", "beyond", "--read", str(out / "beyond.json"), "--docs", str(page)]
    monkeypatch.setattr("sys.argv", words)
    assert program.main() == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("behind\n") and "old numbers" not in text
    assert (out / "beyond.md").read_text() in text
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not set(beyond.LONG) & set(line["study"][beyond.OWN][0])
    page.write_text("no markers")
    with pytest.raises(UserError, match="has no lines"):
        beyond_text.put_into(page, _result(out))


def test_docs_beyond_has_the_markers() -> None:
    text = (Path(__file__).parents[1] / "docs" / "beyond.md").read_text()
    assert text.index(beyond_text.BEGIN) < text.index(beyond_text.END)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"benchmark": "qtc"}'])
def test_a_wrong_file_is_one_line(content: str, tmp_path: Path) -> None:
    path = tmp_path / "beyond.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"is no beyond\.json") as caught:
        beyond._read(path)
    assert "\n" not in str(caught.value)


def test_a_gain_counts_only_at_no_more_bytes_as_its_frames_end_and_at_the_end(out: Path) -> None:
    result = _result(out)
    lanes = result["free"]
    assert lanes["qtc"]["held"].keys() == {"early", "whole"}
    lanes["qtc"]["over_quantwm"]["early"] = {"mean": 7.0, "low": 6.0, "high": 8.0}
    told = []
    for early, whole in ((90, 90), (101, 90), (90, 101)):
        lanes["quantwm"]["held"] = {"early": 100.0, "whole": 100.0}
        lanes["qtc"]["held"] = {"early": float(early), "whole": float(whole)}
        (row,) = [r for r in beyond_text._wanted(result).splitlines() if "first window: at" in r]
        told.append(row.split("|")[-3:-1])
    assert told == [["0.90, 0.90", "yes"], ["1.01, 0.90", "no"], ["0.90, 1.01", "no"]]


def test_a_result_of_an_earlier_version_is_one_line(out: Path, tmp_path: Path) -> None:
    result = _result(out)
    del result["free"]["qtc"]["held"]
    path = tmp_path / "beyond.json"
    path.write_text(json.dumps(result))
    with pytest.raises(UserError, match="is of an earlier version of this benchmark"):
        beyond._read(path)


def test_unknown_lanes_and_methods_are_named() -> None:
    with pytest.raises(UserError, match="--lanes and --few take quantwm, quantwm-half"):
        beyond.lanes_named("quantwm,qvg")
    assert beyond_study.known_methods(["qtc", "qtc:huge", "none"]) == (
        ["qtc"],
        ["qtc:huge", "none"],
    )


def test_what_failed_is_said(out: Path) -> None:
    text = beyond_text.markdown(_result(out) | {"not_begun": 3, "missing_methods": ["abc"]})
    assert "**Not whole**: methods that this version has not: abc; tasks that failed" in text


def test_every_method_exists_and_every_format_has_three_budgets() -> None:
    assert beyond_study.known_methods(beyond_study.METHODS) == (list(beyond_study.METHODS), [])
    for name, three in beyond_study.BUDGETS.items():
        assert len(three) == 3 and {split_method(method)[0] for method in three} == {name}
    for method in beyond_study.HALF_MEASURES:
        name, settings = split_method(method)
        assert make_format(name, **settings).name == "quantwm"

"""The benchmarks run small on a CPU: a table, one JSON line last, honest about what did not run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as program
from benchmarks import agreement, cache, chunk, codebooks, codec, frames, memory
from benchmarks.guards import guarded_allocations
from benchmarks.stopwatch import Stopwatch
from benchmarks.timing import measure_in_turn
from quantwm.errors import UserError
from tests.test_study import make_tensors, write


def run_program(monkeypatch: pytest.MonkeyPatch, capsys: Any, *words: str) -> tuple[int, list[str]]:
    monkeypatch.setattr("sys.argv", ["benchmarks", *words])
    status = program.main()
    return status, capsys.readouterr().out.strip().splitlines()


def test_codec_prints_a_table_and_one_json_line(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(codec, "copy_ceiling", lambda device: {"copy_gb_s": 10.0})
    words = "codec --device cpu --heads 1 --tokens 70 --head-dim 64 --centroids 8 --repeats 2"
    status, lines = run_program(monkeypatch, capsys, *words.split())
    result = json.loads(lines[-1])
    assert status == 0
    assert [(r["method"], r["step"]) for r in result["rows"]] == [
        (method, step)
        for method in ("qvg", "quantwm", "kivi", "rtn", "qvg-pro")
        for step in (
            ("encode", "decode") if method in ("kivi", "rtn")
            else ("encode, cold codebook", "encode, warm codebook", "encode, codebook given",
                  "decode")
        )
    ]  # fmt: skip
    assert result["qvg_public"] == "not run: no --qvg-path"
    assert any("reference" in line for line in lines)


def test_codec_prints_nothing_when_the_check_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: Any) -> None:
        raise agreement.Disagreement("ids differ")

    monkeypatch.setattr(codec, "agree", wrong)
    parser = argparse.ArgumentParser()
    codec.arguments(parser)
    options = parser.parse_args(["--device", "cpu", "--heads", "1", "--tokens", "8"])
    with pytest.raises(agreement.Disagreement):
        codec.run(options)


def test_codebooks_of_a_file_end_with_one_json_line(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(codebooks, "NATIVE", ())
    file = write(tmp_path / "a.safetensors", make_tensors())
    words = (
        f"codebooks --file {file} --world none --chunk 8 --span 16 --methods bf16,rtn:group_size=8"
    )
    status, lines = run_program(monkeypatch, capsys, *words.split())
    rows = json.loads(lines[-1])["file"]["rows"]
    assert status == 0 and [row["method"] for row in rows] == ["bf16", "rtn:group_size=8"]


def test_frames_splits_the_time(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    words = "frames --device cpu --preset tiny --history 96 --chunks 1 --steps 1 --lanes bf16,qvg"
    status, lines = run_program(monkeypatch, capsys, *words.split())
    (row,) = json.loads(lines[-1])["rows"]
    assert status == 0
    assert row["history_tokens"] >= 96
    assert set(row["lane_ms"]) == {"bf16", "qvg"}
    assert {"decode history", "attention", "encode", "autoencoder"} <= set(row["split_ms"])
    assert min(row["split_ms"].values()) >= 0
    assert frames.table(json.loads(lines[-1])).splitlines() == lines[:-1]


def test_stopwatch_counts_the_outer_call_alone_and_puts_back() -> None:
    class Thing:
        def outer(self) -> int:
            return self.inner() + 1

        def inner(self) -> int:
            return 1

    genuine = Thing.outer
    watch = Stopwatch(torch.device("cpu"))
    with watch.watching([(Thing, "outer", "outer"), (Thing, "inner", "inner")]):
        assert Thing().outer() == 2
        assert Thing().inner() == 1
    assert Thing.outer is genuine
    assert set(watch.totals()) == {"outer", "inner"}
    assert len(watch._spans["inner"]) == 1


def test_guards_see_a_write_out_of_bounds_and_poison_what_is_unwritten() -> None:
    with pytest.raises(RuntimeError, match="beside an output"), guarded_allocations():
        small = torch.empty(4, dtype=torch.uint8)
        small.as_strided((5,), (1,)).zero_()
    with guarded_allocations():
        assert torch.empty(3).isnan().all()
        assert torch.empty(2, 5, dtype=torch.float16)[:, 1:].isnan().all()
    assert torch.empty(3, dtype=torch.uint8).shape == (3,)


def test_attention_compares_with_bf16(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    words = "attention --device cpu --heads 2 --queries 80 --cached 200 --head-dim 64 --repeats 1"
    status, lines = run_program(monkeypatch, capsys, *words.split())
    result = json.loads(lines[-1])
    (history,) = result["histories"]
    assert status == 0
    assert [(r["method"], r["how"]) for r in history["rows"]] == [
        ("bf16", "PyTorch"), ("qvg", "staged"), ("qvg", "decode alone"), ("quantwm", "staged"),
        ("quantwm", "decode alone"),
    ]  # fmt: skip
    staged = history["rows"][1]
    assert staged["heads_in_turns_give_the_same_bits"]
    assert staged["scratch_bytes"] == 2 * 2 * (200 + 80) * 64 * 2
    assert staged["of_best"] == pytest.approx(staged["median"] / staged["bf16_beside_ms"], abs=1e-3)


def test_what_is_compared_is_timed_in_turn() -> None:
    calls: list[str] = []
    runs = [lambda: calls.append("a"), lambda: calls.append("b")]
    first, second = measure_in_turn(runs, torch.device("cpu"), 4)
    assert calls == ["a", "b"] * (3 + 4)  # three rounds to warm up
    assert first.repeats == second.repeats == 4
    assert first.p20 <= first.median <= first.p80


def test_cache_times_every_method_and_counts_in_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(cache, "copy_ceiling", lambda device: {"copy_gb_s": 10.0})
    words = (
        "cache --device cpu --heads 1 --tokens 70 --head-dim 64 --centroids 8 --repeats 1 "
        "--chunks 1 --methods bf16,kivi,qvg,qtc"
    )
    status, lines = run_program(monkeypatch, capsys, *words.split())
    result = json.loads(lines[-1])
    assert status == 0
    assert {row["method"] for row in result["rows"]} == {"bf16", "kivi", "qvg"}
    assert [life["method"] for life in result["runs"]] == ["bf16", "kivi", "qvg", "qtc"]
    assert all(life["compiled_after_warm_up"] == 0 for life in result["runs"])


def test_chunk_reads_each_lane_against_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(lane: str, whole: float, attention: float, encode: float) -> dict[str, Any]:
        split = {"attention": attention, "cache: encode": encode, "transformer and the rest": 5.0}
        return {"lanes": [lane], "ms_per_chunk": {lane: whole}, "split_ms": split}

    rows = [row("bf16", 100.0, 40.0, 0.0), row("qvg", 103.0, 41.0, 2.0)]
    given = []
    for benchmark in (chunk, chunk.wan):
        parser = argparse.ArgumentParser()
        benchmark.arguments(parser)
        given.append(parser.parse_args([]))
    options, wanted = given
    options.lanes = "bf16,qvg"
    monkeypatch.setattr(chunk.wan, "run", lambda options: {"benchmark": "wan", "rows": rows})
    result = chunk.run(options)
    assert vars(options).keys() >= vars(wanted).keys()  # `wan` finds every option of its own
    assert result["benchmark"] == "chunk"
    assert result["over_bf16"]["qvg"] == {"whole": 0.03, "attention_and_cache": 0.075}
    assert result["parts_ms"]["qvg"]["rest"] == 60.0
    with pytest.raises(UserError, match="--lanes needs bf16"):
        chunk.run(argparse.Namespace(lanes="qvg"))


@pytest.mark.parametrize("method", ["rtn", "kivi", "qvg", "qvg-pro", "quantwm", "qtc"])
@pytest.mark.parametrize("kept", [(), ("--sink", "2", "--recent", "1")])
def test_planned_memory_is_within_two_percent_of_a_run(method: str, kept: tuple[str, ...]) -> None:
    parser = argparse.ArgumentParser()
    memory.arguments(parser)
    words = "--device cpu --layers 1 --heads 2 --head-dim 64 --grid 4,4 --window 12 --centroids 8"
    row = memory.measured(method, parser.parse_args([*words.split(), *kept]))
    assert set(row["apart"]) == {"stored", "scratch"}
    assert all(abs(apart) <= 0.02 for apart in row["apart"].values()), row["apart"]
    assert row["found"]["peak"] is None and row["planned"]["peak"] > row["planned"]["stored"]
    result = {"hardware": {"device": "a CPU"}, "rows": [row]}
    assert method in memory.table(result) and "resident" in memory.table(result)

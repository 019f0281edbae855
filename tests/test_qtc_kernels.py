"""qtc's kernels: in the interpreter against the PyTorch code, and compiled for sm_90."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from compiling import Launched, compile_launch, compiled_rows, record, specialised
from interpreter import INTERPRETABLE, passes_interpreted

from benchmarks import qtc_tune
from kernels import qtc_decode, qtc_encode, qtc_moments, qtc_tile, qtc_tuning
from quantwm.cache.formats import qtc_levels

MODULES = (qtc_encode, qtc_decode, qtc_moments)


@INTERPRETABLE
def test_kernels_in_the_interpreter() -> None:
    passes_interpreted("interpret_qtc.py")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launched]:
    return record(monkeypatch, *MODULES)


def run_launchers(dim: int, rows: int, words: int, turned: bool) -> None:
    """Every launcher once; heads and tokens as large as decides for the larger launch rows."""
    heads, tokens, none = 2, 20_000, torch.zeros
    turning = qtc_tile.Turning()
    if turned:
        phases = none(2, dim // 2, dtype=torch.int32)
        turning = qtc_tile.Turning(phases, (dim // 6, dim // 6), (30, 52), 0)
    x, weights = none(heads, tokens, dim).bfloat16(), none(heads, tokens)
    centre, widths = none(heads, dim), none(heads, rows // 16, dtype=torch.uint8)
    for group in (1, 2, 8, 16):
        qtc_moments.centre(x, turning, group, 16.0)
    qtc_moments.centre(x, turning, 16, 16.0, centre)
    qtc_moments.second_moment(x, turning, centre, weights)
    qtc_moments.second_moment(x, turning, None, None)
    cpu = torch.device("cpu")
    tables = qtc_levels.table(cpu), none(256), qtc_levels.cell_table(cpu)
    analysis = qtc_encode.split(none(heads, dim, rows))
    codes, gains = qtc_encode.encode_qtc(
        x, turning, centre, analysis, none(heads, rows), widths, words, tables
    )
    basis = none(heads, rows, dim, dtype=torch.int8), none(heads, rows).bfloat16()
    means = none(heads, 1, dim, dtype=torch.int8), none(heads, 1).bfloat16()
    decoder = qtc_decode.prepare_qtc(
        codes, gains, (*basis, centre.bfloat16(), widths), (*means, none(1, dtype=torch.int32)),
        (qtc_levels.pair_levels(cpu), none(256)), turning,
    )  # fmt: skip
    decoder(x.clone(), 0, 0, tokens)


@pytest.mark.parametrize(
    ("dim", "rows", "words", "turned"),
    [(128, 96, 16, True), (128, 112, 22, False), (64, 48, 8, True)],
)  # fmt: skip
def test_every_launch_row_compiles(
    launches: list[Launched], dim: int, rows: int, words: int, turned: bool
) -> None:
    run_launchers(dim, rows, words, turned)
    assert {launched.kernel.__name__ for launched in launches} == {
        "group_sums_kernel", "middle_kernel", "weighted_sums_kernel", "mean_kernel",
        "second_moment_kernel", "encode_qtc_kernel", "decode_qtc_kernel", "rows_qtc_kernel",
    }  # fmt: skip
    for launched, compiled, used, label in compiled_rows(launches):
        assert used["STACK"] == 0, label
        if launched.kernel.__name__ in ("decode_qtc_kernel", "encode_qtc_kernel"):
            ptx = compiled.asm["ptx"]
            assert "wgmma.mma_async" in ptx or "mma.sync" in ptx, f"no tensor cores: {label}"


def test_blocks_wait_for_little(launches: list[Launched]) -> None:
    """Barriers: where codes or coordinates have another layout than what is looked up for them, all
    of them pass through shared memory, which made 45 in decoding and 136 in encoding (40 since with
    32 tokens a block; with 16, faster on an H200, 57 by Triton 3.9 and 70 by 3.7, which torch 2.13
    for CUDA brings). Up to 168 registers, three decoding programs share a multiprocessor."""
    run_launchers(128, 96, 16, True)
    compiled = {
        launched.kernel.__name__: compile_launch(launched)
        for launched in launches
        if launched.kernel.__name__ in ("decode_qtc_kernel", "encode_qtc_kernel")
    }
    barriers = {name: made.asm["ptx"].count("bar.sync") for name, (made, _) in compiled.items()}
    assert barriers["decode_qtc_kernel"] <= 12 and barriers["encode_qtc_kernel"] <= 80
    assert compiled["decode_qtc_kernel"][1]["REG"] <= 168
    # Besides the operand nothing is in shared memory: levels go from look-ups into the product and
    # tokens from there to where they are stored.
    assert compiled["decode_qtc_kernel"][0].metadata.shared == 96 * 128 * 2
    # The next step's odd bits, what alone is loaded in 16, come behind a product: before one it
    # waits for them.
    ptx = compiled["decode_qtc_kernel"][0].asm["ptx"]
    assert ptx.index("wgmma.mma") < ptx.rindex("ld.global.b16") < ptx.rindex("wgmma.mma")


def test_no_row_encodes_64_tokens_at_once() -> None:
    """Such rows read illegal addresses on an H200. The shipped rows are the first ones tuned."""
    assert all(row.block_n < 64 for row in qtc_tuning.ENCODE.values())
    assert all(row[0] < 64 for row in qtc_tune.ENCODE_ROWS)
    for rows, table in (
        (qtc_tune.ENCODE_ROWS, qtc_tuning.ENCODE), (qtc_tune.DECODE_ROWS, qtc_tuning.DECODE)
    ):  # fmt: skip
        shipped = table[128]
        assert rows[0] == (shipped.block_n, shipped.num_warps, shipped.registers)


def test_lengths_are_not_specialised() -> None:
    """What grows with the history never makes a new kernel."""
    growing = {"n_tokens", "offset", "start", "stop", "n_chunks", "first_place", "blocks"}
    growing |= {"step", "groups", "several", "merged"}
    assert specialised(growing, *MODULES) == (8, [])

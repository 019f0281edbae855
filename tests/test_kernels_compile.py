"""Every shipped launch row compiles for sm_90 without a GPU: no spill, tensor cores, it fits."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from compiling import Launched, compiled_rows, record, specialised

from kernels import decode, decode_pair, decode_spans, encode, flash, fused, kmeans, tuning
from kernels.format import Side


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launched]:
    return record(monkeypatch, kmeans, encode, decode, fused)


def run_launchers(dim: int, group_size: int, rank: int) -> None:
    """Every launcher once, with the shapes that decide which kernels and rows are launched."""
    x = torch.zeros(2, 100, dim, dtype=torch.bfloat16)
    centroids, ids = torch.zeros(2, 256, dim).bfloat16(), torch.zeros(2, 100, dtype=torch.uint8)
    basis, eigenvalues = torch.zeros(2, dim, rank).bfloat16(), torch.ones(2, rank)
    out, stops = torch.zeros(2, 200, dim).bfloat16(), torch.tensor([100], dtype=torch.int32)
    decode.prepare_copy(x.transpose(0, 1).contiguous().transpose(0, 1))(out, 0, 0, 100)
    decode.copy_pair(out.float(), out.float(), 0, x, x)
    kmeans.assign(x, centroids)
    kmeans.assign(x, centroids.float())
    kmeans.assign_qsac(x, centroids, torch.ones(2, dim), group_size, 4)
    kmeans.update(x, ids, centroids.float())
    long = tuning.UPDATE_SPLIT_TOKENS
    kmeans.update(
        torch.zeros(1, long, dim).bfloat16(), torch.zeros(1, long).byte(), centroids[:1].float()
    )
    codes, scales = encode.encode_qvg(x, ids, centroids, group_size)
    decode.prepare_qvg(codes, ids, centroids, scales, group_size)(out, 0, 0, 100)
    encode.encode_quantwm(x, ids, centroids, group_size, 1.0, None, None)
    packed = encode.encode_quantwm(x, ids, centroids, group_size, 1.0, basis, eigenvalues)
    codes, scales, secondary, zeros, coefficients, row_scales = packed
    shared = (codes, ids, centroids, scales, secondary[:, None], stops, zeros, group_size)
    for correction in ((None, None, None), (coefficients, row_scales, basis)):
        decode.prepare_quantwm(*shared, *correction, 0)(out, 0, 0, 100)
    decode.prepare_quantwm(*shared, coefficients, row_scales, basis, 0)(out.float(), 0, 0, 100)


def run_fused(dim: int, group_size: int, rank: int) -> None:
    """Every kind of keys and values that a world can have, alone and behind another segment."""
    x = torch.zeros(2, 100, dim, dtype=torch.bfloat16)
    centroids, ids = torch.zeros(2, 256, dim).bfloat16(), torch.zeros(2, 100, dtype=torch.uint8)
    basis, eigenvalues = torch.zeros(2, dim, rank).bfloat16(), torch.ones(2, rank)
    codes, scales = encode.encode_qvg(x, ids, centroids, group_size)
    ternary = Side("ternary", None, codes, ids, centroids, scales)
    packed = encode.encode_quantwm(x, ids, centroids, group_size, 1.0, basis, eigenvalues)
    shared = (packed[0], ids, centroids, packed[1], packed[2][:, None], (100,), packed[3])
    affine = Side("affine", None, *shared)
    corrected = Side("affine", None, *shared, packed[4], packed[5], basis, 10)
    plain = Side("plain", x)
    for keys, values in ((plain, plain), (ternary, ternary), (corrected, affine), (affine, affine)):
        fused.fused(x, [(keys, values, 0, 100)] * 2, 0.1)
    fused.attend_int8(x, x, x, 0.1)


def has_dot(launched: Launched) -> bool:
    name = launched.kernel.__name__
    return (
        name in ("assign_kernel", "update_kernel", "flash_kernel")
        or launched.arguments.get("RANK", 0) > 0
    )


@pytest.mark.parametrize(
    ("dim", "group_size", "rank"),
    [(64, 64, 8), (128, 64, 8), (256, 64, 8), (128, 16, 32), (256, 128, 1)],
)
def test_every_launch_row_compiles(
    launches: list[Launched], dim: int, group_size: int, rank: int
) -> None:
    run_launchers(dim, group_size, rank)
    assert {launched.kernel.__name__ for launched in launches} == {
        "prepare_kernel", "assign_kernel", "update_kernel", "means_kernel", "encode_ternary_kernel",
        "largest_scale_kernel", "encode_affine_kernel", "decode_ternary_kernel",
        "decode_affine_kernel", "copy_kernel", "copy_pair_kernel",
    }  # fmt: skip
    for launched, compiled, used, label in compiled_rows(launches):
        assert used["STACK"] == 0, label
        if has_dot(launched):
            ptx = compiled.asm["ptx"]
            assert "wgmma.mma_async" in ptx or "mma.sync" in ptx, f"no tensor cores: {label}"
            # Head dim 128 is the large models': there k-means must run on Hopper's own path.
            if dim == 128 and launched.kernel.__name__ in ("assign_kernel", "update_kernel"):
                assert "wgmma.mma_async" in ptx, f"no wgmma: {label}"


@pytest.mark.parametrize(("dim", "group_size", "rank"), [(64, 16, 3), (128, 64, 8), (128, 32, 32)])
def test_fused_attention_compiles(
    launches: list[Launched], dim: int, group_size: int, rank: int
) -> None:
    run_fused(dim, group_size, rank)
    mine = [n for n in launches if n.kernel.__name__ in ("flash_kernel", "quantize_rows_kernel")]
    for launched, compiled, used, label in compiled_rows(mine):
        # All 255 registers are used, and where they are bounded so that two programs share a
        # multiprocessor some values lie on the stack, outside the loop.
        allowed = 512 if launched.arguments.get("maxnreg") else 64
        assert used["STACK"] <= allowed, label
        ptx = compiled.asm["ptx"]
        if has_dot(launched):
            assert "wgmma.mma_async" in ptx, f"no wgmma: {label}"
        if launched.arguments.get("K_KIND") in (1, 2):
            assert "fma.rn.bf16x2" in ptx, f"not two channels an instruction: {label}"


def run_readings(monkeypatch: pytest.MonkeyPatch, dim: int, group: int, rank: int | None) -> None:
    """Keys and values of one span, and of several; rank None: ternary."""
    monkeypatch.setattr(decode_spans, "WORTHWHILE", 1)
    codes, ids = torch.zeros(2, 100, dim // 4).byte(), torch.zeros(2, 100).byte()
    centroids, scales = torch.zeros(2, 256, dim).bfloat16(), torch.zeros(2, 100, dim // group)
    sides = []
    for directions in (rank, rank and 0):
        if directions is None:
            given = codes, ids, centroids, scales.to(torch.float8_e4m3fn), group
            sides.append(decode.prepare_qvg(*given))
            continue
        rows = torch.zeros(2, 100, directions).char(), torch.zeros(2, 100).half()
        correction = (*rows, torch.zeros(2, dim, directions).bfloat16())
        zeros = torch.zeros(2, 25 * dim // group).byte()
        affine = torch.zeros(2, 1).half(), torch.tensor([100], dtype=torch.int32), zeros
        sides.append(decode.prepare_quantwm(
            codes, ids, centroids, scales.byte(), *affine, group,
            *(correction if directions else (None, None, None)), 0,
        ))  # fmt: skip
    keys, values = sides
    outs = (torch.zeros(2, 200, dim).bfloat16(), torch.zeros(2, 200, dim).bfloat16())
    for parts in ([(keys, 0, 0, 100)], [(keys, 0, 0, 100), (keys, 100, 0, 100)]):
        decode_spans.decode_spans((parts, [(values, 0, 0, 100)]), outs)


@pytest.mark.parametrize(
    ("dim", "group_size", "rank"),
    [(128, 64, None), (128, 64, 0), (128, 64, 8), (64, 16, 3), (256, 64, 8), (128, 16, 32)],
)
def test_readings_in_one_launch_compile(
    monkeypatch: pytest.MonkeyPatch, dim: int, group_size: int, rank: int | None
) -> None:
    """16 bytes a load of centroids and a store, though addresses come from a table."""
    launches = record(monkeypatch, decode, decode_pair, decode_spans)
    for long in (1, 1 << 62):
        monkeypatch.setattr(tuning, "LONG_TOKENS", long)
        run_readings(monkeypatch, dim, group_size, rank)
    stem = "ternary" if rank is None else "affine"
    names = [f"{stem}_pair_kernel", f"{stem}_spans_kernel"]
    assert [launched.kernel.__name__ for launched in launches] == names * 2
    for _, compiled, used, label in compiled_rows(launches):
        # Where models are large 12 warps and more share a multiprocessor.
        most = 168 if (dim, group_size) == (128, 64) else 255
        assert used["STACK"] == 0 and used["REG"] <= most, label
        ptx = compiled.asm["ptx"]
        assert re.search(r"ld\.global[.a-z0-9:]*\.v[48]", ptx) and "st.global.v4" in ptx


def test_a_first_reading_compiles_the_row_of_longer_ones_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = tuning.DECODE_PAIR[128]
    monkeypatch.setitem(tuning.DECODE_PAIR_LONG, 128, replace(row, block_n=2 * row.block_n))
    noted: list[tuple[str, int]] = []
    known: set[tuple[object, int]] = set()

    def note(name, kernel, grid, args, constants):
        noted.append((name, constants["BLOCK_N"] // row.block_n))
        first = (kernel, constants["BLOCK_N"]) not in known
        known.add((kernel, constants["BLOCK_N"]))
        return first

    for name in ("launch", "compile_only"):
        monkeypatch.setattr(decode_pair, name, partial(note, name))
    for long in (1 << 62, 1):
        monkeypatch.setattr(tuning, "LONG_TOKENS", long)
        run_readings(monkeypatch, 128, 64, 8)
    one, other = ("launch", 1), ("compile_only", 2)
    assert noted == [one, other, one, other, ("launch", 2), ("launch", 2)]


def test_lengths_are_not_specialised() -> None:
    """What grows with the history never makes a new kernel."""
    growing = {
        "n_tokens", "offset", "start", "stop", "n_chunks", "first_corrected", "n_queries",
        "first_head", "n_rows", "k_tokens", "v_tokens", "k_chunks", "v_chunks", "k_book",
        "v_book",
    }  # fmt: skip
    modules = kmeans, encode, decode, decode_pair, decode_spans, flash
    assert specialised(growing, *modules) == (17, [])

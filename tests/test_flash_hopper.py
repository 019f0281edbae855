"""Warp-specialised fused attention: what its launcher asks for, and that it compiles for sm_90."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
pytest.importorskip(
    "triton.experimental.gluon.language.nvidia.hopper", reason="this Triton has no Gluon for Hopper"
)

from compiling import SHARED_LIMIT, TYPES, cubin_of, resources  # noqa: E402
from sass import listing, unwritten_reads  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from kernels import flash_hopper_tiles as tiles  # noqa: E402
from kernels import fused, fused_hopper  # noqa: E402
from kernels.flash_hopper import flash_hopper_kernel  # noqa: E402
from kernels.format import Side  # noqa: E402

HEADS, TOKENS = 2, 200


def side(kind: str, group: int, rank: int = 0) -> Side:
    scales = torch.zeros(HEADS, TOKENS, 128 // group, dtype=torch.uint8)
    codes, ids = (torch.zeros(HEADS, TOKENS, n, dtype=torch.uint8) for n in (32, 1))
    packed = (codes, ids[:, :, 0].contiguous(), torch.zeros(HEADS, 16, 128).bfloat16(), scales)
    if kind == "ternary":
        return Side("ternary", None, *packed)
    zeros = torch.zeros(HEADS, TOKENS * 128 // group // 4, dtype=torch.uint8)
    affine = Side("affine", None, *packed, torch.zeros(HEADS, 2).half(), (100, TOKENS), zeros)
    if not rank:
        return affine
    rows = torch.zeros(HEADS, TOKENS - 100, rank, dtype=torch.int8)
    basis = torch.zeros(HEADS, 128, rank).bfloat16()
    return affine._replace(
        coefficients=rows, row_scales=rows[:, :, 0].half(), basis=basis, first_corrected=100
    )


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict, dict]]:
    """What launchers ask for, as (arguments, constants); flash_kernel's have no table."""
    noted: list[tuple[dict, dict]] = []

    def note(kernel, grid, args, constants):
        noted.append((dict(zip(kernel.arg_names, args, strict=False)), dict(constants)))

    monkeypatch.setattr(fused_hopper, "kernel_on", lambda device: flash_hopper_kernel)
    monkeypatch.setattr(fused_hopper, "launch", note)
    monkeypatch.setattr(fused, "launch", note)
    return noted


def attend(*segments: tuple[Side, Side, int, int]) -> None:
    fused.fused(torch.zeros(HEADS, 150, 128).bfloat16(), segments, 0.1)


def test_segments_of_one_kind_are_one_launch(launches: list[tuple[dict, dict]]) -> None:
    plain = Side("plain", torch.zeros(HEADS, TOKENS, 128).bfloat16())
    corrected, ternary = side("affine", 64, 8), side("ternary", 64)
    values = side("affine", 64)
    attend(
        (corrected, values, 3, TOKENS),  # before token 100 no key is corrected
        (corrected, values, 150, TOKENS), (plain, plain, 0, 9), (ternary, ternary, 0, 64),
        (side("affine", 64, 6), values, 150, 160), (ternary, ternary, 1, TOKENS),
    )  # fmt: skip
    held = [None if "table_ptr" not in args else args["table_ptr"].tolist() for args, _ in launches]
    assert [t and [row[:2] for row in t] for t in held] == [
        [[3, 100]], [[100, 200], [150, 200]], None, [[0, 64]], None, [[1, 200]]
    ]  # fmt: skip
    assert [c["RANK"] for _, c in launches] == [0, 8, 0, 0, 6, 0]
    assert [(a["is_first"], a["is_last"]) for a, _ in launches] == [
        (1, 0), (0, 0), (0, 0), (0, 0), (0, 0), (0, 1)
    ]  # fmt: skip
    row = held[1][1]
    places = ("TOKENS", "FIRST_CORRECTED", "CHUNK", "CHUNKS", "COEFFICIENTS", "ROW_SCALES", "BASIS")
    given = (corrected.coefficients, corrected.row_scales, corrected.basis)
    assert [row[getattr(tiles, name).value] for name in places] == [
        TOKENS, 100, 1, 2, *(t.data_ptr() for t in given)
    ]  # fmt: skip
    for of, first in ((corrected, tiles.K_SIDE.value), (values, tiles.V_SIDE.value)):
        tensors = (of.codes, of.ids, of.centroids, of.scales, of.secondary, of.zeros)
        assert row[first : first + 7] == [*(t.data_ptr() for t in tensors), 16]
    assert len(row) == tiles.ROW.value


def test_why_flash_kernel_runs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(HEADS, 5, 128).bfloat16()
    assert fused_hopper.unsupported(q) == "compute capability 0.0 is not 9.x"
    monkeypatch.setattr(fused_hopper, "kernel_on", lambda device: flash_hopper_kernel)
    assert fused_hopper.unsupported(q) is None
    keys = [side("affine", 64, 8), side("affine", 64, 6)]
    assert fused_hopper.unsupported(q, keys) == "some keys' rank 6 is no multiple of 4"
    assert fused_hopper.unsupported(q, keys[:1]) is None
    assert "head dim 64" in str(fused_hopper.unsupported(q[:, :, :64]))
    with fused_hopper.switched_off():
        with fused_hopper.switched_off():
            pass
        assert "switched off" in str(fused_hopper.unsupported(q))
    assert fused_hopper.unsupported(q) is None


def compiled(args: dict, constants: dict, tmp_path) -> tuple[object, dict[str, int]]:
    """As tests/compiling.py does, for a Gluon kernel."""
    kernel = flash_hopper_kernel
    fixed = {p.name for p in kernel.params if p.do_not_specialize}
    assert {"n_rows", "n_queries", "is_first", "is_last"} <= fixed  # lengths compile nothing anew
    options = {"num_warps": constants.pop("num_warps")}
    signature, attributes = {}, {}
    for place, (name, value) in enumerate(args.items()):
        wide = isinstance(value, Tensor) or (name not in fixed and isinstance(value, int))
        if wide and (isinstance(value, Tensor) or value % 16 == 0):
            attributes[(place,)] = [["tt.divisibility", 16]]
        number = "fp32" if isinstance(value, float) else "i32"
        signature[name] = TYPES[value.dtype] if isinstance(value, Tensor) else number
    signature |= dict.fromkeys(constants, "constexpr")
    source = GluonASTSource(kernel, signature, constants, attributes)
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return result, resources(result)


@pytest.mark.parametrize(("kind", "rank"), [("ternary", 0), ("affine", 8), ("affine", 32)])
def test_it_compiles(
    launches: list[tuple[dict, dict]], monkeypatch: pytest.MonkeyPatch, tmp_path, kind: str,
    rank: int,
) -> None:  # fmt: skip
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    attend((side(kind, 64, rank), side(kind, 64), 100, TOKENS))
    result, used = compiled(*launches[0], tmp_path)
    sass = listing(cubin_of(result))
    assert not unwritten_reads(sass)
    # Beside the loops, where the first tile of a segment is prepared.
    assert used["STACK"] <= 640 and not used["LOCAL"], used
    assert result.metadata.shared <= SHARED_LIMIT
    ptx = result.asm["ptx"]
    assert "wgmma.mma_async" in ptx and "fma.rn.bf16x2" in ptx
    inner = innermost_loops(sass)
    products = [body for body in inner if any("HGMMA" in line for line in body)]
    # Centroids come 16 bytes at a time, to stay: 8 loads a tile of keys, and of values.
    decoding = [b for b in inner if sum("LDG.E.EL.128" in t for t in b) == 16]
    # Where registers run out, a product waits for the one before: 26 warpgroup instructions for 5.
    free = [b for b in products if len(b) < 400 and sum("WARPGROUP" in t for t in b) < 9]
    assert len(free) == 3 and len(decoding) == 1, [len(body) for body in inner]
    assert not any("STL" in t for b in decoding for t in b), "a byte loaded ahead is stored"


def innermost_loops(sass: str) -> list[list[str]]:
    """Instructions of each loop of more than 100 that has none in it."""
    code, labels = [], {}
    for line in sass.splitlines():
        if label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = len(code)
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            code.append(found[1])
    spans = {}
    for end, text in enumerate(code):
        target = re.search(r"BRA.*`\((\.L\w+)\)", text)
        if target and end - labels[target[1]] > 100:
            spans[labels[target[1]]] = max(end, spans.get(labels[target[1]], 0))
    inner = [
        (a, b) for a, b in spans.items() if not any(a < c and d <= b for c, d in spans.items())
    ]
    return [code[a : b + 1] for a, b in inner]

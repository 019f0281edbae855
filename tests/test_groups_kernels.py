"""Kernels of rtn, kivi and qvg-pro: in the interpreter, compiled for sm_90, behind the formats."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from compiling import Launched, compiled_rows, note, record, specialised
from interpreter import INTERPRETABLE, passes_interpreted

from kernels import decode, encode, groups, kmeans, stages
from quantwm.cache import dispatch, make_format
from quantwm.cache.formats import QueryGuide, kivi, qvg_pro, rtn

OPS = dispatch.TritonOps(kmeans, encode, decode, groups, stages)


@INTERPRETABLE
def test_kernels_in_the_interpreter() -> None:
    passes_interpreted("interpret_groups.py")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launched]:
    return record(monkeypatch, groups, stages)


def run_launchers(dim: int, group_size: int, bits: int, count: int) -> None:
    x = torch.zeros(2, 100, dim, dtype=torch.bfloat16)
    out = torch.zeros(2, 200, dim).bfloat16()
    for target in (out, out.float()):
        packed = groups.encode_token_groups(x, group_size, bits)
        groups.prepare_token_groups(*packed, bits)(target, 0, 0, 100)
        packed = groups.encode_channel_groups(x, group_size, bits)
        lengths = packed[3].clone().fill_(group_size)
        lengths[-1] = 100 - group_size * (len(lengths) - 1)
        decoder = groups.prepare_channel_groups(*packed, lengths.tolist(), bits)
        decoder(target, 0, 0, 100)
        ids, books = torch.zeros(2, 100, count).byte(), torch.zeros(2, count * 256, dim).bfloat16()
        stages.residual(x, ids[..., 0].contiguous(), books[:, :256].contiguous())
        scales = torch.zeros(2, 100, dim // group_size).to(torch.float8_e4m3fn)
        codes = torch.zeros(2, 100, dim // 4, dtype=torch.uint8)
        stages.prepare_stages(codes, ids, books, scales, group_size)(target, 0, 0, 100)


@pytest.mark.parametrize(
    ("dim", "group_size", "bits", "count"),
    [(128, 32, 2, 4), (64, 64, 4, 2), (256, 16, 4, 4), (256, 128, 2, 1), (128, 128, 4, 16)],
)
def test_every_launch_row_compiles(
    launches: list[Launched], dim: int, group_size: int, bits: int, count: int
) -> None:
    run_launchers(dim, group_size, bits, count)
    assert {launched.kernel.__name__ for launched in launches} == {
        "encode_token_groups_kernel", "encode_channel_groups_kernel", "residual_kernel",
        "decode_token_groups_kernel", "decode_channel_groups_kernel", "decode_stages_kernel",
    }  # fmt: skip
    for _, _, used, label in compiled_rows(launches):
        assert used["STACK"] == 0, label


def test_lengths_are_not_specialised() -> None:
    """What grows with the history never makes a new kernel."""
    growing = {"n_tokens", "n_groups", "offset", "start", "stop", "first_head", "first_group"}
    assert specialised(growing, groups, stages) == (6, [])


@pytest.mark.parametrize("name", ["rtn", "kivi", "qvg-pro"])
@pytest.mark.parametrize("role", ["keys", "values"])
def test_formats_launch_kernels(
    name: str, role: Any, launches: list[Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a format launches on a GPU for a chunk: no operation of PyTorch's in between."""
    for module in (rtn, kivi, qvg_pro):
        monkeypatch.setattr(module, "ops_for", lambda device: OPS)
    note(monkeypatch, launches, kmeans, encode)
    fmt = make_format(name)
    x = torch.zeros(2, 100, 128, dtype=torch.bfloat16)
    book = fmt.fit(x, torch.Generator().manual_seed(0), None)
    launches.clear()
    span = fmt.encode(x, book, role, QueryGuide())
    fmt.decode_into(span, torch.zeros(2, 100, 128), 0, 0, 100)
    kind = "channel" if name == "kivi" and role == "keys" else "token"
    assigned = ["prepare_kernel", "assign_kernel"]
    wanted = [f"encode_{kind}_groups_kernel", f"decode_{kind}_groups_kernel"]
    if name == "qvg-pro":
        wanted = [*assigned, "residual_kernel"] * 3 + assigned
        wanted += ["encode_ternary_kernel", "decode_stages_kernel"]
    assert [launched.kernel.__name__ for launched in launches] == wanted

"""The kernels of rtn, kivi and qvg-pro in Triton's interpreter; test_groups_kernels.py runs it.

Not collected by name: TRITON_INTERPRET=1 must be set before triton is imported.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from memory_guard import guarded_launches  # noqa: F401  (a fixture of every test here)
from torch import Tensor

from benchmarks.agreement import Disagreement, make_case
from benchmarks.agreement_groups import agree_channel_groups, agree_groups, agree_token_groups
from benchmarks.guards import guarded_allocations
from kernels import decode, encode, groups, kmeans, stages
from quantwm.cache import reference
from quantwm.cache.dispatch import TritonOps
from quantwm.cache.pack import unpack

OPS = TritonOps(kmeans, encode, decode, groups, stages)

# heads, tokens, head dim, centroids, group size, bits: every head dim, group size, odd lengths
CASES = (
    (2, 75, 128, 20, 32, 2),
    (1, 100, 64, 9, 16, 4),
    (2, 37, 256, 3, 128, 2),
    (3, 1, 64, 1, 64, 4),
    (1, 129, 128, 256, 128, 4),
)


@pytest.mark.parametrize("shape", CASES, ids=str)
def test_agrees_with_the_reference(shape: tuple[int, ...]) -> None:
    *sizes, bits = shape
    with guarded_allocations():
        agree_groups(OPS, make_case(*sizes, 1, "cpu"), bits, truncates=True)


def test_float32_keys() -> None:
    x = make_case(1, 40, 64, 4, 16, 1, "cpu").x.float() + 1e-4
    for name in ("encode_token_groups", "encode_channel_groups"):
        found = [getattr(ops, name)(x, 16, 2) for ops in (groups, reference)]
        for mine, wanted in zip(*found, strict=True):
            assert torch.equal(mine, wanted)


EXTREMES = (3e38, -3e38, 1e-38, -1e-10, 0.0, -0.0, 65504.0, -65520.0, 7e-8, 1.0)


def extremes(swapped: bool) -> Tensor:
    """Groups of one value, of both zeros, below FP16's smallest and beyond its largest number."""
    x = torch.tensor(EXTREMES)[torch.arange(64 * 64) * 7 // 64 % len(EXTREMES)].view(1, 64, 64)
    x[0, :16] = torch.tensor(EXTREMES)[torch.arange(16) % len(EXTREMES)].unsqueeze(-1)
    x[0, 16:32, ::2], x[0, 16:32, 1::2] = 0.0, -0.0
    x[0, 32:40] = torch.tensor([1000.5, 1001.0]).repeat(32)
    return (x.transpose(1, 2) if swapped else x).contiguous().to(torch.bfloat16)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("swapped", [False, True])
def test_numbers_at_the_ends(swapped: bool, bits: int) -> None:
    case = SimpleNamespace(x=extremes(swapped), group_size=16)
    agree_token_groups(OPS, case, bits, truncates=True)
    agree_channel_groups(OPS, case, bits, truncates=True)


@pytest.mark.parametrize("bits", [2, 4])
def test_values_beside_every_tie(bits: int) -> None:
    """The number at half a step, the one before and the one behind it, for many scales."""
    levels, rows = 2**bits, 200
    generator = torch.Generator().manual_seed(bits)
    power = torch.randint(-20, 4, (rows, 1), generator=generator).float().exp2()
    scale = (power * (1 + torch.rand(rows, 1, generator=generator))).half().float()
    ties = (torch.arange(1, levels) - 0.5) * scale
    beside = [torch.nextafter(ties, torch.tensor(end)) for end in (-torch.inf, torch.inf)]
    ends = torch.cat((torch.zeros(rows, 1), (levels - 1) * scale), dim=1)
    x = torch.cat((ends, ties, *beside, ends.repeat(1, 64)), dim=1)[:, :64].unsqueeze(0)
    mine = groups.encode_token_groups(x, 64, bits)
    wanted = reference.encode_token_groups(x, 64, bits)
    assert torch.equal(wanted[1].float(), scale.unsqueeze(0)) and not wanted[2].any()
    assert torch.equal(mine[0], wanted[0])
    exact = torch.floor(x.double() / scale.double() + 0.5).clamp(0, levels - 1)
    assert torch.equal(unpack(mine[0], 64, bits).double(), exact)


def test_a_wrong_kernel_is_noticed() -> None:
    case = make_case(1, 40, 64, 4, 16, 1, "cpu")

    def off(*args: Any) -> Any:
        codes, scales, zeros = reference.encode_token_groups(*args)
        zeros[0, 3, 1] += 0.01
        return codes, scales, zeros

    with pytest.raises(Disagreement, match="zeros"):
        agree_token_groups(SimpleNamespace(encode_token_groups=off), case, 2)


def test_launchers_refuse_what_they_do_not_cover() -> None:
    x = torch.zeros(1, 8, 64)
    with pytest.raises(ValueError, match="group size 24"):
        groups.encode_channel_groups(x, 24, 2)
    with pytest.raises(ValueError, match="codes of 3 bits"):
        groups.encode_token_groups(x, 16, 3)
    codes, scales, zeros, stops = groups.encode_channel_groups(x, 16, 2)
    with pytest.raises(ValueError, match="1 groups do not hold 8 tokens"):
        groups.prepare_channel_groups(codes, scales, zeros, stops, (7,), 2)
    decoder = groups.prepare_channel_groups(codes, scales, zeros, stops, (8,), 2)
    with pytest.raises(ValueError, match=r"0\.\.8 of 8 do not fit"):
        decoder(torch.empty(1, 6, 64), 0, 0, 8)
    ids, books = torch.zeros(1, 8, 3, dtype=torch.uint8), torch.zeros(1, 8, 64).bfloat16()
    with pytest.raises(ValueError, match="8 centroids are not 3 stages"):
        stages.prepare_stages(codes, ids, books, torch.zeros(1, 8, 4).to(torch.float8_e4m3fn), 16)


def test_what_is_not_covered_runs_on_the_reference_and_is_named() -> None:
    ops = TritonOps(kmeans, encode, decode, groups, stages)
    agree_groups(ops, make_case(1, 20, 48, 4, 24, 1, "cpu"), 2, truncates=True)
    ops.encode_token_groups(torch.zeros(1, 4, 64).half(), 16, 2)
    assert ops.fallbacks == [
        "head dim 48 is not one of (64, 128, 256)",
        "keys and values are torch.float16, the kernels take bfloat16",
    ]

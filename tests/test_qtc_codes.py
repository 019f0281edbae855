"""Parts of qtc: levels, code words, codes without a basis, gains, statistics."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from qtc_helpers import CPU, positive_definite, randn
from torch import Tensor

from quantwm.cache.formats import (
    qtc_fallback,
    qtc_gain,
    qtc_levels,
    qtc_planes,
    qtc_statistics,
)
from quantwm.cache.formats.qtc_tokens import Tokens
from quantwm.cache.positions import TokenPositions

# Levels.


def test_the_table_is_what_its_generator_gives() -> None:
    from pathlib import Path

    assert qtc_levels.source_text() in Path(qtc_levels.__file__).read_text()


@pytest.mark.parametrize("bits", range(1, 7))
def test_levels_are_optimal_for_a_gaussian(bits: int) -> None:
    """Numerical integration: the distortion is as stated, and moving a level raises it."""
    x = torch.linspace(-9, 9, 400_001, dtype=torch.float64)
    density = torch.exp(-x * x / 2) / math.sqrt(2 * math.pi) * (x[1] - x[0])

    def error(levels: Tensor) -> float:
        codes = torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)
        return float(((x - levels[codes]).square() * density).sum())

    levels = qtc_levels.table(CPU)[2**bits : 2 ** (bits + 1)].double()
    best = error(levels)
    assert best == pytest.approx(qtc_levels.DISTORTIONS[bits], rel=2e-4)
    for place in (0, len(levels) // 2):
        for step in (-0.01, 0.01):
            moved = levels.clone()
            moved[place] += step
            assert error(moved) > best


@pytest.mark.parametrize("bits", range(1, 7))
def test_codes_name_the_nearest_level(bits: int) -> None:
    x = 2 * randn(500, seed=bits)
    levels = qtc_levels.table(CPU)[2**bits : 2 ** (bits + 1)]
    nearest = (x[:, None] - levels).abs().argmin(1)
    assert torch.equal(qtc_levels.quantize(x, bits).long(), nearest)


def test_look_up_of_pairs_is_the_table() -> None:
    places = torch.arange(128, dtype=torch.uint8).view(8, 16)
    expected = qtc_levels.table(CPU)[places.long()]
    assert torch.equal(qtc_levels.look_up(places), expected)
    assert torch.equal(qtc_levels.look_up(places.flip(1)), expected.flip(1))


# Code words.


@given(
    widths=st.lists(st.integers(0, 6), min_size=1, max_size=8),
    tokens=st.integers(0, 5),
    seed=st.integers(0, 9),
)
def test_unpacking_undoes_packing(widths: list[int], tokens: int, seed: int) -> None:
    ordered = tuple(sorted(widths, reverse=True))
    generator = torch.Generator().manual_seed(seed)
    codes = torch.cat(
        [torch.randint(0, 2**w, (tokens, 16), generator=generator) for w in ordered], dim=1
    ).to(torch.uint8)
    packed = qtc_planes.pack(codes, ordered)
    assert packed.shape == (tokens, 2 * sum(ordered))
    coded = 16 * qtc_planes.coded_blocks(ordered)
    assert torch.equal(qtc_planes.unpack(packed, ordered), codes[:, :coded])
    places = torch.tensor([2**w for w in ordered if w], dtype=torch.uint8).repeat_interleave(16)
    assert torch.equal(qtc_planes.unpack(packed, ordered, first=1), codes[:, :coded] + places)


def test_a_channel_s_bits_lie_where_the_layout_says() -> None:
    codes = torch.zeros(1, 32, dtype=torch.uint8)
    codes[0, 9], codes[0, 16] = 0b110, 0b1
    packed = qtc_planes.pack(codes, (3, 1))
    # Digit 0 of block 0 (channel 9 in bits 2 and 3 of the third byte), then the odd bits: of block
    # 0 (channel 9 in bit 1 of the second byte) and of block 1 (channel 0 of it).
    assert packed.tolist() == [[0, 0, 0b1000, 0, 0, 0b10, 1, 0]]


def test_the_kernel_s_quantizer_is_the_quantizer() -> None:
    """One look-up by cell against the search, beside borders and far out."""
    table = qtc_levels.cell_table(CPU)
    for bits in range(1, 7):
        edges = qtc_levels.borders(bits, CPU)
        x = torch.cat((edges + 1e-4, edges - 1e-4, 3 * randn(500), torch.tensor([50.0])))
        size, half = x.abs(), 2 ** (bits - 1)
        cell = (size.clamp(max=4.0) * 16).int().clamp(max=qtc_levels.CELLS - 1).long()
        word = table[bits, cell]
        level = (word & 31) + (size > word.view(torch.float32))
        code = torch.where(x > 0, half + level, half - 1 - level)
        assert torch.equal(code, qtc_levels.quantize(x, bits).int())


def test_pairs_of_levels_are_the_levels() -> None:
    """A pair's code is what lies in the words; both levels are the table's, in BF16."""
    pairs = qtc_levels.pair_levels(CPU).view(torch.bfloat16).view(-1, 2)
    assert len(pairs) == (4**7 - 1) // 3
    levels = qtc_levels.table(CPU).bfloat16()
    for width, (first, second) in ((1, (1, 0)), (2, (3, 1)), (5, (0b10110, 0b01101))):
        code = 0
        for digit in range(width // 2):
            both = (first >> 2 * digit & 3) | (second >> 2 * digit & 3) << 2
            code |= both << 4 * digit
        if width % 2:
            code |= (first >> width - 1 | (second >> width - 1) << 1) << 4 * (width // 2)
        found = pairs[(4**width - 1) // 3 + code]
        assert found.tolist() == levels[[2**width + first, 2**width + second]].tolist()


# Fallback.


@pytest.mark.parametrize("head_dim", [16, 48, 96, 128])
def test_the_rotation_is_orthogonal(head_dim: int) -> None:
    turn = qtc_fallback.rotation(head_dim, CPU)
    torch.testing.assert_close(turn @ turn.T, torch.eye(head_dim), atol=1e-5, rtol=0)


def test_feedback_costs_less_than_rounding() -> None:
    """LDLQ and the descent lower the cost in the metric; the descent never raises it."""
    metric = positive_definite(7).float()
    z = randn(2, 200, 32, seed=2)
    plain = qtc_fallback.level(qtc_levels.quantize(z, 2), 2) - z
    codes, error = qtc_fallback._ldlq(z, metric, 2)
    descended = qtc_fallback._descend(z, metric, codes, error.clone(), 2)
    descended = qtc_fallback.level(descended, 2) - z
    costs = [((e @ metric) * e).sum(-1) for e in (plain, error, descended)]
    assert float(costs[1].mean()) < 0.7 * float(costs[0].mean())
    assert bool((costs[2] <= costs[1] * (1 + 1e-4) + 1e-4).all())


# Gains, means, statistics.


def test_gains_are_within_half_a_step() -> None:
    wanted = torch.logspace(-8, 8, 200)
    found = qtc_gain.gains(qtc_gain.gain_codes(wanted).to(torch.uint8))
    assert float((found / wanted).log2().abs().max()) <= 0.5 / qtc_gain.STEPS + 1e-4
    assert qtc_gain.gains(qtc_gain.gain_codes(torch.zeros(1))).item() == 0


def test_means_are_within_half_a_step() -> None:
    mean, about = randn(2, 16), randn(2, 16, seed=1)
    codes, scale = qtc_gain.mean_codes(mean, about)
    off = (qtc_gain.decoded_means(codes, scale, about)[:, 0] - mean).abs()
    assert bool((off <= 0.51 * scale.float()).all())


def _tokens(x: Tensor) -> Tokens:
    return Tokens(x, None, TokenPositions(0, x.shape[1]))


@pytest.mark.parametrize("count", [3, 24, 192])
def test_one_broken_token_does_not_own_mean_and_covariance(count: int) -> None:
    x = randn(1, count, 16)
    clean = qtc_statistics.Moments.empty(CPU).with_chunk(_tokens(x))
    x[0, count // 2] = 1e6
    broken = qtc_statistics.Moments.empty(CPU).with_chunk(_tokens(x))
    assert float((broken.mean - clean.mean).norm()) < 0.5 + 40 / count
    size = [
        count * float(m.scatter.matrix().diagonal(dim1=1, dim2=2).sum()) for m in (clean, broken)
    ]
    assert size[1] < 1.5 * size[0] + 1000 / count


def test_the_mean_is_the_mean_where_nothing_stands_out() -> None:
    x = randn(2, 50, 16) + 3
    mean, weights = _tokens(x).centre()
    torch.testing.assert_close(mean, x.mean(1))
    assert torch.equal(weights, torch.ones(2, 50))


def test_moments_of_chunks_are_those_within_chunks() -> None:
    first, second = randn(2, 30, 16), randn(2, 20, 16, seed=1) + 3
    found = qtc_statistics.Moments.empty(CPU).with_chunk(_tokens(first))
    found = found.with_chunk(_tokens(second))
    expected = sum(
        (x - x.mean(1, keepdim=True)).mT @ (x - x.mean(1, keepdim=True)) for x in (first, second)
    )
    torch.testing.assert_close(50 * found.scatter.matrix(), expected, atol=4e-3, rtol=1e-4)
    torch.testing.assert_close(
        found.mean, torch.cat((first, second), 1).mean(1), atol=1e-5, rtol=1e-4
    )
    assert found.count == 50

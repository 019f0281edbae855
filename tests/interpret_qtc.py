"""qtc's kernels in Triton's interpreter against the PyTorch code; test_qtc_kernels.py runs it.

Not collected by name: TRITON_INTERPRET=1 must be set before triton is imported.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from memory_guard import guarded_launches  # noqa: F401  (a fixture of every test here)
from torch import Tensor

from kernels import qtc_decode, qtc_encode, qtc_moments, qtc_tile
from quantwm.cache.dispatch import QtcKernels
from quantwm.cache.formats import qtc_basis, qtc_lesson, qtc_ready, qtc_span, qtc_tokens
from quantwm.cache.formats.base import QueryGuide
from quantwm.cache.formats.qtc import QtcConfig, QtcFormat
from quantwm.cache.formats.qtc_correlations import Correlations
from quantwm.cache.formats.qtc_lesson import LearnedGuide, Lesson, SlotGuide, slot_metric
from quantwm.cache.formats.qtc_span import QtcSpan
from quantwm.cache.formats.qtc_statistics import QueryMoment, SlotStatistics
from quantwm.cache.formats.qtc_tokens import Projection, Tokens
from quantwm.cache.positions import TokenPositions
from quantwm.cache.spec import RopeLayout

CPU = torch.device("cpu")
KERNELS = QtcKernels(qtc_encode, qtc_decode, qtc_moments, qtc_tile.Turning)
LAYOUTS = {
    64: RopeLayout((20, 20, 20), (3, 5)),  # 4 channels behind the split
    128: RopeLayout((44, 42, 42), (2, 7)),
}


def _randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _spd(heads: int, size: int, seed: int) -> Tensor:
    turn = torch.linalg.qr(_randn(heads, size, size, seed=seed, dtype=torch.float64))[0]
    return turn @ torch.diag(torch.logspace(1, -2, size, dtype=torch.float64)) @ turn.mT


def _positions(tokens: int, first: int, gaps: bool) -> TokenPositions:
    if not gaps:
        return TokenPositions(first, tokens)
    places = first + torch.arange(2 * tokens)[torch.arange(2 * tokens) % 3 != 1][:tokens]
    return TokenPositions(first, tokens, places.int())


class Case:
    """Tokens, a basis for them, and what encoding needs."""

    def __init__(self, heads: int, tokens: int, dim: int, bits: float, rows: float) -> None:
        self.format = QtcFormat(QtcConfig(key_bits=bits, key_rows=rows))
        cov, self.metric = _spd(heads, dim, 1), _spd(heads, dim, 2)
        mean = _randn(heads, dim, seed=3)
        kept, budget = self.format._rows("keys", dim), self.format._budget("keys", dim)
        self.basis, _ = qtc_basis.fit_basis(cov, self.metric, mean, budget, kept, 6)
        root = torch.linalg.cholesky(cov).mT.float()
        self.x = (mean[:, None] + _randn(heads, tokens, dim) @ root).to(torch.bfloat16)
        self.x[0, tokens // 2] *= 50
        self.x[-1, 0] = 0


def with_kernels(monkeypatch: pytest.MonkeyPatch, on: bool) -> None:
    for module in (qtc_tokens, qtc_span):
        monkeypatch.setattr(module, "qtc_kernels", lambda *_: KERNELS if on else None)


# heads, tokens, head dim, bits, rows: 1 to 8 blocks, both head dims, odd lengths
CASES = (
    (2, 75, 128, 2.0, 0.75),
    (1, 33, 128, 1.375, 0.625),
    (1, 70, 128, 2.75, 0.875),
    (2, 40, 64, 1.5, 0.25),
    (1, 1, 64, 1.0, 0.5),
    (1, 20, 128, 2.0, 1.0),
)


@pytest.mark.parametrize("shape", CASES, ids=str)
def test_codes_are_the_reference_s(monkeypatch: pytest.MonkeyPatch, shape: tuple[Any, ...]) -> None:
    """Bit for bit without rotation; with it but for ties, as the angles round otherwise."""
    case = Case(*shape)
    for layout in (None, LAYOUTS[shape[2]]):
        positions = _positions(case.x.shape[1], 60, gaps=layout is not None)
        mean = case.basis.mean.float()
        found = []
        for on in (False, True):
            with_kernels(monkeypatch, on)
            tokens = Tokens.of(case.x, layout, positions)
            found.append(tokens.encoded(mean, case.basis, case.metric, 2))
        differ = [int((a != b).sum()) for a, b in zip(*found, strict=True)]
        assert differ == [0, 0] if layout is None else max(differ) <= case.x.shape[1] // 20


@pytest.mark.parametrize("shape", CASES, ids=str)
@pytest.mark.parametrize("layout", ["none", "run", "gaps"])
def test_decoding_is_the_reference_s_to_rounding(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[Any, ...], layout: str
) -> None:
    case = Case(*shape)
    dim, tokens = shape[2], case.x.shape[1]
    rope = None if layout == "none" else LAYOUTS[dim]
    with_kernels(monkeypatch, False)
    positions = _positions(tokens, 10**6, gaps=layout == "gaps")
    span = QtcFormat(case.format.config).encode(case.x, None, "keys", _guide(case, rope, positions))
    span = QtcFormat().join(span, _later(case, span))
    found = []
    for on in (False, True):
        with_kernels(monkeypatch, on)
        own = replace(span)
        out = torch.zeros(shape[0], 2 * tokens + 3, dim)
        own.decode(out, 2, 1, 2 * tokens - 1)
        found.append(out)
        assert not out[:, :2].any() and not out[:, 2 * tokens :].any()
        one = torch.zeros(1, 2 * tokens, dim)
        own.decode(one, 0, 0, 2 * tokens, shape[0] - 1)
        torch.testing.assert_close(one[0, 1 : 2 * tokens - 1], out[-1, 2 : 2 * tokens])
    # Levels are BF16 in the kernel: 2**-9 of each channel's share.
    error = (found[1] - found[0]).norm(dim=-1)
    assert bool((error <= 0.004 * found[0].norm(dim=-1) + 1e-4).all())


@pytest.mark.parametrize(("dim", "rows"), [(128, 0.375), (128, 0.875), (64, 0.5)])
def test_chunks_of_any_length_in_one_launch(
    monkeypatch: pytest.MonkeyPatch, dim: int, rows: float
) -> None:
    """Borders inside a program's tokens and steps, more tokens than a program has, and tails."""
    case, span, first = Case(2, 341, dim, 1.5, rows), None, 0
    with_kernels(monkeypatch, False)
    for tokens in (1, 15, 17, 64, 128, 2, 114):
        positions = TokenPositions(10 + first, tokens)
        x = case.x[:, first : first + tokens]
        guide = _guide(case, LAYOUTS[dim], positions)
        chunk = case.format.encode(x.contiguous(), None, "keys", guide)
        span = chunk if span is None else QtcFormat().join(span, chunk)
        first += tokens
    plain = torch.zeros(2, first, dim)
    span.decode(plain, 0, 0, first)
    with_kernels(monkeypatch, True)
    own, out = replace(span), torch.zeros(2, first, dim)
    own.decode(out, 0, 0, first)
    error = (out - plain).norm(dim=-1)
    assert bool((error <= 0.004 * plain.norm(dim=-1) + 1e-4).all())
    for start, stop in ((0, 1), (1, 16), (15, 17), (16, 33), (97, 341), (225, 228)):
        part = torch.full((2, stop - start + 2, dim), 7.0)
        own.decode(part, 1, start, stop)
        torch.testing.assert_close(part[:, 1:-1], out[:, start:stop])
        assert bool((part[:, [0, -1]] == 7).all())


def _guide(case: Case, rope: RopeLayout | None, positions: TokenPositions) -> QueryGuide:
    queries = SlotStatistics.empty(CPU).queries
    learned = SlotGuide(rope, positions, queries, 8, case.basis, case.basis, 1)
    return QueryGuide(learned=learned)


def _later(case: Case, span: QtcSpan) -> QtcSpan:
    """The next chunk of the same span."""
    positions = span.positions
    if positions is not None:
        positions = TokenPositions(positions.tensor(0, positions.count)[-1].item() + 4, span.tokens)
    guide = _guide(case, span.rope, positions or TokenPositions(span.tokens, span.tokens))
    return case.format.encode((case.x.float() - 1).bfloat16(), None, "keys", guide)


def test_codes_without_a_basis(monkeypatch: pytest.MonkeyPatch) -> None:
    x = _randn(2, 50, 64).bfloat16()
    spans, outs = [], []
    for on in (False, True):
        with_kernels(monkeypatch, on)
        span = QtcFormat().encode(x, None, "keys", QueryGuide())
        out = torch.zeros(2, 50, 64)
        span.decode(out, 0, 0, 50)
        spans.append(span)
        outs.append(out)
    assert torch.equal(spans[0].codes, spans[1].codes)
    assert torch.equal(spans[0].gains, spans[1].gains)
    torch.testing.assert_close(outs[0], outs[1], atol=0.01, rtol=0.01)


@pytest.mark.parametrize(("dim", "tokens", "step"), [(64, 3, 1), (64, 100, 1), (128, 149, 3)])
def test_means_weights_and_moments(
    monkeypatch: pytest.MonkeyPatch, dim: int, tokens: int, step: int
) -> None:
    x = _randn(2, tokens, dim).bfloat16()
    x[1, tokens // 2 // step * step] = 1e4
    about = _randn(2, dim, seed=1)
    found = []
    for gaps in (False, True):
        for on in (False, True):
            with_kernels(monkeypatch, on)
            seen = Tokens.of(x, LAYOUTS[dim], _positions(tokens, 5, gaps)).every(step)
            centre, weights = seen.centre()
            moments = seen.second_moment(centre, weights), seen.second_moment()
            found.append((centre, weights, *moments, *seen.coded_mean(about)))
        for plain, own in zip(*found[-2:], strict=True):
            assert plain.dtype == own.dtype
            size = 2e-4 * float(plain.abs().max()) if plain.is_floating_point() else 1.0
            torch.testing.assert_close(own, plain, atol=size, rtol=1e-4)
    assert float(found[0][1].min()) < 0.01 or tokens < 4


def test_what_a_run_of_layers_is_encoded_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metric and projection of some layers together are those of each by itself."""
    monkeypatch.setattr(qtc_ready, "HEADS", 4)
    monkeypatch.setattr(qtc_lesson, "qtc_kernels", lambda *_: KERNELS)
    cases = [Case(2, 8, 64, 2.0, 0.5) for _ in range(3)]
    queries = [_randn(2, 90, 64, seed=seed) for seed in range(3)]
    moments = tuple(QueryMoment(Correlations.of(q.mT @ q), 90) for q in queries)
    bases = tuple(case.basis for case in cases)
    lesson = Lesson(1, bases, bases, 90, ())
    guide = LearnedGuide(LAYOUTS[64], TokenPositions(0, 8), moments, 8, lesson)
    held = len(guide.tensors())
    for slot in (0, 1, 2, 0):
        known = guide.of_slot(slot)
        alone = slot_metric(moments[slot], LAYOUTS[64], 8)
        torch.testing.assert_close(known.metric(), alone.float(), atol=1e-5, rtol=1e-4)
        for role, metric in (("keys", alone), ("values", None)):
            expected = Projection.of(KERNELS, bases[slot], metric)
            found = known.projection(role)
            scale = float(expected.high.abs().max())
            torch.testing.assert_close(found.high, expected.high, atol=1e-4 * scale, rtol=1e-4)
            torch.testing.assert_close(found.costs, expected.costs, atol=1e-4, rtol=1e-4)
    assert len(guide.tensors()) == held + 7
    guide.forget()
    assert len(guide.tensors()) == held


def test_launchers_refuse_what_they_do_not_cover() -> None:
    x, none = torch.zeros(1, 8, 48), qtc_tile.Turning()
    with pytest.raises(ValueError, match="head dim 48"):
        qtc_moments.centre(x, none, 1, 16.0)
    x = torch.zeros(1, 8, 64)
    with pytest.raises(ValueError, match="phases must be"):
        turned = qtc_tile.Turning(torch.zeros(2, 30, dtype=torch.int32))
        qtc_moments.centre(x, turned, 1, 16.0)
    with pytest.raises(ValueError, match="groups of 3"):
        qtc_moments.centre(x, none, 3, 16.0)
    with pytest.raises(ValueError, match="together"):
        qtc_moments.second_moment(x, none, torch.zeros(1, 64), None)

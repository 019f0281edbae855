"""Formats: encode, join, select, settle, decode; settings; bytes against the published ratios."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quantwm.cache.formats import FORMATS, QueryGuide, make_format
from quantwm.cache.formats.base import Codebook, Format
from quantwm.errors import UserError

HEADS, CHANNELS = 2, 32
SETTINGS: dict[str, dict[str, object]] = {
    "bf16": {},
    "rtn": {"group_size": 16},
    "kivi": {"group_size": 16},
    "qvg": {"centroids": 8, "group_size": 16},
    "qvg-pro": {"stages": 3, "centroids": 8, "group_size": 16},
    "quantwm": {"centroids": 8, "group_size": 16, "rank": 4},
    "qtc": {},
}
BUDGET = {
    "bf16": 0.0, "rtn": 0.16, "kivi": 0.16, "qvg": 0.55, "qvg-pro": 0.4, "quantwm": 0.22,
    "qtc": 0.14,
}  # fmt: skip
"""Relative squared error of Gaussian data with 8 centroids; a bound per format, not a result."""


def _data(seed: int, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(HEADS, tokens, CHANNELS, generator=generator).to(torch.bfloat16)


def _guide(rank: int = 4) -> QueryGuide:
    generator = torch.Generator().manual_seed(99)
    basis = torch.linalg.qr(torch.randn(HEADS, CHANNELS, rank, generator=generator))[0]
    weights = torch.rand(HEADS, CHANNELS, generator=generator) + 0.5
    values = torch.arange(rank, 0, -1).float().expand(HEADS, rank)
    return QueryGuide(weights, basis.to(torch.bfloat16), values.contiguous())


def _encode(fmt: Format[Any], x: Tensor, book: Codebook | None, guided: bool = True) -> Any:
    return fmt.encode(x, book, "keys", _guide() if guided else QueryGuide())


def _decode(fmt: Format[Any], span: Any, start: int = 0, stop: int | None = None) -> Tensor:
    stop = fmt.tokens(span) if stop is None else stop
    out = torch.full((HEADS, stop - start + 5, CHANNELS), torch.nan)
    fmt.decode_into(span, out, 2, start, stop)
    assert bool(out[:, :2].isnan().all()) and bool(out[:, stop - start + 2 :].isnan().all())
    return out[:, 2 : stop - start + 2]


def _fitted(name: str, **more: object) -> tuple[Format[Any], Codebook | None]:
    fmt = make_format(name, **{**SETTINGS[name], **more})
    return fmt, fmt.fit(_data(0, 20), torch.Generator().manual_seed(0), None)


@pytest.mark.parametrize("name", FORMATS)
def test_decoding_is_within_the_format_s_budget(name: str) -> None:
    fmt, book = _fitted(name)
    x = _data(1, 50)
    decoded = _decode(fmt, _encode(fmt, x, book))
    error = (decoded - x.float()).square().sum() / x.float().square().sum()
    assert not float(error) > BUDGET[name]


@pytest.mark.parametrize("name", FORMATS)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    unguided=st.integers(0, 2),
    data=st.data(),
)
def test_joined_chunks_decode_as_they_did_alone(
    name: str, sizes: list[int], unguided: int, data: st.DataObject
) -> None:
    """Nothing is quantized again, wherever byte borders fall and wherever a read begins."""
    fmt, book = _fitted(name)
    chunks = [
        _encode(fmt, _data(7 + i, size), book, guided=i >= unguided) for i, size in enumerate(sizes)
    ]
    alone = torch.cat([_decode(fmt, chunk) for chunk in chunks], dim=1)
    span = chunks[0]
    for chunk in chunks[1:]:
        span = fmt.settle([fmt.join(span, chunk)])[0]
    assert fmt.tokens(span) == sum(sizes)
    torch.testing.assert_close(_decode(fmt, span), alone, atol=1e-5, rtol=1e-5)
    start = data.draw(st.integers(0, sum(sizes) - 1))
    stop = data.draw(st.integers(start + 1, sum(sizes)))
    torch.testing.assert_close(
        _decode(fmt, span, start, stop), alone[:, start:stop], atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("name", FORMATS)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    unguided=st.integers(0, 1),
    data=st.data(),
)
def test_select_keeps_the_tokens_and_nothing_else(
    name: str, sizes: list[int], unguided: int, data: st.DataObject
) -> None:
    fmt, book = _fitted(name)
    total = sum(sizes)
    span = _encode(fmt, _data(7, sizes[0]), book, guided=unguided == 0)
    for i, size in enumerate(sizes[1:]):
        span = fmt.join(span, _encode(fmt, _data(8 + i, size), book))
    if data.draw(st.booleans()):
        start = data.draw(st.integers(0, total - 1))
        keep: slice | Tensor = slice(start, data.draw(st.integers(start + 1, total)))
        positions = torch.arange(total)[keep]
    else:
        mask = data.draw(st.lists(st.booleans(), min_size=total, max_size=total))
        mask[data.draw(st.integers(0, total - 1))] = True
        keep = positions = torch.tensor(mask).nonzero().flatten()
    kept = fmt.select(span, keep)
    torch.testing.assert_close(
        _decode(fmt, kept), _decode(fmt, span)[:, positions], atol=1e-5, rtol=1e-5
    )
    if name == "quantwm":
        assert kept.scales.shape[1] == len(positions) == sum(kept.chunk_tokens)
        assert kept.chunk_stops.tolist() == torch.tensor(kept.chunk_tokens).cumsum(0).tolist()
    for tensors in fmt.parts(kept).values():
        for tensor in tensors:
            if not any(tensor is shared for shared in (book and book.centroids,)):
                assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("name", ["qvg", "quantwm"])
@pytest.mark.parametrize("sizes", [(16, 32), (7, 9)])
@pytest.mark.parametrize("unguided", [0, 1])
def test_many_spans_at_once_are_what_each_is_alone(
    name: str, sizes: tuple[int, int], unguided: int
) -> None:
    fmt, book = _fitted(name)
    firsts, seconds = (
        [_encode(fmt, _data(i + 10 * n, size), book, guided=n >= unguided) for i in range(3)]
        for n, size in enumerate(sizes)
    )
    joined = fmt.join_all(firsts, seconds)
    _same_spans(fmt, joined, list(map(fmt.join, firsts, seconds)))
    for start, stop in ((0, 12), (4, 16), (3, sum(sizes))):
        cut = fmt.cut_all(joined, start, stop)
        _same_spans(fmt, cut, [fmt.select(span, torch.arange(start, stop)) for span in joined])


def _same_spans(fmt: Format, some: list[object], others: list[object]) -> None:
    for one, other in zip(some, others, strict=True):
        mine, wanted = fmt.parts(one), fmt.parts(other)
        assert mine.keys() == wanted.keys()
        for part in mine:
            for a, b in zip(mine[part], wanted[part], strict=True):
                assert torch.equal(a.float(), b.float()), part
        torch.testing.assert_close(_decode(fmt, one), _decode(fmt, other))


@pytest.mark.parametrize("name", FORMATS)
def test_encoding_is_equivariant_under_head_permutation(name: str) -> None:
    fmt, book = _fitted(name, **({"psac": False, "qsac": False} if name == "quantwm" else {}))
    x = _data(3, 17)
    swapped = None if book is None else Codebook(book.centroids[[1, 0]].contiguous())
    moved = fmt.encode(x[[1, 0]].contiguous(), swapped, "keys", QueryGuide())
    assert torch.equal(_decode(fmt, moved), _decode(fmt, _encode(fmt, x, book))[[1, 0]])


@pytest.mark.parametrize("name", ["qvg", "quantwm"])
def test_tokens_on_their_centroid_come_back_exactly(name: str) -> None:
    fmt, book = _fitted(name)
    assert book is not None
    span = _encode(fmt, book.centroids, book, guided=False)
    assert torch.equal(_decode(fmt, span), book.centroids.float())


@pytest.mark.parametrize("name", ["qvg", "quantwm"])
def test_all_zero_input_gives_zeros(name: str) -> None:
    fmt = make_format(name, **SETTINGS[name])
    x = torch.zeros(HEADS, 9, CHANNELS, dtype=torch.bfloat16)
    book = fmt.fit(x, torch.Generator().manual_seed(0), None)
    assert not _decode(fmt, _encode(fmt, x, book)).any()


def test_values_get_neither_qsac_nor_psac() -> None:
    fmt, book = _fitted("quantwm")
    x = _data(5, 30)
    guided = fmt.encode(x, book, "values", _guide())
    plain = fmt.encode(x, book, "values", QueryGuide())
    assert guided.correction is None
    assert torch.equal(guided.ids, plain.ids) and torch.equal(guided.codes, plain.codes)


def test_psac_lowers_the_error_along_the_queries() -> None:
    fmt, book = _fitted("quantwm")
    off, _ = _fitted("quantwm", psac=False)
    x, guide = _data(5, 200), _guide()
    errors = [
        (_decode(f, f.encode(x, book, "keys", guide)) - x.float()) @ guide.basis.float()
        for f in (off, fmt)
    ]
    assert errors[1].square().sum() < 0.01 * errors[0].square().sum()


def test_the_gate_zeroes_rows_that_would_not_help() -> None:
    """All weight on a direction in which the error is nil: rounding can only add to it."""
    fmt, book = _fitted("quantwm", qsac=False)
    x = _data(5, 40)
    error = x.float() - _decode(fmt, fmt.encode(x, book, "keys", QueryGuide()))
    basis = torch.linalg.svd(error)[2].transpose(1, 2)[..., [31, 0]]
    narrow = replace(
        _guide(2), basis=basis.to(torch.bfloat16), eigenvalues=torch.tensor([[1.0, 0.0]] * HEADS)
    )
    zero = replace(narrow, eigenvalues=torch.zeros(HEADS, 2))
    assert not fmt.encode(x, book, "keys", zero).correction.row_scales.any()
    rows = fmt.encode(x, book, "keys", narrow).correction
    refused = rows.row_scales == 0
    assert bool(refused.any()) and not rows.coefficients[refused].any()
    exact = error @ basis.to(torch.bfloat16).float()
    stored = rows.coefficients.float() * rows.row_scales.float().unsqueeze(-1)
    before, after = exact[..., 0].square(), (exact - stored)[..., 0].square()
    assert bool((after <= before * (1 + 1e-3) + 1e-9).all())


def test_a_sparse_span_decodes_like_the_dense_one() -> None:
    fmt, book = _fitted("quantwm")
    span = _encode(fmt, _data(5, 21), book)
    gate = (torch.arange(21) % 4 == 0).expand(HEADS, 21)
    rows = replace(
        span.correction,
        coefficients=span.correction.coefficients * gate.unsqueeze(-1),
        row_scales=span.correction.row_scales * gate,
    )
    dense = replace(span, correction=rows)
    sparse = fmt.settle([dense])[0]
    assert sparse.correction.mask is not None
    assert torch.equal(_decode(fmt, sparse), _decode(fmt, dense))
    assert fmt.nominal_bytes(sparse) == fmt.nominal_bytes(dense)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"centroids": 257}, "centroids must be 1 to 256, got 257"),
        ({"centroids": 0}, "centroids must be 1 to 256"),
        ({"group_size": 6}, "multiple of 4"),
        ({"candidates": 0}, "candidates must be at least 1"),
        ({"rank": 0}, "rank must be at least 1"),
        ({"clip": 0.0}, "clip must be above 0"),
        ({"clip": 1.5}, "clip must be above 0"),
        ({"iterations": 10**9}, "iterations must be 0 to 1,000"),
        ({"ranks": 8}, "has no setting 'ranks'"),
        ({"rank": 2.5}, "rank must be int"),
        ({"qsac": 1}, "qsac must be bool"),
        ({"preset": "mine"}, "unknown quantwm preset"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        make_format("quantwm", **settings)


@pytest.mark.parametrize(
    ("name", "settings", "head_dim", "says"),
    [
        ("qvg", {"group_size": 48}, 128, "group_size 48 does not divide head_dim 128"),
        ("quantwm", {"rank": 65}, 64, "rank 65 is above head_dim 64"),
    ],
)
def test_settings_must_suit_the_head(
    name: str, settings: dict[str, object], head_dim: int, says: str
) -> None:
    with pytest.raises(UserError, match=says):
        make_format(name, **settings).check(head_dim)


def test_unknown_format_names_the_known_ones() -> None:
    with pytest.raises(UserError, match=f"format 'kv'; there are: {', '.join(FORMATS)}"):
        make_format("kv")


def test_presets_can_be_changed() -> None:
    fmt = make_format("quantwm", preset="embedded", rank=2)
    assert (fmt.config.centroids, fmt.config.rank, fmt.rank) == (64, 2, 2)


@pytest.mark.parametrize("name", FORMATS)
def test_planned_bytes_are_the_bytes_of_a_real_span(name: str) -> None:
    fmt, book = _fitted(name)
    first, second = _data(7, 9), _data(8, 6)
    for role in ("keys", "values"):
        span = fmt.join(
            fmt.encode(first, book, role, _guide()), fmt.encode(second, book, role, _guide())
        )
        held = {
            part: sum(t.numel() * t.element_size() for t in tensors)
            for part, tensors in fmt.parts(span).items()
        }
        assert held == fmt.packed_bytes(15, 2, HEADS, CHANNELS, role)
        assert fmt.nominal_bytes(span) == sum(held.values())

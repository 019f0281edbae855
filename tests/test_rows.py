"""Parts of many slots joined and cut at once: the same values, one storage, aligned views."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantwm.cache.formats import rows


def _parts(count: int, tokens: int, width: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (3, tokens, width)
    return [
        torch.randint(0, 256, shape, generator=generator, dtype=torch.int32).byte()
        for _ in range(count)
    ]


def _one_storage(tensors: list[Tensor]) -> bool:
    return len({t.untyped_storage().data_ptr() for t in tensors}) == 1


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [(16, 32, True), (16, 31, False), (7, 9, True), (0, 16, True)],
)
def test_join_rows(first: int, second: int, together: bool) -> None:
    a, b = _parts(4, first, 2), _parts(4, second, 2, seed=1)
    joined = rows.join_rows(a, b)
    for got, pair in zip(joined, zip(a, b, strict=True), strict=True):
        assert torch.equal(got, torch.cat(pair, dim=1)) and got.is_contiguous()
        assert not together or got.storage_offset() % rows.ALIGNED_BYTES == 0
    assert _one_storage(joined) == together
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in joined}
    assert sum(held.values()) == sum(t.numel() for t in joined)


@pytest.mark.parametrize(("start", "stop", "together"), [(3, 19, True), (3, 18, False)])
def test_cut_rows(start: int, stop: int, together: bool) -> None:
    parts = _parts(3, 20, 2)
    cut = rows.cut_rows(parts, start, stop)
    for got, part in zip(cut, parts, strict=True):
        assert torch.equal(got, part[:, start:stop]) and got.is_contiguous()
        assert got.untyped_storage().data_ptr() != part.untyped_storage().data_ptr()
    assert _one_storage(cut) == together
    assert _one_storage(rows.cut_rows(parts, start, stop, anywhere=True))


def test_what_is_large_unlike_or_alone_is_made_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rows.join_rows(_parts(1, 16, 2), _parts(1, 16, 2))[0].shape == (3, 32, 2)
    unlike = [*_parts(1, 16, 2), *_parts(1, 16, 4)]
    assert [t.shape[2] for t in rows.join_rows(unlike, unlike)] == [2, 4]
    monkeypatch.setattr(rows, "LARGE_BYTES", 3 * 32 * 2)
    assert not _one_storage(rows.join_rows(_parts(2, 16, 2), _parts(2, 16, 2)))

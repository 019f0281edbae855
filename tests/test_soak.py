"""A short soak in every format, and that a leak would be seen."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import soak
from quantwm.cache import KVCache
from quantwm.cache.formats import FORMATS
from quantwm.errors import UserError


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("HEADS", 1), ("HEAD_DIM", 32), ("FRAME", 4), ("SPAN_TOKENS", 64)):
        monkeypatch.setattr(soak, name, value)
    monkeypatch.setattr(soak, "CHUNKS_A_SPAN", 4)
    monkeypatch.setattr(soak, "CENTROIDS", 4)


def _run(method: str, chunks: int = 64) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    soak.arguments(parser)
    words = ["--device", "cpu", "--chunks", str(chunks), "--layers", "1", "--every", "2"]
    return soak.run(parser.parse_args([*words, "--methods", method]))


SHORT = {
    "rtn": "rtn:group_size=16", "kivi": "kivi:group_size=16", "qvg": "qvg:group_size=16",
    "qvg-pro": "qvg-pro:stages=2,group_size=16", "quantwm": "quantwm:group_size=16",
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_nothing_grows(small: None, name: str) -> None:
    result = _run(SHORT.get(name, name))
    assert result["ok"], result["rows"][0]["grown"]
    assert "nothing grew" in soak.table(result)
    (row,) = result["rows"]
    assert row["looks"][-1]["chunk"] == 64 and row["looks"][0]["cache_bytes"] > 0


def test_a_leak_of_one_tensor_a_chunk_is_seen(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[torch.Tensor] = []
    whole = KVCache.finalize_chunk

    def leaking(self: KVCache, *given: Any) -> None:
        whole(self, *given)
        kept.append(torch.empty(10))

    monkeypatch.setattr(KVCache, "finalize_chunk", leaking)
    result = _run("rtn:group_size=16")
    assert not result["ok"] and "tensors from" in result["rows"][0]["grown"][0]


def test_growth_of_each_kind_is_named() -> None:
    look = soak.Look(1, 100, 100, 100, 10**9, 50, 1000, 3, 4)
    assert soak.growth([look] * 4) == []
    for name in ("cache_bytes", "scratch_bytes", "device_bytes", "segments", "kernels"):
        more = replace(look, **{name: getattr(look, name) + 1})
        assert soak.growth([look, look, look, more])[0].startswith(name)
    assert soak.growth([look]) == ["too few looks: more chunks, or a smaller --every"]
    with pytest.raises(UserError, match="at least 64"):
        _run("rtn", chunks=10)

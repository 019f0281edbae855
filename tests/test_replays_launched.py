"""What is launched again, or with another slot's launches, is what reading anew launches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels import decode, encode, groups, kmeans, launch, stages
from quantwm.cache import CachePolicy, CacheSpec, KVCache, dispatch, make_format
from quantwm.cache.formats.correction import Correction
from quantwm.cache.replays import Replays

SPEC = CacheSpec(layers=5, heads=2, head_dim=64, tokens_per_frame=12, frames_per_chunk=2)
SETTINGS: dict[str, dict[str, object]] = {
    "bf16": {},
    "qvg": {"centroids": 4, "group_size": 16},
    "quantwm": {"centroids": 4, "group_size": 16, "rank": 2},
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the driver is given: function, grid and arguments. Nothing runs."""
    found: list[tuple[Any, ...]] = []

    def first(kernel: Any, grid: Any, args: Any, constants: dict[str, Any]) -> Any:
        def run(*given: Any) -> None:
            found.append((given[4], given[:3], given[9:]))

        values, _ = launch._described(args, launch._specialised(kernel))
        ordered = tuple(constants[name] for name in kernel.arg_names[len(args) :])
        run(*grid, 1, "stream", kernel.fn.__name__, *[None] * 4, *values, *ordered)
        return launch._Compiled(run, kernel.fn.__name__, None, ordered)

    active = SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda device: "stream"
    )
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(launch, "_COMPILED", {})
    monkeypatch.setattr(launch, "_first_launch", first)
    return found


def _held(name: str, policy: CachePolicy) -> tuple[KVCache, Tensor]:
    """A cache whose spans were encoded by the reference and not read yet, a chunk being open."""
    generator = torch.Generator().manual_seed(0)
    cache = KVCache(SPEC, make_format(name, **SETTINGS[name]), policy)
    shape = (3, SPEC.heads, SPEC.tokens_per_chunk, SPEC.head_dim)
    for chunk in range(4):
        cache.begin_chunk(2 * chunk, 2)
        for layer in range(SPEC.layers):
            given = torch.randn(shape, generator=generator).bfloat16()
            cache.attend(layer, *given, clean=True)
        cache.finalize_chunk()
    for segment in cache._segments:
        for span in (*segment.keys, *segment.values):
            vars(span).pop("decode", None)
            vars(span).pop("frame", None)
    cache.begin_chunk(8, 2)
    return cache, torch.randn(shape, generator=generator).bfloat16()


@pytest.mark.parametrize("span", [24, 48])
@pytest.mark.parametrize(
    ("name", "sparse"), [("bf16", False), ("qvg", False), ("quantwm", False), ("quantwm", True)]
)
def test_the_same_launches(
    name: str, sparse: bool, span: int, launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if sparse:
        monkeypatch.setattr(Correction, "sparse_is_smaller", lambda self, kept: True)
    policy = CachePolicy(span_tokens=span, window_frames=8, sink_frames=1)
    cache, (q, k, v) = _held(name, policy)
    ops = dispatch.TritonOps(kmeans, encode, decode, groups, stages)
    monkeypatch.setattr(dispatch, "_choose", lambda device, override: (ops, "a test"))
    assert cache.workspace.room_on(q.device)(8192) is not None  # else it would grow meanwhile
    moves = []
    plain = Replays._moved

    def moved(self: Replays, *given: Any) -> Any:
        moves.append(plain(self, *given))
        return moves[-1]

    seen: list[list[Any]] = []
    for may in (False, True, True, True):
        # Anew; by another slot's launches; again.
        monkeypatch.setattr(Replays, "_moved", moved if may else lambda self, *given: None)
        if not seen or len(seen) == 1:
            cache._replays.forget()
        launched.clear()
        for layer in range(SPEC.layers):
            launched.append(layer)
            cache.attend(layer, q, k, v)
        seen.append(list(launched))
    assert seen[0] == seen[1] == seen[2] == seen[3]
    assert sum(found is not None for found in moves) >= SPEC.layers - 2
    assert not cache._replays._known or set(cache._replays._known) == set(range(SPEC.layers))


def test_a_copy_that_a_decoder_made_is_nobody_else_s(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A basis that does not lie together is copied for one slot's decoder."""
    cache, (q, k, v) = _held("quantwm", CachePolicy(span_tokens=48))
    for segment in cache._segments:
        for span in segment.keys:
            rows = span.correction
            if rows is not None:
                turned = rows.basis.transpose(1, 2).contiguous().transpose(1, 2)
                vars(span)["correction"] = SimpleNamespace(**{**vars(rows), "basis": turned})
                vars(span)["correction"].is_plain = True
    ops = dispatch.TritonOps(kmeans, encode, decode, groups, stages)
    monkeypatch.setattr(dispatch, "_choose", lambda device, override: (ops, "a test"))
    for layer in range(SPEC.layers):
        cache.attend(layer, q, k, v)
    assert cache._replays._known and cache._replays._pattern is None


def test_another_alignment_is_not_moved() -> None:
    kernel = SimpleNamespace(params=[SimpleNamespace(do_not_specialize=n > 0) for n in range(2)])
    launches = launch.Launches()
    launches.add(kernel, "compiled", (1, 1), 0, (1 << 40, 1 << 41))
    assert launches.addresses() == {1 << 40, 1 << 41}
    moved = launches.moved({1 << 40: (1 << 42) + 32, 1 << 41: 7})
    assert moved._made[0][2] == ((1 << 42) + 32, 7)
    assert launches.moved({1 << 40: (1 << 42) + 8}) is None

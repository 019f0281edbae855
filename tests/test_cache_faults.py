"""Memory runs out at every allocation of a chunk: the cache is as it was, and says what fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quantwm.cache import CachePolicy, CacheSpec, KVCache, LayerWrite, Workspace, make_format
from quantwm.cache.formats import FORMATS
from quantwm.cache.remedy import (
    CacheMemoryError,
    is_out_of_memory,
    remedy,
    saying_what_fits,
)
from quantwm.cache.spec import RopeLayout
from quantwm.errors import UserError
from tests.cache_helpers import SETTINGS, make_cache, qkv

SPEC = CacheSpec(1, 2, 16, 3, 2, rope=RopeLayout((8, 4, 4), (1, 3)))
MASK = torch.tensor([True, False, True, True, True, False])
TRIALS = 40
"""Of the allocations of a chunk, evenly spread where there are more."""

POLICIES = {
    "open": CachePolicy(span_tokens=12),
    "all": CachePolicy(span_tokens=12, sink_frames=1, recent_chunks=1, window_frames=7),
}


class FailAt(TorchDispatchMode):
    """Raises at the n-th operation that makes a tensor of its own; counts them."""

    def __init__(self, at: int = -1) -> None:
        super().__init__()
        self.at, self.seen = at, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and not func._schema.is_mutable:
            self.seen += 1
            if self.seen == self.at + 1:
                raise torch.OutOfMemoryError("injected")
        return func(*args, **(kwargs or {}))


def _steps(cache: KVCache, salt: int) -> list[Callable[[], object]]:
    """One chunk, call by call: a pass without and a clean one, then its commit."""
    first = cache.next_frame or 0
    q, k, v = qkv(salt, 6, cache.spec)
    return [
        lambda: cache.begin_chunk(first, 2),
        lambda: cache.attend(0, q, k, v),
        lambda: cache.attend(0, q, k, v, clean=True),
        lambda: cache.finalize_chunk(MASK if salt % 2 else None),
    ]


def _filled(name: str, policy: CachePolicy, chunks: int) -> KVCache:
    spec = SPEC if name == "qtc" else replace(SPEC, rope=None)
    cache = make_cache(name, policy, spec=spec)
    for salt in range(chunks):
        for step in _steps(cache, salt):
            step()
    return cache


def _bytes(cache: KVCache, folder: Path) -> bytes:
    """All that the cache is, and will do."""
    cache.save(folder / "state.safetensors")
    return (folder / "state.safetensors").read_bytes()


def _run(steps: list[Callable[[], object]]) -> int | None:
    """The step that ran out of memory, None when all went well."""
    for number, step in enumerate(steps):
        try:
            step()
        except CacheMemoryError as error:
            assert "would fit" in str(error) or "no setting" in str(error)
            assert "\n" not in str(error)
            return number
    return None


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("chunks", [0, 4])
def test_every_allocation_may_fail(name: str, policy: str, chunks: int, tmp_path: Path) -> None:
    base = _filled(name, POLICIES[policy], chunks)
    before, salt = _bytes(base, tmp_path), chunks + 1
    wanted = base.fork()
    wanted.workspace = Workspace()
    with FailAt() as counted:
        assert _run(_steps(wanted, salt)) is None
    after = _bytes(wanted, tmp_path)
    failures = 0
    for at in range(0, counted.seen, max(counted.seen // TRIALS, 1)):
        trial = base.fork()
        trial.workspace = Workspace()
        steps = _steps(trial, salt)
        with FailAt(at):
            failed = _run(steps)
        if failed is None:
            break  # tables that the counted run made are there already
        failures += 1
        if at % 2:
            # The call can be made again and the chunk goes on.
            assert _run(steps[failed:]) is None
        else:
            trial.abort_chunk()
            assert _bytes(trial, tmp_path) == before, at
            assert _run(steps) is None
        assert _bytes(trial, tmp_path) == after, at
    assert failures > 3 and _bytes(base, tmp_path) == before


@pytest.mark.parametrize("name", ["qvg", "quantwm", "qtc"])
def test_a_prefill_that_fails_leaves_nothing_behind(name: str, tmp_path: Path) -> None:
    base = _filled(name, POLICIES["open"], 2)
    before = _bytes(base, tmp_path)
    q, k, v = qkv(9, 6, base.spec)
    failures = 0
    with FailAt() as counted:
        base.fork().prefill(4, 2, [LayerWrite(0, k, v, q)])
    for at in range(0, counted.seen, max(counted.seen // 20, 1)):
        trial = base.fork()
        with FailAt(at):
            try:
                trial.prefill(4, 2, [LayerWrite(0, k, v, q)])
            except CacheMemoryError:
                failures += 1
            else:
                break  # tables that the counted run made are there already
        assert _bytes(trial, tmp_path) == before, at
    assert failures > 5


MOUSE = CacheSpec(layers=1, heads=2, head_dim=16, tokens_per_frame=2, frames_per_chunk=2)


def _with_a_companion(name: str) -> KVCache:
    spec = replace(SPEC, rope=None, companions=(("mouse", MOUSE),))
    cache = make_cache(name, POLICIES["open"], spec=spec)
    for salt in range(3):
        *passes, commit = _steps(cache, salt)
        for step in passes:
            step()
        cache.gather(0, *qkv(salt, 4, MOUSE)[1:], clean=True, stream="mouse")
        commit()
    return cache


CALLS: dict[str, Callable[[KVCache], object]] = {
    "evict": lambda cache: cache.evict(3),  # inside a chunk, so that spans are cut
    "history": lambda cache: cache.history(0),
    "fork": lambda cache: cache.fork(),
    "reset": lambda cache: cache.reset(),
}


@pytest.mark.parametrize(
    ("call", "name"),
    [
        *((call, name) for call in ("evict", "history", "fork") for name in FORMATS),
        ("reset", "qtc"),
    ],
)
def test_other_calls_leave_the_cache_and_its_companions(
    call: str, name: str, tmp_path: Path
) -> None:
    base = _with_a_companion(name)
    before = _bytes(base, tmp_path)
    with FailAt() as counted:
        CALLS[call](base.fork())
    failures = 0
    for at in range(counted.seen):
        trial = base.fork()
        try:
            with FailAt(at):
                CALLS[call](trial)
        except CacheMemoryError:
            failures += 1
            assert _bytes(trial, tmp_path) == before, at
    assert failures > 0


def test_a_companion_that_cannot_begin_leaves_no_open_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = _with_a_companion("kivi")

    def refuses(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(cache._companions["mouse"], "begin_chunk", refuses)
        with pytest.raises(MemoryError):
            cache.begin_chunk(6, 2)
    cache.begin_chunk(6, 2)


@pytest.mark.parametrize("name", ["kivi", "quantwm"])
def test_a_file_that_memory_does_not_hold_is_a_mistake_of_one_line(
    name: str, tmp_path: Path
) -> None:
    base = _filled(name, POLICIES["all"], 4)
    _bytes(base, tmp_path)

    def load() -> KVCache:
        path = tmp_path / "state.safetensors"
        return KVCache.load(path, base.spec, base.fmt, base.policy, dtype=base.dtype)

    with FailAt() as counted:
        load()
    # The first allocations are the new cache's own generator, the rest the file's.
    for at in range(counted.seen // 2, counted.seen, 7):
        with FailAt(at), pytest.raises(UserError, match="bytes of tensors and cpu has no room"):
            load()


def _held(policy: CachePolicy, name: str = "qvg") -> KVCache:
    spec = CacheSpec(2, 2, 64, 16, 4)
    fmt = make_format(name, **({"centroids": 4} if name != "bf16" else {}))
    cache = KVCache(spec, fmt, policy)
    for first in range(0, 16, 4):
        cache.prefill(first, 4, [LayerWrite(i, *qkv(first, 64, spec)[1:]) for i in range(2)])
    return cache


def test_the_least_change_that_fits_is_named() -> None:
    """Policy before format, format before history; each with what it needs."""
    recent = _held(CachePolicy(recent_chunks=2, sink_frames=4, span_tokens=256))
    assert remedy(recent, free=10**9).startswith("recent_chunks=0 would fit: ")
    sink = _held(CachePolicy(sink_frames=8, span_tokens=256))
    assert remedy(sink, free=10**9).startswith("compress_sink=True would fit: ")
    plain = _held(CachePolicy(span_tokens=256), "bf16")
    assert remedy(plain, free=10**9).startswith("the format ")
    tight = _held(CachePolicy(span_tokens=64, window_frames=16))
    texts = [remedy(tight, free=free) for free in range(400_000, 0, -20_000)]
    text = next(text for text in texts if text.startswith("window_frames="))
    assert "tokens of history" in text and int(text.split("=")[1].split()[0]) < 16
    assert remedy(tight, free=-(10**9)).startswith("no setting of this cache fits")


def test_what_the_device_does_not_say_is_not_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantwm.memory.free_bytes", lambda device: None)
    cache = _held(CachePolicy(recent_chunks=1, span_tokens=256))
    assert "recent_chunks=0 would fit" in remedy(cache)


def test_other_errors_pass_through() -> None:
    class Holder:
        tokens = 3

        @saying_what_fits
        def call(self, error: Exception) -> None:
            raise error

    for error in (RuntimeError("shapes differ"), ValueError("x"), CacheMemoryError(3, "y")):
        with pytest.raises(type(error)) as caught:
            Holder().call(error)
        assert caught.value is error


@pytest.mark.parametrize(
    "says",
    [
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes",
        "CUDA error: out of memory",
        "Triton Error [CUDA]: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)",
    ],
)
def test_every_library_s_words_for_it_are_known(says: str) -> None:
    """Beside torch.OutOfMemoryError: all of these are plain RuntimeErrors."""
    assert is_out_of_memory(RuntimeError(says))
    assert not is_out_of_memory(ValueError(says))


def test_settings_of_the_tests_cover_all_formats() -> None:
    assert set(SETTINGS) == set(FORMATS)

"""Save and load: a loaded cache is the saved one and goes on as it would have, bit for bit."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quantwm.cache import CachePolicy, CacheSpec, KVCache, make_format
from quantwm.cache import tensor_store as store
from quantwm.cache.formats import FORMATS
from quantwm.cache.span_checks import SPANS
from quantwm.cache.spec import RopeLayout
from quantwm.cache.storage import SavedState
from quantwm.errors import UserError
from tests.cache_helpers import (
    HALF_MEASURES,
    ROPE,
    SETTINGS,
    SPEC,
    make_cache,
    qkv,
    run_chunk,
    same_bytes,
)

POLICIES = (
    CachePolicy(span_tokens=12),
    CachePolicy(span_tokens=12, sink_frames=1, recent_chunks=2, window_frames=9),
    CachePolicy(span_tokens=18, sink_frames=3, window_frames=8, compress_sink=True),
)
MASK = torch.tensor([True, False, True, True, False, True])


def _load(path: Path, cache: KVCache, **other: object) -> KVCache:
    given = {"spec": cache.spec, "fmt": cache.fmt, "policy": cache.policy, **other}
    return KVCache.load(path, dtype=cache.dtype, **given)  # type: ignore[arg-type]


def _held(cache: KVCache) -> object:
    """The ledger without the scratch, which a loaded cache has not needed yet."""
    return replace(cache.ledger(), scratch_bytes=0)


def _same(first: KVCache, second: KVCache) -> bool:
    alike = _held(first) == _held(second) and same_bytes(first, second)
    return alike and first.next_frame == second.next_frame


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("chunks", [0, 1, 5])
def test_a_loaded_cache_goes_on_bit_for_bit(
    name: str, policy: CachePolicy, chunks: int, tmp_path: Path
) -> None:
    spec = replace(SPEC, rope=ROPE) if name == "qtc" else SPEC
    cache = make_cache(name, policy, spec=spec, seed=7)
    for number in range(chunks):
        run_chunk(cache, keep_mask=MASK if number == 2 else None)
    cache.save(tmp_path / "a.safetensors")
    loaded = _load(tmp_path / "a.safetensors", cache)
    assert loaded.seed == 7 and _same(cache, loaded)
    for layer in range(SPEC.layers):
        for ours, theirs in zip(cache.history(layer), loaded.history(layer), strict=True):
            assert torch.equal(ours, theirs)
    for number in range(5):
        frames = 1 + number % 3
        for mine, its in zip(run_chunk(cache, frames), run_chunk(loaded, frames), strict=True):
            assert torch.equal(mine, its)
        assert _same(cache, loaded)


@pytest.mark.parametrize("name", FORMATS)
def test_a_cache_on_a_gpu_goes_on_bit_for_bit(
    name: str, tmp_path: Path, cuda: torch.device
) -> None:
    spec = CacheSpec(2, 3, 128, 48, 4, rope=RopeLayout((44, 42, 42), (6, 8)))
    fmt, policy = make_format(name), CachePolicy(span_tokens=768, window_frames=20)
    cache = KVCache(spec, fmt, policy, device=cuda)

    def chunk(one: KVCache) -> list[torch.Tensor]:
        first = one.next_frame or 0
        one.begin_chunk(first, 4)
        moved = [[t.to(cuda, torch.bfloat16) for t in qkv(first + i, 192, spec)] for i in (0, 1)]
        outs = [one.attend(i, *moved[i], clean=True) for i in (0, 1)]
        one.finalize_chunk()
        return outs

    for _ in range(8):
        chunk(cache)
    cache.save(tmp_path / "a.safetensors")
    loaded = KVCache.load(tmp_path / "a.safetensors", spec, fmt, policy, device=cuda)
    for _ in range(4):
        for ours, theirs in zip(chunk(cache), chunk(loaded), strict=True):
            assert torch.equal(ours, theirs)
    assert _same(cache, loaded)
    here = KVCache.load(tmp_path / "a.safetensors", spec, fmt, policy)
    assert here.tokens == 16 * 48


@pytest.mark.parametrize(
    "more",
    [
        {"book_bits": 40.0, "refit_after": 6, "refit_above": 0.5},
        {"book_bits": 1.0, "centroid_bits": 8, "compact_statistics": True},
        {"full_moment": True, "psac": False},
        HALF_MEASURES,
    ],
)
def test_what_outlives_spans_is_saved(more: dict[str, object], tmp_path: Path) -> None:
    policy = CachePolicy(span_tokens=12, recent_chunks=1)
    spec = replace(SPEC, rope=ROPE)
    cache = make_cache("quantwm", policy, spec, {**SETTINGS["quantwm"], **more})
    for _ in range(6):
        run_chunk(cache)
    cache.save(tmp_path / "a.safetensors")
    loaded = _load(tmp_path / "a.safetensors", cache)
    for _ in range(6):
        run_chunk(cache)
        run_chunk(loaded)
        assert _same(cache, loaded)


def test_every_format_can_be_saved() -> None:
    assert set(SPANS) == set(FORMATS)


def test_all_that_a_cache_knows_is_saved() -> None:
    """What a new attribute holds would be lost: say here where it goes."""
    saved = {f"_{name}" for name in SavedState.__dataclass_fields__} - {"_segments"}
    given = {"spec", "fmt", "policy", "device", "dtype", "workspace", "seed", "_stored", "_open"}
    # Segments lie in `_history`; setting them forgets the replays, which are made anew. `remade` is
    # set by the next `clear`.
    assert set(vars(make_cache("quantwm"))) == saved | given | {"_history", "_replays", "remade"}


@pytest.mark.parametrize("name", ["bf16", "quantwm"])
def test_companions_are_saved(name: str, tmp_path: Path) -> None:
    mouse = CacheSpec(1, 1, 8, 1, 2)
    spec = replace(SPEC, companions=(("mouse", mouse),))
    cache = make_cache(name, CachePolicy(span_tokens=12, window_frames=5), spec=spec)

    def chunk(one: KVCache) -> None:
        first = one.next_frame or 0
        one.begin_chunk(first, 2)
        for layer in range(SPEC.layers):
            one.attend(layer, *qkv(first + layer, 6), clean=True)
        _, k, v = qkv(first, 2, mouse)
        one.gather(0, k, v, clean=True, stream="mouse")
        one.finalize_chunk()

    for _ in range(3):
        chunk(cache)
    cache.save(tmp_path / "a.safetensors")
    loaded = _load(tmp_path / "a.safetensors", cache)
    chunk(cache)
    chunk(loaded)
    assert _same(cache, loaded)
    for ours, theirs in zip(cache.history(0, "mouse"), loaded.history(0, "mouse"), strict=True):
        assert ours.numel() and torch.equal(ours, theirs)


def test_exact_caches_are_saved_in_their_type(tmp_path: Path) -> None:
    cache = make_cache("bf16", settings={"exact": True})
    run_chunk(cache)
    cache.save(tmp_path / "a.safetensors")
    loaded = _load(tmp_path / "a.safetensors", cache)
    assert loaded.history(0)[0].dtype == torch.float32 and _same(cache, loaded)


def test_the_safetensors_library_reads_the_file(tmp_path: Path) -> None:
    cache = make_cache("qvg")
    run_chunk(cache)
    cache.save(tmp_path / "a.safetensors")
    found = load_file(tmp_path / "a.safetensors")
    assert sum(t.numel() * t.element_size() for t in found.values()) >= cache.ledger().total


def test_a_fork_is_saved_as_its_own(tmp_path: Path) -> None:
    cache = make_cache("quantwm")
    for _ in range(3):
        run_chunk(cache)
    other = cache.fork()
    run_chunk(other)
    other.save(tmp_path / "b.safetensors")
    assert _same(_load(tmp_path / "b.safetensors", cache), other)


def test_an_open_chunk_is_refused(tmp_path: Path) -> None:
    cache = make_cache("qvg")
    cache.begin_chunk(0, 2)
    with pytest.raises(RuntimeError, match="save while the chunk at frame 0 is open"):
        cache.save(tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot write"):
        make_cache("qvg").save(tmp_path / "file" / "a.safetensors")
    with pytest.raises(UserError, match="no such file"):
        _load(tmp_path / "none", make_cache("qvg"))


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, path = make_cache("qvg"), tmp_path / "a.safetensors"
    cache.save(path)
    before = path.read_bytes()
    run_chunk(cache)

    def full(file: object, tensor: torch.Tensor) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "_write_tensor", full)
    with pytest.raises(UserError, match="No space left"):
        cache.save(path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"fmt": make_format("rtn", group_size=8)}, "saved with format qvg, this cache has rtn"),
        (
            {"fmt": make_format("qvg", **{**SETTINGS["qvg"], "centroids": 5})},
            "saved with settings: centroids 4, this cache has 5",
        ),
        ({"spec": replace(SPEC, heads=3)}, "saved with geometry: heads 2, this cache has 3"),
        ({"spec": replace(SPEC, rope=ROPE)}, "saved with geometry: rope None"),
        (
            {"policy": CachePolicy(span_tokens=12, window_frames=4)},
            "saved with policy: window_frames None, this cache has 4",
        ),
    ],
)
def test_a_cache_of_other_settings_is_refused(
    change: dict[str, object], says: str, tmp_path: Path
) -> None:
    cache = make_cache("qvg")
    run_chunk(cache)
    cache.save(tmp_path / "a.safetensors")
    with pytest.raises(UserError, match=says):
        _load(tmp_path / "a.safetensors", cache, **change)
    with pytest.raises(UserError, match="saved with dtype float32, this cache has bfloat16"):
        KVCache.load(tmp_path / "a.safetensors", cache.spec, cache.fmt, cache.policy)


def test_saving_moves_a_block_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python holds one block of one tensor, however many there are."""
    monkeypatch.setattr(store, "BLOCK_BYTES", 4096)
    sizes: list[int] = []
    whole = store._write_tensor

    def watched(file: object, tensor: torch.Tensor) -> None:
        sizes.append(tensor.numel() * tensor.element_size())
        whole(file, tensor)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "_write_tensor", watched)
    spec = CacheSpec(1, 2, 64, 64, 2)
    cache = KVCache(spec, make_format("bf16"), CachePolicy(span_tokens=128))
    for first in range(0, 24, 2):
        cache.begin_chunk(first, 2)
        cache.attend(0, *qkv(first, 128, spec), clean=True)
        cache.finalize_chunk()
    tracemalloc.start()
    cache.save(tmp_path / "a.safetensors")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(sizes) > 2**19 and peak < 2**18

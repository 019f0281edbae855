"""KVCache: the chunk cycle, determinism, forks, failures, misuse."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from quantwm.cache import CachePolicy, KVCache, LayerWrite, make_format
from quantwm.cache.formats import FORMATS
from quantwm.errors import UserError
from tests.cache_helpers import SPEC, make_cache, packed_tensors, qkv, run_chunk, same_bytes

COMPRESSED = ["qvg", "quantwm"]


def _filled(name: str, chunks: int, policy: CachePolicy | None = None, **more: object) -> KVCache:
    cache = make_cache(name, policy, **more)
    for _ in range(chunks):
        run_chunk(cache)
    return cache


@pytest.mark.parametrize("name", FORMATS)
def test_the_first_chunk_attends_to_itself(name: str) -> None:
    cache = make_cache(name)
    cache.begin_chunk(0, 2)
    q, k, v = qkv(0, 6)
    wanted = torch.softmax(q @ k.transpose(1, 2) / 4.0, -1) @ v
    torch.testing.assert_close(cache.attend(0, q, k, v), wanted, atol=1e-5, rtol=1e-5)
    assert cache.tokens == 0 and cache.frames == 0


def test_bf16_history_is_what_was_written_rounded_once() -> None:
    cache = _filled("bf16", 2)
    k, v = cache.history(1)
    parts = [qkv(first * 100 + 1, 6) for first in (0, 2)]
    assert torch.equal(k, torch.cat([p[1] for p in parts], 1).bfloat16().float())
    assert torch.equal(v, torch.cat([p[2] for p in parts], 1).bfloat16().float())


@pytest.mark.parametrize("name", FORMATS)
def test_denoising_passes_leave_no_trace(name: str) -> None:
    once, often = make_cache(name), make_cache(name)
    for _ in range(3):
        run_chunk(once, passes=1)
        run_chunk(often, passes=3)
    assert same_bytes(once, often)


@pytest.mark.parametrize("name", FORMATS)
def test_same_seed_same_bytes_whatever_else_draws_random_numbers(name: str) -> None:
    first = _filled(name, 4)
    torch.manual_seed(12345)
    state = torch.random.get_rng_state()
    second = _filled(name, 4)
    assert same_bytes(first, second)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("name", COMPRESSED)
def test_the_seed_reaches_k_means(name: str) -> None:
    assert not same_bytes(_filled(name, 1, seed=0), _filled(name, 1, seed=1))


@pytest.mark.parametrize("name", FORMATS)
def test_reset_gives_the_same_bytes_again(name: str) -> None:
    cache, fresh = _filled(name, 3), _filled(name, 2)
    cache.reset()
    assert cache.tokens == 0 and cache.ledger().total == 0
    for _ in range(2):
        run_chunk(cache)
    assert same_bytes(cache, fresh)


@pytest.mark.parametrize("name", FORMATS)
def test_prefill_writes_what_attend_writes(name: str) -> None:
    cache, filled = _filled(name, 3), make_cache(name)
    for first in (0, 2, 4):
        writes = (
            LayerWrite(layer, k, v, q)
            for layer in range(SPEC.layers)
            for q, k, v in [qkv(first * 100 + layer, 6)]
        )
        filled.prefill(first, 2, writes)
    assert same_bytes(cache, filled)


@pytest.mark.parametrize("name", FORMATS)
def test_gather_returns_what_attend_attends_to(name: str) -> None:
    cache, twin = _filled(name, 2), _filled(name, 2)
    q, k, v = qkv(5, 6)
    cache.begin_chunk(4, 2)
    twin.begin_chunk(4, 2)
    for layer in range(SPEC.layers):
        keys, values = cache.gather(layer, k, v, clean=True, q=q)
        history = twin.history(layer)
        assert torch.equal(keys, torch.cat((history[0], k), 1))
        assert torch.equal(values, torch.cat((history[1], v), 1))
        twin.attend(layer, q, k, v, clean=True)
    cache.finalize_chunk()
    twin.finalize_chunk()
    assert same_bytes(cache, twin)


def test_a_score_bias_reaches_cached_scores_only() -> None:
    cache = _filled("quantwm", 2)
    cache.begin_chunk(4, 2)
    q, k, v = qkv(5, 6)
    seen = []

    def forget(layer: int, stream: str, queries: Tensor, history: int) -> Tensor:
        seen.append((layer, stream, tuple(queries.shape), history))
        return torch.full((2, 1, history), -torch.inf)

    out = cache.attend(1, q, k, v, score_bias=forget)
    wanted = torch.softmax(q @ k.transpose(1, 2) / 4.0, -1) @ v
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)
    assert seen == [(1, "self", (2, 6, 16), 12)]


@pytest.mark.parametrize("name", FORMATS)
def test_a_fork_goes_its_own_way(name: str) -> None:
    cache = _filled(name, 3)
    other, twin = cache.fork(), cache.fork()
    run_chunk(other, salt=7)
    run_chunk(cache)
    run_chunk(twin)
    assert same_bytes(cache, twin) and not same_bytes(cache, other)
    other.reset()
    assert cache.tokens == 24


@pytest.mark.parametrize("name", COMPRESSED)
@pytest.mark.parametrize("where", ["fit", "encode"])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_write_that_runs_out_of_memory_can_be_tried_again(
    name: str, where: str, layer: int
) -> None:
    cache, twin = make_cache(name), make_cache(name)
    run_chunk(cache)
    run_chunk(twin)
    before = [t.clone() for t in packed_tensors(cache)]
    cache._span = twin._span = replace(cache._span, tokens=99)  # the next chunk opens a span
    cache.begin_chunk(2, 2)
    data = [qkv(200 + i, 6) for i in range(SPEC.layers)]
    for i in range(layer):
        cache.attend(i, *data[i], clean=True)
    failure = torch.OutOfMemoryError("injected")
    real = getattr(cache.fmt, where)
    calls = []

    def fail_on_values(*args: object) -> object:
        calls.append(args)
        if len(calls) == 2:
            raise failure
        return real(*args)

    with (
        mock.patch.object(cache.fmt, where, fail_on_values),
        pytest.raises(torch.OutOfMemoryError),
    ):
        cache.attend(layer, *data[layer], clean=True)
    assert all(torch.equal(a, b) for a, b in zip(before, packed_tensors(cache), strict=True))
    for i in range(layer, SPEC.layers):
        cache.attend(i, *data[i], clean=True)
    cache.finalize_chunk()
    run_chunk(twin)
    assert same_bytes(cache, twin)


@pytest.mark.parametrize("name", FORMATS)
def test_an_aborted_chunk_leaves_no_trace(name: str) -> None:
    cache, twin = make_cache(name), make_cache(name)
    cache.begin_chunk(0, 2)
    for layer in range(SPEC.layers):
        cache.attend(layer, *qkv(77 + layer, 6), clean=True)
    cache.abort_chunk()
    cache.abort_chunk()
    for each in (cache, twin):
        run_chunk(each)
    assert same_bytes(cache, twin)


def test_bfloat16_attention_stores_the_same_bytes() -> None:
    caches = [
        KVCache(SPEC, make_format("qvg", centroids=4, group_size=8), CachePolicy(), dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    for cache in caches:
        out = run_chunk(cache)
        assert out[0].dtype == cache.dtype
        run_chunk(cache)
    assert same_bytes(*caches)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda c: c.attend(0, *qkv(0, 6)), RuntimeError, "attend needs an open chunk"),
        (lambda c: c.finalize_chunk(), RuntimeError, "finalize_chunk needs an open chunk"),
        (lambda c: c.begin_chunk(3, 2), UserError, "must begin at frame 2, got 3"),
        (lambda c: c.begin_chunk(2, 0), UserError, "at least 1 frame"),
        (lambda c: c.history(9), UserError, "layer must be 0 to 1, got 9"),
        (lambda c: c.history(0, "mouse"), UserError, "unknown stream 'mouse'"),
    ],
)
def test_misuse_between_chunks(call: object, error: type[Exception], says: str) -> None:
    cache = _filled("qvg", 1)
    with pytest.raises(error, match=says):
        call(cache)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda c: c.begin_chunk(2, 2), RuntimeError, "chunk at frame 2 is open"),
        (lambda c: c.fork(), RuntimeError, "fork while the chunk at frame 2 is open"),
        (lambda c: c.evict(1), RuntimeError, "evict while the chunk"),
        (lambda c: c.attend(0, *qkv(0, 5)), UserError, r"k must be \[2, 6, 16\].*got \[2, 5, 16\]"),
        (lambda c: c.attend(0, *(t[0] for t in qkv(0, 6))), UserError, "heads, tokens, head_dim"),
        (
            lambda c: c.finalize_chunk(torch.ones(5, dtype=torch.bool)),
            RuntimeError,
            "before the clean pass of layer 0 stream self, layer 1 stream self",
        ),
    ],
)
def test_misuse_inside_a_chunk(call: object, error: type[Exception], says: str) -> None:
    cache = _filled("qvg", 1)
    cache.begin_chunk(2, 2)
    with pytest.raises(error, match=says):
        call(cache)


@pytest.mark.parametrize("role", ["queries", "keys", "values"])
def test_not_finite_input_is_named_and_not_kept(role: str) -> None:
    cache = make_cache("quantwm")
    run_chunk(cache)
    cache.begin_chunk(2, 2)
    data = list(qkv(0, 6))
    data[["queries", "keys", "values"].index(role)][1, 2, 3] = torch.nan
    with pytest.raises(UserError, match=rf"layer 1 {role} \(stream self\) hold NaN"):
        cache.attend(1, *data, clean=True)
    assert cache.ledger().pending_bytes == 0
    cache.attend(1, *qkv(0, 6), clean=True)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_on_cuda_one_read_at_the_end_finds_what_is_not_finite(bad: float) -> None:
    """The CUDA path, with CPU tensors that say that they are on CUDA."""
    cache, twin = make_cache("quantwm"), make_cache("quantwm")
    for each in (cache, twin):
        run_chunk(each)
    with mock.patch("torch.Tensor.is_cuda", new_callable=mock.PropertyMock, return_value=True):
        cache.begin_chunk(2, 2)
        for layer in range(SPEC.layers):
            q, k, v = qkv(layer, 6)
            if layer == 1:
                v[0, 0, 0] = bad
            cache.attend(layer, q, k, v, clean=True)
        with pytest.raises(UserError, match=r"layer 1 values \(stream self\) hold NaN"):
            cache.finalize_chunk()
    cache.abort_chunk()
    for each in (cache, twin):
        run_chunk(each)
    assert same_bytes(cache, twin)


def test_group_and_dtype_are_checked_when_the_cache_is_made() -> None:
    with pytest.raises(UserError, match="group_size 64 does not divide head_dim 16"):
        KVCache(SPEC, make_format("qvg"), CachePolicy())
    with pytest.raises(UserError, match="dtype must be"):
        KVCache(SPEC, make_format("bf16"), CachePolicy(), dtype=torch.float16)

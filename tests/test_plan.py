"""plan: published ratios to the byte, the bytes of a filled cache, and what does not fit."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from quantwm.cache import CachePolicy, CacheSpec, KVCache, make_format
from quantwm.cache.formats import FORMATS
from quantwm.cache.plan import MethodPlan, Workload, plan, plan_lanes
from quantwm.cache.remedy import gib, remedy, require_memory
from quantwm.engine_types import LaneConfig
from quantwm.errors import UserError
from tests.cache_helpers import SETTINGS, SPEC, make_cache, qkv, run_chunk

GIB = 2**30


def _planned(method: str, load: Workload, **settings: object) -> MethodPlan:
    return plan({method: settings}, load).methods[0]


def _span(tokens: int, head_dim: int = 128, heads: int = 40, layers: int = 1) -> Workload:
    return Workload(layers, heads, head_dim, tokens, tokens)


@pytest.mark.parametrize(
    ("method", "load", "ratio"),
    [
        ("quantwm", _span(4680), 4.68),
        ("quantwm", _span(9360), 5.38),
        ("quantwm", _span(14400), 5.67),
        ("quantwm", _span(29640), 5.99),
        ("quantwm", _span(17600, head_dim=256, heads=24), 6.20),
        ("qvg", _span(1560), 3.32),
        ("qvg", _span(4680), 5.22),
        ("qvg", _span(29640), 6.88),
        ("qvg", _span(37440), 6.97),
    ],
)
def test_published_ratios(method: str, load: Workload, ratio: float) -> None:
    assert round(_planned(method, load).ratio, 2) == ratio


@pytest.mark.parametrize(("method", "ratio"), [("quantwm", 5.5), ("qvg", 6.35)])
def test_embedded_world_ratios(method: str, ratio: float) -> None:
    load = Workload(10, 3, 128, 3072, 3072, chunk_tokens=192)
    assert _planned(method, load, preset="embedded").ratio == pytest.approx(ratio, abs=0.05)


def test_longcat_bytes() -> None:
    """48 layers x 32 heads x 29,640 tokens: 3.62486 GiB against 21.70898 GiB."""
    found = _planned("quantwm", _span(29640, heads=32, layers=48))
    assert round(found.bytes_packed / GIB, 5) == 3.62486
    assert round(found.bytes_bf16 / GIB, 5) == 21.70898


@pytest.mark.parametrize("tokens", [4680, 29640])
def test_bits_per_token_are_the_design_s(tokens: int) -> None:
    """Keys 364 + values 284 bits and 1,064,960 a head and span; the secondary scale apart."""
    found = _planned("quantwm", _span(tokens))
    bits = 8 * (found.bytes_packed - found.bytes["secondary_scales"])
    assert bits == 40 * (tokens * (364 + 284) + 1_064_960)
    found = _planned("qvg", _span(tokens))
    assert 8 * found.bytes_packed == 40 * 2 * (tokens * 280 + 524_288)


def test_the_secondary_scale_vanishes() -> None:
    found = _planned("quantwm", _span(4680))
    assert found.bytes["secondary_scales"] / found.bytes_packed < 1e-4
    small = _planned("quantwm", Workload(10, 3, 128, 3072, 3072, 192), preset="embedded")
    assert small.bytes["secondary_scales"] / small.bytes_packed < 1e-3


POLICIES = [
    CachePolicy(span_tokens=12),
    CachePolicy(span_tokens=6),
    CachePolicy(span_tokens=12, sink_frames=2, recent_chunks=1),
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", FORMATS)
def test_plan_is_the_ledger_of_a_filled_cache(name: str, policy: CachePolicy) -> None:
    """After the first span is gone, in which the first chunk has no PSAC rows.

    One direction and one centroid: then the gate keeps every row (with more directions rounding
    can hurt, and a token that is its own centroid has no error), and all rows are dense.
    """
    dense = {"rank": 1, "centroids": 1} if name == "quantwm" else {}
    settings = {**SETTINGS[name], **dense}
    cache = make_cache(name, policy, settings=settings)
    for _ in range(9):
        run_chunk(cache)
    compressed = [s for s in cache._segments if s.kind == "packed"]
    cache.evict(compressed[1].first_frame)
    ledger = cache.ledger()
    load = Workload.of_policy(SPEC, policy, tokens=cache.tokens, itemsize=4)
    found = plan({name: settings}, load).methods[0]
    assert found.bytes == ledger.parts and found.bytes_total == ledger.total
    assert found.bytes_bf16 == ledger.bf16_bytes
    assert found.ratio == ledger.nominal_ratio and found.resident_ratio == ledger.resident_ratio


@pytest.mark.parametrize("name", FORMATS)
def test_planned_scratch_is_the_scratch_of_a_windowed_cache(name: str) -> None:
    policy = CachePolicy(span_tokens=12, window_frames=7)
    cache = make_cache(name, policy)
    for _ in range(6):
        run_chunk(cache)
    load = Workload.of_policy(SPEC, policy, itemsize=4)
    assert load.tokens == cache.tokens == 15
    found = plan({name: SETTINGS[name]}, load).methods[0]
    assert found.scratch_bytes == cache.ledger().scratch_bytes
    held = found.bytes_total + found.scratch_bytes
    assert 0 <= found.peak_bytes - held - found.pending_bytes <= found.transient_bytes
    one = 2 * 6 * 16 * 4  # an attention's output, and queries in FP32 for those who learn of them
    assert found.transient_bytes == one * (2 if name in ("quantwm", "qtc") else 1)


@pytest.mark.parametrize("kept", [{}, {"sink_frames": 1}])
@pytest.mark.parametrize("name", FORMATS)
def test_a_history_that_is_made_anew_is_one_chunk(name: str, kept: dict[str, int]) -> None:
    policy = CachePolicy(span_tokens=6, window_frames=7, **kept)
    settings = {**SETTINGS[name], **({"rank": 1, "centroids": 1} if name == "quantwm" else {})}
    cache = make_cache(name, policy, settings=settings)
    for _ in range(3):
        cache.clear()
        run_chunk(cache, frames=5)
        cache.begin_chunk(5, 2)
        cache.attend(0, *qkv(0, 6))
        cache.abort_chunk()
    load = Workload.of_policy(SPEC, policy, itemsize=4, remade=True)
    found, ledger = plan({name: settings}, load).methods[0], cache.ledger()
    assert cache.remade and cache.fork().remade and not make_cache(name).remade
    assert found.bytes == ledger.parts and found.bytes_bf16 == ledger.bf16_bytes
    assert found.scratch_bytes == ledger.scratch_bytes
    cache.clear()
    cache.begin_chunk(0, 5)
    for layer in range(SPEC.layers):
        cache.attend(layer, *qkv(layer, 15), clean=True)
    ledger = cache.ledger()
    least = ledger.total + ledger.pending_bytes + ledger.scratch_bytes
    assert least <= found.peak_bytes <= least + found.transient_bytes + found.bytes_packed // 2


def test_only_a_gpu_encodes_layers_together() -> None:
    """BF16 on a CPU, layer by layer, with the queries of one in FP32."""
    spec, policy = replace(SPEC, layers=10), CachePolicy(span_tokens=12, window_frames=7)
    gpu, cpu = (Workload.of_policy(spec, policy, on_gpu=on_gpu) for on_gpu in (True, False))
    there, here = (plan({"quantwm": SETTINGS["quantwm"]}, load).methods[0] for load in (gpu, cpu))
    alone = plan({"bf16": {}}, cpu).methods[0].scratch_bytes
    assert there.scratch_bytes > here.scratch_bytes == alone
    assert here.transient_bytes == 2 * 6 * 16 * (2 + 4)
    cache = KVCache(spec, make_format("quantwm", **SETTINGS["quantwm"]), policy)
    run_chunk(cache)
    assert f" instead of {gib(here.peak_bytes)}, " in remedy(cache, free=10**9)


@pytest.mark.parametrize("chunks", [1, 2, 5, 9])
def test_planned_scratch_of_an_open_history_has_its_room_to_grow(chunks: int) -> None:
    """The workspace grows by a quarter when a chunk does not fit; the last one reads before it."""
    cache = make_cache("bf16", CachePolicy(span_tokens=12))
    for _ in range(chunks):
        run_chunk(cache)
    load = Workload.of_policy(SPEC, cache.policy, tokens=cache.tokens - 6, itemsize=4)
    assert plan({"bf16": {}}, load).methods[0].scratch_bytes == cache.ledger().scratch_bytes


def test_scratch_keeps_to_its_limit() -> None:
    """150,000 tokens and a chunk in 40 heads: 10 heads at a time, 0.79 GB (workspace.py)."""
    load = Workload(40, 40, 128, 150_000, 4680, 4680, current_tokens=4680, windowed=True)
    found = plan({"qvg": {}}, load).methods[0].scratch_bytes
    assert found == 10 * 154_680 * 128 * 2 * 2 < 800_000_000
    open_history = plan({"qvg": {}}, replace(load, windowed=False)).methods[0].scratch_bytes
    assert found <= open_history <= 800_000_000
    endless = replace(load, windowed=False, tokens=2**40, heads=1, layers=1)
    assert plan({"qvg": {}}, endless).methods[0].scratch_bytes == (2**40 + 4680) * 128 * 4


@pytest.mark.parametrize("name", ["bf16", "qvg", "quantwm"])
@pytest.mark.parametrize(
    "policy",
    [
        CachePolicy(span_tokens=6),
        CachePolicy(span_tokens=6, sink_frames=2, recent_chunks=1, window_frames=9),
        CachePolicy(span_tokens=6, window_frames=7),
    ],
)
def test_companion_streams_are_counted(name: str, policy: CachePolicy) -> None:
    mouse = CacheSpec(1, 1, 8, 1, 2)
    spec = replace(SPEC, companions=(("mouse", mouse), ("keyboard", replace(mouse, layers=2))))
    settings = {**SETTINGS[name], **({"rank": 1, "centroids": 1} if name == "quantwm" else {})}
    cache = make_cache(name, policy, spec=spec, settings=settings)
    for _ in range(8):
        first = cache.next_frame or 0
        cache.begin_chunk(first, 2)
        for layer in range(SPEC.layers):
            cache.attend(layer, *qkv(first + layer, 6), clean=True)
            _, k, v = qkv(first, 2, mouse)
            cache.gather(layer, k, v, clean=True, stream="keyboard")
        cache.gather(0, k, v, clean=True, stream="mouse")
        cache.finalize_chunk()
    if policy.window_frames is None:
        cache.evict(8)
    ledger = cache.ledger()
    load = Workload.of_policy(spec, policy, tokens=cache.tokens, itemsize=4)
    found = plan({name: settings}, load).methods[0]
    assert found.bytes == ledger.parts and found.bytes_bf16 == ledger.bf16_bytes
    assert found.resident_ratio == ledger.resident_ratio
    assert found.scratch_bytes == ledger.scratch_bytes or policy.window_frames is None
    fewer = plan_lanes(spec, [LaneConfig("a", name, settings, policy)]).with_tokens(6)
    assert [c.tokens for c in fewer.lanes[0][2].companions] == [2, 2]


@pytest.mark.parametrize("name", FORMATS)
def test_planned_pending_covers_the_clean_pass(name: str) -> None:
    cache = make_cache(name, CachePolicy(span_tokens=12))
    for _ in range(4):
        run_chunk(cache)
    load = Workload.of_policy(SPEC, cache.policy, tokens=cache.tokens)
    planned = plan({name: SETTINGS[name]}, load).methods[0].pending_bytes
    cache.begin_chunk(8, 2)
    for layer in range(SPEC.layers):
        cache.attend(layer, *qkv(layer, 6), clean=True)
    assert 0 < cache.ledger().pending_bytes <= planned


def test_a_window_of_whole_chunks_cuts_no_span_of_one() -> None:
    """A span of one chunk is dropped whole where chunks divide the window."""
    whole = Workload(40, 40, 128, 23400, 4680, 4680, current_tokens=4680, windowed=True)
    cut = replace(whole, tokens=23400 + 1560)
    one_chunk = replace(whole, tokens=0)
    pending = [plan({"qvg": {}}, load).methods[0].pending_bytes for load in (one_chunk, whole, cut)]
    assert pending[0] == pending[1] and pending[2] == 2 * pending[1]


def test_sink_recent_and_current_count_only_when_asked_for() -> None:
    bare = _planned("quantwm", Workload(2, 2, 128, 9360, 4680))
    assert not {"bf16_sink", "bf16_recent"} & set(bare.bytes) and bare.pending_bytes == 0
    more = _planned(
        "quantwm",
        Workload(2, 2, 128, 9360 + 4680 + 1560, 4680, None, 1560, 4680, 4680),
    )
    assert more.ratio == bare.ratio and more.bytes_packed == bare.bytes_packed
    assert more.resident_ratio < bare.resident_ratio < bare.ratio
    assert more.bytes["bf16_recent"] == 4680 * 2 * 2 * 128 * 4


def test_json_holds_what_the_command_promises() -> None:
    document = plan({"bf16": {}, "qvg": {}, "quantwm": {}}, _span(4680)).as_json()
    again = json.loads(json.dumps(document))
    promised = {"method", "ratio", "resident_ratio", "bytes", "bytes_total", "bytes_bf16"}
    for method in again["methods"]:
        assert promised | {"scratch_bytes", "peak_bytes"} <= set(method)
        assert method["bytes_total"] == sum(method["bytes"].values())


def _lanes(policy: CachePolicy) -> tuple[LaneConfig, ...]:
    return tuple(LaneConfig(n, n, s, policy) for n, s in SETTINGS.items())


def test_lanes_share_the_scratch() -> None:
    planned = plan_lanes(SPEC, _lanes(CachePolicy(window_frames=12, span_tokens=12)))
    each = planned.methods
    assert planned.peak_bytes == (
        sum(m.bytes_total for m in each)
        + each[0].scratch_bytes
        + max(m.peak_bytes - m.bytes_total - m.scratch_bytes for m in each)
    )


def test_enough_memory_is_no_error() -> None:
    planned = plan({"bf16": {}}, _span(4680))
    require_memory(planned, planned.peak_bytes)


def test_too_little_memory_names_needed_free_and_what_fits() -> None:
    spec = CacheSpec(40, 40, 128, 1560, 3)
    lanes = (LaneConfig("quantwm", "quantwm", {}, CachePolicy(window_frames=63)),)
    planned = plan_lanes(spec, lanes)
    free = planned.peak_bytes // 2
    with pytest.raises(UserError) as caught:
        require_memory(planned, free)
    text = str(caught.value)
    assert f"{planned.peak_bytes:,} bytes" in text and f"{free:,} bytes" in text
    assert "\n" not in text
    fits = int(text.split("a history of ")[1].split(" tokens")[0].replace(",", ""))
    assert fits % 4680 == 0 and planned.with_tokens(fits).peak_bytes <= free
    assert planned.with_tokens(fits + 4680).peak_bytes > free


def test_when_not_even_a_chunk_fits_it_says_so() -> None:
    with pytest.raises(UserError, match="not even one chunk of history fits"):
        require_memory(plan({"bf16": {}}, _span(4680)), 1000)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layers": 0}, "layers must be at least 1"),
        ({"span_tokens": 0}, "span_tokens must be at least 1"),
        ({"chunk_tokens": 0}, "chunk_tokens must be at least 1"),
        ({"tokens": -1}, "tokens must be 0 or more"),
    ],
)
def test_bad_workloads_are_refused(change: dict[str, int], says: str) -> None:
    with pytest.raises(UserError, match=says):
        replace(_span(4680), **change)


def test_a_head_that_the_group_does_not_divide_is_refused() -> None:
    with pytest.raises(UserError, match="group_size 64 does not divide head_dim 96"):
        _planned("qvg", _span(4680, head_dim=96))


def test_a_history_of_very_many_spans_is_counted_and_not_listed() -> None:
    load = Workload(layers=1, heads=1, head_dim=128, tokens=2**40 + 1, span_tokens=2)
    qvg = plan({"qvg": {"centroids": 4}}, load).methods[0]
    assert qvg.bytes["codebooks"] == 2 * (2**39 + 1) * 4 * 128 * 2
    assert qvg.bytes["ids"] == 2 * (2**40 + 1)


def test_a_history_shorter_than_what_stays_bf16_is_held_once() -> None:
    load = Workload(
        layers=1, heads=1, head_dim=128, tokens=100, span_tokens=50, sink_tokens=80,
        recent_tokens=60,
    )  # fmt: skip
    found = plan({"qvg": {}}, load).methods[0]
    assert found.bytes == {"bf16_sink": 80 * 512, "bf16_recent": 20 * 512}
    assert (found.ratio, found.resident_ratio) == (None, 1.0)

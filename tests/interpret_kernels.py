"""Every kernel in Triton's interpreter against the reference; test_kernels_interpret.py runs it.

Not collected by name: TRITON_INTERPRET=1 must be set before triton is imported, so this runs in
a process of its own.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from memory_guard import guarded_launches  # noqa: F401  (a fixture of every test here)

from benchmarks import histories, low_memory
from benchmarks.agreement import (
    Disagreement,
    agree,
    agree_encode_quantwm,
    agree_encode_qvg,
    agree_update,
    make_case,
    relative_error,
)
from benchmarks.agreement_fused import agree_fused
from benchmarks.guards import guarded_allocations
from benchmarks.timing import Timing
from kernels import decode, decode_pair, decode_spans, encode, fused, groups, kmeans, stages, tuning
from kernels.launch import launch
from quantwm.cache import (
    CachePolicy,
    CacheSpec,
    KVCache,
    LayerWrite,
    Workspace,
    make_format,
    reference,
)
from quantwm.cache import fused as attention_modes
from quantwm.cache.batch import encode_slots
from quantwm.cache.chunk import Codebooks, encode_pair
from quantwm.cache.codebook import Codebook
from quantwm.cache.dispatch import TritonOps
from quantwm.cache.formats import QueryGuide, quantwm, qvg, qvg_pro
from quantwm.cache.segments import ChunkGuide, SpanPlan

OPS = TritonOps(kmeans, encode, decode, groups, stages)

# heads, tokens, head dim, centroids, group size, rank; every head dim, group size, odd lengths
CASES = (
    (2, 63, 128, 64, 64, 8),
    (1, 100, 64, 100, 16, 3),
    (1, 37, 256, 3, 128, 32),
    (3, 1, 64, 1, 32, 1),
    (2, 33, 128, 256, 32, 16),
)


def test_interpreting() -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.parametrize("shape", CASES, ids=str)
def test_agrees_with_the_reference(shape: tuple[int, ...]) -> None:
    with guarded_allocations():
        agree(OPS, make_case(*shape, "cpu"), truncates=True)


@pytest.mark.parametrize("shape", CASES, ids=str)
def test_clipped_scales_agree_with_the_reference(shape: tuple[int, ...]) -> None:
    """Where a scale is cut only encoding differs."""
    case = make_case(*shape, "cpu")
    with guarded_allocations():
        agree_encode_quantwm(OPS, case, reference.assign(case.x, case.centroids), 0.6)


@pytest.mark.parametrize("tokens", [1, 70, 300])
def test_update_in_parts(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    monkeypatch.setattr(tuning, "UPDATE_SPLIT_TOKENS", 1)
    case = make_case(2, tokens, 64, 40, 32, 4, "cpu")
    agree_update(kmeans, case, reference.assign(case.x, case.centroids))


@pytest.mark.parametrize("shape", [(2, 70, 40, 128, 64, 4, 16), (1, 130, 129, 64, 16, 3, 5)])
def test_fused_attention(shape: tuple[int, ...]) -> None:
    agree_fused("cpu", *shape)


@pytest.mark.parametrize("method", ["qvg", "quantwm", "rtn", "bf16"])
def test_attention_in_slabs(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """A sink, packed spans that slabs cut anywhere, recent frames: as staged."""
    monkeypatch.setattr(attention_modes, "fused_kernel", lambda device: fused)
    spec = CacheSpec(layers=1, heads=2, head_dim=64, tokens_per_frame=15, frames_per_chunk=3)
    policy = CachePolicy(sink_frames=1, window_frames=16, recent_chunks=1, span_tokens=60)
    fmt = make_format(method, **({"centroids": 8} if method in ("qvg", "quantwm") else {}))
    cache = KVCache(spec, fmt, policy, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 45, 64, generator=generator) for _ in range(3))
    for frame in range(0, 21, 3):
        cache.prefill(frame, 3, [LayerWrite(0, k + frame, v, q)])
    cache.begin_chunk(21, 3)
    staged = cache.attend(0, q, k, v)
    cache.workspace = Workspace(scratch_limit=1, mode="slabs")
    slabs = cache.attend(0, q, k, v)
    assert relative_error(slabs, staged.double()) < 1e-5
    assert cache.workspace.nbytes == 2 * 2 * 128 * 64 * 4
    cache.workspace = Workspace(mode="slabs", slab_heads=1)  # another slab, heads in turns
    assert torch.equal(cache.attend(0, q, k, v), slabs)
    assert cache.workspace.nbytes == 2 * 256 * 64 * 4


@pytest.mark.parametrize("case", [("qvg", 0), ("quantwm", 0), ("quantwm", 3)], ids=str)
def test_spans_of_a_history_in_one_launch(
    monkeypatch: pytest.MonkeyPatch, case: tuple[str, int]
) -> None:
    """The same bits as span by span, of some heads, nothing touched between and beside them: of
    many spans by one launch, of few by one for keys and values of each."""
    method, rank = case
    launched: list[tuple[int, ...]] = []

    def noted(kernel: object, grid: tuple[int, ...], args: object, constants: object) -> None:
        launched.append(grid)
        launch(kernel, grid, args, constants)

    monkeypatch.setattr(decode_pair, "launch", noted)
    sides: tuple[list[Any], list[Any]] = ([], [])
    for side, parts in enumerate(sides):
        offset = 2
        for number, tokens in enumerate((40, 17, 90)):
            ranked = rank if side == 0 and number != 1 else 0
            prepared = _drawn_span(method, ranked, tokens, 3 * side + number)
            parts.append((prepared, offset, number, 2 * tokens - number))
            offset += 2 * tokens
    wanted, first = torch.full((2, 2, offset + 3, 64), torch.nan), 1
    for parts, out in zip(sides, wanted, strict=True):
        for decoder, *given in parts:
            decoder(out, *given, first)
    block = decode_pair.launch_constants(sides[0][0][0], wanted, False)["BLOCK_N"]
    for worthwhile, made, grids in (
        (1, 0, [(-(-178 // block), 12)]), (1 << 62, 3, [(-(-n // block), 4) for n in (80, 33, 178)])
    ):  # fmt: skip
        monkeypatch.setattr(decode_spans, "WORTHWHILE", worthwhile)
        mine = torch.full_like(wanted, torch.nan)
        assert decode_spans.decode_spans(sides, tuple(mine), first) == made
        assert torch.equal(wanted.view(torch.int32), mine.view(torch.int32))
        assert launched == grids
        launched.clear()


def test_spans_that_share_no_launch() -> None:
    """Outputs that are not alike, parts of one side, other tokens of keys than of values."""
    keys, values = (_drawn_span("quantwm", rank, 30, rank) for rank in (3, 0))
    for sides in (
        ([(keys, 1, 2, 50)], [(values, 1, 2, 50)]), ([(keys, 1, 2, 50)], []),
        ([(keys, 0, 2, 50)], [(values, 0, 3, 50)]), ([(keys, 0, 5, 5)], [(values, 0, 5, 5)]),
        ([(values, 0, 0, 60)], [(keys, 0, 0, 60)]),
    ):  # fmt: skip
        outs = torch.full((3, 70, 64), torch.nan), torch.full((3, 72, 64), torch.nan)
        for v_out in (outs[1], torch.full((3, 70, 64), torch.nan)):
            wanted = [torch.full_like(out, torch.nan) for out in (outs[0], v_out)]
            for parts, out in zip(sides, wanted, strict=True):
                for decoder, *given in parts:
                    decoder(out, *given)
            assert decode_spans.decode_spans(sides, (outs[0], v_out))
            for one, other in zip(wanted, (outs[0], v_out), strict=True):
                assert torch.equal(one.view(torch.int32), other.view(torch.int32))


def test_a_pair_that_does_not_fit() -> None:
    keys, values = (_drawn_span("quantwm", rank, 30, rank) for rank in (3, 0))
    outs = torch.zeros(3, 40, 64), torch.zeros(3, 40, 64)
    with pytest.raises(ValueError, match="do not fit"):
        decode_spans.decode_spans(([(keys, 0, 0, 60)], [(values, 0, 0, 60)]), outs)


def _drawn_span(method: str, rank: int, tokens: int, seed: int) -> decode.Decoder:
    """The decoder of two chunks of 3 heads of 64 channels."""
    settings = {} if method == "qvg" else {"psac": rank > 0, "rank": max(rank, 1)}
    fmt = make_format(method, centroids=8, group_size=16, **settings)
    drawn = make_case(3, tokens, 64, 8, 16, max(rank, 1), "cpu", seed=seed)
    guide = QueryGuide(drawn.weights, drawn.basis, drawn.eigenvalues)
    book = fmt.fit(drawn.x, torch.Generator().manual_seed(0), None)
    return prepare(method, fmt.join(*(fmt.encode(drawn.x, book, "keys", guide) for _ in range(2))))


def prepare(method: str, span: Any) -> decode.Decoder:
    """The kernels' decoder of a span, which on a CPU would be the reference's."""
    book, group_size = span.codebook.dense(), 16
    if method == "qvg":
        return decode.prepare_qvg(span.codes, span.ids, book, span.scales, group_size)
    rows = span.correction
    held = (None, None, None, 0)
    if rows is not None:
        held = (rows.coefficients, rows.row_scales, rows.basis, rows.first)
    return decode.prepare_quantwm(
        span.codes, span.ids, book, span.scales, span.secondary, span.chunk_stops, span.zeros,
        group_size, *held,
    )  # fmt: skip


def test_float32_keys() -> None:
    case = make_case(1, 40, 64, 16, 32, 4, "cpu")
    x = case.x.float() + 1e-4
    ids = reference.assign(x, case.centroids)
    assert torch.equal(kmeans.assign(x, case.centroids), ids)
    assert torch.equal(encode.encode_qvg(x, ids, case.centroids, 32)[0],
                       reference.encode_qvg(x, ids, case.centroids, 32)[0])  # fmt: skip


@pytest.mark.parametrize("candidates", [1, 2, 3])
def test_fewer_candidates(candidates: int) -> None:
    case = make_case(1, 50, 64, 20, 32, 4, "cpu", seed=3)
    wanted = reference.assign_qsac(case.x, case.centroids, case.weights, 32, candidates)
    mine = kmeans.assign_qsac(case.x, case.centroids, case.weights, 32, candidates)
    assert (mine != wanted).sum() <= 1


def test_every_e4m3_scale_and_all_tiny_groups() -> None:
    """Residual maxima on every E4M3 value, between them, above 448 and below the smallest."""
    values = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    largest = torch.cat((values, values * 1.0625, values * 0.96875, torch.tensor([0.0, 2e-4, 900])))
    x = torch.rand(1, len(largest), 64) * largest[:, None]
    x[..., 0] = largest
    x = x.to(torch.bfloat16)
    centroids = torch.zeros(1, 1, 64, dtype=torch.bfloat16)
    ids = torch.zeros(1, len(largest), dtype=torch.uint8)
    mine, wanted = (m.encode_qvg(x, ids, centroids, 64) for m in (encode, reference))
    assert torch.equal(mine[0], wanted[0])
    assert torch.equal(mine[1].view(torch.uint8), wanted[1].view(torch.uint8))


def test_constant_zero_keys_stay_zero() -> None:
    x = torch.zeros(1, 20, 64, dtype=torch.bfloat16)
    centroids, ids = torch.zeros(1, 2, 64, dtype=torch.bfloat16), torch.zeros(1, 20).byte()
    basis, eigenvalues = torch.eye(64)[None, :, :4].bfloat16().contiguous(), torch.ones(1, 4)
    packed = encode.encode_quantwm(x, ids, centroids, 32, 1.0, basis, eigenvalues)
    assert not any(t.any() for t in packed)


@pytest.mark.parametrize("opens", [True, False])
@pytest.mark.parametrize("name", ["qvg", "qvg-pro", "quantwm"])
def test_heads_of_many_layers_are_encoded_as_those_of_one(
    monkeypatch: pytest.MonkeyPatch, name: str, opens: bool
) -> None:
    for module in (qvg, qvg_pro, quantwm):
        monkeypatch.setattr(module, "ops_for", lambda device: OPS)
    monkeypatch.setattr(tuning, "UPDATE_SPLIT_TOKENS", 1)
    settings = {"stages": 2} if name == "qvg-pro" else {}
    fmt = make_format(name, centroids=5, group_size=16, **settings)
    generator, slots, shape = torch.Generator().manual_seed(5), (2, 0, 1), (3, 2, 37, 64)
    k, v = (torch.randn(shape, generator=generator).bfloat16() for _ in range(2))
    weights = torch.rand(3, 2, 64, generator=generator) + 0.5
    basis = torch.linalg.qr(torch.randn(3, 2, 64, 8, generator=generator))[0].bfloat16()
    eigenvalues = torch.rand(3, 2, 8, generator=generator) + 1.0
    plan = SpanPlan(1, 37, basis=basis, eigenvalues=eigenvalues)
    guide = ChunkGuide(plan, weights)
    pairs = {
        slot: tuple(fmt.fit(x[slot].flip(1), generator, None) for x in (k, v)) for slot in slots
    }
    books = Codebooks(0 if opens else 1, pairs)
    given = fmt, generator, slots, k, v, guide, [pairs[slot] for slot in slots], opens
    for place, (spans, fitted) in enumerate(encode_slots(*given).slots):
        one = encode_pair(fmt, generator, slots[place], k[place], v[place], guide, books)
        for mine, wanted in zip((*spans, *fitted), (*one[0], *one[1]), strict=True):
            for ours, theirs in zip(_tensors(fmt, mine), _tensors(fmt, wanted), strict=True):
                assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def _tensors(fmt: Any, held: Any) -> list[torch.Tensor]:
    if isinstance(held, Codebook):
        return list(held.tensors())
    return [tensor.contiguous() for part in fmt.parts(held).values() for tensor in part]


def test_a_wrong_kernel_is_noticed() -> None:
    """The comparison itself: one flipped code or one moved token is a Disagreement."""
    case = make_case(1, 40, 64, 16, 32, 4, "cpu")
    ids = reference.assign(case.x, case.centroids)

    def flipped(*args: object) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = reference.encode_qvg(*args)
        codes[0, 7, 3] ^= 1
        return codes, scales

    with pytest.raises(Disagreement, match="1 of"):
        agree_encode_qvg(SimpleNamespace(encode_qvg=flipped), case, ids)
    moved = SimpleNamespace(update=lambda x, i, c: reference.update(x, i.roll(1, 1), c))
    with pytest.raises(Disagreement, match="means"):
        agree_update(moved, case, ids)


def test_launchers_refuse_what_they_do_not_cover() -> None:
    case = make_case(1, 8, 64, 4, 32, 4, "cpu")
    ids = torch.zeros(1, 8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="head dim 48"):
        kmeans.assign(case.x[..., :48], case.centroids[..., :48].contiguous())
    with pytest.raises(ValueError, match="group size 24"):
        encode.encode_qvg(case.x, ids, case.centroids, 24)
    with pytest.raises(ValueError, match="adjacent channels"):
        kmeans.assign(case.x.transpose(1, 2), case.centroids)
    with pytest.raises(ValueError, match="ids must be"):
        encode.encode_qvg(case.x, ids[:, :7], case.centroids, 32)
    codes, scales = encode.encode_qvg(case.x, ids, case.centroids, 32)
    out = torch.empty(1, 6, 64)
    with pytest.raises(ValueError, match=r"0\.\.8 of 8 do not fit"):
        decode.prepare_qvg(codes, ids, case.centroids, scales, 32)(out, 0, 0, 8)


def test_what_is_not_covered_runs_on_the_reference_and_is_named() -> None:
    ops = TritonOps(kmeans, encode, decode, groups, stages)
    case = make_case(1, 20, 48, 4, 24, 4, "cpu")
    agree(ops, case, truncates=True)
    agree(ops, case, truncates=True)
    ops.assign(case.x.float(), case.centroids)
    ops.assign_qsac(case.x, case.centroids, case.weights, 24, 9)
    assert ops.fallbacks == [
        "head dim 48 is not one of (64, 128, 256)",
        "keys and values are torch.float32, the kernels take bfloat16",
        "9 QSAC candidates, the kernel takes 4",
    ]


def test_the_low_memory_benchmark_compares_what_it_times(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every slab the same bits, every launch row near staged attention; a row that is refused is
    named and the others still run."""
    monkeypatch.setattr(attention_modes, "fused_kernel", lambda device: fused)
    monkeypatch.setattr(histories, "CLUSTERS", 4)
    monkeypatch.setattr(low_memory, "SLABS", ((1 << 20, 0), (1 << 15, 1)))
    monkeypatch.setattr(low_memory, "ROWS", ((32, 64, 4, 1, 0), (48, 64, 4, 1, 0)))

    def once(run: Callable[[], object], *_: object) -> Timing:
        run()
        return Timing(1.0, 1.0, 1.0, 1.0, 1, None)

    monkeypatch.setattr(low_memory, "measure", once)
    parser = argparse.ArgumentParser()
    low_memory.arguments(parser)
    words = f"--heads 2 --queries 20 --cached 60 --head-dim 64 --device cpu --out {tmp_path}"
    result = low_memory.run(parser.parse_args(words.split()))
    rows = result["rows"]
    assert result["ok"] and all(row["same_bits"] for row in rows if "refused" not in row)
    assert [row["how"] for row in rows if row["method"] == "qvg"] == [
        "slabs, 2 heads", "slabs, 1 heads", "fused [32, 64, 4, 1, 0]", "fused [48, 64, 4, 1, 0]",
    ]  # fmt: skip
    assert [row["scratch_bytes"] for row in rows[:3]] == [2 * 2 * 128 * 64 * 2, 2 * 128 * 64 * 2, 0]
    assert "refused" in rows[3] and rows[3]["refused"] in (tmp_path / "low_memory.txt").read_text()
    assert [row["how"] for row in rows[4:]][-1] == "fused [32, 64, 4, 1, 0]"  # PSAC: the fastest

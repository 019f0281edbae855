"""Histories kept from pass to pass: the same bits, decoded once a chunk, within a limit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantwm.cache import CachePolicy, CacheSpec, KVCache, make_format, reading
from quantwm.cache.remedy import CacheMemoryError
from quantwm.cache.workspace import Workspace

SPEC = CacheSpec(layers=2, heads=3, head_dim=16, tokens_per_frame=6, frames_per_chunk=2)
POLICY = CachePolicy(sink_frames=1, window_frames=7, recent_chunks=1, span_tokens=24)
SETTINGS = {"qvg": {"centroids": 4, "group_size": 8}, "qtc": {"basis_after": 2.0}}


def lanes(workspace: Workspace) -> list[KVCache]:
    return [
        KVCache(
            SPEC, make_format(name, **SETTINGS.get(name, {})), POLICY, dtype=torch.bfloat16,
            workspace=workspace,
        )
        for name in ("bf16", "qvg", "qtc")
    ]  # fmt: skip


def run(caches: list[KVCache], chunks: int, passes: int = 3) -> list[Tensor]:
    """Lane after lane, as an engine does: every pass over every layer, the last one clean."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for chunk in range(chunks):
        shape = (SPEC.layers, 3, SPEC.heads, SPEC.tokens_per_chunk, SPEC.head_dim)
        given = torch.randn(shape, generator=generator).bfloat16()
        for cache in caches:
            cache.begin_chunk(2 * chunk, 2)
            for number in range(passes):
                for layer, (q, k, v) in enumerate(given):
                    scaled = k * (1 + number), v
                    found.append(cache.attend(layer, q, *scaled, clean=number == passes - 1))
            cache.finalize_chunk()
    return found


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Slots, one for each time that a history is decoded."""
    noted: list[int] = []
    plain = reading.decode_visible

    def noting(segments: object, slot: int, *rest: object) -> None:
        noted.append(slot)
        plain(segments, slot, *rest)

    monkeypatch.setattr(reading, "decode_visible", noting)
    return noted


def test_the_same_bits_and_one_decoding_a_chunk(decodes: list[int]) -> None:
    """Sinks, a window that moves, recent chunks, several lanes in the same buffers."""
    plain = run(lanes(Workspace()), 7)
    assert len(decodes) == 7 * 3 * 3 * SPEC.layers
    decodes.clear()
    kept = run(lanes(Workspace(kept_limit=10**6)), 7)
    empty = 2 * SPEC.layers  # of the other lanes, whose history of no token is the first one's
    assert len(decodes) == 7 * 3 * SPEC.layers - empty
    assert all(torch.equal(a, b) for a, b in zip(plain, kept, strict=True))


def test_what_passes_the_limit_is_decoded_in_each_pass(decodes: list[int]) -> None:
    """Bytes are counted, and one layer's room is one layer's."""
    tokens = (7 + 1) * SPEC.tokens_per_frame
    one = 2 * SPEC.heads * tokens * SPEC.head_dim * 2
    workspace = Workspace(kept_limit=one)
    caches = lanes(workspace)
    run(caches, 5)
    # Of the last chunk: one layer once and the other in every pass, in each of three lanes.
    last = decodes[-3 * (1 + 3) :]
    assert sorted(last.count(slot) for slot in range(2)) == [3, 9]
    assert sum(2 * held.keys.nbytes for held in workspace._kept.values()) <= one
    assert caches[0].ledger().scratch_bytes == workspace.nbytes
    workspace.release()
    assert not workspace.nbytes


def test_a_decoding_that_fails_leaves_nothing_that_is_taken_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = run(lanes(Workspace()), 2)
    caches = lanes(Workspace(kept_limit=10**6))
    found = run(caches[:1], 1)
    cache = caches[0]
    generator = torch.Generator().manual_seed(0)
    shape = (2, SPEC.layers, 3, SPEC.heads, SPEC.tokens_per_chunk, SPEC.head_dim)
    q, k, v = torch.randn(shape, generator=generator).bfloat16()[1][0]
    plain = reading.decode_visible

    def failing(segments: object, slot: int, keys: Tensor, *rest: object) -> None:
        keys.fill_(9.0)
        raise torch.OutOfMemoryError("out of memory")

    cache.begin_chunk(2, 2)
    monkeypatch.setattr(reading, "decode_visible", failing)
    with pytest.raises(CacheMemoryError):
        cache.attend(0, q, k, v)
    monkeypatch.setattr(reading, "decode_visible", plain)
    found.append(cache.attend(0, q, k, v))
    assert torch.equal(found[-1], expected[3 * 3 * SPEC.layers])

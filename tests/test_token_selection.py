"""Token selection: picks are the highest score among earlier chunks, by each lane's own keys."""

from __future__ import annotations

import pytest
import torch

from quantwm.cache.formats import make_format
from quantwm.cache.kv_cache import KVCache
from quantwm.cache.spec import CachePolicy, CacheSpec, RopeLayout
from quantwm.errors import UserError
from quantwm.token_selection import QueryWatch, grid_of, picks, watched_layers

ROPE = RopeLayout(split=(16, 24, 24), grid=(2, 3))
SPEC = CacheSpec(2, 2, 64, tokens_per_frame=6, frames_per_chunk=2, rope=ROPE)


def run(chunks: int, policy: CachePolicy) -> tuple[QueryWatch, dict[str, KVCache], dict]:
    """Two lanes fed the same; the BF16 lane is watched. Returns the last chunk's queries too."""
    watch, generator = QueryWatch(watched_layers(SPEC)), torch.Generator().manual_seed(0)
    lanes = {
        "bf16": KVCache(SPEC, make_format("bf16"), policy),
        "qvg": KVCache(SPEC, make_format("qvg", centroids=4), policy),
    }
    watched, last = watch.attach(lanes["bf16"]), {}
    for chunk in range(chunks):
        for name, cache in (("bf16", watched), ("qvg", lanes["qvg"])):
            cache.begin_chunk(2 * chunk, 2)
            for layer in range(2):
                seed = torch.Generator().manual_seed(100 * chunk + layer)
                q, k, v = torch.randn(3, 2, 12, 64, generator=seed).to(torch.bfloat16)
                cache.attend(layer, q + 1, k, v)
                cache.attend(layer, q, k, v, clean=True)
                last[layer] = q
            cache.finalize_chunk()
            del name
    del generator
    return watch, lanes, last


def test_picks_are_the_best_token_of_earlier_chunks() -> None:
    watch, lanes, queries = run(4, CachePolicy(span_tokens=48))
    token = 6 + 1 * 3 + 2  # second frame of the newest chunk, row 1, column 2
    for found in picks(watch, lanes, frame=7, row=1, column=2):
        for name, cache in lanes.items():
            keys = cache.history(found.layer)[0][:, :36].float()
            best = (keys @ queries[found.layer][:, token].float().unsqueeze(-1)).squeeze(-1)
            for head, pick in enumerate(found.lanes[name]):
                index = int(best[head].argmax())
                assert (pick.frame, pick.row, pick.column) == (
                    index // 6, index % 6 // 3, index % 3,
                )  # fmt: skip
                assert pick.lead >= 0
    assert any(layer.lanes["bf16"] != layer.lanes["qvg"] for layer in picks(watch, lanes, 7, 1, 2))


def test_frames_are_told_right_behind_a_sink_and_a_window() -> None:
    policy = CachePolicy(span_tokens=12, sink_frames=2, window_frames=6)
    watch, lanes, _ = run(8, policy)
    held = [frame for frame, _ in lanes["bf16"].frame_tokens()]
    for layer in picks(watch, lanes, frame=15, row=0, column=0):
        for chosen in layer.lanes.values():
            assert all(pick.frame in held and pick.frame < 14 for pick in chosen)


def test_what_cannot_be_told_is_one_line() -> None:
    watch, lanes, _ = run(3, CachePolicy(span_tokens=48))
    with pytest.raises(UserError, match="newest chunk only, latent frames 4 to 5"):
        picks(watch, lanes, frame=1, row=0, column=0)
    with pytest.raises(UserError, match="2 rows and 3 columns"):
        picks(watch, lanes, frame=5, row=2, column=0)
    with pytest.raises(UserError, match="no chunk has been generated"):
        picks(QueryWatch((0,)), lanes, frame=5, row=0, column=0)
    with pytest.raises(UserError, match="without their position"):
        grid_of(CacheSpec(1, 1, 64, 6, 2))


def test_layers_are_few_where_queries_are_large() -> None:
    assert watched_layers(SPEC) == (0, 1)
    large = CacheSpec(40, 40, 128, tokens_per_frame=1560, frames_per_chunk=3)
    assert watched_layers(large) == (0, 39)

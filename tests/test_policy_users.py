"""Each policy in the hands of one real user, in every format."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quantwm.cache import CachePolicy, CacheSpec, KVCache, LayerWrite, make_format
from quantwm.cache.formats import FORMATS
from quantwm.cache.positions import TokenPositions, rotate_, turns
from quantwm.cache.spec import RopeLayout
from tests.cache_helpers import same_bytes
from tests.small_world import SPEC as WORLD
from tests.small_world import SmallWorld

SPEC = CacheSpec(layers=1, heads=2, head_dim=32, tokens_per_frame=6, frames_per_chunk=3)
ROPE = RopeLayout((12, 10, 10), (2, 3))
SETTINGS: dict[str, dict[str, object]] = {
    "bf16": {},
    "rtn": {"bits": 4, "group_size": 8},
    "kivi": {"bits": 4, "group_size": 8},
    "qvg": {"centroids": 12, "group_size": 16},
    "qvg-pro": {"stages": 2, "centroids": 12, "group_size": 8},
    "quantwm": {"centroids": 12, "group_size": 16, "rank": 4},
    "qtc": {"basis_after": 1.0, "key_bits": 3.0, "value_bits": 3.0},
}
ERROR = {"bf16": 1e-3, "rtn": 0.05, "kivi": 0.05, "qvg": 0.7, "qvg-pro": 0.5, "quantwm": 0.35,
         "qtc": 0.35}  # fmt: skip
"""Relative squared error of an attention output over random, unclustered tokens; a bound."""


def _cache(name: str, policy: CachePolicy, spec: CacheSpec = SPEC, seed: int = 0) -> KVCache:
    fmt = make_format(name, **SETTINGS[name])
    return KVCache(spec, fmt, policy, dtype=torch.float32, seed=seed)


def _qkv(seed: int, tokens: int, spec: CacheSpec = SPEC) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (3, spec.heads, tokens, spec.head_dim)
    return tuple(torch.randn(shape, generator=generator).unbind(0))  # type: ignore[return-value]


def _softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(1, 2) * q.shape[-1] ** -0.5, dim=-1) @ v


def _relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).square().sum() / wanted.square().sum())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("recent", [0, 1])
def test_lingbot_s_window_of_sink_and_recent_frames(name: str, recent: int) -> None:
    """LingBot-World-v2 sees 6 sink frames and the newest 12, its chunk of 3 among them."""
    policy = CachePolicy(sink_frames=6, recent_chunks=recent, window_frames=18, span_tokens=36)
    cache = _cache(name, policy)
    written: list[tuple[Tensor, Tensor]] = []
    for first in range(0, 30, 3):
        q, k, v = _qkv(first, 18)
        cache.begin_chunk(first, 3)
        seen = [f for f in range(first) if f < 6 or f >= first + 3 - 12]
        keys, values = cache.gather(0, k, v)
        assert keys.shape[1] == 6 * len(seen) + 18
        past = [torch.cat([written[f][i] for f in seen] + [x], dim=1)
                for i, x in enumerate((k, v))] if seen else [k, v]  # fmt: skip
        out = cache.attend(0, q, k, v, clean=True)
        assert _relative(out, _softmax(q, *past)) < ERROR[name]
        sink = slice(0, 6 * min(first, 6))
        assert torch.equal(keys[:, sink], past[0][:, sink].bfloat16().float())
        newest = 18 * recent if first > 3 else 0
        kept = slice(keys.shape[1] - 18 - newest, keys.shape[1] - 18)
        assert torch.equal(values[:, kept], past[1][:, kept].bfloat16().float())
        cache.finalize_chunk()
        written += list(zip(k.split(6, 1), v.split(6, 1), strict=True))
    ledger = cache.ledger()
    assert ledger.parts["bf16_sink"] == 36 * 2 * 32 * 2 * 2
    assert (ledger.parts.get("bf16_recent", 0) > 0) == bool(recent)
    if ledger.nominal_ratio > 1:
        assert ledger.resident_ratio < ledger.nominal_ratio


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("chunk", "window", "sink"), [(3, 7, 0), (3, 8, 1), (4, 10, 3), (5, 6, 2)])
def test_chunks_that_do_not_divide_the_window(
    name: str, chunk: int, window: int, sink: int
) -> None:
    """Self-Forcing rolls by frames: evicted spans are cut where the window begins."""
    spec = replace(SPEC, frames_per_chunk=chunk)
    cache = _cache(name, CachePolicy(sink, 0, window, span_tokens=2 * spec.tokens_per_chunk), spec)
    first_said: dict[int, Tensor] = {}
    for first in range(0, 6 * chunk, chunk):
        cache.prefill(first, chunk, [LayerWrite(0, *_qkv(first, 6 * chunk, spec)[1:])])
        held = [frame for frame, _ in cache.frame_tokens()]
        stop = first + chunk
        wanted = [f for f in range(stop) if f < sink or f >= stop + chunk - (window - sink)]
        assert held == wanted
        for frame, keys in zip(held, cache.history(0)[0].split(6, dim=1), strict=True):
            kept = first_said.setdefault(frame, keys.clone())
            torch.testing.assert_close(keys, kept, atol=1e-5, rtol=1e-5)


def _rotated(x: Tensor, first_frame: int) -> Tensor:
    place = TokenPositions(first_frame * SPEC.tokens_per_frame, x.shape[1])
    return rotate_(x.clone(), turns(ROPE, place, 0, x.shape[1], x.device))


@pytest.mark.parametrize("name", FORMATS)
def test_keys_before_rope_and_after_it(name: str) -> None:
    """Self-Forcing and QVG's LongCat cache un-turned keys, turned at read; LingBot turned ones."""
    before = _cache(
        name, CachePolicy(span_tokens=36), replace(SPEC, rope=replace(ROPE, baked=False))
    )
    after = _cache(name, CachePolicy(span_tokens=36), replace(SPEC, rope=ROPE))
    exact: list[list[Tensor]] = [[], []]
    for first in range(0, 12, 3):
        q, k, v = _qkv(first, 18)
        turned_q, turned_k = _rotated(q, first), _rotated(k, first)
        exact = [[*exact[0], turned_k], [*exact[1], v]]
        wanted = _softmax(turned_q, *(torch.cat(part, dim=1) for part in exact))
        for cache, own_q, own_k in ((before, q, k), (after, turned_q, turned_k)):
            cache.begin_chunk(first, 3)
            keys, values = cache.gather(0, own_k, v, clean=True, q=own_q)
            keys = _rotated(keys, 0) if cache is before else keys
            assert _relative(_softmax(turned_q, keys, values), wanted) < ERROR[name]
            cache.finalize_chunk()
    assert before.ledger().nominal_ratio == pytest.approx(after.ledger().nominal_ratio, rel=0.05)


def _cameras(frames: int) -> Tensor:
    """One rigid motion a frame, float32 [frames, 4, 4]."""
    generator = torch.Generator().manual_seed(5)
    turn = torch.linalg.qr(torch.randn(frames, 3, 3, generator=generator))[0]
    camera = torch.eye(4).repeat(frames, 1, 1)
    camera[:, :3, :3], camera[:, :3, 3] = turn, torch.randn(frames, 3, generator=generator)
    return camera


def _projected(x: Tensor, matrices: Tensor) -> Tensor:
    """PRoPE: every four channels of a token times its frame's 4 x 4 matrix."""
    per_token = matrices.repeat_interleave(SPEC.tokens_per_frame, dim=0)
    return torch.einsum("nij,hngj->hngi", per_token, x.unflatten(-1, (-1, 4))).flatten(-2)


@pytest.mark.parametrize("name", FORMATS)
def test_one_pair_serves_rope_and_prope_reads(name: str) -> None:
    """HY-WorldPlay's two branches: the second read costs no second pair of keys and values.

    Scores of the projective branch are (P^-T q) . (P k), of cameras P of query and key frame.
    """
    cache = _cache(
        name, CachePolicy(span_tokens=36), replace(SPEC, rope=replace(ROPE, baked=False))
    )
    doubled = _cache(name, CachePolicy(span_tokens=36), replace(SPEC, head_dim=64))
    cameras = _cameras(12)
    keys_seen: list[Tensor] = []
    for first in range(0, 12, 3):
        q, k, v = _qkv(first, 18)
        keys_seen.append(k)
        cache.begin_chunk(first, 3)
        keys, values = cache.gather(0, k, v, clean=True, q=q)
        keys, values = keys.clone(), values.clone()
        cache.finalize_chunk()
        both = torch.cat((_rotated(k, first), _projected(k, cameras[first : first + 3])), dim=-1)
        doubled.prefill(first, 3, [LayerWrite(0, both, torch.cat((v, v), dim=-1))])
    all_keys = torch.cat(keys_seen, dim=1)
    all_values = torch.cat([_qkv(first, 18)[2] for first in range(0, 12, 3)], dim=1)
    reads = {
        "rope": (_rotated(q, 9), lambda k: _rotated(k, 0)),
        "prope": (
            _projected(q, torch.linalg.inv(cameras[9:12]).transpose(1, 2)),
            lambda k: _projected(k, cameras),
        ),
    }
    for query, turn in reads.values():
        wanted = _softmax(query, turn(all_keys), all_values)
        assert _relative(_softmax(query, turn(keys), values), wanted) < 3 * ERROR[name]
    if name != "qtc":  # whose statistics of past tokens belong to one head size
        assert cache.ledger().nominal_bytes < 0.62 * doubled.ledger().nominal_bytes


@pytest.mark.parametrize("name", FORMATS)
def test_matrix_game_s_streams_and_a_prompt(name: str) -> None:
    """Self-attention beside mouse and keyboard, frame by frame; a prompt's text once, for all."""
    mouse = CacheSpec(1, 1, 16, 1, 3)
    spec = replace(SPEC, streams=("self", "memory"), companions=(
        ("mouse", mouse), ("keyboard", replace(mouse, layers=2)),
    ))  # fmt: skip
    cache = _cache(name, CachePolicy(window_frames=7, span_tokens=36), spec)
    text_spec = CacheSpec(1, 2, 32, tokens_per_frame=9, frames_per_chunk=1)
    text = _cache(name, CachePolicy(sink_frames=1, span_tokens=9, compress_sink=True), text_spec)
    _, words_k, words_v = _qkv(77, 9)
    text.prefill(0, 1, [LayerWrite(0, words_k, words_v)])
    said = [part.clone() for part in text.history(0)]
    for first in range(0, 15, 3):
        cache.begin_chunk(first, 3)
        for stream, salt in (("self", 0), ("memory", 500)):
            q, k, v = _qkv(first + salt, 18)
            cache.attend(0, q, k, v, stream=stream, clean=True)
        for stream, layers in (("mouse", 1), ("keyboard", 2)):
            for layer in range(layers):
                _, k, v = _qkv(first + layer, 3, mouse)
                cache.gather(layer, k, v, stream=stream, clean=True)
        cache.finalize_chunk()
    frames = [frame for frame, _ in cache.frame_tokens()]
    assert frames == [11, 12, 13, 14]
    for stream, salt in (("self", 0), ("memory", 500)):
        wanted = torch.cat([_qkv(f + salt, 18)[1] for f in (9, 12)], dim=1)[:, 12:]
        assert _relative(cache.history(0, stream)[0], wanted) < ERROR[name]
    keys, _ = cache.history(1, "keyboard")
    assert keys.shape[1] == 4
    assert torch.equal(keys[:, 1:], _qkv(13, 3, mouse)[1].bfloat16().float())
    assert all(torch.equal(a, b) for a, b in zip(said, text.history(0), strict=True))
    assert _relative(said[0], words_k) < ERROR[name]


@pytest.mark.parametrize("name", FORMATS)
def test_guidance_forks_what_both_branches_share(name: str) -> None:
    """Classifier-free guidance: a common past, then one cache a branch; as two from the start."""
    policy = CachePolicy(window_frames=9, span_tokens=36, recent_chunks=1)
    shared = _cache(name, policy)
    apart = [_cache(name, policy) for _ in range(2)]
    for first in (0, 3):
        q, k, v = _qkv(first, 18)
        for cache in (shared, *apart):
            cache.prefill(first, 3, [LayerWrite(0, k, v, q)])
    branches = [shared, shared.fork()]
    for first in (6, 9, 12):
        for salt, (branch, alone) in enumerate(zip(branches, apart, strict=True)):
            q, k, v = _qkv(first + 100 * salt, 18)
            outs = []
            for cache in (branch, alone):
                cache.begin_chunk(first, 3)
                outs.append(cache.attend(0, q, k, v, clean=True))
                cache.finalize_chunk()
            assert torch.equal(*outs) and same_bytes(branch, alone)
    assert not same_bytes(*branches)


@pytest.mark.parametrize("name", FORMATS)
def test_a_rank_s_heads_are_the_whole_cache_s(name: str) -> None:
    """Ulysses: eight ranks hold five heads each of LingBot's 40; here two hold two of four."""
    spec = replace(SPEC, heads=4, rope=ROPE)
    policy = CachePolicy(sink_frames=1, window_frames=10, span_tokens=36)
    whole = _cache(name, policy, spec)
    shards = [_cache(name, policy, replace(spec, heads=2)) for _ in range(2)]
    for first in range(0, 15, 3):
        q, k, v = _qkv(first, 18, spec)
        whole.prefill(first, 3, [LayerWrite(0, k, v, q)])
        for rank, shard in enumerate(shards):
            own = slice(2 * rank, 2 * rank + 2)
            shard.prefill(first, 3, [LayerWrite(0, k[own], v[own], q[own])])
    for part in (0, 1):
        joined = torch.cat([shard.history(0)[part] for shard in shards])
        torch.testing.assert_close(joined, whole.history(0)[part], atol=1e-5, rtol=1e-5)


KEEP_ABOVE, PATCH = 0.10, 1


def decoprune_mask(early: Tensor, final: Tensor) -> Tensor:
    """DeCoPrune (arXiv 2609.39096): keep a token whose clean prediction still moved.

    early, final: predictions of x0 [frames, channels, rows, columns]. The squared difference,
    averaged over channels and the token's latent patch, above 0.10; what is not finite is kept.
    """
    score = (early - final).square().mean(1, keepdim=True)
    score = torch.nn.functional.avg_pool2d(score, PATCH).flatten()
    return (score > KEEP_ABOVE) | ~score.isfinite()


@pytest.mark.parametrize("name", FORMATS)
def test_decoprune_drops_tokens_before_they_are_encoded(name: str) -> None:
    world, spec = SmallWorld(), replace(WORLD.cache, head_dim=64)
    fmt = make_format(name, **{k: v for k, v in SETTINGS[name].items() if "group" not in k})
    cache = KVCache(spec, fmt, CachePolicy(span_tokens=48), dtype=torch.float32)
    masks = []
    for number in range(4):
        generator = torch.Generator().manual_seed(number)
        early, final = torch.randn(2, 2, *WORLD.latent_shape, generator=generator).unbind(0)
        mask = decoprune_mask(0.5 * early, 0.5 * early + 0.4 * final)
        mask[0], masks = True, [*masks, mask]
        writes = [LayerWrite(i, *_qkv(number, 12, spec)[1:]) for i in range(spec.layers)]
        cache.prefill(2 * number, 2, writes, keep_mask=mask)
    assert world.spec.latent_shape == (4, 2, 3)
    kept = [int(mask.sum()) for mask in masks]
    assert 0 < sum(kept) < 48 and cache.tokens == sum(kept)
    wanted = torch.cat([_qkv(n, 12, spec)[1][:, m] for n, m in enumerate(masks)], dim=1)
    assert _relative(cache.history(0)[0], wanted) < ERROR[name]
    nan = torch.full((2, 4, 2, 3), torch.nan)
    assert bool(decoprune_mask(nan, nan).all())


def stolen_attention(q: Tensor, steps: Tensor) -> Tensor:
    """ "Quantized Keys Steal Attention" (arXiv 2605.26266): what noise adds to a cached key's mass.

    q: [H, Nq, D]; steps: of the quantizer, [H, n, groups]. Uniform noise of a step D makes
    E[exp(q.e / sqrt(d))] = prod sinh(x) / x, x = q D / (2 sqrt(d)); its logarithm to second order
    is sum_g D_g^2 |q_g|^2 / (24 d). The mean over keys does as well as each key's own. [H, Nq, 1].
    """
    dim = q.shape[-1]
    power = q.unflatten(-1, (steps.shape[-1], -1)).square().sum(-1)
    mean = steps.square().mean(1, keepdim=True)
    return -(power * mean).sum(-1, keepdim=True) / (24 * dim)


@pytest.mark.parametrize("name", ["rtn", "kivi"])
def test_the_score_bias_gives_the_current_chunk_its_share_back(name: str) -> None:
    """INT2 keys beside an exact chunk: with the correction the cached ones take less too much."""
    cache = KVCache(SPEC, make_format(name, group_size=32), CachePolicy(), dtype=torch.float32)
    _, k, v = _qkv(1, 18)
    cache.prefill(0, 3, [LayerWrite(0, k, v)])
    span = cache._segments[0].keys[0]
    steps = span.scales.float()
    if name == "kivi":  # a step a channel and group of tokens
        steps = steps.repeat_interleave(torch.tensor(span.group_tokens), dim=1)
    cache.begin_chunk(3, 3)
    q, own_k, _ = _qkv(2, 18)
    marks = torch.zeros(2, 18, 32)
    q, marks[..., 0] = 2.0 * q, 1.0

    def share(bias: Tensor | None) -> Tensor:
        """Of the current chunk: its values are ones, the cached ones' decoded are taken off."""
        hook = None if bias is None else (lambda layer, stream, query, past: bias)
        values = cache.history(0)[1]
        out = cache.attend(0, q, own_k, marks, score_bias=hook)[..., 0]
        scores = q @ torch.cat((cache.history(0)[0], own_k), 1).transpose(1, 2) * 32**-0.5
        if bias is not None:
            scores[..., :18] += bias
        cached = torch.softmax(scores, -1)[..., :18]
        return out - (cached @ values[..., :1]).squeeze(-1)

    exact = torch.softmax(q @ torch.cat((k, own_k), 1).transpose(1, 2) * 32**-0.5, -1)
    wanted = exact[..., 18:].sum(-1)
    plain, corrected = share(None), share(stolen_attention(q, steps))
    assert float(plain.mean()) < float(corrected.mean())
    assert abs(float((corrected - wanted).mean())) < abs(float((plain - wanted).mean()))

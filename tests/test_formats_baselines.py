"""rtn, kivi and qvg-pro: against plain arithmetic, the published ratios, and QVG's public code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quantwm.cache import explain, make_format, reference, reference_groups
from quantwm.cache.formats import Codebook, QueryGuide
from quantwm.cache.formats.base import Format
from quantwm.cache.formats.qvg_pro import QvgProSpan
from quantwm.cache.pack import pack, unpack
from quantwm.cache.plan import Workload, plan
from quantwm.errors import UserError

HEADS, DIM = 2, 16


def _data(tokens: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(HEADS, tokens, DIM, generator=generator).to(torch.bfloat16)


def _round_trip(fmt: Format[Any], x: Tensor, role: Any) -> tuple[Any, Tensor]:
    book = fmt.fit(x, torch.Generator().manual_seed(0), None)
    span = fmt.encode(x, book, role, QueryGuide())
    out = torch.empty(x.shape)
    fmt.decode_into(span, out, 0, 0, x.shape[1])
    return span, out


def _plain(x: np.ndarray, levels: int) -> np.ndarray:
    """One group, rounded to nearest by the textbook; numbers kept in FP16."""
    zero = np.float32(np.float16(x.min()))
    scale = np.float32(np.float16((x.max() - zero) / (levels - 1)))
    codes = np.clip(np.floor((x - zero) / scale + 0.5), 0, levels - 1) if scale else x * 0
    return zero + codes * scale


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("tokens", [3, 8, 13, 16])
def test_kivi_keys_are_grouped_by_channel_with_a_shorter_last_group(bits: int, tokens: int) -> None:
    fmt = make_format("kivi", bits=bits, group_size=8)
    x = _data(tokens)
    span, out = _round_trip(fmt, x, "keys")
    assert span.group_tokens == (8,) * (tokens // 8) + ((tokens % 8,) if tokens % 8 else ())
    assert span.group_stops.tolist() == np.cumsum(span.group_tokens).tolist()
    exact = x.float().numpy()
    for head in range(HEADS):
        for first in range(0, tokens, 8):
            for channel in range(DIM):
                group = exact[head, first : first + 8, channel]
                got = out[head, first : first + 8, channel].numpy()
                np.testing.assert_allclose(got, _plain(group, 2**bits), atol=1e-6)


@pytest.mark.parametrize(("name", "role"), [("kivi", "values"), ("rtn", "keys")])
@pytest.mark.parametrize("bits", [2, 4])
def test_others_are_grouped_by_token(name: str, role: str, bits: int) -> None:
    fmt = make_format(name, bits=bits, group_size=8)
    x = _data(5)
    _, out = _round_trip(fmt, x, role)
    for group, got in zip(x.float().view(-1, 8).numpy(), out.view(-1, 8).numpy(), strict=True):
        np.testing.assert_allclose(got, _plain(group, 2**bits), atol=1e-6)


@pytest.mark.parametrize(("name", "role"), [("kivi", "keys"), ("kivi", "values"), ("rtn", "keys")])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_groups_of_one_sign_keep_their_real_zero(name: str, role: str, sign: float) -> None:
    """A zero clamped to the codes would stretch 100 .. 101 to 0 .. 101."""
    x = (sign * (100.0 + torch.rand(1, 32, 32))).to(torch.bfloat16)
    _, out = _round_trip(make_format(name, group_size=32), x, role)
    assert float((out - x.float()).abs().max()) <= 1.01 / 6 + 0.01


@pytest.mark.parametrize("name", ["rtn", "kivi", "qvg-pro"])
def test_numbers_at_the_ends_of_bf16_stay_finite(name: str) -> None:
    x = _data(9)
    x[0, 0, 0], x[0, 1, 1], x[1, 2] = 3e38, -3e38, 1e-38
    fmt = make_format(name, group_size=8)
    for role in ("keys", "values"):
        assert bool(_round_trip(fmt, x, role)[1].isfinite().all())
        zeros = torch.zeros(HEADS, 9, DIM, dtype=torch.bfloat16)
        assert not _round_trip(fmt, zeros, role)[1].any()


def test_chunks_are_never_grouped_together() -> None:
    fmt = make_format("kivi", group_size=8)
    parts = [_data(n, seed=n) for n in (11, 3, 8)]
    spans, outs = zip(*(_round_trip(fmt, x, "keys") for x in parts), strict=True)
    span = fmt.join(fmt.join(spans[0], spans[1]), spans[2])
    assert span.group_tokens == (8, 3, 3, 8)
    out = torch.empty(HEADS, 22, DIM)
    fmt.decode_into(span, out, 0, 0, 22)
    assert torch.equal(out, torch.cat(outs, dim=1))


@pytest.mark.parametrize("name", ["rtn", "kivi", "qvg-pro"])
@pytest.mark.parametrize("role", ["keys", "values"])
def test_heads_encoded_in_turns_are_the_same(
    name: str, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fmt = make_format(name, group_size=8)
    whole = _round_trip(fmt, _data(13), role)
    monkeypatch.setattr(reference_groups, "ENCODE_ELEMENTS", 13 * DIM)
    turns = _round_trip(fmt, _data(13), role)
    assert torch.equal(whole[1], turns[1])
    for a, b in zip(_all(fmt, whole[0]), _all(fmt, turns[0]), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["rtn", "kivi", "qvg-pro"])
def test_a_range_of_heads_decodes_as_the_whole(name: str) -> None:
    fmt = make_format(name, group_size=8)
    span, whole = _round_trip(fmt, _data(13), "keys")
    some = torch.empty(1, 6, DIM)
    fmt.decode_heads_into(span, some, 0, 4, 10, 1)
    assert torch.equal(some, whole[1:, 4:10])


@pytest.mark.parametrize(
    ("method", "settings", "tokens", "ratio"),
    [
        ("rtn", {"preset": "int2"}, 4680, 6.40),
        ("rtn", {"preset": "int4"}, 4680, 3.56),
        ("kivi", {"preset": "int2"}, 4672, 5.33),  # whole groups of 32
        ("kivi", {"group_size": 64}, 4672, 6.40),
        ("kivi", {"group_size": 128}, 4608, 7.11),
        ("qvg-pro", {}, 1560, 1.21),
        ("qvg-pro", {}, 4680, 2.56),
        ("qvg-pro", {}, 9360, 3.56),
        ("qvg-pro", {}, 29640, 4.84),
        ("qvg-pro", {}, 37440, 5.02),
    ],
)
def test_published_ratios(method: str, settings: dict, tokens: int, ratio: float) -> None:
    load = Workload(1, 40, 128, tokens, tokens)
    assert round(plan({method: settings}, load).methods[0].ratio, 2) == ratio


def test_a_480p_chunk_has_a_short_key_group() -> None:
    """4,680 tokens are 146 groups of 32 and one of 8, whose scales and zeros cost as much."""
    found = plan({"kivi": {}}, Workload(1, 1, 128, 4680, 4680)).methods[0]
    assert found.bytes["zeros"] == 147 * 128 * 2 + 4680 * 4 * 2
    assert found.bytes["scales"] == found.bytes["zeros"] + 147 * 4


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("rtn", {"bits": 3}, "bits must be 2 or 4, got 3"),
        ("kivi", {"bits": 8}, "bits must be 2 or 4"),
        ("rtn", {"group_size": 0}, "group_size must be at least 1"),
        ("kivi", {"group_size": 0}, "group_size must be at least 1"),
        ("qvg-pro", {"stages": 0}, "stages must be 1 to 16"),
    ],
)
def test_bad_settings_are_refused(name: str, settings: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        make_format(name, **settings)


def test_settings_must_suit_the_head() -> None:
    for name in ("rtn", "kivi"):
        with pytest.raises(UserError, match=f"{name}: group_size 48 does not divide head_dim 128"):
            make_format(name, group_size=48).check(128)
        with pytest.raises(UserError, match="do not fill whole bytes"):
            make_format(name, group_size=3).check(3)


def test_stages_are_the_residual_s_centroids() -> None:
    """Each stage halves what is left; one stage is the qvg format."""
    x = _data(200)
    errors = []
    for stages in (1, 2, 4):
        fmt = make_format("qvg-pro", stages=stages, centroids=16, group_size=8)
        span, out = _round_trip(fmt, x, "values")
        assert span.ids.shape == (HEADS, 200, stages)
        errors.append(float((out - x.float()).square().mean()))
    assert errors == sorted(errors, reverse=True)
    plain = make_format("qvg", centroids=16, group_size=8)
    one = make_format("qvg-pro", stages=1, centroids=16, group_size=8)
    assert torch.equal(_round_trip(plain, x, "keys")[1], _round_trip(one, x, "keys")[1])


def test_stages_are_warm_started() -> None:
    fmt = make_format("qvg-pro", stages=2, centroids=4, group_size=8, iterations=0)
    x = _data(30)
    first = fmt.fit(x, torch.Generator().manual_seed(0), None)
    again = fmt.fit(_data(30, seed=9), torch.Generator().manual_seed(5), first)
    assert torch.equal(first.centroids, again.centroids)


@pytest.fixture(scope="module", params=["k", "v"])
def pro(request: pytest.FixtureRequest, shared_dir: Path) -> dict[str, Tensor]:
    path = shared_dir / "formats" / "qvg_pro_layer0.safetensors"
    if not path.is_file():
        pytest.skip(f"{path} not found")
    role = request.param
    recorded = load_file(shared_dir / "tensors" / "doom_rooms_a.safetensors")
    found = {n[2:]: t.squeeze(0) for n, t in load_file(path).items() if n.startswith(f"{role}.")}
    return {**found, "x": recorded[f"layer0.{role}"][:, :1536].contiguous()}


def test_qvg_pro_stores_what_the_public_code_stores(pro: dict[str, Tensor]) -> None:
    """Given its centroids and ids (its k-means moves centroids after it has assigned them)."""
    x = pro["x"]
    for stage in range(3):
        x = reference.residual(x, pro[f"ids.{stage}"], pro[f"centroids.{stage}"])
    packed, scales = reference.encode_qvg(x, pro["ids.3"], pro["centroids.3"], 16)
    assert torch.equal(scales.float(), pro["scales"].float())
    codes = torch.stack([(pro["packed"] >> shift) & 3 for shift in (6, 4, 2, 0)], -1).flatten(-2)
    scaled = (pro["scales"] > 0).repeat_interleave(16, dim=-1)
    same = unpack(packed, 128)[scaled] == codes[scaled]
    assert float(same.float().mean()) > 0.997
    book = Codebook(torch.cat([pro[f"centroids.{stage}"] for stage in range(4)], dim=1))
    ids = torch.stack([pro[f"ids.{stage}"] for stage in range(4)], dim=-1)
    span = QvgProSpan(pack(codes.contiguous()), ids, scales, book)
    out = torch.empty(x.shape)
    make_format("qvg-pro", centroids=64).decode_into(span, out, 0, 0, 1536)
    difference = (out - pro["decoded"].float()).abs()
    assert float(difference.max()) <= 0.032 and float(difference.mean()) < 0.001


def test_our_stages_are_as_good_as_theirs(pro: dict[str, Tensor]) -> None:
    _, out = _round_trip(make_format("qvg-pro", centroids=64), pro["x"], "values")
    ours = (out - pro["x"].float()).square().sum()
    theirs = (pro["decoded"].float() - pro["x"].float()).square().sum()
    assert float(ours) < 1.1 * float(theirs)


@pytest.mark.parametrize("count", [1, 2, 7, 8])
def test_four_bit_codes_come_back(count: int) -> None:
    codes = torch.randint(0, 16, (3, count), dtype=torch.uint8)
    packed = pack(codes, 4)
    assert packed.shape == (3, -(-count // 2))
    assert torch.equal(unpack(packed, count, 4), codes)
    assert pack(torch.tensor([[1, 2, 15]], dtype=torch.uint8), 4).tolist() == [[1 | 2 << 4, 15]]


@pytest.mark.parametrize("name", ["rtn", "kivi", "qvg-pro"])
@pytest.mark.parametrize("role", ["keys", "values"])
def test_a_gpu_stores_and_decodes_the_same(name: str, role: str, cuda: torch.device) -> None:
    fmt = make_format(name, **({"centroids": 8} if name == "qvg-pro" else {}))
    x = torch.randn(3, 197, 128).to(torch.bfloat16)
    book = fmt.fit(x, torch.Generator().manual_seed(0), None)
    moved = None if book is None else Codebook(book.centroids.to(cuda))
    here = fmt.encode(x, book, role, QueryGuide())
    there = fmt.encode(x.to(cuda), moved, role, QueryGuide())
    same = sum(
        int((a == b.cpu()).sum()) for a, b in zip(_all(fmt, here), _all(fmt, there), strict=True)
    )
    assert same > 0.999 * sum(t.numel() for t in _all(fmt, here))
    ours, theirs = torch.empty(3, 150, 128), torch.empty(3, 150, 128, device=cuda)
    fmt.decode_into(here, ours, 0, 20, 170)
    fmt.decode_into(there, theirs, 0, 20, 170)
    assert float((ours - theirs.cpu()).square().mean() / ours.square().mean()) < 1e-3
    assert explain(cuda).startswith("Triton kernels")


def _all(fmt: Format[Any], span: Any) -> list[Tensor]:
    return [t.float() for part in fmt.parts(span).values() for t in part]

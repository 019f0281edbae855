"""Attention over a cache: heads in turns give the same bits, and fused is never a silent choice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from quantwm.cache import CachePolicy, CacheSpec, KVCache, LayerWrite, dispatch, fused, make_format
from quantwm.cache import attention as attention_module
from quantwm.cache.attention import attention
from quantwm.cache.formats.qvg import QvgConfig, QvgFormat
from quantwm.cache.slabs import slab_heads, slab_tokens
from quantwm.cache.workspace import SCRATCH_LIMIT, SLAB_BYTES, Workspace, heads_at_once
from quantwm.errors import UserError

HEADS, FRAME, DIM = 5, 6, 16
SPEC = CacheSpec(
    layers=1, heads=HEADS, head_dim=DIM, tokens_per_frame=FRAME, frames_per_chunk=2
)  # fmt: skip
SETTINGS = {"qvg": {"centroids": 4, "group_size": 8}, "quantwm": {"centroids": 4, "group_size": 8}}


def filled(method: str, workspace: Workspace, dtype: torch.dtype = torch.float32) -> KVCache:
    """A sink, packed frames and two recent chunks, with a chunk open behind them."""
    policy = CachePolicy(sink_frames=1, recent_chunks=1, span_tokens=24)
    fmt = make_format(method, **SETTINGS.get(method, {}))
    cache = KVCache(SPEC, fmt, policy, dtype=dtype, workspace=workspace)
    generator = torch.Generator().manual_seed(0)
    for chunk in range(4):
        k, v, q = (torch.randn(HEADS, 2 * FRAME, DIM, generator=generator) for _ in range(3))
        cache.prefill(2 * chunk, 2, [LayerWrite(0, k, v, q)])
    cache.begin_chunk(8, 2)
    return cache


def queries() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(HEADS, 2 * FRAME, DIM, generator=generator) for _ in range(3))
    return q, k, v


@pytest.mark.parametrize("method", ["bf16", "qvg", "quantwm"])
@pytest.mark.parametrize("biased", [False, True])
def test_heads_in_turns_give_the_same_bits(method: str, biased: bool) -> None:
    def bias(layer: int, stream: str, q: Tensor, past: int) -> Tensor:
        return torch.arange(HEADS * past).view(HEADS, 1, past) / 100

    per_head = 2 * 60 * DIM * 4
    whole, turns = Workspace(), Workspace(scratch_limit=2 * per_head + 1)
    hook = bias if biased else None
    one = filled(method, whole).attend(0, *queries(), score_bias=hook)
    other = filled(method, turns).attend(0, *queries(), score_bias=hook)
    assert torch.equal(one, other)
    assert whole.nbytes == HEADS * per_head
    assert turns.nbytes == 2 * per_head


@pytest.mark.parametrize("together", [1, 2, 5])
def test_a_bias_is_spread_over_some_heads_at_a_time(
    together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = queries()
    biases = (torch.randn(HEADS, 12, 7), torch.randn(HEADS, 1, 7), torch.randn(1, 12, 1))
    wanted = [attention(q, k, v, bias) for bias in biases]
    sizes: list[int] = []
    genuine = F.scaled_dot_product_attention

    def noted(*args: Tensor, attn_mask: Tensor) -> Tensor:
        sizes.append(attn_mask.shape[1])
        return genuine(*args, attn_mask=attn_mask)

    monkeypatch.setattr(attention_module, "MASK_ELEMENTS", together * 12 * 12)
    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    for bias, expected in zip(biases, wanted, strict=True):
        assert torch.equal(attention(q, k, v, bias), expected)
    assert max(sizes) == together


def test_one_head_may_pass_the_limit_and_gather_is_never_split() -> None:
    tiny = Workspace(scratch_limit=1)
    cache = filled("quantwm", tiny)
    cache.attend(0, *queries())
    assert tiny.nbytes == 2 * 60 * DIM * 4
    keys, values = cache.gather(0, *queries()[1:])
    assert keys.shape == values.shape == (HEADS, 60, DIM)


def test_the_longest_history_asked_for_fits_the_default_limit() -> None:
    tokens = 150_000 + 4_680
    group = heads_at_once(40, tokens, 128, 2)
    assert group == 10
    assert 2 * group * tokens * 128 * 2 <= SCRATCH_LIMIT
    assert heads_at_once(40, 28_080, 128, 2) == 40
    assert heads_at_once(7, 10, 64, 4, limit=3 * 2 * 10 * 64 * 4) == 3
    assert heads_at_once(7, 0, 64, 4) == 7


def test_a_format_that_decodes_no_single_heads_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class WholeFormat:
        def __init__(self, **settings: int) -> None:
            self._fmt = QvgFormat(QvgConfig(**settings))

        def __getattr__(self, name: str) -> object:
            if name == "decode_heads_into":
                raise AttributeError(name)
            return getattr(self._fmt, name)

    monkeypatch.setattr(dispatch, "_notes", {})
    monkeypatch.setitem(globals(), "make_format", lambda name, **s: WholeFormat(**s))
    workspace = Workspace(scratch_limit=1)
    filled("qvg", workspace).attend(0, *queries())
    assert workspace.nbytes == HEADS * 2 * 60 * DIM * 4
    assert "qvg decodes no single ones" in dispatch.explain("cpu")


@pytest.mark.parametrize(("mode", "says"), [("fused", "fused"), ("slabs", "in slabs")])
def test_low_memory_on_a_cpu_is_staged_and_says_so(
    monkeypatch: pytest.MonkeyPatch, mode: str, says: str
) -> None:
    monkeypatch.setattr(dispatch, "_notes", {})
    staged = filled("quantwm", Workspace()).attend(0, *queries())
    other = filled("quantwm", Workspace(mode=mode)).attend(0, *queries())
    assert torch.equal(staged, other)
    assert f"attention is staged where it was to be {says}: PyTorch" in dispatch.explain("cpu")


@pytest.mark.parametrize(
    ("method", "kind"), [("quantwm", "affine"), ("qvg", "ternary"), ("bf16", "plain")]
)
def test_what_goes_to_the_fused_kernel(
    monkeypatch: pytest.MonkeyPatch, method: str, kind: str
) -> None:
    """Packed spans as they lie and the chunk's own tokens behind them."""
    monkeypatch.setattr(dispatch, "_notes", {})
    seen: list[str] = []

    class Kernel:
        def unsupported_queries(self, q: Tensor) -> None:
            return None

        def not_by_hopper(self, q: Tensor, segments: list[fused.Shown]) -> str:
            return "so"

        def fused(self, q: Tensor, segments: list[fused.Shown], scale: float) -> Tensor:
            seen.extend(side.kind for keys, values, *_ in segments for side in (keys, values))
            return q

    monkeypatch.setattr(fused, "fused_kernel", lambda device: Kernel())
    filled(method, Workspace(mode="fused")).attend(0, *queries())
    assert set(seen) == {kind, "plain"} and seen[-2:] == ["plain"] * 2
    assert "fused attention by flash_kernel: so" in dispatch.explain("cpu")


def test_slabs_are_few_and_equal() -> None:
    assert [slab_heads(40, most) for most in (0, 50, 40, 14, 10, 1)] == [40, 40, 40, 14, 10, 1]
    assert slab_heads(40, 11) == 10
    assert slab_tokens(28_080, 10, 128, 2, 21_000_000) == 4_096
    assert slab_tokens(28_080, 40, 128, 2, SLAB_BYTES) == 4_096
    assert slab_tokens(8_192, 40, 128, 2, SLAB_BYTES) == 4_096
    assert slab_tokens(8_200, 40, 128, 2, SLAB_BYTES) == 2_816
    assert slab_tokens(100, 40, 128, 2, SLAB_BYTES) == 128
    assert slab_tokens(0, 40, 128, 2, SLAB_BYTES) == 0
    assert slab_tokens(1_000, 3, 64, 2, limit=1) == 128


def test_the_mode_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Workspace().mode == "staged"
    monkeypatch.setenv("QUANTWM_ATTENTION", "fused")
    assert Workspace().mode == "fused"
    assert Workspace(mode="staged").mode == "staged"
    monkeypatch.setenv("QUANTWM_ATTENTION", "magic")
    says = "QUANTWM_ATTENTION must be one of staged, slabs, fused, got"
    with pytest.raises(UserError, match=says):
        Workspace()
    with pytest.raises(UserError, match="scratch_limit is in bytes and at least 1, got 0"):
        Workspace(scratch_limit=0, mode="staged")


def test_attention_equals_its_definition() -> None:
    q, k, v = (t.double() for t in queries())
    wanted = (q @ k.transpose(1, 2) * DIM**-0.5).softmax(-1) @ v
    assert torch.allclose(attention(q, k, v), wanted)


def test_bf16_on_a_cpu_in_blocks_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (t.bfloat16() for t in queries())
    wanted = (q.double() @ k.double().transpose(1, 2) * DIM**-0.5).softmax(-1) @ v.double()
    few = attention(q, k, v)
    assert torch.equal(few, F.scaled_dot_product_attention(q[None], k[None], v[None])[0])
    monkeypatch.setattr("quantwm.cache.attention.CPU_SCORES_WORTH", 0)
    whole = attention(q, k, v)
    monkeypatch.setattr("quantwm.cache.attention.CPU_SCORES", 5 * 2 * FRAME)
    for out in (few, whole, attention(q, k, v)):
        assert out.dtype == torch.bfloat16
        assert (out.double() - wanted).norm() < 0.01 * wanted.norm()

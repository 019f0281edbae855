"""What the golden rollouts share: a watched cache, models from miniatures, trace comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from quantwm.cache import CachePolicy, KVCache, make_format
from quantwm.errors import UserError
from quantwm.goldens import Comparison, GoldenSet
from quantwm.worlds.wan.backbone import CausalWan
from quantwm.worlds.wan.config import WanConfig
from quantwm.worlds.wan.geometry import cache_spec
from quantwm.worlds.wan.loading import assign, on_meta
from quantwm.worlds.wan.names import canonical, family, infer_config
from quantwm.worlds.wan.self_forcing import StepTrace

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "bf16_autocast": torch.bfloat16}
SPAN_TOKENS = 4680  # of no consequence in the bf16 format


class WatchedCache(KVCache):
    """A cache that also keeps what its newest clean pass attended, per stream and layer.

    finalize_chunk evicts what the next chunk cannot see; the published final caches still hold
    it, so they are compared with history and chunk as they stood in the last clean pass.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.attended: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def tokens_per_frame(self, stream: str) -> int:
        return dict(self.spec.companions).get(stream, self.spec).tokens_per_frame

    def _watch(self, stream: str, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        past_k, past_v = self.history(layer, stream)
        self.attended[stream, layer] = torch.cat([past_k, k], 1), torch.cat([past_v, v], 1)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        clean: bool = False,
        stream: str = "self",
        **rest: Any,
    ) -> torch.Tensor:
        if clean:
            self._watch(stream, layer, k, v)
        return super().attend(layer, q, k, v, clean=clean, stream=stream, **rest)

    def gather(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        clean: bool = False,
        stream: str = "self",
        q: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if clean:
            self._watch(stream, layer, k, v)
        return super().gather(layer, k, v, clean=clean, stream=stream, q=q)


def build(weights: Mapping[str, torch.Tensor], config: WanConfig, dtype: torch.dtype) -> CausalWan:
    """A model of these weights (any naming) in `dtype`."""
    model = on_meta(lambda: CausalWan(config))
    named = canonical(weights)
    assign(model, named, family(named), dtype, "cpu")
    return model


def open_cache(
    model: CausalWan,
    tokens_per_frame: int,
    frames_per_chunk: int,
    policy: CachePolicy,
    dtype: torch.dtype,
) -> WatchedCache:
    """A cache that holds the compute dtype, so that FP32 runs are compared in FP32."""
    spec = cache_spec(model.config, tokens_per_frame, frames_per_chunk)
    fmt = make_format("bf16", exact=dtype == torch.float32)
    return WatchedCache(spec, fmt, policy, dtype=dtype)


def policy_of(window: int, sink: int) -> CachePolicy:
    return CachePolicy(
        sink_frames=sink if window > 0 else 0,
        window_frames=window if window > 0 else None,
        span_tokens=SPAN_TOKENS,
    )


def grid_of(hw: tuple[int, int]) -> tuple[int, int]:
    return hw[0] // 2, hw[1] // 2


def flat(k: torch.Tensor) -> torch.Tensor:
    """[heads, N, D] -> the published layout [1, N, heads, D]."""
    return k.transpose(0, 1)[None]


def runs_of(golden: GoldenSet, rollout: str, config: Mapping[str, Any] | None) -> Iterator[str]:
    listed = config.get("dtypes") if config else None
    for run in listed or DTYPES:
        if any(name.startswith(f"{rollout}.{run}.") for name in golden.tensors):
            if run not in DTYPES:
                raise UserError(f"{golden.name} holds an unknown run {run}")
            yield run


def check_cursors(compare: Comparison, prefix: str, held_tokens: int, end_tokens: int) -> None:
    compare.check(f"{prefix}.local_end_index", held_tokens)
    compare.check(f"{prefix}.global_end_index", end_tokens)


def sized(golden: GoldenSet, heads: int, context_len: int, action_heads: int = 0) -> WanConfig:
    """The sizes of a miniature: its heads are given, the rest is read from its weights.

    action_heads: of Matrix-Game-2's action module, 0 for a model without one.
    """
    named = canonical(golden.weights)
    width = named["patch_embedding.weight"].shape[0]
    inner = [t for name, t in named.items() if name.endswith("action_model.mouse_attn_q.weight")]
    if heads < 1 or width % heads:
        raise UserError(f"{golden.name}: a width of {width} is not {heads} equal heads")
    if not inner:
        return replace(infer_config(named, width // heads), context_len=context_len)
    if action_heads < 1 or inner[0].shape[0] % action_heads:
        raise UserError(
            f"{golden.name}: an action width of {inner[0].shape[0]} is not {action_heads} heads"
        )
    config = infer_config(named, width // heads, inner[0].shape[0] // action_heads)
    return replace(config, context_len=context_len)


def check_trace(
    compare: Comparison,
    at: str,
    trace: Sequence[StepTrace],
    layout: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Inputs, timesteps, flows and x0 of a chunk's steps; `layout` turns [F, C, H, W] around."""
    for index, step in enumerate(trace):
        prefix = f"{at}.s{index}"
        compare.check(f"{prefix}.x_in", layout(step.x))
        compare.check(f"{prefix}.flow", layout(step.flow))
        compare.check(f"{prefix}.x0", layout(step.x0))
        stored = f"{prefix}.timestep"
        if compare.wants(stored):
            count = compare.golden.tensors[stored].numel()
            compare.check(stored, torch.full((count,), step.timestep))


def channels_first(x: torch.Tensor) -> torch.Tensor:
    """[F, C, H, W] <-> [C, F, H, W]."""
    return x.transpose(0, 1)

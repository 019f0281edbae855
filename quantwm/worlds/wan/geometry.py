"""The KV cache geometry of a Wan transformer, its action streams included."""

from __future__ import annotations

from dataclasses import replace

from quantwm.cache.spec import CacheSpec, RopeLayout
from quantwm.worlds.wan.config import WanConfig
from quantwm.worlds.wan.rotary import THETA, axis_split


def key_layout(config: WanConfig, latent: tuple[int, int], kind: str) -> RopeLayout | None:
    """How positions are in the cached keys; None in long-video mode, where the first chunk's keys
    are cached before RoPE and the others after it."""
    if kind == "rolling":
        return None
    grid = latent[0] // 2, latent[1] // 2  # 2x2 patches
    return RopeLayout(axis_split(config.head_dim), grid, THETA, baked=kind != "memory")


def cache_spec(
    config: WanConfig,
    tokens_per_frame: int,
    frames_per_chunk: int,
    rope: RopeLayout | None = None,
) -> CacheSpec:
    """Self-attention stream, and Matrix-Game-2's mouse and keyboard as companions."""
    return CacheSpec(
        layers=config.layers,
        heads=config.heads,
        head_dim=config.head_dim,
        tokens_per_frame=tokens_per_frame,
        frames_per_chunk=frames_per_chunk,
        companions=_action_streams(config, tokens_per_frame, frames_per_chunk),
        rope=rope,
    )


def _action_streams(
    config: WanConfig, cells: int, frames_per_chunk: int
) -> tuple[tuple[str, CacheSpec], ...]:
    """Mouse: one token per latent cell and frame. Keyboard: one token per frame."""
    action = config.action
    if action is None:
        return ()
    keyboard = CacheSpec(
        layers=len(action.layers),
        heads=action.heads,
        head_dim=action.head_dim,
        tokens_per_frame=1,
        frames_per_chunk=frames_per_chunk,
    )
    if not action.mouse_dim:
        return (("keyboard", keyboard),)
    return (("mouse", replace(keyboard, tokens_per_frame=cells)), ("keyboard", keyboard))

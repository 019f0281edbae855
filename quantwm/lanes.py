"""Lane configurations: by format name, with one limit on the history for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from quantwm.cache.formats import FORMATS
from quantwm.cache.spec import CachePolicy, CacheSpec
from quantwm.engine_types import LaneConfig
from quantwm.errors import UserError
from quantwm.worlds.base import WorldSpec

MODES = ("free", "teacher")
CPU_MAX_TOKENS = 4096
"""History kept on a CPU unless asked otherwise: attention over 16k tokens takes 331 ms a pass on
two cores where 4k take 95 (embedded world, BF16)."""


def lanes_for(spec: WorldSpec, names: Sequence[str]) -> tuple[LaneConfig, ...]:
    """One lane per format name, with the world's settings for that format and its policy.

    Raises:
        UserError: an unknown or repeated name; the text lists the formats.
    """
    known = ", ".join(FORMATS)
    if not names:
        raise UserError(f"name at least one lane; there are {known}")
    for name in names:
        if name not in FORMATS:
            raise UserError(f"unknown lane {name!r}; there are {known}")
    if len(set(names)) != len(names):
        raise UserError(f"a lane is named twice in {','.join(names)}; name each once")
    return tuple(
        LaneConfig(name, name, dict(spec.format_settings.get(name, {})), spec.policy)
        for name in names
    )


def limit_history(policy: CachePolicy, spec: CacheSpec, max_tokens: int | None) -> CachePolicy:
    """The policy with a window of at most max_tokens, in whole latent frames, its sink kept.

    Raises:
        UserError: fewer tokens than the sink and two chunks need.
    """
    if max_tokens is None:
        return policy
    frames = max_tokens // spec.tokens_per_frame
    least = policy.sink_frames + 2 * spec.frames_per_chunk  # a window counts the current chunk
    if frames < least:
        raise UserError(
            f"a history of {max_tokens:,} tokens is too short: this world needs at least "
            f"{least * spec.tokens_per_frame:,} ({least} latent frames)"
        )
    if policy.window_frames is not None:
        frames = min(frames, policy.window_frames)
    return replace(policy, window_frames=frames)


def is_bf16(lane: LaneConfig) -> bool:
    """Whether a lane keeps its cache in BF16: the reference that the others are measured by."""
    return lane.method == "bf16"


def max_tokens_for(device: torch.device, max_tokens: int | None) -> int | None:
    """Tokens of history kept: as asked, or CPU_MAX_TOKENS on a CPU and no limit elsewhere."""
    if max_tokens is None:
        return CPU_MAX_TOKENS if device.type == "cpu" else None
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
        raise UserError(f"max_tokens is a whole number of tokens from 1, got {max_tokens!r}")
    return max_tokens


def check_lanes(lanes: Sequence[LaneConfig], mode: str) -> None:
    """UserError unless the lanes have distinct names and the mode exists and suits them."""
    if mode not in MODES:
        raise UserError(f"unknown mode {mode!r}; there are {', '.join(MODES)}")
    if not lanes:
        raise UserError("name at least one lane, for example bf16")
    names = [lane.name for lane in lanes]
    if len(set(names)) != len(names):
        raise UserError(f"two lanes have one name in {', '.join(names)}; names are distinct")
    if mode == "teacher" and not any(is_bf16(lane) for lane in lanes):
        raise UserError("mode teacher needs a bf16 lane: its latents are every lane's history")

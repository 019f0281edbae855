"""Lane configurations: by format name, with one limit on the history for all of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from quantwm.cache.formats import FORMATS, Format, make_format, split_method
from quantwm.cache.score_correction import CorrectedCache
from quantwm.cache.second_kernel import SecondKernelCache
from quantwm.cache.spec import CachePolicy, CacheSpec
from quantwm.engine_types import LaneConfig
from quantwm.errors import UserError
from quantwm.worlds.base import WorldSpec

MODES = ("free", "teacher")
LONGEST_LABEL = 32
"""Of a lane's name in a session folder."""
CPU_MAX_TOKENS = 4096
"""History kept on a CPU unless asked otherwise: attention over 16k tokens takes 331 ms a pass on
two cores where 4k take 95 (embedded world, BF16)."""


def lanes_for(spec: WorldSpec, names: Sequence[str]) -> tuple[LaneConfig, ...]:
    """One lane per method, with the world's settings for that format and its policy.

    A method is a format name, or one with settings behind it ("quantwm:rank=4,clip=0.7"), which
    come before the world's; a preset replaces them.

    Raises:
        UserError: an unknown or repeated name; the text lists the formats.
    """
    if not names:
        raise UserError(f"name at least one lane; there are {', '.join(FORMATS)}")
    lanes = []
    for name in names:
        method, own = split_method(name)
        if method not in FORMATS:
            raise UserError(f"unknown lane {name!r}; there are {', '.join(FORMATS)}")
        suited = {} if "preset" in own else spec.format_settings.get(method, {})
        settings = {**suited, **own}
        make_format(method, **settings)  # a setting that does not exist is named at once
        lanes.append(LaneConfig(_label(name), method, settings, spec.policy))
    if len({lane.name for lane in lanes}) != len(lanes):
        raise UserError(f"a lane is named twice in {','.join(names)}; name each once")
    return tuple(lanes)


def _label(method: str) -> str:
    """A lane's name, which is also its video's: "quantwm:rank=4,psac=false" is
    "quantwm-rank4-psacfalse"."""
    plain = method.lower().replace("=", "").replace(" ", "")
    return re.sub(r"[^a-z0-9_.-]+", "-", plain)[:LONGEST_LABEL]


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
        where = ", as kept on a CPU," if max_tokens == CPU_MAX_TOKENS else ""
        raise UserError(
            f"a history of {max_tokens:,} tokens{where} is too short: this world needs at least "
            f"{least * spec.tokens_per_frame:,} ({least} latent frames; --max-tokens)"
        )
    if policy.window_frames is not None:
        frames = min(frames, policy.window_frames)
    return replace(policy, window_frames=frames)


def lane_format(lane: LaneConfig) -> Format[Any]:
    """The cache format that a lane's method and settings name."""
    return make_format(lane.method, **lane.settings)


def with_output_weights(fmt: Format[Any], world: Any) -> Format[Any]:
    """The format, told of the world's output weights where it asks and the world gives them."""
    given = getattr(world, "value_metric", None)
    if given is not None and hasattr(fmt, "output_metric"):
        layers, streams = world.spec.cache.layers, world.spec.cache.streams
        fmt.output_metric = lambda slot: given(slot % layers, streams[slot // layers])
    return fmt


def read_through(lane: LaneConfig, cache: Any) -> Any:
    """The lane's cache, or what stands in for it where its settings ask for another reading."""
    if is_floor(lane):
        return SecondKernelCache(cache)
    return CorrectedCache(cache) if lane.settings.get("corrected") else cache


def is_bf16(lane: LaneConfig) -> bool:
    """Whether a lane is the reference that the others are measured by: BF16, and not the noise
    floor, which is BF16 through another attention kernel."""
    return lane.method == "bf16" and not is_floor(lane)


def is_floor(lane: LaneConfig) -> bool:
    """Whether a lane is the noise floor (`bf16:floor`)."""
    settings = lane.settings
    return lane.method == "bf16" and (
        settings.get("preset") == "floor" or bool(settings.get("second_kernel"))
    )


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

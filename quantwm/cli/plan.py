"""`plan`: bytes by part, ratios, scratch and peak, before anything is allocated."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from quantwm.cache.formats import FORMATS, split_method, split_methods, takes
from quantwm.cache.plan import MethodPlan, Workload, companion_loads, plan
from quantwm.cli.common import emit, integer, number, say, table
from quantwm.errors import UserError
from quantwm.worlds.base import WorldSpec
from quantwm.worlds.registry import world_spec
from quantwm.worlds.room import capacity_of, fit, planned_device, world_room

DEFAULT_CENTROIDS = 256
"""The published choice at full size, one codebook per native chunk."""

_GEOMETRY = ("layers", "heads", "head_dim", "tokens", "span")
_KEPT = ("sink", "recent", "current")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `plan`."""
    count = integer(1, 2**40)
    numbers = parser.add_argument_group("explicit numbers")
    numbers.add_argument("--layers", type=count)
    numbers.add_argument("--heads", type=count)
    numbers.add_argument("--head-dim", type=count)
    numbers.add_argument("--tokens", type=count, help="of history")
    numbers.add_argument("--span", type=count, help="tokens that share a codebook")
    numbers.add_argument(
        "--chunk", type=count, help="tokens of a chunk; a span is one chunk by default"
    )
    world = parser.add_argument_group("or a world")
    world.add_argument("--world", help="a name that `worlds` lists")
    world.add_argument(
        "--frames", type=count, help="video frames of history; without, the world's window is full"
    )
    world.add_argument("--resolution", metavar="WxH", help="the world's own by default")
    world.add_argument(
        "--memory", type=integer(1, 2**20), metavar="GIB", help="of the GPU; this machine's, if any"
    )
    parser.add_argument(
        "--methods",
        type=split_methods,
        default=("bf16", "qvg", "quantwm"),
        help="formats, with a preset or settings behind a colon: quantwm:rank=4,clip=0.7",
    )
    parser.add_argument(
        "--centroids", type=integer(1, 256), help="of a codebook (256, or the world's own)"
    )
    kept = integer(0, 2**40)
    for part, text in (
        ("sink", "of the history that stay BF16 at its beginning"),
        ("recent", "of the history that stay BF16 at its end"),
        ("current", "of the chunk being denoised"),
    ):
        parser.add_argument(f"--{part}-tokens", type=kept, default=0, help=f"tokens {text}")


def run(arguments: argparse.Namespace) -> int:
    """Plan the methods and print a table and its JSON."""
    if not arguments.methods:
        raise UserError("name at least one method, for example --methods bf16,qvg,quantwm")
    load, settings = _of_world(arguments) if arguments.world else _of_numbers(arguments)
    asked = arguments.centroids is not None
    planned = plan({name: _settings(name, settings, asked) for name in arguments.methods}, load)
    say(_table(planned.methods))
    needs = _needs(arguments) if arguments.world else None
    emit(
        {
            "methods": [method.as_json() for method in planned.methods],
            "world": arguments.world,
            "layers": load.layers,
            "heads": load.heads,
            "head_dim": load.head_dim,
            "tokens": load.tokens,
            "span": load.span_tokens,
            "chunk": load.chunk_tokens or load.span_tokens,
            "sink_tokens": load.sink_tokens,
            "recent_tokens": load.recent_tokens,
            "current_tokens": load.current_tokens,
            **({} if needs is None else {"needs": needs}),
        }
    )
    return 0


def _needs(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the whole world needs with one lane of each method, windows full, and what would fit."""
    name, lanes = arguments.world, arguments.methods
    device, size = planned_device(name), _size(arguments.resolution)
    capacity = None if arguments.memory is None else arguments.memory * 2**30
    if capacity is None and device.type == "cuda" and torch.cuda.is_available():
        capacity = capacity_of(device)
    room = world_room(name, lanes, device, size)
    total = room.total(lanes)
    advice = found = None
    if capacity is not None:
        found = fit(name, lanes, device, capacity, size)
        advice = found.advice
    more = ""
    if room.working:
        more = f"; each lane's video {_gib(room.streaming)}; decoding a frame {_gib(room.working)}"
    say(
        f"{name} with lanes {','.join(lanes)} and full windows needs {_gib(total)} in all: "
        f"weights {_gib(room.weights)}{more}; the caches"
    )
    if room.passing:
        say(f"  for a prompt {_gib(room.passing)} of text encoder, on the CPU where room is short")
    if room.least < room.weights:
        least = room.total(lanes, offload=True)
        say(f"  with the transformer's blocks on the CPU (--offload blocks): {_gib(least)}")
    if found is not None:
        say(advice or f"  it fits into {_gib(capacity or 0)}")
    return {
        "weight_bytes": room.weights,
        "text_encoder_bytes": room.passing,
        "video_bytes": room.streaming,
        "decoding_bytes": room.working,
        "total_bytes": total,
        "offloaded_bytes": room.total(lanes, offload=True),
        "capacity_bytes": capacity,
        "fitting_lanes": None if found is None else list(found.lanes),
        "offload": None if found is None else found.offload,
        "advice": advice,
    }


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


def _settings(
    method: str, settings: Mapping[str, Mapping[str, object]], asked: bool
) -> dict[str, object]:
    """What the method says, before what suits the geometry; a preset keeps its own numbers."""
    name, own = split_method(method)
    return own if "preset" in own and not asked else {**settings.get(name, {}), **own}


def _of_numbers(
    arguments: argparse.Namespace,
) -> tuple[Workload, Mapping[str, Mapping[str, object]]]:
    missing = [name for name in _GEOMETRY if getattr(arguments, name) is None]
    of_world = (arguments.frames, arguments.resolution, arguments.memory)
    if missing or any(given is not None for given in of_world):
        wanted = " ".join(f"--{name.replace('_', '-')} N" for name in _GEOMETRY)
        raise UserError(f"give {wanted}, or --world NAME --frames N")
    clustered = {"centroids": arguments.centroids or DEFAULT_CENTROIDS}
    settings = {name: clustered for name in FORMATS if takes(name, "centroids")}
    load = Workload(
        layers=arguments.layers,
        heads=arguments.heads,
        head_dim=arguments.head_dim,
        tokens=arguments.tokens,
        span_tokens=arguments.span,
        chunk_tokens=arguments.chunk,
        sink_tokens=arguments.sink_tokens,
        recent_tokens=arguments.recent_tokens,
        current_tokens=arguments.current_tokens,
    )
    return load, settings


def _of_world(
    arguments: argparse.Namespace,
) -> tuple[Workload, Mapping[str, Mapping[str, object]]]:
    given = [name for name in (*_GEOMETRY[:4], "chunk") if getattr(arguments, name) is not None]
    spec = world_spec(arguments.world)
    if given or (arguments.frames is None and spec.policy.window_frames is None):
        raise UserError("with --world give --frames N and, if need be, --span and --resolution")
    per_frame = _tokens_per_frame(spec, arguments.resolution)
    settings = {name: dict(found) for name, found in spec.format_settings.items()}
    if arguments.centroids is not None:
        for name in FORMATS:
            if takes(name, "centroids"):
                settings.setdefault(name, {})["centroids"] = arguments.centroids
    if arguments.frames is None:
        return _of_window(arguments, spec), settings
    on_gpu = planned_device(spec.name).type == "cuda"
    # the first latent frame is one video frame, every later one frames_per_latent
    frames = -(-(arguments.frames - 1) // spec.frames_per_latent) + 1
    load = Workload(
        layers=spec.cache.layers * len(spec.cache.streams),
        heads=spec.cache.heads,
        head_dim=spec.cache.head_dim,
        tokens=frames * per_frame,
        span_tokens=arguments.span
        or spec.policy.span_tokens * per_frame // spec.cache.tokens_per_frame,
        chunk_tokens=(frames if spec.remade else spec.cache.frames_per_chunk) * per_frame,
        sink_tokens=arguments.sink_tokens,
        recent_tokens=arguments.recent_tokens,
        current_tokens=arguments.current_tokens,
        companions=companion_loads(
            spec.cache,
            frames,
            arguments.recent_tokens // per_frame,
            arguments.current_tokens // per_frame,
        ),
        scratch_itemsize=2 if on_gpu else 4,
        on_gpu=on_gpu,
        remade=spec.remade,
    )
    return load, settings


def _of_window(arguments: argparse.Namespace, spec: WorldSpec) -> Workload:
    """What a lane holds between two chunks with its window full, as its policy says."""
    sized = world_spec(spec.name, _size(arguments.resolution))
    itemsize = 2 if planned_device(spec.name).type == "cuda" else 4
    load = Workload.of_policy(sized.cache, sized.policy, itemsize=itemsize, remade=spec.remade)
    kept = {f"{part}_tokens": getattr(arguments, f"{part}_tokens") for part in _KEPT}
    span = {} if arguments.span is None else {"span_tokens": arguments.span}
    return replace(load, **span, **{name: count for name, count in kept.items() if count})


def _size(resolution: str | None) -> tuple[int, int] | None:
    """Of a resolution that was looked at before."""
    if resolution is None:
        return None
    width, height = map(int, resolution.split("x"))
    return width, height


def _tokens_per_frame(spec: WorldSpec, resolution: str | None) -> int:
    """Tokens of a latent frame at a resolution that the world runs at."""
    sizes = {f"{w}x{h}": w * h for w, h in (spec.video_size, *spec.resolutions)}
    own = spec.video_size[0] * spec.video_size[1]
    if resolution is None:
        return spec.cache.tokens_per_frame
    if resolution not in sizes:
        raise UserError(f"{spec.name} runs at {', '.join(sizes)}, not at {resolution[:20]!r}")
    return spec.cache.tokens_per_frame * sizes[resolution] // own


def _table(methods: Sequence[MethodPlan]) -> str:
    parts = dict.fromkeys(part for method in methods for part in method.bytes)
    rows = [["", *(method.method for method in methods)]]
    for part in parts:
        rows.append([part, *(_mib(method.bytes.get(part)) for method in methods)])
    rows.append(["total", *(_mib(method.bytes_total) for method in methods)])
    rows.append(["scratch", *(_mib(method.scratch_bytes) for method in methods)])
    rows.append(["peak", *(_mib(method.peak_bytes) for method in methods)])
    rows.append(["ratio (nominal)", *(number(method.ratio, 3, "x") for method in methods)])
    rows.append(["ratio (resident)", *(number(m.resident_ratio, 3, "x") for m in methods)])
    return table(rows)


def _mib(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:,.2f} MiB"

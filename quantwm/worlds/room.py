"""What a world needs on a device before anything is loaded, and the settings that would fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import torch

from quantwm.cache.plan import plan_lanes
from quantwm.errors import UserError
from quantwm.lanes import CPU_MAX_TOKENS, lanes_for, limit_history
from quantwm.memory import read_memory
from quantwm.worlds.registry import world_module, world_presence, world_spec


@dataclass(frozen=True)
class Room:
    """Bytes on the device. What a pass of the transformer takes is small beside decoding frames.

    Attributes:
        weights: that stay. passing: held for a moment (a text encoder), on the CPU where they do
            not fit. caches: method, as it was asked for -> peak of one lane with its window full.
        least: weights that stay when the transformer's blocks are kept on the CPU and visit the
            device one after the other.
        held: method -> what one lane holds between chunks. streaming: what one lane's video holds
            of the frames before, the newest chunk's beside the last one's. working: while a frame
            is decoded, one layer's scratch with it. kept: what the transformer keeps between
            passes, whatever the lanes.
    """

    weights: int
    passing: int
    caches: Mapping[str, int]
    least: int
    held: Mapping[str, int] = field(default_factory=dict)
    streaming: int = 0
    working: int = 0
    kept: int = 0

    def total(self, lanes: Sequence[str], offload: bool = False) -> int:
        """The larger of two moments: a lane commits a chunk, then its video has one state and the
        other lanes may have two; or all have two while a frame of the last lane is decoded."""
        stays = (self.least if offload else self.weights) + self.kept
        held = {name: self.held.get(name, self.caches[name]) for name in lanes}
        states = self.streaming * len(lanes)
        commits = max((self.caches[name] - held[name] for name in lanes), default=0)
        return (
            stays + states + sum(held.values()) + max(commits - self.streaming // 2, self.working)
        )


@dataclass(frozen=True)
class Fit:
    """How a choice of lanes fits.

    Attributes:
        needed: bytes of what was asked for. capacity: bytes of the device, None when unknown.
        lanes: those that fit, as asked for where all do; empty where not even one does.
        offload: whether that takes the transformer's blocks on the CPU.
        advice: one line when it does not fit as asked for.
    """

    needed: int
    capacity: int | None
    lanes: tuple[str, ...]
    offload: bool = False
    advice: str | None = None


def planned_device(name: str) -> torch.device:
    """Large worlds are for GPUs: a CPU's history is shorter than their window."""
    return torch.device("cuda" if hasattr(world_module(name), "room") else "cpu")


def world_room(
    name: str, lanes: Sequence[str], device: torch.device, size: tuple[int, int] | None = None
) -> Room:
    """What a world needs with these formats; nothing is allocated. UserError on unknown names.

    size: width and height of its video where they are not the first ones.
    """
    own = getattr(world_module(name, size), "room", None)
    item = 4 if device.type == "cpu" else 2
    if own is not None:
        found = own(tuple(lanes), item)
        # On a CPU there is nowhere else to wait.
        return replace(found, least=found.weights) if device.type == "cpu" else found
    spec, weights = world_spec(name), world_presence(name).weight_bytes
    caches = {}
    for method, lane in zip(lanes, lanes_for(spec, lanes), strict=True):
        policy = limit_history(
            lane.policy, spec.cache, CPU_MAX_TOKENS if device.type == "cpu" else None
        )
        kept = lane.__class__(lane.name, lane.method, lane.settings, policy)
        caches[method] = plan_lanes(spec.cache, [kept], itemsize=item).peak_bytes
    return Room(weights, 0, caches, weights)


def capacity_of(device: torch.device) -> int | None:
    """Bytes of memory of a device; None where nothing says so."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return read_memory(device, {}).total or None


def fit(
    name: str,
    lanes: Sequence[str],
    device: torch.device,
    capacity: int | None = None,
    size: tuple[int, int] | None = None,
) -> Fit:
    """Whether lanes of a world fit on a device, and which settings would.

    Tried in this order: as asked for; BF16 and QuantWM; the leanest lane alone; the same with the
    transformer's blocks on the CPU. Tiles are no way to save memory: what each tile's video holds
    of the frames before outweighs what a smaller frame takes.
    """
    title = world_spec(name).title.partition(":")[0]
    lanes = tuple(lanes)
    capacity = capacity_of(device) if capacity is None else capacity
    room = world_room(name, lanes, device, size)
    needed = room.total(lanes)
    if capacity is None or needed <= capacity:
        return Fit(needed, capacity, lanes)
    leanest = (min(lanes, key=lambda lane: room.total((lane,))),)
    pair = tuple(lane for lane in lanes if lane in ("bf16", "quantwm"))
    for offload, some in product((False, True), (lanes, pair, leanest)):
        found = room.total(some, offload)
        if some and found <= capacity:
            changes = [] if some == lanes else [f"lanes {','.join(some)}"]
            if offload:
                changes.append("the transformer's blocks on the CPU (--offload blocks)")
            advice = (
                f"{title} needs {_gib(needed)} with lanes {','.join(lanes)}, this device has "
                f"{_gib(capacity)}: {_gib(found)} would do with {' and '.join(changes)}"
            )
            return Fit(needed, capacity, some, offload, advice)
    least = room.total(leanest, True)
    return Fit(
        needed,
        capacity,
        (),
        False,
        f"{title} needs at least {_gib(least)} with its leanest lane, this device has "
        f"{_gib(capacity)}: take a smaller world or a larger device",
    )


def require_room(name: str, lanes: Sequence[str], device: torch.device, offload: bool) -> None:
    """UserError with what would fit, where the lanes do not."""
    found = fit(name, lanes, device)
    fits = found.lanes == tuple(lanes) and (offload or not found.offload)
    if not fits and found.advice is not None:
        raise UserError(found.advice)


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"

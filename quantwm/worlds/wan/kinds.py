"""Which class runs which kind of Wan world."""

from __future__ import annotations

from quantwm.worlds.wan.memory_world import MemoryWorld
from quantwm.worlds.wan.rolling_world import RollingWorld
from quantwm.worlds.wan.self_forcing_world import SelfForcingWorld
from quantwm.worlds.wan.world import WanWorld

_KINDS = {"memory": MemoryWorld, "rolling": RollingWorld}


def world_class(kind: str) -> type[WanWorld]:
    """kind: `Entry.kind`; all but two are driven by self-forcing."""
    return _KINDS.get(kind, SelfForcingWorld)

"""`worlds`: what can be run, under which licence, with which memory, and what is present."""

from __future__ import annotations

import argparse
from typing import Any

from quantwm.cache.plan import plan_lanes
from quantwm.cli.common import emit, say, table
from quantwm.errors import UserError
from quantwm.lanes import CPU_MAX_TOKENS, lanes_for, limit_history
from quantwm.worlds.registry import (
    WORLDS,
    world_presence,
    world_scenes,
    world_scripts,
    world_spec,
    world_terms,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`worlds` takes no arguments."""


def run(arguments: argparse.Namespace) -> int:
    """List the worlds."""
    found = [_describe(name) for name in WORLDS]
    rows = [["world", "present", "weights", "memory", "licence", "source"]]
    for world in found:
        rows.append(
            [
                world["world"],
                "yes" if world["present"] else "no",
                f"{world['weight_bytes'] / 2**20:.1f} MiB",
                f"{world['memory_bytes'] / 2**20:.0f} MiB",
                world["licence"],
                world["source"],
            ]
        )
    say(table(rows))
    for world in found:
        scenes = ", ".join(scene["name"] for scene in world["scenes"])
        keys = ", ".join(f"{key} {meaning}" for key, meaning in world["keys"].items())
        scripts = ", ".join(script["name"] for script in world["scripts"])
        say(f"{world['world']}: {world['title']}\n  scenes: {scenes or 'none'}\n  keys: {keys}")
        if scripts:
            say(f"  scripts: {scripts}")
        if world["problem"]:
            say(f"  {world['problem']}")
    emit({"worlds": found})
    return 0


def _describe(name: str) -> dict[str, Any]:
    spec, presence = world_spec(name), world_presence(name)
    try:
        policy = limit_history(spec.policy, spec.cache, CPU_MAX_TOKENS)
    except UserError:
        policy = spec.policy  # a world for GPUs: a CPU's limit is shorter than its window
    lanes = [
        lane.__class__(lane.name, lane.method, lane.settings, policy)
        for lane in lanes_for(spec, ("bf16", "qvg", "quantwm"))
    ]
    caches = plan_lanes(spec.cache, lanes).peak_bytes
    return {
        "world": name,
        "title": spec.title,
        "licence": spec.licence,
        "source": spec.source,
        "terms": world_terms(name),
        "present": presence.present,
        "where": presence.where,
        "problem": presence.problem,
        "weight_bytes": presence.weight_bytes,
        # weights and three lanes with the history that a CPU keeps by default, or their window
        "memory_bytes": presence.weight_bytes + caches,
        "scenes": [{"name": scene.name, "title": scene.title} for scene in world_scenes(name)],
        "scripts": [
            {"name": script.name, "title": script.title, "scene": script.scene}
            for script in world_scripts(name)
        ],
        "keys": dict(spec.keys),
        "resolution": "{}x{}".format(*spec.video_size),
        "fps": spec.fps,
    }

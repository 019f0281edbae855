"""`worlds`: what can be run, under which licence, with which memory, and what is present."""

from __future__ import annotations

import argparse
from typing import Any

from quantwm.cli.common import emit, say, table
from quantwm.cli.download import add_weights
from quantwm.worlds.registry import (
    WORLDS,
    world_presence,
    world_scenes,
    world_scripts,
    world_spec,
    world_terms,
)
from quantwm.worlds.room import planned_device, world_room

LANES = ("bf16", "qvg", "quantwm")
"""Whose memory is listed: all three with their histories full, and what decodes their frames."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `worlds`."""
    add_weights(parser)


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
    needed = world_room(name, LANES, planned_device(name)).total(LANES)
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
        "memory_bytes": needed,
        "scenes": [{"name": scene.name, "title": scene.title} for scene in world_scenes(name)],
        "scripts": [
            {"name": script.name, "title": script.title, "scene": script.scene}
            for script in world_scripts(name)
        ],
        "keys": dict(spec.keys),
        "resolution": "{}x{}".format(*spec.video_size),
        "fps": spec.fps,
    }

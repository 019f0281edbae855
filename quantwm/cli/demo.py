"""`demo`: records the three short sessions that ship in assets/demo, for machines without a GPU."""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from quantwm.actions import parse_actions
from quantwm.cli.common import add_device, emit, integer, pick_device, progress, progress_done, say
from quantwm.describe import session_info
from quantwm.engine import Engine
from quantwm.lanes import lanes_for
from quantwm.session import SessionWriter
from quantwm.video_reader import require_pyav
from quantwm.worlds.base import World
from quantwm.worlds.embedded.adapter import ASSETS
from quantwm.worlds.registry import load_world


@dataclass(frozen=True)
class Demo:
    """One session: its folder, what people read, the keys, and which start scene by number."""

    name: str
    title: str
    actions: str
    scene: int
    lanes: tuple[str, ...] = ("bf16", "qvg", "quantwm")


DEMOS = (
    Demo("1-standing-still", "Standing still: what moves is flicker", "none-400", 0),
    Demo("2-slow-turn", "A slow turn to the right", "right-400", 1),
    Demo("3-walk", "Walking on", "w-400", 2),
)
DEFAULT_CHUNKS = 2
"""Eight frames. A lossless frame of 128 x 96 takes 8 to 9 kB, so three sessions of three lanes take
0.3 MB a chunk, and the repository has little room left."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `demo`."""
    parser.add_argument("--out", type=Path, default=ASSETS / "demo", help="assets/demo by default")
    parser.add_argument(
        "--chunks", type=integer(1, 100), default=DEFAULT_CHUNKS, help=f"of each ({DEFAULT_CHUNKS})"
    )
    parser.add_argument("--seed", type=integer(0, 2**63 - 1), default=0)
    add_device(parser)


def run(arguments: argparse.Namespace) -> int:
    """Record all three, replacing what was there."""
    require_pyav()
    device = pick_device(arguments.device)
    say(f"loading the world on {device}")
    world = load_world("embedded", device)
    sizes = {}
    for demo in DEMOS:
        folder = arguments.out / demo.name
        if folder.exists():
            shutil.rmtree(folder)
        _record(world, demo, folder, arguments)
        sizes[demo.name] = sum(path.stat().st_size for path in folder.iterdir())
    progress_done()
    emit(
        {
            "sessions": sizes,
            "bytes": sum(sizes.values()),
            "chunks": arguments.chunks,
            "weights_sha256": world.weights_sha256(),
        }
    )
    return 0


def _record(world: World, demo: Demo, folder: Path, arguments: argparse.Namespace) -> None:
    spec = world.spec
    scenes = world.scenes()
    actions = parse_actions(demo.actions, spec.keys, spec.cache.frames_per_chunk)
    played = actions[: arguments.chunks]
    with Engine(
        world,
        lanes_for(spec, demo.lanes),
        seed=arguments.seed,
        scene=scenes[demo.scene % len(scenes)].name if scenes else None,
    ) as engine:
        info = replace(session_info(engine), title=demo.title)
        first = engine.start()
        with SessionWriter(folder, info, extras=False) as writer:
            writer.write(first)
            for number, action in enumerate(played, 1):
                writer.write(engine.step(action))
                progress(f"{demo.name}: chunk {number}/{len(played)}")

"""`demo`: records the three short sessions that ship in assets/demo, for machines without a GPU."""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from quantwm.actions import parse_actions
from quantwm.cli.common import (
    add_device,
    emit,
    integer,
    pick_device,
    progress,
    progress_done,
    say,
    table,
)
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
    """One session: its folder, what people read, the start scene's name, the keys, each held for
    an equal share of the frames."""

    name: str
    title: str
    scene: str
    keys: tuple[str, ...]
    frames: int = 8
    lanes: tuple[str, ...] = ("bf16", "qvg", "quantwm")

    def actions(self, frames: int | None) -> str:
        """The action string; frames: instead of its own."""
        each = (self.frames if frames is None else frames) // len(self.keys)
        return ", ".join(f"{key}-{each}" for key in self.keys)


DEMOS = (
    Demo("1-standing-still", "Standing still: what moves is flicker", "dead-stump", ("none",)),
    Demo(
        "2-turn-and-back",
        "A turn aside and back: which lanes find the room again?",
        "carpet-pillars",
        ("right", "left"),
    ),
    Demo(
        "3-walk",
        "Some steps back and as many forward: which lanes keep the lamps?",
        "lamp-hall",
        ("s", "w"),
    ),
)
"""Six chunks in all. A lossless frame of 128 x 96 takes 12.5 to 17 kB, densely coded, so three
lanes take 0.16 MB a chunk, and the repository has no room left: 24 frames each (--frames 24) would
take 2.9 MB. Tried on these frames, each lossless and larger: H.264 and H.265, VP9. Of the twelve
scenes, these were looked at and are among those that cost the fewest bytes: each stays in the room
that its start shows, which is what the world keeps best (behind doors it invents), and what the
lanes do to it is seen within a second."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `demo`."""
    parser.add_argument("--out", type=Path, default=ASSETS / "demo", help="assets/demo by default")
    parser.add_argument(
        "--chunks", type=integer(1, 100), default=None, help="at most, of each; all without"
    )
    parser.add_argument(
        "--frames", type=integer(4, 400), default=None, help="of each, instead of 8"
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
    rows = [[name, f"{size:,}"] for name, size in sizes.items()]
    say(table([["session", "bytes"], *rows, ["together", f"{sum(sizes.values()):,}"]]))
    emit(
        {
            "sessions": sizes,
            "bytes": sum(sizes.values()),
            "weights_sha256": world.weights_sha256(),
        }
    )
    return 0


def _record(world: World, demo: Demo, folder: Path, arguments: argparse.Namespace) -> None:
    spec = world.spec
    text = demo.actions(arguments.frames)
    actions = parse_actions(text, spec.keys, spec.cache.frames_per_chunk)
    played = actions[: arguments.chunks]
    with Engine(
        world,
        lanes_for(spec, demo.lanes),
        seed=arguments.seed,
        scene=demo.scene if world.scenes() else None,
    ) as engine:
        info = replace(session_info(engine), title=demo.title)
        first = engine.start()
        with SessionWriter(folder, info, extras=False, dense=True) as writer:
            writer.write(first)
            for number, action in enumerate(played, 1):
                writer.write(engine.step(action))
                progress(f"{demo.name}: chunk {number}/{len(played)}")

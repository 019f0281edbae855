"""A small deterministic engine behind the page's protocols: no model, but honest pictures.

Every frame carries its number as a bar code and the keys that were held as lit squares, so that a
test can read from a canvas which frame it shows and what made it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from app.backend import LANES, Catalogue, Progress, Settings, WorldCard
from quantwm.cache.spec import CachePolicy, CacheSpec
from quantwm.engine_types import BlockResult, LaneConfig, LaneResult, MemoryReading
from quantwm.errors import UserError
from quantwm.session import SessionInfo, SessionWriter
from quantwm.worlds.base import ChunkAction, Scene, Script, WorldSpec

WIDTH, HEIGHT = 128, 96
HELD = 100.0
"""Seconds after which what a test holds back goes on all the same, so that a failure ends."""
BAR_BITS, BAR_PIXELS = 16, 8
KEYS = ("w", "a", "s", "d", "left", "right")
BF16_BYTES_PER_TOKEN = 15_360
RATIOS = {"bf16": 1.0, "qvg": 6.35, "quantwm": 5.5}

SPEC = WorldSpec(
    name="rooms",
    title="Test rooms",
    licence="Apache-2.0",
    source="tests/fake_engine.py",
    cache=CacheSpec(layers=10, heads=3, head_dim=128, tokens_per_frame=48, frames_per_chunk=4),
    policy=CachePolicy(span_tokens=3072),
    format_settings={},
    latent_shape=(16, 12, 16),
    video_size=(WIDTH, HEIGHT),
    fps=40.0,
    frames_per_latent=1,
    keys={
        "w": "walk",
        "s": "step back",
        "a": "step left",
        "d": "step right",
        "left": "turn left",
        "right": "turn right",
    },
    default_steps={"cpu": 2, "cuda": 4},
    context_frames=16,
)


CAVES = replace(
    SPEC,
    name="caves",
    title="Test caves: a prompt and two keys",
    licence="Testers only",
    keys={"w": "walk", "s": "step back"},
    latent_shape=(16, 9, 16),
    context_frames=0,
)
"""Another world: takes a prompt, has no scenes, two keys."""

PROMPTS = ("a cave", "a deep cave", "a cave of ice")
TERMS = "Testers only: not for production"


def draw(number: int, angle: float, keys: frozenset[str], noise: float) -> np.ndarray:
    """One frame: a turning room, a bar code of `number` at the bottom, the keys at the top."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH].astype(np.float32)
    wall = 0.5 + 0.5 * np.sin(x / 9 + angle)
    depth = np.abs(y - HEIGHT / 2) / (HEIGHT / 2)
    red = 60 + 90 * wall * (1 - depth) + 60 * depth
    green = 70 + 60 * wall * (1 - depth) + 30 * depth
    blue = 90 + 40 * (1 - depth)
    frame = np.stack([red, green, blue], axis=-1)
    if noise:
        rng = np.random.default_rng([number, int(noise * 100)])
        frame += rng.normal(0, noise, frame.shape)
    frame = frame.clip(0, 255).astype(np.uint8)
    for bit in range(BAR_BITS):
        value = 255 if number >> bit & 1 else 0
        frame[-BAR_PIXELS:, bit * BAR_PIXELS : (bit + 1) * BAR_PIXELS] = value
    for slot, key in enumerate(KEYS):
        frame[:6, slot * 6 : slot * 6 + 6] = 255 if key in keys else 0
    return frame


def read_bar_code(frame: np.ndarray) -> int:
    """The number that `draw` wrote."""
    row = frame[-BAR_PIXELS // 2, BAR_PIXELS // 2 :: BAR_PIXELS, 0]
    return sum(1 << bit for bit, value in enumerate(row[:BAR_BITS]) if value > 127)


class FakeEngine:
    """EngineLike. `actions` keeps what it was asked to do; `go` holds it inside a chunk."""

    def __init__(self, settings: Settings, delay: float) -> None:
        self.lanes: Sequence[LaneConfig] = [
            LaneConfig(name, name, {}, SPEC.policy) for name in settings.lanes
        ]
        self.settings = settings
        self.delay = delay
        self.actions: list[ChunkAction] = []
        self.prompts = [settings.prompt]
        self.closed = False
        self.go = threading.Event()
        self.go.set()
        self._frame = 0
        self._angle = float(settings.seed % 7)

    def start(self) -> BlockResult:
        return self._block(ChunkAction.held(frozenset(), 4), SPEC.context_frames)

    def step(self, action: ChunkAction) -> BlockResult:
        time.sleep(self.delay)
        self.actions.append(action)
        self.go.wait(HELD)
        return self._block(action, 4)

    def change_prompt(self, prompt: str) -> None:
        if prompt == "refuse":
            raise UserError("this prompt is refused by the test engine")
        self.prompts.append(prompt)

    def explain(self) -> str:
        return "test engine: no kernels"

    def close(self) -> None:
        self.closed = True

    def _block(self, action: ChunkAction, count: int) -> BlockResult:
        first = self._frame
        index = 0 if first == 0 else len(self.actions)
        frames: dict[str, list[np.ndarray]] = {lane.name: [] for lane in self.lanes}
        for _ in range(count):
            keys = action.frames[0]
            self._angle += 0.25 * (("right" in keys) - ("left" in keys)) + 0.1 * ("w" in keys)
            for lane in self.lanes:
                noise = {"bf16": 0.0, "quantwm": 2.0}.get(lane.name, 8.0)
                frames[lane.name].append(draw(self._frame, self._angle, keys, noise))
            self._frame += 1
        tokens = self._frame * 48
        lanes = tuple(
            LaneResult(
                name=lane.name,
                frames=np.stack(frames[lane.name]),
                ms=self.delay * 333,
                kv_bytes=int(tokens * BF16_BYTES_PER_TOKEN / RATIOS[lane.name]),
                ratio=RATIOS[lane.name],
                resident_ratio=RATIOS[lane.name] * 0.9 if lane.name != "bf16" else 1.0,
                tokens=tokens,
            )
            for lane in self.lanes
        )
        parts = {"weights": 48_000_000} | {f"kv:{r.name}": r.kv_bytes for r in lanes}
        parts |= {"scratch": 6_000_000, "process other": 400_000_000}
        used = sum(parts.values())
        parts["free"] = 8 * 2**30 - used
        memory = MemoryReading("test numbers", parts, used, 8 * 2**30)
        return BlockResult(index, first, action, lanes, memory, self.delay * 1000, {})


class FakeBackend:
    """Backend. `engines` keeps every engine that was opened; `gate` holds loading back."""

    def __init__(self, folder: Path, delay: float = 0.02) -> None:
        import imageio.v3 as iio

        self.delay = delay
        self.engines: list[FakeEngine] = []
        self.gate = threading.Event()
        self.gate.set()
        self.fail: Exception | None = None
        self.loaded = ["rooms"]
        self.load_fails: str | None = None
        self.beside = True
        self.present = {"rooms": True, "caves": True, "ruins": False}
        self.fetched: list[tuple[str, bool]] = []
        self.fetch_gate = threading.Event()
        self.fetch_gate.set()
        self.fetch_fails: str | None = None
        self._scenes = []
        for number, title in enumerate(("Hall", "Cellar", "Gate", "Attic", "Yard", "Vault")):
            file = folder / f"{title.lower()}.png"
            picture = draw(number, number * 1.3, frozenset(), 0.0)
            iio.imwrite(file, picture)
            self._scenes.append(Scene(title.lower(), title, str(file)))

    def worlds(self) -> list[WorldCard]:
        return [
            self._card("rooms", SPEC, ""),
            self._card("caves", CAVES, ""),
            self._card("ruins", replace(CAVES, name="ruins", title="Test ruins: far away"), TERMS),
        ]

    def _card(self, name: str, spec: WorldSpec, terms: str) -> WorldCard:
        title, _, note = spec.title.partition(": ")
        here = self.present[name]
        return WorldCard(
            name=name, title=title, note=note, licence=spec.licence, source=spec.source,
            terms=terms, weight_bytes=3 * 2**30, needed=5 * 2**30, capacity=8 * 2**30,
            present=here, problem=None if here else "the transformer is missing: test/ruins",
            advice="Test ruins needs 9 GiB, this device has 8 GiB: lanes quantwm would do"
            if name == "ruins" else None,
            lanes=("bf16", "qvg", "quantwm"), offloads=name == "ruins",
        )  # fmt: skip

    def fits_beside(self, world: str) -> bool:
        return self.beside

    def load(self, world: str, progress: Progress) -> None:
        progress("Loading the transformer", 0.3)
        self.gate.wait(HELD)
        if self.load_fails is not None:
            raise UserError(self.load_fails)
        progress("Loading the autoencoder", 0.5)
        self.loaded.append(world)

    def download(self, world: str, agreed: bool, progress: Progress) -> None:
        self.fetched.append((world, agreed))
        progress(f"Downloading the transformer from test/{world}", 0.4)
        self.fetch_gate.wait(HELD)
        if self.fetch_fails is not None:
            raise UserError(self.fetch_fails)
        progress("Downloaded", 1.0)
        self.present[world] = True

    def catalogue(self, world: str = "") -> Catalogue:
        names = ("bf16", "qvg", "quantwm")
        lanes = [LANES[name] for name in names]
        if world in ("caves", "ruins"):
            return Catalogue(
                world=CAVES if world == "caves" else replace(CAVES, name="ruins"),
                scenes=[], lanes=lanes, chosen=names, steps=2, seed=0, scene=None, device="cpu",
                accepts_picture=False, prompts=PROMPTS,
            )  # fmt: skip
        if world not in ("", "rooms"):
            raise UserError(f"unknown world {world[:40]!r}; there are rooms, caves, ruins")
        return Catalogue(
            world=SPEC,
            scenes=self._scenes,
            lanes=lanes,
            chosen=names,
            steps=2,
            seed=0,
            scene="hall",
            device="cpu",
            scripts=(Script("loop", "Walk and turn", "w-8, right-4", "gate"),),
        )

    def open(
        self, settings: Settings, picture: np.ndarray | None, progress: Progress
    ) -> FakeEngine:
        progress("Reading the weights", 0.2)
        self.gate.wait(HELD)
        if self.fail is not None:
            raise self.fail
        if settings.seed == 13:
            raise UserError("seed 13 is refused by the test engine; choose another")
        progress("Building the lanes", 0.8)
        engine = FakeEngine(settings, self.delay)
        self.engines.append(engine)
        return engine

    def record(
        self, folder: Path, settings: Settings, picture: np.ndarray | None, engine: FakeEngine
    ) -> SessionWriter:
        info = SessionInfo(
            world=settings.world,
            weights_sha256="0" * 64,
            seed=settings.seed,
            scene=settings.scene,
            prompt=settings.prompt,
            start_picture=picture is not None,
            mode=settings.mode,
            steps=settings.steps,
            max_tokens=None,
            lanes=tuple(engine.lanes),
            keys=tuple(SPEC.keys),
            frames_per_chunk=SPEC.cache.frames_per_chunk,
            fps=SPEC.fps,
            size=SPEC.video_size,
            device="cpu",
            hardware={},
            versions={},
            kernels=engine.explain(),
        )
        return SessionWriter(folder, info, start_picture=None)

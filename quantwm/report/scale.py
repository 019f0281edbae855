"""How much the report runs: all of it on a GPU, less on a CPU, the least in tests."""

from __future__ import annotations

from dataclasses import dataclass, replace

SCRIPTS = (
    "w-16, right-24, w-16, left-24, w-8",
    "left-16, w-24, right-32, w-16",
)
"""Two walks of 88 frames (10.06 s of the embedded world): rooms come back into view."""

STILL = "none-88"
SLOW_TURN = "right-88"
"""7.5 degrees a frame is the world's only turn: 88 frames are almost two turns."""


@dataclass(frozen=True)
class Scale:
    """Numbers of scenes, seeds and chunks; a chunk is four frames of the embedded world.

    Attributes:
        scenes, seeds, scripts: a "scene" of the report is one of each; their product counts.
        chunks: of the free runs. taught: of the teacher-forced ones (0: none).
        short_chunks: of ablation, K-only and V-only. sweep_chunks: of ranks and candidates.
        sweep_scenes, flicker_scenes, recorded_scenes, minute_scenes: how many of the scenes.
        flicker_chunks: standing still and turning. recorded_chunks: whose q, k, v are kept.
        minute_chunks: one minute is 131. revisits: truth episodes of each of `revisit_kinds`.
        few: lanes of the flicker, minute and revisit runs; empty for all methods.
        timed_chunks: of one round of the latency run, lane by lane; the second half counts.
        contact_sheets: scenes that are shown.
    """

    name: str
    scenes: int
    seeds: int
    scripts: int
    chunks: int
    taught: int
    short_chunks: int
    sweep_scenes: int
    sweep_chunks: int
    flicker_scenes: int
    flicker_chunks: int
    recorded_scenes: int
    recorded_chunks: int
    minute_scenes: int
    minute_chunks: int
    revisits: int
    timed_chunks: int
    contact_sheets: int
    revisit_kinds: tuple[str, ...] = ("turn", "back")
    few: tuple[str, ...] = ()

    @property
    def units(self) -> int:
        """Scenes of the report: start scenes times seeds times walks."""
        return self.scenes * self.seeds * self.scripts

    def at_pace(self, chunk_seconds: float) -> Scale:
        """As many seconds of a world whose chunks are as long as this, at least one chunk."""
        share = CHUNK_SECONDS / chunk_seconds
        lengths = {name: getattr(self, name) for name in LENGTHS}
        return replace(self, **{n: max(1, round(c * share)) for n, c in lengths.items() if c})

    def of_scenes(self, wanted: int) -> Scale:
        """With that many scenes, and as much fewer or more of what runs on some of them only.

        Fewer than the preset's are as many start scenes as possible, each with one seed and walk.
        """
        share = wanted / self.units
        some = {name: max(1, round(getattr(self, name) * share)) for name in PARTS}
        own = self.seeds * self.scripts
        if wanted >= self.units and wanted % own == 0:
            return replace(self, scenes=wanted // own, **some)
        return replace(self, scenes=wanted, seeds=1, scripts=1, **some)


PARTS = ("sweep_scenes", "flicker_scenes", "recorded_scenes", "minute_scenes", "revisits")
"""Of a scale, what runs on some of the scenes."""

LENGTHS = ("chunks", "taught", "short_chunks", "sweep_chunks", "flicker_chunks", "minute_chunks")
"""Of a scale, what lasts so many seconds."""

CHUNK_SECONDS = 4 / 8.75
"""Of the embedded world, whose chunks the presets count."""

PRESETS = {
    "full": Scale(
        name="full", scenes=8, seeds=2, scripts=2, chunks=22, taught=12, short_chunks=8,
        sweep_scenes=32, sweep_chunks=5, flicker_scenes=32, flicker_chunks=22, recorded_scenes=32,
        recorded_chunks=12, minute_scenes=32, minute_chunks=131, revisits=32, timed_chunks=24,
        contact_sheets=2,
    ),
    "small": Scale(
        name="small", scenes=2, seeds=1, scripts=1, chunks=5, taught=2, short_chunks=2,
        sweep_scenes=1, sweep_chunks=2, flicker_scenes=1, flicker_chunks=3, recorded_scenes=1,
        recorded_chunks=4, minute_scenes=1, minute_chunks=6, revisits=1, timed_chunks=2,
        contact_sheets=1, revisit_kinds=("turn",), few=("qvg", "quantwm"),
    ),
    "minimal": Scale(
        name="minimal", scenes=2, seeds=1, scripts=1, chunks=2, taught=1, short_chunks=1,
        sweep_scenes=1, sweep_chunks=1, flicker_scenes=1, flicker_chunks=2, recorded_scenes=1,
        recorded_chunks=2, minute_scenes=1, minute_chunks=2, revisits=1, timed_chunks=1,
        contact_sheets=1,
    ),
}  # fmt: skip
"""`full` needs about three minutes of two H200, `small` three of two CPU cores."""

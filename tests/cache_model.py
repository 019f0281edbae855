"""The plain list of frames that a KVCache must agree with, and the policies it is tried under."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st
from torch import Tensor

from quantwm.cache import CachePolicy
from tests.cache_helpers import SPEC


@dataclass
class Frame:
    """The model of one latent frame: what was written, and what the cache first said it was."""

    number: int
    k: list[Tensor]
    v: list[Tensor]
    decoded: list[tuple[Tensor, Tensor]] | None = None

    @property
    def tokens(self) -> int:
        return self.k[0].shape[1]


@dataclass
class Open:
    """The chunk that is open: its first frame, its data per layer, the layers written."""

    first: int
    frames: int
    data: list[tuple[Tensor, Tensor, Tensor]]
    written: set[int] = field(default_factory=set)


@dataclass
class Model:
    """Frames held, ascending; what a KVCache must agree with."""

    policy: CachePolicy
    origin: int | None = None
    next_frame: int | None = None
    frames: list[Frame] = field(default_factory=list)

    def is_sink(self, number: int) -> bool:
        return self.origin is not None and number < self.origin + self.policy.sink_frames

    def first_visible(self, stop: int) -> int:
        window = self.policy.window_frames
        return 0 if window is None else stop - (window - self.policy.sink_frames)

    def visible(self, stop: int) -> list[Frame]:
        first = self.first_visible(stop)
        return [f for f in self.frames if self.is_sink(f.number) or f.number >= first]

    def evict(self, before: int) -> None:
        self.frames = [f for f in self.frames if self.is_sink(f.number) or f.number >= before]

    def commit(self, frames: list[Frame]) -> None:
        if self.origin is None:
            self.origin = frames[0].number
        self.next_frame = frames[-1].number + 1
        self.frames.extend(frames)
        self.evict(self.first_visible(self.next_frame + SPEC.frames_per_chunk))

    def copy(self) -> Model:
        frames = [Frame(f.number, f.k, f.v, f.decoded) for f in self.frames]
        return Model(self.policy, self.origin, self.next_frame, frames)


policies = st.builds(
    lambda sink, recent, room, span: CachePolicy(
        sink_frames=sink,
        recent_chunks=recent,
        window_frames=None if room is None else sink + room,
        span_tokens=span,
    ),
    sink=st.integers(0, 3),
    recent=st.integers(0, 2),
    room=st.none() | st.integers(1, 9),
    span=st.sampled_from([1, 6, 12, 13, 20]),
)

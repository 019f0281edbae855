"""Reads video files that may come from anybody: bounded, frame by frame, upright, RGB."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from quantwm.errors import UserError
from quantwm.ffv1_checksum import has_checksums

MAX_VIDEO_BYTES = 4 * 2**30
"""A lossless 128 x 96 recording needs about 20 kB a frame: 60 hours of driving stay below this."""
MAX_PIXELS = 3840 * 2160
"""Largest picture that is decoded; checked in the header, before any pixel is."""
MAX_VIDEO_FRAMES = 200_000

# Container by its first bytes. The demuxer is forced to what was recognised: left to guess, FFmpeg
# takes a text file for a playlist and opens the addresses in it.
_EBML = b"\x1a\x45\xdf\xa3"
_DURATION = re.compile(r"(\d{1,4}):(\d{2}):(\d{2}(?:\.\d*)?)")
"""Of a Matroska track, "00:00:02.000000000"; written when a recording ends well."""
_NO_PYAV = "reading and writing video needs PyAV; install it with: pip install av"

UNEVEN = 0.25
"""A file has a variable frame rate where a step between frames differs from the median by more than
this share of it: timestamps in milliseconds alone move a step of 1/60 s by 4%."""


@dataclass(frozen=True)
class VideoFacts:
    """What a video's container says and its timestamps show; no pixel is decoded to know it.

    Attributes:
        size: (width, height) upright, after the rotation that the file asks for.
        rate: frames a second, of the timestamps' mean step (the median where they vary); None for
            a single frame.
        frames: packets of the video stream. variable_rate: steps between frames differ.
        pixel_format, codec: FFmpeg's names. rotation: degrees counter-clockwise, 0, 90, 180, 270.
        short: (seconds of pictures, seconds announced) where pictures end well before what the
        file announces; None where they do not, or nothing is announced.
    """

    name: str
    size: tuple[int, int]
    rate: float | None
    frames: int
    variable_rate: bool
    pixel_format: str
    codec: str
    rotation: int
    short: tuple[float, float] | None = None

    @property
    def pixels(self) -> int:
        """Of all frames together."""
        return self.frames * self.size[0] * self.size[1]


def has_pyav() -> bool:
    """Whether PyAV is installed."""
    return importlib.util.find_spec("av") is not None


def require_pyav() -> None:
    """UserError that names the package when PyAV is missing."""
    if not has_pyav():
        raise UserError(_NO_PYAV)


def probe_video(path: Path) -> VideoFacts:
    """Facts about a file, from its packets: one frame is decoded, for its rotation.

    Raises:
        UserError: missing, too large, not a video, without a video stream, or unreadable.
    """
    with _opened(path) as (container, stream):
        times = [p.pts for p in container.demux(stream) if p.size and p.pts is not None]
        base = float(stream.time_base or 1)
        announced = _announced(stream)
    steps = np.diff(np.sort(np.asarray(times, dtype=np.float64))) * base
    step = float(np.median(steps)) if len(steps) else 0.0
    uneven = step > 0 and bool((np.abs(steps - step) > UNEVEN * step).any())
    if not uneven and len(steps):
        step = float(steps.mean())  # a container that counts milliseconds rounds single steps
    with _opened(path) as (container, stream):
        frame = next(_decoded(path, container, stream), None)
        if frame is None:
            raise UserError(f"{path.name} holds no frame")
        turned = _turns(frame)
        size = (frame.width, frame.height) if turned % 2 == 0 else (frame.height, frame.width)
        return VideoFacts(
            name=path.name,
            size=size,
            rate=1 / step if step > 0 else None,
            frames=len(times),
            variable_rate=uneven,
            pixel_format=str(stream.codec_context.pix_fmt),
            codec=str(stream.codec_context.name),
            rotation=turned * 90,
            short=_short(times, base, step, announced),
        )


def short_of(facts: VideoFacts) -> str | None:
    """What is to be said where pictures end early, a sentence without its full stop."""
    if facts.short is None:
        return None
    seconds, announced = facts.short
    return (
        f"{facts.name} has pictures of {seconds:.3g} of the {announced:.3g} seconds that it "
        "announces: it may be cut off or damaged there"
    )


def _announced(stream: Any) -> float | None:
    """Seconds that the container says its pictures last; None where it does not."""
    if stream.duration and stream.time_base:
        return float(stream.duration * stream.time_base)
    found = _DURATION.fullmatch(stream.metadata.get("DURATION", ""))
    if found is None:
        return None
    hours, minutes, seconds = map(float, found.groups())
    return 3600 * hours + 60 * minutes + seconds


def _short(
    times: Sequence[int], base: float, step: float, announced: float | None
) -> tuple[float, float] | None:
    """`VideoFacts.short`. A last picture may be announced to stay for two steps more."""
    if announced is None or not times or step <= 0:
        return None
    seconds = (max(times) - min(times)) * base + step
    return (seconds, announced) if announced - seconds > 2.5 * step else None


def iter_video(path: Path, max_frames: int = MAX_VIDEO_FRAMES) -> Iterator[np.ndarray]:
    """Frames of a video file one by one, uint8 [H, W, 3], upright; at most max_frames.

    Any pixel format becomes 8-bit RGB. A rotation that the file asks for is applied.

    Raises:
        UserError: missing, too large or unreadable file, a frame that is damaged or of another
            size than the first; the text names it and the limit.
    """
    with _opened(path) as (container, stream):
        shape: tuple[int, ...] | None = None
        for index, frame in enumerate(_decoded(path, container, stream)):
            picture = np.rot90(frame.to_ndarray(format="rgb24"), _turns(frame))
            if shape not in (None, picture.shape):
                raise UserError(
                    f"{path.name} changes its size at frame {index}; all frames must have one size"
                )
            shape = picture.shape
            yield np.ascontiguousarray(picture)
            if index + 1 >= max_frames:
                return


def read_video(path: Path, max_frames: int) -> np.ndarray:
    """The first max_frames frames of a video, uint8 [T, H, W, 3]. Raises like `iter_video`."""
    frames = list(iter_video(path, max_frames))
    if not frames:
        raise UserError(f"{path.name} holds no frame")
    return np.stack(frames)


def is_video(path: Path) -> bool:
    """Whether a file begins like a video container that `iter_video` reads."""
    with path.open("rb") as file:
        return _container(file) is not None


def check_file(path: Path, limit: int) -> None:
    """UserError unless the file exists and is no larger than limit, in bytes."""
    if not path.is_file():
        raise UserError(f"no such file: {path}")
    size = path.stat().st_size
    if size > limit:
        raise UserError(f"{path.name} has {size:,} bytes, at most {limit:,} are read")


def one_line(error: BaseException) -> str:
    """An error's text as one line of at most 200 characters; of errors with a number, the words."""
    text = getattr(error, "strerror", None) or str(error)
    return " ".join(str(text).split())[:200] or type(error).__name__


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Any]]:
    """Container and video stream, with every failure as one line."""
    require_pyav()
    import av

    kind = _sniff_video(path)
    try:
        with av.open(path, "r", format=kind, metadata_errors="replace") as container:
            if not container.streams.video:
                raise UserError(f"{path.name} holds no video stream; name a file with pictures")
            stream = container.streams.video[0]
            if stream.codec_context is None:
                raise UserError(f"{path.name} cannot be read as a video: no decoder knows it")
            width, height = stream.codec_context.width, stream.codec_context.height
            if width < 1 or height < 1:
                raise UserError(f"{path.name} cannot be read as a video: it gives no size")
            if width * height > MAX_PIXELS:
                raise UserError(
                    f"{path.name} is {width} x {height}, at most {MAX_PIXELS:,} pixels are read"
                )
            # A decoder that hides damage would give its repair for the picture.
            stream.codec_context.options = {"err_detect": "crccheck+explode"}
            yield container, stream
    except (av.FFmpegError, OSError, IndexError, RuntimeError) as error:
        raise UserError(f"{path.name} cannot be read as a video: {one_line(error)}") from error


def _decoded(path: Path, container: Any, stream: Any) -> Iterator[Any]:
    """Frames in order; UserError with the number of the first one that is damaged."""
    import av

    count = 0
    try:
        for packet in _whole_packets(path, container, stream):
            for frame in packet.decode():
                if frame.is_corrupt:
                    raise UserError(_damaged(path, count))
                yield frame
                count += 1
    except av.FFmpegError as error:
        # a file cut off in mid-frame ends here after its last whole frame
        raise UserError(f"{_damaged(path, count)} ({one_line(error)})") from error


def _whole_packets(path: Path, container: Any, stream: Any) -> Iterator[Any]:
    """Packets of the stream; FFV1's are held to their checksums where they have them."""
    lossless, checked, count = stream.codec_context.name == "ffv1", False, 0
    for packet in container.demux(stream):
        if lossless and packet.size:
            whole = has_checksums(bytes(packet))
            if checked and not whole:
                raise UserError(_damaged(path, count))
            checked = checked or (count == 0 and whole)
            count += 1
        yield packet


def _damaged(path: Path, count: int) -> str:
    if count == 0:
        return f"{path.name} cannot be read as a video: its first frame is damaged"
    return f"{path.name} is damaged at frame {count}; the {count} frames before it can be read"


def _turns(frame: Any) -> int:
    """Quarter turns counter-clockwise that bring a frame upright, 0 to 3."""
    return round(frame.rotation / 90) % 4


def _container(file: BinaryIO) -> str | None:
    head = file.read(12)
    if head[:4] == _EBML:
        return "matroska"
    if head[4:8] == b"ftyp":
        return "mov"
    if head[:4] == b"RIFF" and head[8:12] == b"AVI ":
        return "avi"
    return None


def _sniff_video(path: Path) -> str:
    check_file(path, MAX_VIDEO_BYTES)
    with path.open("rb") as file:
        container = _container(file)
    if container is None:
        raise UserError(f"{path.name} is not a video; use .mkv, .webm, .mp4, .mov or .avi")
    return container

"""Video files: lossless RGB per lane, a labelled preview, start pictures and videos."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np

from quantwm.errors import UserError

MAX_PICTURE_BYTES = 32 * 2**20
MAX_VIDEO_BYTES = 4 * 2**30
"""A lossless 128 x 96 recording needs about 20 kB a frame: 60 hours of driving stay below this."""
MAX_PIXELS = 3840 * 2160
"""Largest picture that is decoded; checked in the header, before any pixel is."""
MAX_VIDEO_FRAMES = 200_000

PICTURE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP")

# Container by its first bytes. The demuxer is forced to what was recognised: left to guess, FFmpeg
# takes a text file for a playlist and opens the addresses in it.
_EBML = b"\x1a\x45\xdf\xa3"
_NO_PYAV = "reading and writing video needs PyAV; install it with: pip install av"


def has_pyav() -> bool:
    """Whether PyAV is installed, which imageio needs for video."""
    return importlib.util.find_spec("av") is not None


class _Writer:
    """Closing, common to both writers; `_stream` is the file being written."""

    _stream: _Stream

    def close(self) -> None:
        """Finish the file; a second call does nothing."""
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()


class LosslessWriter(_Writer):
    """Streams frames into a Matroska file as FFV1, bit-exact RGB; holds one frame at a time.

    FFV1 codes every frame by itself, so a file that was cut off is readable up to the cut.
    """

    def __init__(self, path: Path, fps: float) -> None:
        require_pyav()
        # Clusters of at most 0.1 s and no muxer buffer: a killed process loses a frame or two.
        options = {"flush_packets": "1", "cluster_time_limit": "100"}
        self._stream = _Stream(path, "ffv1", "bgr0", fps, options, gop=1)

    def write(self, frames: np.ndarray) -> None:
        """Append frames, uint8 [T, H, W, 3]."""
        self._stream.write(frames)


class PreviewWriter(_Writer):
    """Streams all lanes side by side, with two caption lines each, into an H.264 mp4 for people.

    The mp4 is fragmented, so a file that was cut off plays up to its last whole second.
    """

    CAPTION_HEIGHT = 40
    MIN_PANE_WIDTH = 256  # narrower panes are enlarged so that a caption fits

    def __init__(self, path: Path, fps: float) -> None:
        require_pyav()
        options = {"movflags": "frag_keyframe+empty_moov+default_base_moof", "flush_packets": "1"}
        gop = max(1, round(fps))
        self._stream = _Stream(
            path, "libx264", "yuv420p", fps, options, gop, {"crf": "18", "preset": "veryfast"}
        )

    def write(self, lanes: Sequence[np.ndarray], captions: Sequence[tuple[str, str]]) -> None:
        """Append one chunk: per lane uint8 [T, H, W, 3] and its two caption lines."""
        width = lanes[0].shape[2]
        zoom = max(1, -(-self.MIN_PANE_WIDTH // width))
        bars = [_caption(lines, width * zoom, self.CAPTION_HEIGHT) for lines in captions]
        for together in zip(*lanes, strict=True):
            panes = [
                np.concatenate([bar, picture.repeat(zoom, 0).repeat(zoom, 1)])
                for bar, picture in zip(bars, together, strict=True)
            ]
            row = np.concatenate(panes, axis=1)
            # yuv420p halves the colour planes: odd sizes are cut by one pixel
            row = row[: row.shape[0] // 2 * 2, : row.shape[1] // 2 * 2]
            self._stream.write(row[None])


def iter_video(path: Path, max_frames: int = MAX_VIDEO_FRAMES) -> Iterator[np.ndarray]:
    """Frames of a video file one by one, uint8 [H, W, 3]; at most max_frames.

    Raises:
        UserError: missing, too large or unreadable file; the text names it and the limit.
    """
    require_pyav()
    import av
    import imageio.v3 as iio

    container = _sniff_video(path)
    try:
        with iio.imopen(path, "r", plugin="pyav", format=container) as file:
            height, width = file.properties(index=...).shape[1:3]
            if height * width > MAX_PIXELS:
                raise UserError(
                    f"{path.name} is {width} x {height}, at most {MAX_PIXELS:,} pixels are read"
                )
            for index, frame in enumerate(file.iter()):
                if index >= max_frames:
                    return
                yield frame
    except (av.FFmpegError, OSError, IndexError, RuntimeError) as error:
        # a file cut off in mid-frame ends here after its last whole frame
        raise UserError(f"{path.name} cannot be read as a video: {_one_line(error)}") from error


def read_video(path: Path, max_frames: int) -> np.ndarray:
    """The first max_frames frames of a video, uint8 [T, H, W, 3]. Raises like `iter_video`."""
    frames = list(iter_video(path, max_frames))
    if not frames:
        raise UserError(f"{path.name} holds no frame")
    return np.stack(frames)


def read_picture(path: Path) -> np.ndarray:
    """A picture as uint8 [H, W, 3]; its size is checked before it is decoded."""
    import imageio.v3 as iio
    from PIL import Image, UnidentifiedImageError

    _check_file(path, MAX_PICTURE_BYTES)
    known = ", ".join(PICTURE_FORMATS)
    try:
        with Image.open(path, formats=PICTURE_FORMATS) as header:
            width, height = header.size
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        raise UserError(f"{path.name} cannot be read as a picture; use one of {known}") from error
    if width * height > MAX_PIXELS:
        raise UserError(
            f"{path.name} is {width} x {height}, at most {MAX_PIXELS:,} pixels are read"
        )
    try:
        return np.asarray(iio.imread(path, plugin="pillow", mode="RGB", rotate=True))
    except (OSError, ValueError, SyntaxError) as error:
        raise UserError(f"{path.name} is damaged: {_one_line(error)}") from error


def is_video(path: Path) -> bool:
    """Whether a file begins like a video container that `iter_video` reads."""
    with path.open("rb") as file:
        return _container(file) is not None


def read_start(path: Path, size: tuple[int, int], frames: int) -> np.ndarray:
    """A person's start picture or video, cropped and resized to the world's size.

    size: (width, height). Returns uint8 [T, H, W, 3]; T is 1 for a picture and at most `frames`
    for a video.
    """
    _check_file(path, MAX_VIDEO_BYTES)
    pictures = read_video(path, frames) if is_video(path) else read_picture(path)[None]
    return np.stack([fit(picture, size) for picture in pictures])


def fit(picture: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Crop a picture around its centre to the aspect of size = (width, height), then resize."""
    from PIL import Image

    height, width = picture.shape[:2]
    if (width, height) == size:
        return picture
    scale = min(width / size[0], height / size[1])
    crop_w, crop_h = max(1, round(size[0] * scale)), max(1, round(size[1] * scale))
    left, top = (width - crop_w) // 2, (height - crop_h) // 2
    cropped = picture[top : top + crop_h, left : left + crop_w]
    return np.asarray(Image.fromarray(cropped).resize(size, Image.Resampling.LANCZOS))


class _Stream:
    """One encoded stream written through imageio's PyAV plugin."""

    def __init__(
        self,
        path: Path,
        codec: str,
        pixel_format: str,
        fps: float,
        options: dict[str, str],
        gop: int,
        codec_options: dict[str, str] | None = None,
    ) -> None:
        import imageio.v3 as iio

        self._file: Any = iio.imopen(path, "w", plugin="pyav", options=options)
        self._file.init_video_stream(
            codec, fps=float(fps), pixel_format=pixel_format, max_keyframe_interval=gop
        )
        # imageio has no argument for encoder options; they are set before the first frame
        self._file._video_stream.options = codec_options or {}
        self._shape: tuple[int, ...] | None = None

    def write(self, frames: np.ndarray) -> None:
        if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3:
            raise UserError(f"frames are uint8 [T, H, W, 3], got {frames.dtype} {frames.shape}")
        if self._shape not in (None, frames.shape[1:]):
            raise UserError(f"this video holds frames of {self._shape}, got {frames.shape[1:]}")
        self._shape = frames.shape[1:]
        for frame in frames:
            self._file.write_frame(frame)
        # imageio writes through a buffered Python file: flushed, so that a kill loses little
        self._file.request.get_file().flush()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        if self._shape is None:
            file._video_stream = None  # an encoder that saw no frame has nothing to flush
        try:
            file.close()
        finally:
            # imageio closes again when it collects the file; after a failure that only makes noise
            file.close = lambda: None


def require_pyav() -> None:
    """UserError that names the package when PyAV is missing."""
    if not has_pyav():
        raise UserError(_NO_PYAV)


def _caption(lines: tuple[str, str], width: int, height: int) -> np.ndarray:
    from PIL import Image, ImageDraw, ImageFont

    bar = Image.new("RGB", (width, height), (16, 18, 22))
    draw = ImageDraw.Draw(bar)
    font = ImageFont.load_default(size=14)
    draw.text((6, 3), lines[0], fill=(255, 255, 255), font=font)
    draw.text((6, 20), lines[1], fill=(176, 186, 200), font=font)
    return np.asarray(bar)


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
    _check_file(path, MAX_VIDEO_BYTES)
    with path.open("rb") as file:
        container = _container(file)
    if container is None:
        raise UserError(f"{path.name} is not a video; use .mkv, .webm, .mp4, .mov or .avi")
    return container


def _check_file(path: Path, limit: int) -> None:
    if not path.is_file():
        raise UserError(f"no such file: {path}")
    size = path.stat().st_size
    if size > limit:
        raise UserError(f"{path.name} has {size:,} bytes, at most {limit:,} are read")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__

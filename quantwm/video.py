"""Video files: lossless RGB per lane, a labelled preview, start pictures and videos."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from quantwm import video_reader
from quantwm.errors import UserError
from quantwm.video_reader import (
    check_file,
    has_pyav,
    is_video,
    iter_video,
    one_line,
    read_video,
    require_pyav,
)

if TYPE_CHECKING:
    from PIL import Image

DENSE = {"level": "1", "coder": "1"}
"""FFV1 without slices and with its range coder, which gains more from frames before."""
MAX_PICTURE_BYTES = 32 * 2**20
PICTURE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
MAX_PICTURE_PIXELS = 24_000_000
"""Checked from the header before decoding: a 24-megapixel photo is 72 MB as RGB."""
MIN_PICTURE_SIDE = 8
"""Of a start. Below, there is nothing to see."""
MAX_PICTURE_ASPECT = 8
"""Of a start. A longer strip would be cut to a small part of itself: worlds are about twice as wide
as high."""

__all__ = [
    "LosslessWriter",
    "PreviewWriter",
    "fit",
    "has_pyav",
    "is_video",
    "iter_video",
    "read_picture",
    "read_start",
    "read_video",
    "require_pyav",
    "upright_rgb",
]


class _Writer:
    """One encoded stream: frames in, packets to a file, nothing held but what the encoder holds."""

    def __init__(
        self,
        path: Path,
        fps: float,
        container: str,
        codec: str,
        pixel_format: str,
        options: Mapping[str, str],
        codec_options: Mapping[str, str],
        gop: int,
    ) -> None:
        require_pyav()
        import av

        self.path = path
        self._file: Any = av.open(path, "w", format=container, options=dict(options))
        self._rate = Fraction(fps).limit_denominator(60_060)
        self._stream: Any = self._file.add_stream(
            codec, rate=self._rate, options=dict(codec_options)
        )
        self._stream.pix_fmt, self._stream.gop_size = pixel_format, gop
        self._shape: tuple[int, ...] | None = None
        self._count = 0

    def _encode(self, frames: np.ndarray) -> None:
        import av

        if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3:
            raise UserError(f"frames are uint8 [T, H, W, 3], got {frames.dtype} {frames.shape}")
        if self._shape not in (None, frames.shape[1:]):
            raise UserError(f"this video holds frames of {self._shape}, got {frames.shape[1:]}")
        if self._shape is None:
            self._shape = frames.shape[1:]
            self._stream.height, self._stream.width = frames.shape[1:3]
        for picture in frames:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
            frame.pts, frame.time_base = self._count, 1 / self._rate
            self._count += 1
            for packet in self._stream.encode(frame):
                self._put(packet)

    def close(self) -> None:
        """Finish the file; a second call does nothing."""
        file, self._file = self._file, None
        if file is None:
            return
        try:
            if self._shape is not None:  # an encoder that saw no frame has nothing to flush
                for packet in self._stream.encode(None):
                    file.mux(packet)
        finally:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def _put(self, packet: Any) -> None:
        self._file.mux(packet)


class LosslessWriter(_Writer):
    """Streams frames into a Matroska file as FFV1, bit-exact RGB; holds a few packets at a time.

    FFV1 codes every frame by itself, so a file that was cut off is readable up to the cut. With
    `dense` the coder keeps what the frames before taught it, over the whole picture: 8% smaller on
    the demo sessions, but what comes behind a damage is lost, and there are no checksums.
    """

    HELD = 8
    """Packets kept beside the file: the muxer holds one back until the next frame comes."""
    ONE_GROUP = 100_000
    """Frames without a new beginning: more than a dense file is for."""

    def __init__(self, path: Path, fps: float, dense: bool = False) -> None:
        # Clusters of at most 0.1 s and no muxer buffer: a killed process loses a frame or two.
        options = {"flush_packets": "1", "cluster_time_limit": "100"}
        # Level 3 has slices with checksums, so that a damaged frame is noticed.
        coding = DENSE if dense else {"level": "3", "slicecrc": "1"}
        gop = self.ONE_GROUP if dense else 1
        super().__init__(path, fps, "matroska", "ffv1", "bgr0", options, coding, gop)
        self._dense = dense
        self._held: deque[bytes] = deque(maxlen=self.HELD)

    def write(self, frames: np.ndarray) -> None:
        """Append frames, uint8 [T, H, W, 3]."""
        self._encode(frames)

    def copy_to(self, target: Path) -> None:
        """A finished file with all frames written so far, while this one goes on. No re-encoding.

        Raises:
            OSError: the disk is full, or the file lost more than the packets that are held.
            UserError: the file is dense: its frames cannot be taken one by one.
        """
        if self._dense:
            raise UserError("a densely coded video is copied when it has ended, not before")
        import av

        if self._count == 0:
            return
        with (
            av.open(self.path, "r", format="matroska") as source,
            av.open(target, "w", format="matroska") as copy,
        ):
            stream = copy.add_stream_from_template(source.streams.video[0])
            found = 0
            for packet in source.demux(video=0):
                if packet.size:
                    self._append(copy, stream, bytes(packet), found)
                    found += 1
            missing = self._count - found
            if missing > len(self._held):
                raise OSError(f"{self.path.name} holds {found} of {self._count} frames")
            for offset, data in enumerate(list(self._held)[len(self._held) - missing :]):
                self._append(copy, stream, data, found + offset)

    def _put(self, packet: Any) -> None:
        self._held.append(bytes(packet))
        super()._put(packet)

    def _append(self, copy: Any, stream: Any, data: bytes, number: int) -> None:
        import av

        packet = av.Packet(data)
        packet.stream, packet.time_base, packet.is_keyframe = stream, 1 / self._rate, True
        packet.pts = packet.dts = number
        copy.mux(packet)


class PreviewWriter(_Writer):
    """Streams all lanes side by side, with two caption lines each, into an H.264 mp4 for people.

    Every frame is a fragment and nothing is looked ahead, so a file that was cut off or copied
    plays up to its last frame but one. That costs 1 % of its size over 120 frames.
    """

    CAPTION_HEIGHT = 40
    MIN_PANE_WIDTH = 256  # narrower panes are enlarged so that a caption fits

    def __init__(self, path: Path, fps: float) -> None:
        cut = "frag_every_frame+empty_moov+default_base_moof"
        options = {"movflags": cut, "flush_packets": "1"}
        quality = {"crf": "18", "preset": "veryfast", "tune": "zerolatency"}
        gop = max(1, round(fps))
        super().__init__(path, fps, "mp4", "libx264", "yuv420p", options, quality, gop)

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
            self._encode(row[None])


def read_picture(path: Path) -> np.ndarray:
    """A picture as uint8 [H, W, 3]; its size is checked before it is decoded."""
    from PIL import Image

    check_file(path, MAX_PICTURE_BYTES)
    known = ", ".join(PICTURE_FORMATS)
    try:
        with Image.open(path, formats=PICTURE_FORMATS) as header:
            width, height = header.size
    except Image.DecompressionBombError as error:
        raise UserError(f"{path.name} has far too many pixels; choose a smaller one") from error
    except Exception as error:  # decoders stumble in many ways
        raise UserError(f"{path.name} cannot be read as a picture; use one of {known}") from error
    if width * height > MAX_PICTURE_PIXELS:
        raise UserError(
            f"{path.name} is {width} x {height}, at most {MAX_PICTURE_PIXELS:,} pixels are read"
        )
    try:
        with Image.open(path, formats=PICTURE_FORMATS) as image:
            return upright_rgb(image)
    except Exception as error:  # of broken EXIF anything
        raise UserError(f"{path.name} is damaged: {one_line(error)}") from error


def upright_rgb(image: Image.Image) -> np.ndarray:
    """An opened picture as uint8 [H, W, 3], turned as its camera was held."""
    from PIL import Image, ImageOps

    upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I"):
        # 16 bits a grey level, which Pillow would cut off at 255.
        grey = (np.asarray(upright).astype(np.float32) / 257.0).round().clip(0, 255)
        return np.repeat(grey.astype(np.uint8)[..., None], 3, axis=2)
    if upright.has_transparency_data:
        # What is see-through is shown on white, not with the colour that hides behind it.
        upright = upright.convert("RGBA")
        white = Image.new("RGBA", upright.size, (255, 255, 255, 255))
        upright = Image.alpha_composite(white, upright)
    return np.ascontiguousarray(upright.convert("RGB"), dtype=np.uint8)


def read_start(path: Path, size: tuple[int, int], frames: int) -> np.ndarray:
    """A person's start picture or video, cropped and resized to the world's size.

    size: (width, height). Returns uint8 [T, H, W, 3]; T is 1 for a picture and at most `frames`,
    but at least 1, for a video.
    """
    check_file(path, video_reader.MAX_VIDEO_BYTES)
    pictures = read_video(path, max(frames, 1)) if is_video(path) else read_picture(path)[None]
    short, long = sorted(pictures.shape[1:3])
    if short < MIN_PICTURE_SIDE or long > MAX_PICTURE_ASPECT * short:
        height, width = pictures.shape[1:3]
        raise UserError(
            f"{path.name} is {width} x {height}; a start needs at least {MIN_PICTURE_SIDE} pixels "
            f"a side and a long side of at most {MAX_PICTURE_ASPECT} times the short one"
        )
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


def _caption(lines: tuple[str, str], width: int, height: int) -> np.ndarray:
    from PIL import Image, ImageDraw, ImageFont

    bar = Image.new("RGB", (width, height), (16, 18, 22))
    draw = ImageDraw.Draw(bar)
    font = ImageFont.load_default(size=14)
    draw.text((6, 3), lines[0], fill=(255, 255, 255), font=font)
    draw.text((6, 20), lines[1], fill=(176, 186, 200), font=font)
    return np.asarray(bar)

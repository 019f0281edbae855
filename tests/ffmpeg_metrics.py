"""FFmpeg's own PSNR and SSIM filters, run through PyAV, for tests to compare with."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import numpy as np


def ffmpeg_stats(name: str, a: np.ndarray, b: np.ndarray, path: Path) -> list[dict[str, float]]:
    """Filter "psnr" or "ssim" over two clips uint8 [T, H, W, 3]: its numbers for each frame."""
    import av
    import av.filter

    height, width = a.shape[1:3]
    graph = av.filter.Graph()
    inputs = [
        graph.add_buffer(width=width, height=height, format="gbrp", time_base=Fraction(1, 25))
        for _ in range(2)
    ]
    node, sink = graph.add(name, f"stats_file={path}"), graph.add("buffersink")
    for index, source in enumerate(inputs):
        source.link_to(node, 0, index)
    node.link_to(sink)
    graph.configure()
    for number, pair in enumerate(zip(a, b, strict=True)):
        for source, picture in zip(inputs, pair, strict=True):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(format="gbrp")
            frame.pts, frame.time_base = number, Fraction(1, 25)
            source.push(frame)
        _drain(sink)
    for source in inputs:
        source.push(None)
    _drain(sink)
    del graph, node, sink, inputs, source  # closes the file
    pairs = (re.findall(r"(\w+):([\d.]+)", line) for line in path.read_text().splitlines())
    return [{key: float(value) for key, value in line} for line in pairs]


def _drain(sink) -> None:
    import av

    try:
        while True:
            sink.pull()
    except (av.error.BlockingIOError, av.error.EOFError):
        return


def box_ssim(a: np.ndarray, b: np.ndarray) -> float:
    """SSIM of two planes as FFmpeg defines it: 8 x 8 boxes, 4 apart, sample variances."""
    c1, c2 = (0.01 * 255) ** 2 * 64, (0.03 * 255) ** 2 * 64 * 63
    found = []
    for y in range(0, a.shape[0] // 4 * 4 - 7, 4):
        for x in range(0, a.shape[1] // 4 * 4 - 7, 4):
            p, q = (plane[y : y + 8, x : x + 8].astype(np.float64) for plane in (a, b))
            s1, s2, ss, s12 = p.sum(), q.sum(), (p * p + q * q).sum(), (p * q).sum()
            spread, shared = ss * 64 - s1 * s1 - s2 * s2, s12 * 64 - s1 * s2
            found.append(
                (2 * s1 * s2 + c1) * (2 * shared + c2) / ((s1**2 + s2**2 + c1) * (spread + c2))
            )
    return float(np.mean(found))

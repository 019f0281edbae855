"""The paper's own figures (QuantWM, arXiv 2609.26425), to stand beside ours.

Its worlds have billions of parameters, 480p and 93 frames; ours is small. Directions and ratios can
be compared, decibels cannot.
"""

from __future__ import annotations

from statistics import fmean

MODELS = ("Matrix-Game-2", "LingBot-v2", "HY-World 1.5", "LongCat-Video", "Causal-Forcing")

TABLE_1 = {
    "Matrix-Game-2, middle layer": (0.1460, 0.2335, 0.0853, 0.0560),
    "LingBot-v2, middle layer": (0.2717, 0.3557, 0.1868, 0.1946),
    "HY-World 1.5, middle layer": (0.1340, 0.2973, 0.0821, 0.0536),
    "Matrix-Game-2, last layer": (0.0514, 0.3005, 0.3107, 0.1860),
    "LingBot-v2, last layer": (0.1608, 0.3008, 0.2256, 0.1039),
    "HY-World 1.5, last layer": (0.0090, 0.2939, 0.5884, 0.1679),
}
"""Mean squared error of keys, of values, of the output with K2V16, of the output with K16V2."""

TABLE_2 = {"qvg-keys": (18.47, 15.38), "qvg-values": (21.58, 17.70), "qvg": (18.32, 15.79)}
"""PSNR of QVG's K2V16, K16V2, K2V2 on Matrix-Game-2 and LingBot-v2."""

TABLE_2_SSIM = {"qvg-keys": (0.547, 0.355), "qvg-values": (0.708, 0.476), "qvg": (0.500, 0.376)}

TABLE_3_PSNR = {
    "kivi": (19.298, 14.799, 17.677, 24.448, 15.585),
    "qvg": (17.749, 14.414, 16.118, 20.683, 14.887),
    "quantwm": (20.615, 16.138, 18.449, 25.508, 16.283),
}
"""PSNR at 480p over all 93 frames, by MODELS."""

TABLE_3_SSIM = {
    "kivi": (0.6557, 0.5950, 0.7165, 0.9180, 0.7201),
    "qvg": (0.5651, 0.5726, 0.6559, 0.8556, 0.6773),
    "quantwm": (0.7212, 0.6688, 0.7661, 0.9286, 0.7464),
}
TABLE_3_LPIPS = {
    "kivi": (0.1797, 0.2508, 0.1540, 0.0399, 0.1775),
    "qvg": (0.2851, 0.2779, 0.2114, 0.0784, 0.2185),
    "quantwm": (0.1443, 0.1893, 0.1082, 0.0332, 0.1554),
}

TABLE_3_CONSISTENCY = {
    "bf16": (0.9104, 0.8877, 0.9588, 0.9747, 0.9327),
    "kivi": (0.9097, 0.8869, 0.9520, 0.9754, 0.9334),
    "qvg": (0.8894, 0.8860, 0.9503, 0.9739, 0.9311),
    "quantwm": (0.9109, 0.8894, 0.9600, 0.9748, 0.9342),
}
"""VBench's subject consistency, by MODELS."""

TABLE_4 = {
    "qvg": (0.5388, 0.5491, 0.6136, 0.5034, 0.3728),
    "quantwm": (0.1019, 0.1600, 0.1392, 0.2225, 0.1420),
}
"""Share of queries whose highest-scoring historical token changes, by MODELS."""

TABLE_5 = {
    "qvg": (16.118, 0.6559, 0.6137),
    "qsac": (17.990, 0.7423, 0.3817),
    "psac": (17.849, 0.7358, 0.2290),
    "quantwm": (18.449, 0.7661, 0.1392),
}
"""HY-World 1.5: PSNR, SSIM and token-selection shift; `affine` is the row that the paper lacks."""

TABLE_6 = {"LingBot-v2": 0.0544, "HY-World 1.5": 0.0587, "LongCat-Video": -0.1778}
"""QuantWM's end-to-end latency over BF16's, less 1; LongCat-Video offloads its BF16 cache."""

TABLE_7 = {
    "kivi": ((19.200, 15.134, 17.643, 22.896, 15.394), (0.6659, 0.6317, 0.7338, 0.8805, 0.7349)),
    "qvg": ((17.721, 13.927, 16.085, 20.988, 14.771), (0.5871, 0.5958, 0.6810, 0.8246, 0.6996)),
    "quantwm": ((20.568, 15.564, 18.423, 25.127, 16.231), (0.7234, 0.6540, 0.7779, 0.9094, 0.7628)),
}
"""PSNR and SSIM at 720p, by MODELS."""

TABLE_8 = {
    "bf16": (0.6797, 0.8147, 0.6567, 0.7752, 0.6398),
    "qvg": (0.6417, 0.8063, 0.5949, 0.7680, 0.6576),
    "quantwm": (0.6796, 0.8168, 0.6627, 0.7784, 0.6744),
}
"""VBench average of one minute, by MODELS."""

SWEEP = {
    "rank2": (18.3949, 0.7643),
    "rank4": (18.3973, 0.7645),
    "quantwm": (18.4485, 0.7661),
    "rank16": (18.5368, 0.7692),
    "rank32": (18.5157, 0.7694),
    "top1": (18.2442, 0.7612),
    "top2": (18.3988, 0.7639),
    "top16": (18.4880, 0.7665),
    "top64": (18.4450, 0.7661),
    "full": (18.3827, 0.7665),
}
"""HY-World 1.5's PSNR and SSIM in Tables 9 to 11. `top64` stands for every centroid: 256 in
the paper."""

RATIO = 6.20
"""Largest ratio of the abstract, HY-World 1.5 at 17,600 tokens a span."""


def mean(table: dict[str, tuple[float, ...]], name: str) -> float | None:
    """Over the paper's models; None where the table has no such row."""
    return fmean(table[name]) if name in table else None

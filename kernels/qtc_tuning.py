"""Fixed launch tables of qtc's kernels; see kernels/tuning.py for the rules they follow.

Head dims 64 and 128: decoding 256 channels spills in every row that was tried.
"""

from __future__ import annotations

from kernels.tuning import COMPILED, Launch

TIMED = "2026-11-30, H200, 40 heads, "

DECODE = {
    64: Launch(256, 0, 4, 1, COMPILED),
    128: Launch(256, 0, 4, 1, TIMED + "18,720 tokens: keys 0.115 ms, values 0.097 (large)", 168),
}
"""Tokens of a program, gone through in steps of 16 a warp; 168 registers let three programs of four
warps share a multiprocessor; Triton 3.6 spills nothing then, 3.9 in some spans 8 bytes of keys. 128
let four, keys in 0.109 ms, but spill: 32 bytes of keys by 3.9, 8 of values by 3.6."""
ENCODE = {
    64: Launch(32, 0, 4, 1, COMPILED),
    128: Launch(16, 0, 4, 1, TIMED + "4,680 tokens' codes of keys 0.271 ms; 32, 4 warps 0.347"),
}
"""Blocks of 64 tokens, whose products become wgmma, read illegal addresses on an H200 with 40 heads
of 4,680 tokens (triton 3.6.0, with 4 and 8 warps); blocks of 32 and 16 do not. The two blocks of 16
channels behind the first four are a tile of 64 bytes a row, whose descriptor ptxas 12.8 loses a
register of (tests/sass.py)."""
SUMS = {
    64: Launch(64, 0, 4, 1, COMPILED),
    128: Launch(64, 0, 4, 1, COMPILED),
}
MOMENT = {
    64: Launch(64, 0, 4, 1, COMPILED),
    128: Launch(64, 0, 4, 1, COMPILED),
}
MOMENT_PROGRAMS = 264
"""Programs of a second moment: in each of three parts, two for each multiprocessor of an H200."""

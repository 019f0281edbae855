"""Fixed launch tables of qtc's kernels; see kernels/tuning.py for the rules they follow.

Head dims 64 and 128: decoding 256 channels spills in every row that was tried.
"""

from __future__ import annotations

from kernels.tuning import COMPILED, Launch

DECODE = {
    64: Launch(64, 0, 4, 1, COMPILED),
    128: Launch(64, 0, 4, 1, COMPILED),
}
ENCODE = {
    64: Launch(32, 0, 4, 1, COMPILED),
    128: Launch(64, 0, 8, 1, COMPILED),
}
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

"""Fixed launch tables: no autotune, so nothing recompiles or re-times as history grows.

Every row compiles for sm_90 without spills and within 227 KB of shared memory, and for sm_80, 86,
89, 100 and 120, where nothing was run and some rows spill; `note` gives the date and what it was
chosen by. `python -m benchmarks tune` times the rows worth trying.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton.language as tl
from triton.runtime import driver


@dataclass(frozen=True)
class Launch:
    """One launch row: tokens and centroids (in attention: queries) per program, warps, stages."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    note: str
    registers: int = 0  # a thread's at most, so that two programs share a multiprocessor; 0 for any

    @property
    def options(self) -> dict[str, int]:
        """Of a launch; products and sums are rounded apart, as in the reference."""
        return {
            "num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": False,
        }  # fmt: skip


COMPILED = "2026-11-29, compiles for sm_90 without spills; not yet timed"
TIMED = "2026-11-29, H200 shared with a training, 40 x 4,680 x 128, 256 centroids: "
ALONE = "2026-11-29, H200, 40 x 4,680 x 128, 256 centroids: "
BOTH = "2026-11-30, H200, 40 heads x 128, 256 centroids, at 4,680 and 18,720 tokens: "

PAIR = "2026-11-30, H200, 40 heads x 128, rank 8: "
LONG = "2026-11-30, H200, 40 heads, 4,680 queries over 28,080 tokens: "

PREPARE = {
    64: Launch(0, 64, 4, 1, COMPILED),
    128: Launch(0, 64, 4, 1, COMPILED),
    256: Launch(0, 32, 4, 1, COMPILED),
}
ASSIGN = {
    64: Launch(128, 64, 8, 2, COMPILED),
    128: Launch(128, 64, 4, 2, TIMED + "0.076 ms, second 0.078"),
    256: Launch(64, 64, 4, 2, COMPILED),
}
ASSIGN_RANGE = {
    64: Launch(64, 64, 4, 2, COMPILED),
    128: Launch(64, 64, 4, 2, TIMED + "0.184 ms, second 0.189"),
    256: Launch(32, 64, 8, 1, COMPILED),
}
UPDATE = {
    64: Launch(64, 64, 4, 3, COMPILED),
    128: Launch(128, 64, 4, 3, ALONE + "0.063 ms with the means on the 30th"),
    256: Launch(64, 64, 8, 2, COMPILED),
}
UPDATE_SPLITS = 4
"""Parts that a head's tokens are summed in, so that 40 heads of 256 centroids make 320 programs."""
UPDATE_SPLIT_TOKENS = 2048
"""From here on they are split: below, one launch less is worth more."""
MEANS = {
    64: Launch(0, 16, 4, 1, COMPILED),
    128: Launch(0, 8, 4, 1, COMPILED),
    256: Launch(0, 8, 4, 1, COMPILED),
}
ENCODE = {
    64: Launch(64, 0, 4, 1, COMPILED),
    128: Launch(32, 0, 2, 1, TIMED + "0.033 ms, second 0.034"),
    256: Launch(16, 0, 4, 1, COMPILED),
}
ENCODE_PSAC = {
    64: Launch(64, 0, 4, 1, COMPILED),
    128: Launch(32, 0, 4, 1, TIMED + "0.143 ms, second 0.164"),
    256: Launch(32, 0, 8, 1, COMPILED),
}
DECODE = {
    64: Launch(64, 8, 1, 1, COMPILED),
    128: Launch(64, 8, 4, 1, BOTH + "0.0216 and 0.0658 ms; 64, 8, 1 warp 0.0204 and 0.0674"),
    256: Launch(64, 4, 1, 1, COMPILED),
}
"""Here block_k are the tokens of a step: a program goes through its block_n step by step."""
DECODE_AFFINE = {
    64: Launch(64, 8, 1, 1, COMPILED),
    128: Launch(32, 4, 1, 1, BOTH + "0.0224 and 0.0685 ms; 64, 8, 1 warp 0.0241 and 0.0675"),
    256: Launch(64, 4, 1, 1, COMPILED),
}
DECODE_PSAC = {
    64: Launch(64, 64, 1, 1, COMPILED),
    128: Launch(64, 128, 1, 1, BOTH + "0.0275 and 0.0882 ms; 128, 128 0.0272 and 0.0878"),
    256: Launch(64, 128, 1, 1, COMPILED),
}
"""Here block_k are channels of a pass, of 16 tokens a step of one warp."""
DECODE_PAIR = {
    64: Launch(64, 8, 1, 1, COMPILED),
    128: Launch(64, 8, 1, 1, PAIR + "4,680 tokens 0.0468 ms; 96, 16 0.0484; two launches 0.0516"),
    256: Launch(64, 4, 1, 1, COMPILED),
}
"""Of keys with PSAC and values by one launch: block_k are tokens of a step of values, and channels
of a pass of keys are DECODE_PSAC's. Keys leave 12 programs to a multiprocessor, so values take
longer steps than alone."""
DECODE_PAIR_LONG = DECODE_PAIR | {
    128: Launch(96, 16, 1, 1, PAIR + "18,720 tokens 0.1510 ms; 64, 8 0.1535; two launches 0.1565"),
}
LONG_TOKENS = 16384
"""Of keys and values together, from which on a launch takes DECODE_PAIR_LONG."""
COPY = {
    64: Launch(64, 0, 4, 1, COMPILED),
    128: Launch(32, 0, 4, 1, COMPILED),
    256: Launch(16, 0, 4, 1, COMPILED),
}
ENCODE_TOKENS = {
    64: Launch(64, 0, 4, 1, COMPILED),
    128: Launch(32, 0, 4, 1, COMPILED),
    256: Launch(16, 0, 4, 1, COMPILED),
}
ENCODE_CHANNELS = {64: Launch(8192, 0, 4, 1, COMPILED)}
"""Here block_n is elements a program: a group of tokens, and as many channels as then fit."""
ENCODE_CHANNELS |= dict.fromkeys((128, 256), ENCODE_CHANNELS[64])
DECODE_TOKENS = {
    64: Launch(32, 0, 4, 1, COMPILED),
    128: Launch(16, 0, 4, 1, COMPILED),
    256: Launch(16, 0, 4, 1, COMPILED),
}
DECODE_CHANNELS = {
    64: Launch(32, 0, 4, 1, COMPILED),
    128: Launch(32, 0, 4, 1, COMPILED),
    256: Launch(16, 0, 4, 1, COMPILED),
}
DECODE_STAGES = {
    64: Launch(32, 0, 4, 1, COMPILED),
    128: Launch(8, 0, 4, 1, COMPILED),
    256: Launch(8, 0, 4, 1, COMPILED),
}
SUBSPACE = {
    (64, 16): Launch(0, 32, 4, 1, COMPILED),
    (128, 16): Launch(0, 16, 8, 1, COMPILED),
    (256, 16): Launch(0, 16, 8, 1, COMPILED),
    (64, 32): Launch(0, 16, 8, 1, COMPILED),
    (128, 32): Launch(0, 16, 8, 1, COMPILED),
    (256, 32): Launch(0, 16, 8, 1, COMPILED),
}
"""By head dim and directions. Of 64 directions the small eigenproblem does not fit in registers."""
FLASH = {
    64: Launch(128, 128, 8, 3, COMPILED),
    128: Launch(64, 128, 8, 2, ALONE + "0.92 ms for 4,680 queries, second 0.97", 128),
}
FLASH_PACKED = {
    64: Launch(64, 128, 8, 1, COMPILED),
    128: Launch(64, 256, 16, 1, LONG + "13.1 ms for qvg, 14.6 for quantwm; second 16.8", 128),
}
"""One stage: a gathered centroid is loaded through the multiprocessor's cache, in which a head's 64
KB of them stay; an asynchronous copy of it goes past that cache. Of qvg alone 64, 128, 4 warps take
11.7 ms, with 504 bytes of a thread on the stack; of quantwm 18.1."""
FLASH_PACKED_SMALL = FLASH_PACKED | {128: Launch(64, 128, 8, 1, COMPILED)}
"""In 68 KB of shared memory in place of 132: capability 8.6, 8.9 and 12.0 have 99."""
FLASH_HOPPER = {"STAGES": 2, "num_warps": 4}
FLASH_INT8 = {
    64: Launch(128, 128, 8, 3, COMPILED),
    128: Launch(64, 128, 8, 3, COMPILED),
}


@lru_cache(maxsize=8)
def shared_bytes(device: torch.device) -> int:
    """Of shared memory that a block may have, as Triton counts it; on a CPU a Hopper's."""
    if device.type != "cuda":
        return 227 * 1024
    return driver.active.utils.get_device_properties(device.index)["max_shared_mem"]


def dot_mode(x: torch.Tensor) -> tuple[torch.dtype, tl.dtype]:
    """Type of the operands of every dot: (torch, Triton).

    BF16 on a GPU, where its products are exact and run on the tensor cores. The interpreter holds
    BF16 as uint16 and gets BF16 arithmetic silently wrong, so on a CPU the dots are float32.
    """
    return (torch.bfloat16, tl.bfloat16) if x.is_cuda else (torch.float32, tl.float32)

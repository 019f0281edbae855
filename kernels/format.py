"""Constants of the packed layout (docs/architecture.md) and what the kernels cover; no triton."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

CODES_PER_BYTE = 4
MAX_CENTROIDS = 256  # ids are uint8
MAX_CANDIDATES = 4  # of QSAC
E4M3_MAX = 448.0
COEFFICIENT_MAX = 127

FUSED_HEAD_DIMS = (64, 128)
HEAD_DIMS = (64, 128, 256)
GROUP_SIZES = (16, 32, 64, 128)
MAX_RANK = 32


def unsupported(
    head_dim: int, group_size: int | None = None, centroids: int | None = None, rank: int = 0
) -> str | None:
    """Why the kernels do not cover this geometry, in a few words; None when they do."""
    if head_dim not in HEAD_DIMS:
        return f"head dim {head_dim} is not one of {HEAD_DIMS}"
    if group_size is not None and (group_size not in GROUP_SIZES or head_dim % group_size):
        return f"group size {group_size} is not one of {GROUP_SIZES} dividing {head_dim}"
    if centroids is not None and not 1 <= centroids <= MAX_CENTROIDS:
        return f"{centroids} centroids, the kernels take 1 to {MAX_CENTROIDS}"
    if rank > MAX_RANK:
        return f"rank {rank} exceeds {MAX_RANK}"
    return None


class Side(NamedTuple):
    """Keys or values of one segment as fused attention reads them; packed as in the decoders.

    Attributes:
        kind: "plain" has values alone, [H, N, D]; "ternary" codes, ids, centroids and scales;
            "affine" all but values, and the last four where keys are corrected. chunk_stops are
            on the host, for a launch takes the tokens of one chunk.
    """

    kind: Literal["plain", "ternary", "affine"]
    values: Tensor | None = None
    codes: Tensor | None = None
    ids: Tensor | None = None
    centroids: Tensor | None = None
    scales: Tensor | None = None
    secondary: Tensor | None = None
    chunk_stops: tuple[int, ...] = ()
    zeros: Tensor | None = None
    coefficients: Tensor | None = None
    row_scales: Tensor | None = None
    basis: Tensor | None = None
    first_corrected: int = 0

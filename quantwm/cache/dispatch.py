"""Which implementation of the cache's primitives runs, and why: the only door to `kernels`.

Environment variables of the library (all of them):

| variable | values | meaning |
|---|---|---|
| QUANTWM_KERNELS | auto (default), reference, triton | which primitives run on a CUDA device |
| QUANTWM_ATTENTION | staged (default), slabs, fused | decoded at a time: all, a slab, a tile |
"""

from __future__ import annotations

import logging
import os
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from kernels.format import HEAD_DIMS, MAX_CANDIDATES, unsupported
from quantwm.cache import reference
from quantwm.cache.group_ops import Decode, GroupOps, TritonGroupOps
from quantwm.errors import UserError

logger = logging.getLogger(__name__)

CHOICES = ("auto", "reference", "triton")
AttentionMode = Literal["staged", "slabs", "fused"]
Parts = list[tuple[Decode, int, int, int]]  # and offset, start, stop
Pair = tuple[Tensor, Tensor]


class Ops(GroupOps, Protocol):
    """The primitive operations. `quantwm/cache/reference.py` defines what they mean; those of rtn,
    kivi and qvg-pro are in group_ops.py.

    H heads, N tokens, D channels, K <= 256 centroids, G = group_size, r = rank, C chunks.
    x: [H, N, D] float32 or bfloat16, D contiguous. centroids: [H, K, D] bfloat16 when a chunk is
    encoded or decoded, float32 or bfloat16 inside k-means. ids: uint8 [H, N]. All arithmetic is
    float32. Packed tensors are as in docs/architecture.md and contiguous.
    """

    def assign(self, x: Tensor, centroids: Tensor) -> Tensor:
        """Nearest centroid, ties to the smaller index. Returns ids uint8 [H, N]."""
        ...

    def assign_qsac(
        self, x: Tensor, centroids: Tensor, weights: Tensor, group_size: int, candidates: int
    ) -> Tensor:
        """QSAC (QuantWM Eq. 6-14). Returns ids uint8 [H, N].

        weights: float32 [H, D], mean 1; [H, D, D] in place of diag(w) for the whole moment.
        The `candidates` nearest by sum_c w_c (x_c - mu_c)^2 (ties to the smaller index), of these
        the one with the least sum_g (sum_{c in g} w_c) (max_g(x - mu) - min_g(x - mu))^2, ties to
        the nearer candidate.
        """
        ...

    def update(self, x: Tensor, ids: Tensor, centroids: Tensor) -> Tensor:
        """Mean of each cluster's tokens, an empty cluster keeps its centroid. float32 [H, K, D]."""
        ...

    def encode_qvg(
        self, x: Tensor, ids: Tensor, centroids: Tensor, group_size: int
    ) -> tuple[Tensor, Tensor]:
        """Ternary residual. Returns codes uint8 [H, N, D/4], scales float8_e4m3fn [H, N, D/G]."""
        ...

    def encode_quantwm(
        self,
        x: Tensor,
        ids: Tensor,
        centroids: Tensor,
        group_size: int,
        clip: float,
        basis: Tensor | None,
        eigenvalues: Tensor | None,
        coefficient_max: int = 127,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """4-level affine residual, and the PSAC rows when a basis is given.

        basis: bfloat16 [H, D, r]; eigenvalues: float32 [H, r]; coefficient_max: largest
        coefficient of a row.
        Returns codes uint8 [H, N, D/4], scales uint8 [H, N, D/G], secondary float16 [H],
        zeros uint8 [H, ceil(N * D/G / 4)], coefficients int8 [H, N, r] | None,
        coefficient_scales float16 [H, N] | None. A row that the gate refuses is all zero with
        scale 0.
        """
        ...

    def copy_pair(self, k_out: Tensor, v_out: Tensor, offset: int, k: Tensor, v: Tensor) -> None:
        """k and v [H, N, D] to k_out[:, offset : offset + N] and v_out[...], in their type."""
        ...

    def decode_spans(self, sides: tuple[Parts, Parts], outs: Pair, first_head: int = 0) -> int:
        """Each part of keys and of values as its decoder called alone would do. Returns the number
        of launches, 0 where one of them cannot be made again as it is."""
        ...

    def prepare_copy(self, x: Tensor) -> Decode:
        """The decoder of a span that is not compressed. x: [H, N, D]."""
        ...

    def prepare_qvg(
        self, codes: Tensor, ids: Tensor, centroids: Tensor, scales: Tensor, group_size: int
    ) -> Decode:
        """The decoder of one QVG span, which keeps these tensors. They are checked here."""
        ...

    def prepare_quantwm(
        self,
        codes: Tensor,
        ids: Tensor,
        centroids: Tensor,
        scales: Tensor,
        secondary: Tensor,
        chunk_stops: Tensor,
        zeros: Tensor,
        group_size: int,
        coefficients: Tensor | None,
        coefficient_scales: Tensor | None,
        basis: Tensor | None,
        first_corrected: int,
    ) -> Decode:
        """As prepare_qvg, for QuantWM spans.

        secondary: float16 [H, C], one per chunk of the span; chunk_stops: int32 [C], the token
        of the span at which each chunk ends. scale = scale_code * (secondary / 255).
        coefficients: int8 [H, N - first_corrected, r] (row i belongs to token
        first_corrected + i; tokens before have no correction), coefficient_scales: float16
        [H, N - first_corrected], basis: bfloat16 [H, D, r]; None where there is no correction.
        """
        ...


def attention_mode(wanted: str | None = None) -> AttentionMode:
    """The mode asked for, or without one what QUANTWM_ATTENTION says."""
    given = os.environ.get("QUANTWM_ATTENTION", "staged") if wanted is None else wanted
    for mode in get_args(AttentionMode):
        if given == mode:
            return mode
    source = "QUANTWM_ATTENTION" if wanted is None else "mode"
    raise UserError(f"{source} must be one of {', '.join(get_args(AttentionMode))}, got {given!r}")


def ops_for(device: torch.device) -> Ops:
    """The primitives that run on this device."""
    return _choose(torch.device(device).type, os.environ.get("QUANTWM_KERNELS", "auto"))[0]


def explain(device: torch.device | str) -> str:
    """One line: which primitives run on this device, and why."""
    ops, reason = _choose(torch.device(device).type, os.environ.get("QUANTWM_KERNELS", "auto"))
    if isinstance(ops, TritonOps) and ops.fallbacks:
        reason = f"{reason}; PyTorch reference where {', '.join(ops.fallbacks)}"
    return "; ".join((reason, *_notes))


_notes: dict[str, None] = {}


def note_fallback(text: str) -> None:
    """Something that a format had to do without; logged once and named by `explain`."""
    if text not in _notes:
        _notes[text] = None
        logger.warning(text)


@lru_cache(maxsize=16)
def _choose(device_type: str, override: str) -> tuple[Ops, str]:
    if override not in CHOICES:
        raise UserError(f"QUANTWM_KERNELS must be one of {', '.join(CHOICES)}, got {override!r}")
    if override == "reference":
        return reference, "PyTorch reference (QUANTWM_KERNELS=reference)"
    if device_type != "cuda":
        if override == "triton":
            raise UserError(
                f"QUANTWM_KERNELS=triton needs a CUDA device, this is {device_type}; "
                "set it to auto or reference"
            )
        return reference, f"PyTorch reference (Triton needs a CUDA device, this is {device_type})"
    try:
        ops = _load_triton()
    except ImportError as failure:
        if override == "triton":
            raise UserError(
                f"QUANTWM_KERNELS=triton, but the kernels do not load: {failure}"
            ) from None
        reason = f"PyTorch reference on CUDA, slow: the Triton kernels do not load ({failure})"
        logger.warning(reason)
        return reference, reason
    return ops, "Triton kernels (CUDA device)"


@lru_cache(maxsize=8)
def fused_kernel(device: torch.device) -> ModuleType | str:
    """The kernel of fused attention on this device (`kernels/fused.py`), or why there is none."""
    return kernels_in("fused", device) or explain(device)


@lru_cache(maxsize=8)
def pass_kernels(device: torch.device) -> ModuleType | None:
    """The kernels between a Wan pass's matrix products; None where PyTorch's operations run."""
    if not isinstance(ops_for(device), TritonOps):
        return None
    from kernels import passes

    return passes


def kernels_in(name: str, device: torch.device) -> ModuleType | None:
    """kernels/<name>.py; None where PyTorch's operations run on this device."""
    ops = ops_for(device)
    return import_module(f"kernels.{name}") if isinstance(ops, TritonOps) else None


# --- Triton wiring: the one place that imports `kernels` ---------------------------------------


class QtcKernels(NamedTuple):
    """Launchers of the qtc format's kernels, which have no counterpart in `Ops`."""

    encode: ModuleType
    decode: ModuleType
    moments: ModuleType
    turning: type


def qtc_kernels(device: torch.device, head_dim: int) -> QtcKernels | None:
    """qtc's kernels where they run; None where the PyTorch code of formats/qtc_*.py does."""
    ops = ops_for(device)
    if not isinstance(ops, TritonOps):
        return None
    from kernels import qtc_decode, qtc_encode, qtc_moments, qtc_tile, qtc_tuning

    if head_dim not in qtc_tuning.DECODE:
        note_fallback(f"qtc runs in PyTorch: no kernel for head dim {head_dim}")
        return None
    return QtcKernels(qtc_encode, qtc_decode, qtc_moments, qtc_tile.Turning)


def _load_triton() -> Ops:
    """The launchers behind the signatures of `Ops`. ImportError when they cannot run here."""
    from kernels import decode, encode, groups, kmeans, stages

    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        raise ImportError(f"compute capability {capability[0]}.{capability[1]} is below 8.0")
    return TritonOps(kmeans, encode, decode, groups, stages)


class TritonOps(TritonGroupOps):
    """`Ops` on a GPU: the kernels where they cover the geometry, the reference where not.

    Every reason for falling back is logged once and kept in `fallbacks`, which `explain` prints.
    """

    name = "triton"

    def __init__(
        self,
        kmeans: ModuleType,
        encode: ModuleType,
        decode: ModuleType,
        groups: ModuleType,
        stages: ModuleType,
    ) -> None:
        self._kmeans, self._encode, self._decode = kmeans, encode, decode
        self._groups, self._stages = groups, stages
        self.fallbacks: list[str] = []

    def _covered(self, reason: str | None) -> bool:
        if reason is not None and reason not in self.fallbacks:
            self.fallbacks.append(reason)
            logger.warning("the PyTorch reference runs instead of a kernel: %s", reason)
        return reason is None

    def assign(self, x: Tensor, centroids: Tensor) -> Tensor:
        if not self._covered(_uncovered_rows(x, centroids)):
            return reference.assign(x, centroids)
        return self._kmeans.assign(x, centroids.contiguous())

    def assign_qsac(
        self, x: Tensor, centroids: Tensor, weights: Tensor, group_size: int, candidates: int
    ) -> Tensor:
        reason = _uncovered_rows(x, centroids, group_size)
        if weights.dim() == 3:
            reason = "QSAC with the whole query moment"
        if candidates > MAX_CANDIDATES:
            reason = f"{candidates} QSAC candidates, the kernel takes {MAX_CANDIDATES}"
        if not self._covered(reason):
            return reference.assign_qsac(x, centroids, weights, group_size, candidates)
        return self._kmeans.assign_qsac(
            x, centroids.contiguous(), weights.contiguous(), group_size, candidates
        )

    def update(self, x: Tensor, ids: Tensor, centroids: Tensor) -> Tensor:
        if not self._covered(_uncovered_rows(x, centroids)):
            return reference.update(x, ids, centroids)
        return self._kmeans.update(x, ids, centroids.contiguous())

    def encode_qvg(
        self, x: Tensor, ids: Tensor, centroids: Tensor, group_size: int
    ) -> tuple[Tensor, Tensor]:
        covered = self._covered(_uncovered_rows(x, centroids, group_size))
        ops = self._encode if covered else reference
        return ops.encode_qvg(x, ids, centroids, group_size)

    def encode_quantwm(
        self,
        x: Tensor,
        ids: Tensor,
        centroids: Tensor,
        group_size: int,
        clip: float,
        basis: Tensor | None,
        eigenvalues: Tensor | None,
        coefficient_max: int = 127,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        rank = 0 if basis is None else basis.shape[2]
        reason = _uncovered_rows(x, centroids, group_size, rank)
        if basis is not None and coefficient_max != 127:
            reason = "PSAC coefficients are INT4"
        covered = self._covered(reason)
        if basis is not None and eigenvalues is not None:
            basis, eigenvalues = basis.contiguous(), eigenvalues.contiguous()
        given = x, ids, centroids, group_size, clip, basis, eigenvalues
        if not covered:
            return reference.encode_quantwm(*given, coefficient_max)
        return self._encode.encode_quantwm(*given)

    def copy_pair(self, k_out: Tensor, v_out: Tensor, offset: int, k: Tensor, v: Tensor) -> None:
        ops = self._decode if _copied(k, k_out) and _copied(v, v_out) else reference
        ops.copy_pair(k_out, v_out, offset, k, v)

    def decode_spans(self, sides: tuple[Parts, Parts], outs: Pair, first_head: int = 0) -> int:
        return import_module("kernels.decode_spans").decode_spans(sides, outs, first_head)

    def prepare_copy(self, x: Tensor) -> Decode:
        return (self._decode if _copied(x, x) else reference).prepare_copy(x)

    def prepare_qvg(
        self, codes: Tensor, ids: Tensor, centroids: Tensor, scales: Tensor, group_size: int
    ) -> Decode:
        covered = self._covered(unsupported(centroids.shape[2], group_size, centroids.shape[1]))
        ops = self._decode if covered else reference
        return ops.prepare_qvg(codes, ids, centroids, scales, group_size)

    def prepare_quantwm(
        self,
        codes: Tensor,
        ids: Tensor,
        centroids: Tensor,
        scales: Tensor,
        secondary: Tensor,
        chunk_stops: Tensor,
        zeros: Tensor,
        group_size: int,
        coefficients: Tensor | None,
        coefficient_scales: Tensor | None,
        basis: Tensor | None,
        first_corrected: int,
    ) -> Decode:
        _, count, dim = centroids.shape
        rank = 0 if basis is None else basis.shape[2]
        covered = self._covered(unsupported(dim, group_size, count, rank))
        ops = self._decode if covered else reference
        return ops.prepare_quantwm(
            codes,
            ids,
            centroids,
            scales,
            secondary,
            chunk_stops,
            zeros,
            group_size,
            coefficients,
            coefficient_scales,
            None if basis is None else basis.contiguous(),
            first_corrected,
        )


def _copied(x: Tensor, out: Tensor) -> bool:
    """Whether the copying kernels take these; PyTorch's copy is no slower on the device."""
    types = (torch.float32, torch.bfloat16)
    adjacent = x.stride(2) == 1 and x.device == out.device
    return adjacent and x.dtype in types and x.shape[2] in HEAD_DIMS


def _uncovered_rows(
    x: Tensor, centroids: Tensor, group_size: int | None = None, rank: int = 0
) -> str | None:
    """Why keys or values like these are not for the kernels; None when they are."""
    if x.dtype != torch.bfloat16:
        return f"keys and values are {x.dtype}, the kernels take bfloat16"
    return unsupported(x.shape[2], group_size, centroids.shape[1], rank)

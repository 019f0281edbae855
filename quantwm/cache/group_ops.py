"""The primitives of rtn, kivi and qvg-pro: what `dispatch.Ops` has of them, and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from kernels.format import unsupported
from quantwm.cache import reference_groups


class Decode(Protocol):
    """Decodes ranges of one packed span; made once a span, called in every denoising pass."""

    def __call__(
        self, out: Tensor, offset: int, start: int, stop: int, first_head: int = 0
    ) -> None:
        """Write tokens [start, stop) of the span to out[:, offset : offset + stop - start].

        out: [heads wanted, capacity, D] float32 or bfloat16, D contiguous, the other strides
        free; it takes the span's heads from first_head on.
        """
        ...


class GroupOps(Protocol):
    """`quantwm/cache/reference_groups.py` defines what they mean. Symbols as in `dispatch.Ops`;
    bits: of a code, 2 or 4; x = zero + code * scale."""

    def encode_token_groups(
        self, x: Tensor, group_size: int, bits: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Groups of channels of one token. Returns codes uint8 [H, N, D * bits / 8], scales and
        zeros float16 [H, N, D/G]."""
        ...

    def encode_channel_groups(
        self, x: Tensor, group_size: int, bits: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Groups of tokens of one channel, the last one shorter. Returns codes as above, scales and
        zeros float16 [H, C, D], and int32 [C], where each of the C groups ends."""
        ...

    def residual(
        self, x: Tensor, ids: Tensor, centroids: Tensor, into: Tensor | None = None
    ) -> Tensor:
        """x less its centroids, bfloat16 [H, N, D]: what a stage leaves to the next one.

        into: contiguous and of that type, where it is written; x itself if need be.
        """
        ...

    def prepare_token_groups(
        self, codes: Tensor, scales: Tensor, zeros: Tensor, bits: int
    ) -> Decode:
        """The decoder of one span of encode_token_groups, which keeps these tensors."""
        ...

    def prepare_channel_groups(
        self,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor,
        stops: Tensor,
        group_tokens: Sequence[int],
        bits: int,
    ) -> Decode:
        """The same of encode_channel_groups. group_tokens: tokens of each group, on the host."""
        ...

    def prepare_stages(
        self, codes: Tensor, ids: Tensor, centroids: Tensor, scales: Tensor, group_size: int
    ) -> Decode:
        """As prepare_qvg with S stages: ids uint8 [H, N, S], centroids bfloat16 [H, S * K, D]."""
        ...


class TritonGroupOps:
    """`GroupOps` on a GPU: the kernels where they cover the geometry, the reference where not."""

    _groups: ModuleType
    _stages: ModuleType
    _covered: Callable[[str | None], bool]

    def encode_token_groups(
        self, x: Tensor, group_size: int, bits: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        covered = self._covered(_uncovered(x, group_size))
        ops = self._groups if covered else reference_groups
        return ops.encode_token_groups(x, group_size, bits)

    def encode_channel_groups(
        self, x: Tensor, group_size: int, bits: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        covered = self._covered(_uncovered(x, group_size))
        ops = self._groups if covered else reference_groups
        return ops.encode_channel_groups(x, group_size, bits)

    def residual(
        self, x: Tensor, ids: Tensor, centroids: Tensor, into: Tensor | None = None
    ) -> Tensor:
        covered = self._covered(_uncovered(x, None, centroids.shape[1]))
        ops = self._stages if covered else reference_groups
        return ops.residual(x, ids, centroids.contiguous(), into)

    def prepare_token_groups(
        self, codes: Tensor, scales: Tensor, zeros: Tensor, bits: int
    ) -> Decode:
        dim = codes.shape[2] * 8 // bits
        covered = self._covered(unsupported(dim, dim // scales.shape[2]))
        ops = self._groups if covered else reference_groups
        return ops.prepare_token_groups(codes, scales, zeros, bits)

    def prepare_channel_groups(
        self,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor,
        stops: Tensor,
        group_tokens: Sequence[int],
        bits: int,
    ) -> Decode:
        ops = self._groups if self._covered(unsupported(scales.shape[2])) else reference_groups
        return ops.prepare_channel_groups(codes, scales, zeros, stops, group_tokens, bits)

    def prepare_stages(
        self, codes: Tensor, ids: Tensor, centroids: Tensor, scales: Tensor, group_size: int
    ) -> Decode:
        _, total, dim = centroids.shape
        covered = self._covered(unsupported(dim, group_size, total // ids.shape[2]))
        ops = self._stages if covered else reference_groups
        return ops.prepare_stages(codes, ids, centroids, scales, group_size)


def _uncovered(x: Tensor, group_size: int | None, centroids: int | None = None) -> str | None:
    if x.dtype not in (torch.float32, torch.bfloat16):
        return f"keys and values are {x.dtype}, the kernels take bfloat16"
    return unsupported(x.shape[2], group_size, centroids)

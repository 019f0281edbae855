"""Projective positions (PRoPE): features turned by 4x4 camera matrices, per latent frame."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Cameras:
    """Projection P = K * world-to-camera of each latent frame, and its inverse; [F, 4, 4]."""

    projection: torch.Tensor
    inverse: torch.Tensor

    def select(self, frames: torch.Tensor) -> Cameras:
        """frames: [n] indices -> the cameras of those frames."""
        return Cameras(self.projection[frames], self.inverse[frames])

    def joined(self, later: Cameras) -> Cameras:
        """These cameras with later ones behind them."""
        return Cameras(
            torch.cat([self.projection, later.projection]),
            torch.cat([self.inverse, later.inverse]),
        )


def cameras(w2c: torch.Tensor, intrinsics: torch.Tensor, dtype: torch.dtype) -> Cameras:
    """w2c [F, 4, 4], intrinsics [F, 3, 3] normalised by width and height -> Cameras in `dtype`.

    The principal point is left out. Everything is built in `dtype` itself: the published BF16
    model uses BF16 camera matrices.
    """
    w2c = w2c.to(torch.float32).to(dtype)
    intrinsics = intrinsics.to(torch.float32).to(dtype)
    lens = torch.zeros_like(w2c)
    lens_inverse = torch.zeros_like(w2c)
    for axis in (0, 1):
        lens[:, axis, axis] = intrinsics[:, axis, axis]
        lens_inverse[:, axis, axis] = 1.0 / intrinsics[:, axis, axis]
    for axis in (2, 3):
        lens[:, axis, axis] = 1.0
        lens_inverse[:, axis, axis] = 1.0
    rotation = w2c[:, :3, :3].transpose(-1, -2)
    c2w = torch.zeros_like(w2c)
    c2w[:, :3, :3] = rotation
    c2w[:, :3, 3] = -torch.einsum("fij,fj->fi", rotation, w2c[:, :3, 3])
    c2w[:, 3, 3] = 1.0
    return Cameras(torch.matmul(lens, w2c), torch.matmul(c2w, lens_inverse))


def apply(matrices: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Multiply every group of four channels of a token by its frame's matrix.

    matrices: [F, 4, 4]; x: [heads, F * tokens, D] with D % 4 == 0 -> the same shape.
    """
    heads, count, width = x.shape
    frames = matrices.shape[0]
    groups = x.reshape(heads, frames, count // frames, width // 4, 4)
    return torch.einsum("fij,hftgj->hftgi", matrices, groups).reshape(x.shape)

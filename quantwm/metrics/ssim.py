"""SSIM of frames to a reference: 11 x 11 Gaussian window, sigma 1.5, on any torch device.

Wang et al. 2004: K1 = 0.01, K2 = 0.03, L = 255, population variances, the mean over the windows
that lie wholly inside the picture and over the three RGB channels. scikit-image does the same
(gaussian_weights, sigma 1.5, use_sample_covariance off); torchmetrics has the same windows and
also averages those that its padding mirrors over the edges; FFmpeg's filter has 8 x 8 boxes, 4
apart.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from quantwm.errors import UserError
from quantwm.metrics.fidelity import PEAK, check_pair

WINDOW = 11
SIGMA = 1.5
C1, C2 = (0.01 * PEAK) ** 2, (0.03 * PEAK) ** 2

BATCH_PIXELS = 2**20
"""Pixels that are worked on at once: about 100 MB of float32 intermediates."""


def ssim_per_frame(
    frames: np.ndarray, reference: np.ndarray, device: torch.device | str = "cpu"
) -> np.ndarray:
    """SSIM of each frame, float64 [T]; 1 where identical. frames, reference: uint8 [T, H, W, 3].

    Raises:
        UserError: frames smaller than the window.
    """
    check_pair(frames, reference)
    height, width = frames.shape[1:3]
    if min(height, width) < WINDOW:
        raise UserError(
            f"SSIM needs frames of at least {WINDOW} x {WINDOW} pixels, got {width} x {height}"
        )
    batch = max(1, BATCH_PIXELS // (height * width))
    # A picture that is larger than a batch goes in bands, whose windows follow each other.
    rows = max(1, BATCH_PIXELS // width - WINDOW + 1) if batch == 1 else height
    found = []
    for i in range(0, len(frames), batch):
        total, windows = torch.zeros(len(frames[i : i + batch]), dtype=torch.float64), 0
        for top in range(0, height - WINDOW + 1, rows):
            part = (slice(i, i + batch), slice(top, top + rows + WINDOW - 1))
            band = _ssim(_planes(frames[part], device), _planes(reference[part], device))
            count = min(rows, height - WINDOW + 1 - top)
            total, windows = total + band.cpu() * count, windows + count
        found.append(total / windows)
    return torch.cat(found).numpy()


def _planes(frames: np.ndarray, device: torch.device | str) -> torch.Tensor:
    """uint8 [T, H, W, 3] -> float32 [T, 3, H, W]."""
    pictures = torch.from_numpy(np.ascontiguousarray(frames)).to(device)
    return pictures.permute(0, 3, 1, 2).float()


@torch.no_grad()
def _ssim(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """float32 [T, 3, H, W] twice -> float64 [T]."""
    # Around mid-grey, or E[x^2] - E[x]^2 cancels 2 of float32's 7 digits in bright flat areas.
    x, y = x - PEAK / 2, y - PEAK / 2
    mean_x, mean_y = _blur(x), _blur(y)
    var_x = _blur(x * x) - mean_x**2
    var_y = _blur(y * y) - mean_y**2
    covariance = _blur(x * y) - mean_x * mean_y
    mean_x, mean_y = mean_x + PEAK / 2, mean_y + PEAK / 2
    luminance = (2 * mean_x * mean_y + C1) / (mean_x**2 + mean_y**2 + C1)
    structure = (2 * covariance + C2) / (var_x + var_y + C2)
    return (luminance * structure).mean(dim=(1, 2, 3), dtype=torch.float64)


def _blur(planes: torch.Tensor) -> torch.Tensor:
    """Gaussian means of all windows inside the picture, rows first, then columns."""
    offsets = torch.arange(WINDOW, device=planes.device, dtype=torch.float32) - WINDOW // 2
    weights = torch.exp(-(offsets**2) / (2 * SIGMA**2))
    weights = (weights / weights.sum()).expand(planes.shape[1], 1, WINDOW)
    rows = F.conv2d(planes, weights[..., None], groups=planes.shape[1])
    return F.conv2d(rows, weights[:, :, None], groups=planes.shape[1])

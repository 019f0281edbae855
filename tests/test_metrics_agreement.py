"""Our PSNR and SSIM are those of scikit-image, torchmetrics and FFmpeg on shared clips."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantwm.errors import UserError
from quantwm.metrics import frame_mse, psnr_per_frame, psnr_pooled, ssim_per_frame
from tests.ffmpeg_metrics import box_ssim, ffmpeg_stats


def smooth_clip(seed: int, frames: int = 3, size: tuple[int, int] = (48, 72)) -> np.ndarray:
    """Soft colours that drift, uint8 [T, H, W, 3]."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[: size[0], : size[1]]
    waves = rng.uniform(0.05, 0.25, (3, 2))
    pictures = [
        np.stack([np.sin(wy * y + wx * x + 0.3 * t + c) for c, (wy, wx) in enumerate(waves)], -1)
        for t in range(frames)
    ]
    return (127 + 110 * np.stack(pictures)).astype(np.uint8)


CLIPS = {
    "noise": lambda a: np.clip(a + np.random.default_rng(1).normal(0, 6, a.shape), 0, 255),
    "brighter": lambda a: np.clip(a.astype(int) + 12, 0, 255),
    "other content": lambda a: smooth_clip(9),
    "dark": lambda a: a // 8,
}


@pytest.fixture(params=CLIPS)
def pair(request) -> tuple[np.ndarray, np.ndarray]:
    a = smooth_clip(0)
    return a, CLIPS[request.param](a).astype(np.uint8)


def test_scikit_image(pair):
    metrics = pytest.importorskip("skimage.metrics")
    psnr = [metrics.peak_signal_noise_ratio(x, y) for x, y in zip(*pair, strict=True)]
    assert psnr_per_frame(*pair) == pytest.approx(psnr, abs=1e-5)
    ssim = [
        metrics.structural_similarity(
            x,
            y,
            channel_axis=2,
            data_range=255,
            gaussian_weights=True,
            sigma=1.5,
            use_sample_covariance=False,
        )
        for x, y in zip(*pair, strict=True)
    ]
    assert ssim_per_frame(*pair) == pytest.approx(ssim, abs=2e-5)


def test_torchmetrics(pair):
    functional = pytest.importorskip("torchmetrics.functional.image")
    x, y = (torch.from_numpy(clip).permute(0, 3, 1, 2).double() for clip in pair)
    pooled = functional.peak_signal_noise_ratio(x, y, data_range=255.0)
    assert psnr_pooled(*pair) == pytest.approx(float(pooled), abs=1e-5)
    _, windows = functional.structural_similarity_index_measure(
        x, y, data_range=255.0, reduction="none", sigma=1.5, return_full_image=True
    )
    # torchmetrics also averages windows that its padding mirrors over the edges
    inside = windows[..., 5:-5, 5:-5].mean(dim=(1, 2, 3))
    assert ssim_per_frame(*pair) == pytest.approx(inside.tolist(), abs=2e-5)
    everywhere = windows.mean(dim=(1, 2, 3))
    assert ssim_per_frame(*pair) == pytest.approx(everywhere.tolist(), abs=5e-3)


def test_ffmpeg(pair, tmp_path):
    pytest.importorskip("av")
    lines = ffmpeg_stats("psnr", *pair, tmp_path / "psnr.log")
    assert frame_mse(*pair) == pytest.approx([line["mse_avg"] for line in lines], abs=6e-3)
    assert psnr_per_frame(*pair) == pytest.approx([line["psnr_avg"] for line in lines], abs=6e-3)
    lines = ffmpeg_stats("ssim", *pair, tmp_path / "ssim.log")
    boxes = [
        np.mean([box_ssim(x[..., c], y[..., c]) for c in range(3)])
        for x, y in zip(*pair, strict=True)
    ]
    theirs = [line["All"] for line in lines]
    assert boxes == pytest.approx(theirs, abs=1e-4)  # so the windows are all that differs
    assert ssim_per_frame(*pair) == pytest.approx(theirs, abs=0.09)


def test_ssim_of_identical_and_small_frames():
    a = smooth_clip(0)
    assert ssim_per_frame(a, a).tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(UserError, match="at least 11 x 11"):
        ssim_per_frame(a[:, :10], a[:, :10])


def test_ssim_in_batches_is_the_same(monkeypatch):
    import quantwm.metrics.ssim as module

    a, b = smooth_clip(0, 5), smooth_clip(1, 5)
    whole = ssim_per_frame(a, b)
    monkeypatch.setattr(module, "BATCH_PIXELS", 48 * 72 * 2)
    assert ssim_per_frame(a, b) == pytest.approx(whole, abs=1e-6)


def test_ssim_of_a_large_picture_goes_in_bands(monkeypatch):
    import quantwm.metrics.ssim as module

    a, b = smooth_clip(0, 2), smooth_clip(1, 2)
    whole = ssim_per_frame(a, b)
    for rows in (11, 12, 20, 47):
        monkeypatch.setattr(module, "BATCH_PIXELS", 72 * rows)
        assert ssim_per_frame(a, b) == pytest.approx(whole, abs=1e-6)

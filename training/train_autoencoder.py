"""Trains the autoencoder: L1, MSE and gradient loss on random frames, until its time is over."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from quantwm.worlds.embedded.autoencoder import Autoencoder, ResidualBlock, to_signed
from quantwm.worlds.embedded.config import AutoencoderConfig
from training.data import FramePool
from training.progress import Budget, Log


@dataclass(frozen=True)
class AutoencoderTraining:
    """latent_noise makes the decoder forgive the transformer's small errors; the latent penalty
    keeps the encoder from drowning that noise by growing its latents."""

    batch: int = 256
    lr: float = 1.5e-3
    warmup_steps: int = 100
    weight_decay: float = 0.01
    mse_weight: float = 2.0
    gradient_weight: float = 0.5
    latent_noise: float = 0.03
    latent_penalty: float = 1e-4
    max_steps: int = 1_000_000
    log_every: int = 50


def learning_rate(step: int, fraction: float, warmup_steps: int, floor: float = 0.02) -> float:
    """Factor of the peak rate: linear warm-up in steps, cosine over the stage's time."""
    cosine = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * fraction))
    return min((step + 1) / warmup_steps, 1.0) * cosine


def autoencoder_loss(
    model: torch.nn.Module, pictures: torch.Tensor, config: AutoencoderTraining
) -> tuple[torch.Tensor, torch.Tensor]:
    """pictures [N, 3, H, W] -> (loss, mean squared error), float32 scalars."""
    raw = model.encoder(pictures)
    noisy = raw + config.latent_noise * torch.randn_like(raw)
    out = model.decoder(noisy).float()
    target = pictures.float()
    error = out - target
    mse = error.square().mean()
    across = (error[..., :, 1:] - error[..., :, :-1]).abs().mean()
    down = (error[..., 1:, :] - error[..., :-1, :]).abs().mean()
    loss = error.abs().mean() + config.mse_weight * mse
    loss = loss + config.gradient_weight * (across + down)
    return loss + config.latent_penalty * raw.float().square().mean(), mse.detach()


def set_compiled(model: Autoencoder, compiled: bool) -> None:
    """Block by block: six compilations in all, where the whole model took 110 s on two cores."""
    for module in model.modules():
        if isinstance(module, ResidualBlock):
            if compiled:
                module.compile(dynamic=False)
            else:
                module._compiled_call_impl = None


@torch.no_grad()
def calibrate(model: Autoencoder, pictures: torch.Tensor) -> None:
    """Sets the latents' per-channel mean and deviation from pictures [N, 3, H, W]."""
    parts = [model.encoder(pictures[i : i + 256]).float() for i in range(0, len(pictures), 256)]
    raw = torch.cat(parts)
    model.latent_mean.copy_(raw.mean(dim=(0, 2, 3)))
    model.latent_std.copy_(raw.std(dim=(0, 2, 3)).clamp_min(1e-3))


@torch.no_grad()
def round_to_bf16(model: Autoencoder) -> None:
    """Rounds the weights to what ships, so that latents are made by exactly the shipped encoder."""
    for parameter in model.parameters():
        parameter.copy_(parameter.to(torch.bfloat16))


@torch.no_grad()
def reconstruction_psnr(model: Autoencoder, frames: torch.Tensor) -> float:
    """Mean PSNR in dB over frames uint8 [N, H, W, 3], after rounding to bytes."""
    dtype = next(model.parameters()).dtype
    values = []
    for i in range(0, len(frames), 256):
        pictures = to_signed(frames[i : i + 256], dtype)
        out = model.decode(model.encode(pictures)).clamp(-1, 1)
        rounded = ((out + 1) * 127.5).round()
        truth = frames[i : i + 256].permute(0, 3, 1, 2).float()
        mse = (rounded - truth).square().mean(dim=(1, 2, 3)).clamp_min(1e-4)
        values.append(10 * torch.log10(255.0**2 / mse))
    return float(torch.cat(values).mean())


def train_autoencoder(
    pool: FramePool,
    unseen: torch.Tensor,
    model_config: AutoencoderConfig,
    config: AutoencoderTraining,
    minutes: float,
    seed: int,
    log: Log,
    compiled: bool,
) -> tuple[Autoencoder, dict[str, float]]:
    """Trains from scratch on the pool, which may still be filling. unseen: uint8 [N, H, W, 3]."""
    device = pool.frames.device
    torch.manual_seed(seed)
    generator = torch.Generator(device).manual_seed(seed)
    model = Autoencoder(model_config).to(device, memory_format=torch.channels_last)
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay,
        fused=device.type == "cuda",
    )  # fmt: skip
    set_compiled(model, compiled)
    budget, step = Budget(minutes), 0
    while step < config.max_steps and budget.left > 0:
        factor = learning_rate(step, budget.fraction, config.warmup_steps)
        for group in optimiser.param_groups:
            group["lr"] = config.lr * factor
        pictures = to_signed(pool.random_frames(config.batch, generator))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            try:
                loss, mse = autoencoder_loss(model, pictures, config)
            except RuntimeError as error:
                if not compiled:
                    raise
                log.event("autoencoder runs without the compiler", reason=str(error)[:300])
                compiled = False
                set_compiled(model, False)
                loss, mse = autoencoder_loss(model, pictures, config)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        if step % config.log_every == 0:
            # pictures span [-1, 1], so the peak of PSNR is 2
            psnr = 10 * math.log10(4.0 / max(float(mse), 1e-9))
            log.event(
                "autoencoder", step=step, loss=round(float(loss.detach()), 4), psnr=round(psnr, 2),
                episodes=pool.count, lr=round(config.lr * factor, 6), left_s=round(budget.left),
            )  # fmt: skip
        step += 1
    set_compiled(model, False)
    calibrate(model, to_signed(pool.random_frames(min(4096, 16 * config.batch), generator)))
    round_to_bf16(model)
    psnr = reconstruction_psnr(model, unseen)
    metrics = {"psnr_unseen": round(psnr, 2), "steps": step}
    log.event("autoencoder done", **metrics)
    return model, metrics

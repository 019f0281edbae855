"""Trains the autoencoder: L1, MSE and gradient loss on random frames, until its time is over.

A step is one CUDA graph (training/captured.py), because the host is busy rendering meanwhile.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from quantwm.errors import UserError
from quantwm.worlds.embedded.autoencoder import Autoencoder, ResidualBlock, to_signed
from training.captured import WARM_UPS, CapturedStep
from training.data import FramePool
from training.progress import Budget, Log


@dataclass(frozen=True)
class AutoencoderTraining:
    """latent_noise makes the decoder forgive the transformer's small errors; the latent penalty
    keeps the encoder from drowning that noise by growing its latents."""

    batch: int = 128
    lr: float = 1e-3
    warmup_steps: int = 100
    weight_decay: float = 0.01
    mse_weight: float = 2.0
    gradient_weight: float = 0.5
    energy_weight: float = 0.5
    latent_noise: float = 0.03
    latent_penalty: float = 1e-4
    ema: float = 0.998
    max_steps: int = 1_000_000
    log_every: int = 500


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
    loss = loss + config.energy_weight * energy_error(out, target)
    return loss + config.latent_penalty * raw.float().square().mean(), mse.detach()


def energy_error(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean difference of edge strength in 8 x 8 patches of pictures [N, 3, H, W].

    Errors alone are least where a texture that cannot be stored is left out: at 34 dB the first
    autoencoder kept 0.56 to 0.70 of the truth's gradients. This asks for their strength back.
    160 steps on its weights with weight 0, 0.3 and 1 gave 33.81, 33.70 and 33.27 dB with 0.67,
    0.78 and 0.91 of the gradients.
    """
    total = torch.zeros((), device=out.device)
    for axis in (2, 3):
        strengths = [
            F.avg_pool2d(x.diff(dim=axis).abs().mean(dim=1, keepdim=True), 8, ceil_mode=True)
            for x in (out, target)
        ]
        total = total + (strengths[0] - strengths[1]).abs().mean()
    return total


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


def as_signed(frames: torch.Tensor) -> torch.Tensor:
    """A static batch of bytes to what the encoder reads, channels last."""
    return to_signed(frames).contiguous(memory_format=torch.channels_last)


class Trainer:
    """The model, its average and its optimiser, and one step on a batch that stays in place."""

    def __init__(
        self, model: Autoencoder, config: AutoencoderTraining, frames: torch.Tensor
    ) -> None:
        """frames: uint8 [batch, H, W, 3] on the device; the caller fills it before every step."""
        self.frames, self._config = frames, config
        self.model = model.train().requires_grad_(True)
        self.average = copy.deepcopy(model).requires_grad_(False)
        self.on_gpu = frames.is_cuda
        self._lr = torch.tensor(config.lr, device=frames.device)
        self._adam = torch.optim.AdamW(
            model.parameters(), lr=self._lr if self.on_gpu else config.lr, betas=(0.9, 0.95),
            weight_decay=config.weight_decay, fused=self.on_gpu, capturable=self.on_gpu,
        )  # fmt: skip

    def set_rate(self, factor: float) -> None:
        if self.on_gpu:
            self._lr.fill_(self._config.lr * factor)
        else:
            self._adam.param_groups[0]["lr"] = self._config.lr * factor

    def step(self) -> tuple[torch.Tensor, ...]:
        """loss, mean squared error. Never waits for the device, so that it can be captured."""
        pictures = as_signed(self.frames)
        with torch.autocast(self.frames.device.type, torch.bfloat16, enabled=self.on_gpu):
            loss, mse = autoencoder_loss(self.model, pictures, self._config)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_lerp_(
                list(self.average.parameters()), list(self.model.parameters()),
                1 - self._config.ema,
            )  # fmt: skip
        return loss.detach(), mse


def start_steps(trainer: Trainer, compiled: bool, log: Log) -> Callable[[], Any]:
    """The step as fast as this machine runs it: captured and compiled, captured, or plain."""
    set_compiled(trainer.model, compiled)
    if not trainer.on_gpu:
        return trainer.step
    device = trainer.frames.device
    for step, words in (
        (CapturedStep(trainer.step, device), "without the compiler"),
        (CapturedStep(trainer.step, device), "op by op"),
        (trainer.step, ""),
    ):
        try:
            for _ in range(WARM_UPS + 2):
                step()
            torch.cuda.synchronize(device)
            return step
        except RuntimeError as error:
            if not words:
                raise
            log.event(f"autoencoder runs {words}", reason=str(error)[:300])
            set_compiled(trainer.model, False)
            trainer.model.zero_grad(set_to_none=True)
    return trainer.step


def train_autoencoder(
    pool: FramePool,
    model: Autoencoder,
    config: AutoencoderTraining,
    minutes: float,
    seed: int,
    log: Log,
    compiled: bool,
) -> tuple[Autoencoder, int]:
    """Trains `model`, new or from earlier weights, on the pool, which may still be filling.

    Returns the average of the weights, calibrated and rounded, and how many steps it took.
    """
    device = pool.frames.device
    torch.manual_seed(seed)
    generator = torch.Generator(device).manual_seed(seed)
    model = model.to(device, torch.float32, memory_format=torch.channels_last)
    batch = pool.random_frames(config.batch, generator)
    trainer = Trainer(model, config, batch)
    trainer.set_rate(1 / config.warmup_steps)
    budget, step = Budget(minutes), 0
    run = start_steps(trainer, compiled, log)
    last_time, last_step = time.monotonic(), 0
    while step < config.max_steps and budget.left > 0:
        factor = learning_rate(step, budget.fraction, config.warmup_steps)
        trainer.set_rate(factor)
        batch.copy_(pool.random_frames(config.batch, generator))
        loss, mse = run()
        if step % config.log_every == 0:
            # pictures span [-1, 1], so the peak of PSNR is 2
            psnr, now = 10 * math.log10(4.0 / max(float(mse), 1e-9)), time.monotonic()
            if not math.isfinite(float(loss)):
                raise UserError("the autoencoder's loss is not finite; lower its rate (--ae-lr)")
            log.event(
                "autoencoder", step=step, loss=round(float(loss), 4), psnr=round(psnr, 2),
                episodes=pool.count, lr=round(config.lr * factor, 6),
                steps_per_s=round((step - last_step) / max(now - last_time, 1e-9), 1),
                eta_s=round(budget.left),
            )  # fmt: skip
            last_time, last_step = now, step
        step += 1
    set_compiled(trainer.model, False)
    average = trainer.average
    calibrate(average, to_signed(pool.random_frames(min(4096, 16 * config.batch), generator)))
    round_to_bf16(average)
    return average, step

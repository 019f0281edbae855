"""How a decoder draws unseen free-running frames: what the decoder's stage goes by.

Latents do not depend on the decoder, so rollouts are made once, and a measurement only decodes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from quantwm.errors import UserError
from quantwm.worlds.embedded.autoencoder import Autoencoder, to_bytes
from quantwm.worlds.embedded.transformer import Transformer
from training.data import LatentPool, reckoned_poses
from training.picture_critic import phase_strengths
from training.rollout import roll_out
from training.train_autoencoder import reconstruction_psnr

FIRST, LATE = 8, 64
"""Free frames at the beginning and at the end that are measured by themselves, as in the acceptance
table."""


@dataclass(frozen=True)
class DecoderCheckConfig:
    """Free-running clips of unseen episodes from their first context_chunks; still_frames: more of
    them without a key. autoencoder_frames: true frames that are rebuilt.

    A decoder is fit to ship when the autoencoder reaches psnr_floor (or lost no more than
    psnr_loss, where it began lower), free frames change no more than `change` times as much as the
    truth's or the old decoder's, what they change without a key has grown no more than `change`
    times as much as the gradients that are there to be moved, edges at the latents' grid are off
    even by no more than `grid` or than the old one's, and the first free frames lost no more than
    first_loss dB. near: distances of the energy from the truth's, as logarithms, up to
    this one are alike, and the later decoder is taken.
    """

    episodes: int = 16
    context_chunks: int = 4
    free_frames: int = 256
    still_frames: int = 48
    autoencoder_frames: int = 512
    steps: int = 2
    seed: int = 20_000
    psnr_floor: float = 34.3
    psnr_loss: float = 1.0
    change: float = 1.15
    grid: float = 0.2
    first_loss: float = 1.5
    near: float = 0.1


class DecoderCheck:
    """Rollouts of unseen episodes, and the numbers of any decoder on them."""

    def __init__(
        self, model: Transformer, autoencoder: Autoencoder, frames: torch.Tensor,
        keys: torch.Tensor, shift: float, config: DecoderCheckConfig,
    ) -> None:  # fmt: skip
        """frames uint8 [E, L, H, W, 3], keys [E, L, 6], unseen; models as they ship."""
        per_chunk = model.config.frames_per_chunk
        self._config, self._start = config, config.context_chunks * per_chunk
        length = min(frames.shape[1], self._start + config.free_frames)
        length -= length % per_chunk
        chosen = slice(config.episodes)
        self.truth, held = frames[chosen, :length], keys[chosen, :length]
        stride = max(1, frames[:, :, 0, 0, 0].numel() // config.autoencoder_frames)
        self._rebuilt = frames.flatten(0, 1)[::stride]
        self._free = self._roll(model, autoencoder, self.truth, held, shift)
        still = held[:, : self._start + config.still_frames].clone()
        still[:, self._start :] = 0
        shown = self.truth[:, : still.shape[1]]
        self._still = self._roll(model, autoencoder, shown, still, shift)[:, self._start :]
        self.truth_energy = [_energy(clip) for clip in self.truth[:, self._start :]]
        self.truth_change = _mean([_change(clip) for clip in self.truth[:, self._start :]])
        late = self.truth[:, max(self._start, length - LATE) :]
        self._late_energy = _mean([_energy(clip) for clip in late])

    @property
    def amount(self) -> dict[str, int]:
        """How much is measured, by the names of `training.evaluate`."""
        episodes, length = self.truth.shape[:2]
        free = length - self._start
        return {"episodes": episodes, "rollout_frames": free, "steps": self._config.steps}

    @torch.no_grad()
    def _roll(
        self, model: Transformer, autoencoder: Autoencoder, frames: torch.Tensor,
        keys: torch.Tensor, shift: float,
    ) -> torch.Tensor:  # fmt: skip
        config = self._config
        poses = torch.stack([reckoned_poses(row.cpu().numpy()) for row in keys]).to(frames.device)
        pool = LatentPool.encode(autoencoder, frames, keys, poses)
        return roll_out(
            model, pool.latents, keys.float(), config.context_chunks, config.steps, shift,
            config.seed, teacher_forced=False, poses=poses if model.config.pose else None,
        )  # fmt: skip

    @torch.no_grad()
    def measure(self, autoencoder: Autoencoder) -> dict[str, float]:
        """autoencoder: with the decoder that is measured, as it ships.

        autoencoder_psnr of true frames; free_energy and free_energy_late: gradient energy of free
        frames over the truth's, means over all; free_8_psnr: of the first 8 to the truth;
        free_change: change from frame to frame over the truth's; still_change: the same without a
        key, in grey levels (the truth's is 0); free_grid: largest deviation of `phase_strengths`.
        """
        energies, late, changes, first, phases = [], [], [], [], []
        for clip, truth in zip(self._free, self.truth, strict=True):
            free = decode_bytes(autoencoder, clip[self._start :])
            energies.append(_energy(free))
            late.append(_energy(free[-LATE:]))
            changes.append(_change(free))
            phases.append(phase_strengths(free.permute(0, 3, 1, 2)))
            error = free[:FIRST].float() - truth[self._start : self._start + FIRST].float()
            square = error.square().mean(dim=(1, 2, 3)).clamp_min(1e-4)
            first.append((10 * torch.log10(255.0**2 / square)).mean())
        still = [_change(decode_bytes(autoencoder, clip)) for clip in self._still]
        return {
            "autoencoder_psnr": round(reconstruction_psnr(autoencoder, self._rebuilt), 2),
            "free_energy": round(_mean(energies) / _mean(self.truth_energy), 3),
            "free_energy_late": round(_mean(late) / self._late_energy, 3),
            "free_8_psnr": round(_mean(first), 2),
            "free_change": round(_mean(changes) / max(self.truth_change, 1e-6), 3),
            "still_change": round(_mean(still), 2),
            "free_grid": round(float((torch.stack(phases).mean(dim=0) - 1).abs().max()), 3),
        }

    def pairs(self, autoencoders: list[Autoencoder], count: int) -> list[list[torch.Tensor]]:
        """Of `count` clips, the free frames: truth, then as each of the decoders draws them."""
        rows = []
        for clip, truth in zip(self._free[:count], self.truth[:count], strict=True):
            drawn = [decode_bytes(model, clip[self._start :]) for model in autoencoders]
            rows.append([truth[self._start :], *drawn])
        return rows


def need_frames(frames: torch.Tensor, config: DecoderCheckConfig, per_chunk: int) -> None:
    """UserError when unseen episodes, uint8 [E, L, ...], are over before a frame runs free."""
    length, least = frames.shape[1], (config.context_chunks + 1) * per_chunk
    if length < least:
        raise UserError(f"unseen episodes need at least {least} frames, these have {length}")


def psnr_floor(before: Mapping[str, float], config: DecoderCheckConfig) -> float:
    """The least PSNR of the autoencoder; before: the old decoder's numbers."""
    return min(config.psnr_floor, before["autoencoder_psnr"] - config.psnr_loss)


def is_fit(
    found: Mapping[str, float], before: Mapping[str, float], config: DecoderCheckConfig
) -> bool:
    """Whether a decoder keeps the limits of `DecoderCheckConfig`, beside the old one's numbers."""
    sharper = math.sqrt(max(found["free_energy"] / max(before["free_energy"], 1e-6), 1.0))
    return (
        found["autoencoder_psnr"] >= psnr_floor(before, config)
        and found["free_change"] <= config.change * max(1.0, before["free_change"])
        and found["still_change"] <= config.change * sharper * before["still_change"]
        and found["free_grid"] <= max(config.grid, before["free_grid"])
        and found["free_8_psnr"] >= before["free_8_psnr"] - config.first_loss
    )


def distance(found: Mapping[str, float], near: float = 0.0) -> float:
    """How far the energy of free frames is from the truth's, alike for half and twice, at least
    `near`; 0 at 1."""
    return max(abs(math.log(max(found["free_energy"], 1e-6))), near)


def as_shipped(autoencoder: Autoencoder) -> Autoencoder:
    """A copy with BF16 weights, computing in float32 on a CPU as the product does there."""
    copied = copy.deepcopy(autoencoder).to(torch.bfloat16).requires_grad_(False).eval()
    for name in ("latent_mean", "latent_std"):
        getattr(copied, name).data = getattr(autoencoder, name).data.float().clone()
    return copied if autoencoder.latent_mean.is_cuda else copied.float()


def decode_bytes(autoencoder: Autoencoder, latents: torch.Tensor, batch: int = 256) -> torch.Tensor:
    """[T, C, h, w] -> uint8 [T, H, W, 3] on the device."""
    return torch.cat([to_bytes(autoencoder.decode(part)) for part in latents.split(batch)])


def _energy(frames: torch.Tensor) -> torch.Tensor:
    """`quantwm.metrics.sharpness` averaged over frames uint8 [T, H, W, 3], on the device."""
    values = frames.float()
    return values.diff(dim=1).square().mean() + values.diff(dim=2).square().mean()


def _change(frames: torch.Tensor) -> torch.Tensor:
    """`quantwm.metrics.temporal_difference` averaged over frames uint8 [T, H, W, 3]."""
    return frames.float().diff(dim=0).abs().mean()


def _mean(values: list[torch.Tensor]) -> float:
    return float(torch.stack(values).mean())
